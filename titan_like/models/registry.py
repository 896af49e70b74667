"""From (family, flavor, overrides) to a model configuration, and from that to a model."""

from __future__ import annotations

import difflib
import importlib
import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from titan_like.config.errors import ConfigError, all_of, problem_of
from titan_like.config.schema import Model as ModelSection
from titan_like.models.config import TransformerConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.llama.config import LlamaConfig

if TYPE_CHECKING:
    from titan_like.models.transformer import Transformer

# Far above any model. Up to here each matrix's bytes are a number of 63 bits, and the layers can be built and counted
# one by one.
_MOST = {
    "num_layers": 2048,
    "hidden_size": 2**20,
    "ffn_hidden_size": 2**23,
    "vocab_size": 2**27,
    "vocab_multiple": 2**20,
    "max_seq_len": 2**27,
}

FAMILIES: dict[str, type[TransformerConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}


@cache
def builtin_flavors(family: str) -> dict[str, dict[str, Any]]:
    """The family's flavors.toml: flavor name → fields."""
    text = resources.files(f"titan_like.models.{family}").joinpath("flavors.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def model_config(section: ModelSection) -> TransformerConfig:
    """The shape that a run's [model] section names, its overrides applied.

    Raises:
        ConfigError: unknown flavor or fields, wrong types, sizes that do not divide: a line for each.
    """
    flavors = builtin_flavors(section.family) | section.flavors
    if section.flavor not in flavors:
        near = difflib.get_close_matches(section.flavor, flavors, n=1, cutoff=0.4)
        guess = f"did you mean {near[0]}? " if near else ""
        known = ", ".join(flavors)
        raise ConfigError("model.flavor", section.flavor, f"unknown flavor; {guess}{section.family} has {known}")
    fields = flavors[section.flavor] | section.overrides
    huge = [name for name, value in fields.items() if isinstance(value, int) and abs(value) >= 2**63]
    if huge:
        problem = "TOML's integers have 64 bits; use a smaller one"
        raise all_of([ConfigError(_key_of(section, name), fields[name], problem) for name in huge])
    try:
        model = FAMILIES[section.family].model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # A field that nobody gave is wrong only because of those that it follows from.
        given = [d for d in details if not d["loc"] or d["loc"][0] in fields or d["type"] == "missing"]
        raise all_of([_field_error(section, detail) for detail in given or details]) from None
    large = [name for name, most in _MOST.items() if getattr(model, name) > most]
    if large:
        named = [name for name in large if name in fields] or large
        problems = {name: f"no model is so large; use at most {_MOST[name]:,}" for name in named}
        raise all_of([ConfigError(_key_of(section, name), getattr(model, name), problems[name]) for name in named])
    return model


def _field_error(section: ModelSection, detail: Any) -> ConfigError:
    """One of pydantic's ``errors()`` as a sentence."""
    field = ".".join(str(part) for part in detail["loc"])
    message = problem_of(detail)
    if detail["type"] == "extra_forbidden":
        known = list(FAMILIES[section.family].model_fields)
        near = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        message = f"unknown field; did you mean {near[0]}?" if near else f"unknown field; there are {', '.join(known)}"
    if not field:  # a rule over several fields
        return ConfigError("model.flavor", section.flavor, message)
    return ConfigError(_key_of(section, field), detail["input"] if detail["type"] != "missing" else None, message)


def _key_of(section: ModelSection, field: str) -> str:
    """The setting that a field's value comes from."""
    is_override = field.split(".")[0] in section.overrides
    return f"model.overrides.{field}" if is_override else f"model.flavors.{section.flavor}.{field}"


def build_model(config: TransformerConfig, family: str) -> Transformer:
    """The family's model on the current default device (use ``torch.device("meta")`` to count or to shard first)."""
    return importlib.import_module(f"titan_like.models.{family}.model").build(config)
