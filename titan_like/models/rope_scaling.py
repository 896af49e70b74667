"""Scaling of rotary frequencies, as a flavor describes it."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class RopeScaling(BaseModel):
    """Scaling of the rotary frequencies to longer contexts; `titan_like.models.layers.positions` has the formulas.

    Raises a `pydantic.ValidationError` if a field that the type needs is missing, or ``low_freq_factor`` is not below
    ``high_freq_factor``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    type: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = Field("llama3", description="the formula")
    factor: float = Field(gt=0, description="how much longer the context becomes")
    original_max_seq_len: int = Field(0, ge=0, description="context length of the first training phase, tokens")
    low_freq_factor: float = Field(0, ge=0, description="llama3: wavelengths above original_max_seq_len / this stretch")
    high_freq_factor: float = Field(0, ge=0, description="llama3: wavelengths below original_max_seq_len / this stay")
    beta_fast: float = Field(32, gt=0, description="yarn: frequencies with more turns in the original context stay")
    beta_slow: float = Field(1, gt=0, description="yarn: frequencies with fewer turns are divided by factor")
    truncate: bool = Field(True, description="yarn: round the limits between them to whole pairs of dimensions")
    attention_factor: float = Field(0, ge=0, description="yarn, longrope: factor on cos and sin; 0: by the formula")
    mscale: float = Field(0, ge=0, description="yarn: DeepSeek's terms of attention_factor")
    mscale_all_dim: float = Field(0, ge=0, description="yarn: the other one")
    short_magnitude: float = Field(0, ge=0, description="longrope: that factor up to the original context; 0: the same")
    long_magnitude: float = Field(0, ge=0, description="longrope: that factor in longer contexts; 0: the same")
    short_factors: list[float] = Field([], description="longrope: divisors of frequencies up to the original context")
    long_factors: list[float] = Field([], description="longrope: divisors of the frequencies of longer contexts")

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        needed = {
            "llama3": ("original_max_seq_len", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_max_seq_len",),
            "dynamic": ("original_max_seq_len",),
            "longrope": ("original_max_seq_len", "short_factors", "long_factors"),
        }.get(self.type, ())
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"{self.type} scaling needs {' and '.join(missing)}; set what is missing")
        if (self.short_magnitude > 0) != (self.long_magnitude > 0):
            raise ValueError("short_magnitude and long_magnitude go together; set both, or leave both at 0")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        return self


Scaling = Annotated[RopeScaling | None, BeforeValidator(lambda value: None if value == "none" else value)]
