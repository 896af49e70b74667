"""Command line + TOML file → JobConfig. No other code in the project reads argv or the TOML of a run."""

from __future__ import annotations

import difflib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin

import tomli
from pydantic import BaseModel, ValidationError

from titan_like.config.errors import ConfigError, RunError, all_of, problem_of, require
from titan_like.config.options import as_installed
from titan_like.config.paths import expanded, find_config, read_toml
from titan_like.config.schema import JobConfig
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
            shown = "none" if default is None else json.dumps(default)
            lines.append(f"  --{section}.{key}  {_type_name(option.annotation)}, default {shown}")
            lines += textwrap.wrap(option.description or "", 108, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
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


def setting(config: JobConfig, key: str) -> Any:
    """The value of ``section.key``."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def edit(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """A copy of a configuration with other values of some keys (``section.key``), which are not validated again."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    )


# Tables whose keys the user, the model family, the dataset or the optimizer defines, so the schema does not list them.
_FREE_TABLES = ("model.overrides", "model.flavors", "data.options", "optimizer.options")

_SECONDS_FOR_RANK_0 = 10
# Errors of files that the user has to put right. Any other error is a bug, which shows its traceback.
_PACKAGE = str(Path(__file__).parents[1])
_OF_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def load_config(argv: list[str]) -> JobConfig:
    """Build the configuration from command-line arguments (without the program's name).

    Precedence: command line > TOML file (``--job.config_file``) > default. ``--help`` prints every key and exits.

    Raises:
        ConfigError: unknown keys, wrong types or values, or an unreadable file: every problem, with a line for each.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(as_installed(format_help(os.path.basename(sys.argv[0]), JobConfig)))
        raise SystemExit(0)
    overrides, errors = _read_overrides(argv)
    tree: dict[str, Any] = {}
    try:
        tree = _file_settings(overrides.get("job.config_file"))
    except ConfigError as error:
        errors.append(error)
    errors += _remove_unknown(tree)
    if "config_file" in tree.get("job", {}):
        problem = "settings are read from one file, which the command line names; leave it out here"
        errors.append(ConfigError("job.config_file", tree["job"].pop("config_file"), problem))
    for dotted, value in overrides.items():
        try:
            _set_dotted(tree, dotted, value)
        except ConfigError as error:
            errors.append(error)
    try:
        config = JobConfig.model_validate(tree)
    except ValidationError as error:
        told = {one.key for one in errors}
        errors += [one for one in _validation_errors(error) if one.key not in told]
    if errors:
        raise all_of(errors)
    return config


def run_command(command: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a script's main function and end the process with the project's exit codes.

    0 means done, 1 failed, 2 bad input. Bad input, which includes a file that cannot be opened, gets one sentence on
    stderr, from rank 0 only. A bug shows its traceback.

    Raises:
        SystemExit: always, with the exit code.
    """
    try:
        code = command(sys.argv[1:])
        print(end="", flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        # Otherwise Python writes once more at exit, and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except _OF_FILES as error:
        if error.filename is None or str(error.filename).startswith(_PACKAGE):
            raise
        _refuse(f"{error.filename}: {error.strerror}", 2)
    except (ConfigError, RunError) as error:
        _refuse(str(error), 2 if isinstance(error, ConfigError) else 1, error.of_this_process)
    raise SystemExit(code or 0)


def _refuse(sentence: str, code: int, of_this_process: bool = False) -> NoReturn:
    if not of_this_process and os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_RANK_0)  # rank 0 usually prints the same and ends the job first
    print(as_installed(f"error: {sentence}"), file=sys.stderr, flush=True)
    _end_process_group(code)
    raise SystemExit(code)


def _end_process_group(code: int) -> None:
    """Exit at once if this process is in a process group, whose threads sometimes abort it while Python shuts down.

    Destroying the group does not help: it waits for the other processes, which may never get there.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if distributed.get_world_size() == 1:
        distributed.destroy_process_group()
        return
    with suppress(OSError):  # the reader of the pipe is gone
        print(end="", flush=True)
    os._exit(code)


def parse_overrides(argv: list[str]) -> dict[str, Any]:
    """``--section.key value`` and ``--section.key=value`` → {"section.key": value}.

    A value that is valid TOML (a number, boolean, list or table) is parsed; anything else is a plain string. A key
    without a value is true, several values make a list, and ``none`` unsets a key whose default is no value.

    Raises:
        ConfigError: words that belong to no key, malformed or unknown keys, numbers and lists that cannot be parsed.
    """
    overrides, errors = _read_overrides(argv)
    if errors:
        raise all_of(errors)
    return overrides


def _read_overrides(argv: list[str]) -> tuple[dict[str, Any], list[ConfigError]]:
    """What `parse_overrides` returns, and every error."""
    overrides: dict[str, Any] = {}
    groups, errors = _grouped(argv)
    for dotted, values in groups:
        try:
            overrides[dotted] = _parse_values(dotted, values)
        except ConfigError as error:
            errors.append(error)
    return overrides, errors


def _parse_values(dotted: str, values: list[str]) -> Any:
    annotation = _annotation_of(dotted, values)
    wants_text = annotation is not None and "str" in str(annotation) and "int" not in str(annotation)
    if annotation is not None and "None" in str(annotation) and values in (["none"], ["null"]):
        return None
    if values and wants_text and "float" in str(annotation) and not any(value.startswith("[") for value in values):
        return _weights_and_paths(dotted, values)
    parsed = [value if wants_text and not value.startswith("[") else _parse_value(dotted, value) for value in values]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def _weights_and_paths(dotted: str, words: list[str]) -> Any:
    """Words in which weights and paths may come in turn. A number that may be either is refused."""
    values = [_parse_value(dotted, word) for word in words]
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    is_there = [any(os.path.lexists(word + ending) for ending in ("", ".bin", ".idx")) for word in words]
    if len(words) < 2 or not is_number[0] or (all(is_number) and all(is_there)):
        return words[0] if len(words) == 1 else words
    for place in range(0, len(words), 2):
        if is_number[place] and (is_there[place] or (len(words) == 2 and is_number[1])):
            cure = 'write a TOML list, with weights as numbers and paths in quotes: \'[0.7, "2023", 0.3, "2024"]\''
            raise ConfigError(dotted, words[place], f"may be a weight or a path; {cure}")
    return [
        value if number and not place % 2 else words[place]
        for place, (value, number) in enumerate(zip(values, is_number, strict=True))
    ]


def _grouped(argv: list[str]) -> tuple[list[tuple[str, list[str]]], list[ConfigError]]:
    """Each key with its values, and an error for each word that belongs to no key."""
    groups: list[tuple[str, list[str]]] = []
    errors = []
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            groups.append((key, [value] if equals else []))
        elif (bare := word.removeprefix("-")).partition("=")[0] in _all_keys():
            example = bare if "=" in bare else f"{bare} VALUE"
            errors.append(ConfigError("command line", word, f"a setting needs two dashes; write --{example}"))
            groups.append(("", []))  # collects the words that follow
        elif groups:
            groups[-1][1].append(word)
        else:
            errors.append(ConfigError("command line", word, "not a setting; write --section.key value"))
    return [(key, values) for key, values in groups if key or not errors], errors


def _file_settings(path: Any) -> dict[str, Any]:
    """The settings in `job.config_file`, if it is set."""
    if path is None:
        return {}
    require(isinstance(path, str), "job.config_file", path, "must be the path of one TOML file")
    try:
        found = expanded(path)
    except ValueError as error:
        raise ConfigError("job.config_file", path, str(error)) from None
    return read_toml(find_config(found))


def _parse_value(dotted: str, text: str) -> Any:
    try:
        return tomli.loads(f"value = {text}")["value"]
    except (tomli.TOMLDecodeError, KeyError):
        return text


def _annotation_of(dotted: str, values: list[str]) -> Any:
    """The type of a key in the schema; None for keys inside free tables."""
    if any(dotted == table or dotted.startswith(table + ".") for table in _FREE_TABLES):
        return None
    section, _, key = dotted.partition(".")
    fields = _section_fields(section)
    if fields is None or key not in fields:
        raise ConfigError(f"--{dotted}", " ".join(values) or None, _unknown(dotted))
    return fields[key].annotation


def _section_fields(section: str) -> dict[str, Any] | None:
    field = JobConfig.model_fields.get(section)
    if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
        return None
    return options_of(field.annotation)


def _all_keys() -> list[str]:
    return [f"{section}.{key}" for section in JobConfig.model_fields for key in _section_fields(section) or {}]


def _unknown(dotted: str) -> str:
    """The problem with a key that does not exist, suggesting the nearest one that does."""
    matches = difflib.get_close_matches(dotted, _all_keys(), n=1, cutoff=0.6)
    if not matches:
        tail = dotted.rpartition(".")[2]
        matches = [key for key in _all_keys() if key.endswith("." + tail)][:1]
    return f"unknown key; did you mean {matches[0]}?" if matches else "unknown key; --help lists every key"


def _remove_unknown(tree: dict[str, Any]) -> list[ConfigError]:
    """Remove keys that are not in the schema, so that the rest can be checked; returns an error for each."""
    errors = []
    for section, table in list(tree.items()):
        fields = _section_fields(section)
        if fields is None:
            near = difflib.get_close_matches(section, JobConfig.model_fields, n=1, cutoff=0.5)
            cure = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(JobConfig.model_fields)}"
            shown = table if not isinstance(table, dict) else "[table]"
            errors.append(ConfigError(section, shown, f"unknown section; {cure}"))
            del tree[section]
        elif not isinstance(table, dict):
            errors.append(ConfigError(section, table, f"must be a table; write [{section}] above its keys"))
            del tree[section]
        else:
            for key in [key for key in table if key not in fields]:
                errors.append(ConfigError(f"{section}.{key}", table.pop(key), _unknown(f"{section}.{key}")))
    return errors


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for depth, table in enumerate(tables, start=1):
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(".".join(tables[:depth]), tree, f"must be a table, since {dotted} is set; remove one")
    tree[key] = value


def _validation_errors(error: ValidationError) -> list[ConfigError]:
    """An error for each wrong key, which says what would be valid."""
    found: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        dotted = ".".join(str(part) for part in detail["loc"] if not isinstance(part, int))
        section, _, key = dotted.partition(".")
        fields = _section_fields(section) or {}
        meaning = f" ({fields[key].description})" if key in fields else ""
        found.setdefault(dotted, ConfigError(dotted, detail["input"], f"{problem_of(detail)}{meaning}"))
    return list(found.values())
