"""Settings of rotary position embeddings (arXiv 2104.09864). No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RopeScaling(BaseModel):
    """Llama 3.1's scaling of the rotary frequencies to longer contexts; see `rope_frequencies` for the formula.

    Raises:
        pydantic.ValidationError: ``low_freq_factor`` is not below ``high_freq_factor``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    factor: float = Field(gt=0, description="how much longer the context becomes")
    low_freq_factor: float = Field(gt=0, description="wavelengths above original_max_seq_len / this are stretched")
    high_freq_factor: float = Field(gt=0, description="wavelengths below original_max_seq_len / this are kept")
    original_max_seq_len: int = Field(gt=0, description="context length of the first training phase, tokens")

    @model_validator(mode="after")
    def _check_order(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        return self
