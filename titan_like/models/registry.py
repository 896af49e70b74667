"""From (family, flavor, overrides) to a model configuration, and from that to a model.

A family is a package with the modules `config`, `model`, `sharding` and `hugging_face` and the file `flavors.toml`.
docs/families.md describes each of them. The registry refers to a family by its configuration class.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from titan_like.config.entry_points import check_flavor, find_entry, load_entry, read_flavors
from titan_like.config.errors import ConfigError, all_of, field_errors, first_line
from titan_like.config.schema import Model as ModelSection
from titan_like.models.config import TransformerConfig

if TYPE_CHECKING:
    from titan_like.models.transformer import Transformer


@cache
def config_class(family: str) -> type[TransformerConfig]:
    """Import a family's configuration class.

    Raises a `ConfigError` if there is no such family, or its entry point is not an importable configuration class.
    """
    point = find_entry("model.family", family)
    kind = load_entry("model.family", point)
    if not (isinstance(kind, type) and issubclass(kind, TransformerConfig) and "." in kind.__module__):
        wanted = "a subclass of TransformerConfig in a package, such as my_models.wide.config:WideConfig"
        raise ConfigError(
            "model.family", family, f"its entry point, {point.value}, is not a family; it must be {wanted}"
        )
    return kind


def filled_shape(family: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A stored shape with the defaults of fields that are newer than it, nested ones too; as it is if it is invalid."""
    with suppress(ConfigError, ValidationError):
        return config_class(family).model_validate(shape).model_dump(mode="json")
    return shape


@cache
def flavors(family: str) -> dict[str, dict[str, Any]]:
    """Read the family's flavors.toml: flavor name → fields.

    Raises a `ConfigError` if there is no such family, or its flavors.toml cannot be read.
    """
    package = config_class(family).__module__.rpartition(".")[0]
    try:
        return read_flavors(package)
    except (OSError, ValueError) as error:
        reason = f"the flavors.toml of {package} cannot be read ({first_line(error)}); correct the package"
        raise ConfigError("model.family", family, reason) from error


def model_config(section: ModelSection) -> TransformerConfig:
    """The shape that a run's [model] section names, with its overrides applied.

    Raises:
        ConfigError: unknown family, flavor or fields, wrong types, or sizes that do not divide; one line for each.
    """
    known = flavors(section.family) | section.flavors
    check_flavor(section.family, section.flavor, known)
    fields = known[section.flavor] | section.overrides
    kind = config_class(section.family)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        # A derived field is wrong only because of the given fields that it was derived from: report those alone.
        details = error.errors(include_url=False)
        given = [d for d in details if not d["loc"] or d["loc"][0] in fields or d["type"] == "missing"]

        def key(field: str) -> str:
            if not field:  # a rule over several fields blames none of them
                return "model.overrides" if section.overrides else "model.flavor"
            is_override = field.split(".")[0] in section.overrides
            return f"model.overrides.{field}" if is_override else f"model.flavors.{section.flavor}.{field}"

        raise all_of(field_errors(given or details, key, kind, section.overrides or section.flavor)) from None


def build_model(config: TransformerConfig, family: str) -> Transformer:
    """Build the family's model on the current default device, without initialising its weights.

    Build on ``torch.device("meta")`` to count parameters, or to shard before allocating. Raises a `ConfigError` if
    there is no such family, its package has no module `model`, or its model names parts that it lacks.
    """
    model = config.family_module("model").build(config)
    _check_names(model, family)
    return model


def _check_names(model: Transformer, family: str) -> None:
    """Refuse names that the model's class lists but the model lacks.

    A wrong name would otherwise be noticed late, or only in the scale of initial weights.
    """
    matrices = [name.removesuffix(".weight") for name, weight in model.named_parameters() if weight.ndim >= 2]
    for ending in model.residual_outputs:
        if not any(name.endswith(ending) for name in matrices):
            known = ", ".join(sorted({name.split(".", 2)[-1] for name in matrices if name.startswith("layers.")}))
            reason = f"its model has no matrix {ending!r}, which residual_outputs names; there are {known}"
            raise ConfigError("model.family", family, reason)
    for what in ("entry", "head", "shared"):
        for name in getattr(model, what):
            if not hasattr(model, name):
                raise ConfigError("model.family", family, f"its model has no module {name!r}, which {what} names")
