"""The --help text and the JSON schema, which lets editors complete and check TOML keys."""

from __future__ import annotations

import json
import textwrap
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from titan_like.config.section import options_of


def format_help(program: str, config_type: type[BaseModel]) -> str:
    """How ``program`` is called: every key with its type, default and meaning."""
    lines = [f"usage: {program} --job.config_file FILE.toml [--section.key value | --section.key=value] ..."]
    for section, field in config_type.model_fields.items():
        section_type = field.annotation
        assert isinstance(section_type, type) and issubclass(section_type, BaseModel)
        lines += ["", f"[{section}] {(section_type.__doc__ or '').strip()}"]
        for key, option in options_of(section_type).items():
            default = option.get_default(call_default_factory=True)
            lines.append(f"  --{section}.{key}  {_type_name(option.annotation)}, default {_default(default)}")
            lines += textwrap.wrap(option.description or "", 108, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _default(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) in (dict, list, tuple):
        return {dict: "table", list: "list", tuple: "list"}[get_origin(annotation)]
    choices = [a for a in get_args(annotation) if a is not type(None)]
    if choices and all(isinstance(choice, str | int) and not isinstance(choice, type) for choice in choices):
        return " | ".join(json.dumps(choice) for choice in choices)
    if choices:
        return " | ".join(_type_name(choice) for choice in choices)
    names = {str: "string", int: "integer", float: "number", bool: "true | false"}
    return names.get(annotation, str(annotation))


def json_schema(config_type: type[BaseModel]) -> str:
    """JSON schema of a run's TOML; editors use it if the first line is ``#:schema ./schema.json``."""
    return json.dumps(config_type.model_json_schema(), indent=2) + "\n"
