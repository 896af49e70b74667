"""Building blocks of the configuration's sections: their base class, limits, and types of texts, paths and lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from titan_like.config.paths import expanded

T = TypeVar("T")


def _as_list(value: Any) -> Any:
    """A list setting may be given as a single value on the command line."""
    return [value] if isinstance(value, str | int | float) else value


def weight_of(word: str) -> float | None:
    """The number in a word of a command line; None if the word is not a finite number, and so a path."""
    try:
        return weight if abs(weight := float(word)) < float("inf") else None
    except ValueError:
        return None


def _as_paths(value: Any) -> Any:
    """A list of paths, perhaps with numbers before them as weights."""
    values = _as_list(value)
    if not isinstance(values, list):
        return values
    for item in values:
        is_weight = isinstance(item, int | float) and not isinstance(item, bool) and abs(item) < float("inf")
        if not (is_weight or isinstance(item, str)):
            raise ValueError("should be paths in quotes, with or without a finite number before each as its weight")
    return [expanded(item, takes_urls=True) if isinstance(item, str) else item for item in values]


def expanded_tokenizer(spec: str) -> str:
    """The tokenizer setting with its path expanded, or the two paths after "gpt2:"."""
    if not spec.startswith("gpt2:"):
        return expanded(spec)
    return "gpt2:" + ",".join(expanded(path) if path else path for path in spec.removeprefix("gpt2:").split(","))


_DTYPES = {"half": "float16", "float": "float32", "double": "float64", "bf16": "bfloat16"}
_DTYPES |= {f"fp{bits}": f"float{bits}" for bits in (16, 32, 64)}
_DTYPES |= {name: name for name in ("bfloat16", "float16", "float32", "float64")}


def dtype_name(value: Any) -> Any:
    """torch's name for a dtype such as bf16, FP32, half or torch.bfloat16; other values unchanged."""
    return _DTYPES.get(value.lower().removeprefix("torch."), value) if isinstance(value, str) else value


Degree = Annotated[int, Field(gt=0, le=2**20)]
Layers = Annotated[int, Field(le=2048)]
Samples = Annotated[int, Field(le=10**15)]
StepNumber = Annotated[int, Field(gt=0, le=10**12)]
StepCount = Annotated[int, Field(ge=0, le=10**12)]
PathText = Annotated[str, AfterValidator(expanded)]
TokenizerText = Annotated[str, AfterValidator(expanded_tokenizer)]
OptionalPath = Annotated[str | None, AfterValidator(lambda path: None if path is None else expanded(path))]
OptionalUrl = Annotated[str | None, AfterValidator(lambda path: None if path is None else expanded(path, True))]
TextList = Annotated[list[str], BeforeValidator(_as_list)]
if TYPE_CHECKING:
    PathList = list[Any]  # paths alone, once `shares_of` has separated the weights
else:
    PathList = Annotated[list[str | float], BeforeValidator(_as_paths)]
StepList = Annotated[list[StepNumber], BeforeValidator(_as_list)]
RankList = Annotated[list[Annotated[int, Field(ge=0, lt=2**20)]], BeforeValidator(_as_list)]


def option(default: T, description: str, **limits: Any) -> T:
    """A setting: its default, and its meaning with units; ``limits`` go to `pydantic.Field`."""
    return Field(default, description=description, **limits)


def options_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by their TOML key, which is an alias for `async`, a reserved word in Python."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


class Section(BaseModel):
    """Base of every section: unknown keys are errors, and values are frozen after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), serialize_by_alias=True
    )
    # Settings that `verify` changes in its small run: key → value, or a function of the section.
    SMALL: ClassVar[Mapping[str, Any]] = {}

    def small(self) -> Self:
        """The section, or all sections of the configuration, in a small run that shows the same bugs."""
        sections = {name: section.small() for name, section in self if isinstance(section, Section)}
        values = {name: value(self) if callable(value) else value for name, value in self.SMALL.items()}
        return self.model_copy(update=sections | values)


class Surroundings(Section):
    """Base of sections that do not affect the computation of a step."""

    def small(self) -> Self:
        """The defaults, except those in `SMALL`."""
        changed = super().small()
        return type(self)().model_copy(update={name: getattr(changed, name) for name in self.SMALL})
