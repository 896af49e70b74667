"""Command line + TOML file → JobConfig. Nothing else in the project reads argv or run TOMLs."""

from __future__ import annotations

import difflib
import io
import os
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from titan_like.config.errors import ConfigError, RunError, first_problem
from titan_like.config.help import format_help
from titan_like.config.schema import JobConfig, options_of

# Tables whose keys are the user's or the model family's, not the schema's.
_FREE_TABLES = ("model.overrides", "model.flavors")

_SECONDS_FOR_RANK_0 = 10


def load_config(argv: list[str]) -> JobConfig:
    """Build the configuration from command-line arguments (without the program's name).

    Precedence: command line > TOML file (``--job.config_file``) > default. ``--help`` prints every key and exits.

    Raises:
        ConfigError: unknown key, wrong type or value, unreadable file.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(format_help(JobConfig))
        raise SystemExit(0)
    overrides = parse_overrides(argv)
    config_file = overrides.get("job.config_file")
    if not isinstance(config_file, str | None):
        raise ConfigError("job.config_file", config_file, "must be the path of one TOML file")
    tree = read_toml(config_file) if config_file is not None else {}
    _check_known_keys(tree)
    for dotted, value in overrides.items():
        _set_dotted(tree, dotted, value)
    try:
        return JobConfig.model_validate(tree)
    except ValidationError as error:
        raise _first_problem(error) from None


def run_command(command: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a script's main function and end the process with the project's exit codes.

    0 is done, 1 failed, 2 is bad input: one sentence on stderr (from the first process of a job only), no traceback.
    Characters that the locale's encoding lacks are printed as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except (ConfigError, RunError) as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_RANK_0)  # it says the same and ends the job; only what it does not see is said here
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    raise SystemExit(code or 0)


def read_toml(path: str) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("job.config_file", path, "no such file; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not valid UTF-8; save the file as UTF-8"
        raise ConfigError("job.config_file", path, problem) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("job.config_file", path, f"not valid TOML ({error}); correct that line") from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); give a readable TOML file"
        raise ConfigError("job.config_file", path, problem) from None


def parse_overrides(argv: list[str]) -> dict[str, Any]:
    """``--section.key value`` and ``--section.key=value`` → {"section.key": value}.

    Values are read as TOML where they are TOML (numbers, booleans, lists, tables) and as plain strings elsewhere.
    A key without a value is true; several values make a list; none unsets a key that has no value by default.

    Raises:
        ConfigError: a word that belongs to no key, a malformed or an unknown key.
    """
    overrides: dict[str, Any] = {}
    for dotted, values in _grouped(argv):
        annotation = _annotation_of(dotted, values)
        wants_text = annotation is not None and "str" in str(annotation) and "int" not in str(annotation)
        if annotation is not None and "None" in str(annotation) and values in (["none"], ["null"]):
            overrides[dotted] = None
            continue
        parsed = [value if wants_text and not value.startswith("[") else _parse_value(value) for value in values]
        overrides[dotted] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return overrides


def _grouped(argv: list[str]) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            groups.append((key, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError("command line", word, "not a setting; write --section.key value")
    return groups


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _annotation_of(dotted: str, values: list[str]) -> Any:
    """Type of a schema key; None for keys inside free tables.

    Raises:
        ConfigError: the key is not in the schema.
    """
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
    """What to tell the user about a key that does not exist: the nearest one that does."""
    matches = difflib.get_close_matches(dotted, _all_keys(), n=1, cutoff=0.6)
    if not matches:
        tail = dotted.rpartition(".")[2]
        matches = [key for key in _all_keys() if key.endswith("." + tail)][:1]
    return f"unknown key; did you mean {matches[0]}?" if matches else "unknown key; --help lists every key"


def _check_known_keys(tree: dict[str, Any]) -> None:
    for section, table in tree.items():
        fields = _section_fields(section)
        if fields is None:
            near = difflib.get_close_matches(section, JobConfig.model_fields, n=1, cutoff=0.5)
            cure = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(JobConfig.model_fields)}"
            raise ConfigError(section, table if not isinstance(table, dict) else "[table]", f"unknown section; {cure}")
        if not isinstance(table, dict):
            raise ConfigError(section, table, f"must be a table; write [{section}] above its keys")
        for key, value in table.items():
            if key not in fields:
                raise ConfigError(f"{section}.{key}", value, _unknown(f"{section}.{key}"))


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for depth, table in enumerate(tables, start=1):
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(".".join(tables[:depth]), tree, f"must be a table, since {dotted} is set; remove one")
    tree[key] = value


def _first_problem(error: ValidationError) -> ConfigError:
    """The first validation error as one sentence that says what would be valid."""
    first = error.errors()[0]
    dotted = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    section, _, key = dotted.partition(".")
    fields = _section_fields(section) or {}
    meaning = f" ({fields[key].description})" if key in fields else ""
    return ConfigError(dotted, first["input"], f"{first_problem(error)}{meaning}")
