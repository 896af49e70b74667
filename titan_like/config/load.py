"""Command line + TOML file → JobConfig. No other code in the project reads argv or the TOML of a run."""

import difflib
import json
import os
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn, cast, get_args, get_origin

import tomli
from pydantic import BaseModel, ValidationError

from titan_like import __version__
from titan_like.config.entry_points import START, names_of, wrong_names
from titan_like.config.errors import (
    FULL,
    ConfigError,
    RunError,
    all_of,
    blamed_on,
    printable,
    reason_of,
    record_error,
    require,
    shortened,
    unknown,
)
from titan_like.config.options import as_installed
from titan_like.config.paths import SHIPPED, expanded, find_config, read_toml
from titan_like.config.schema import JobConfig
from titan_like.config.section import options_of, weight_of
from titan_like.config.synonyms import hint_for


def format_help(program: str, config_type: type[BaseModel]) -> str:
    """The usage of ``program``: every key with its type, default and meaning."""
    lines = [f"usage: {program} --job.config_file FILE.toml [--section.key value | --section.key=value]... | --version"]
    for section, field in config_type.model_fields.items():
        lines += ["", f"[{section}] {purpose_of(field.annotation)}"]
        for key, kind, default, meaning in described_options(field.annotation):
            lines.append(f"  --{section}.{key}  {kind}, default {default}")
            if added := names_of(f"{section}.{key}", with_built_in=False):
                meaning += f" (installed here: {', '.join(added)})"
            lines += textwrap.wrap(meaning, 108, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def purpose_of(section: Any) -> str:
    """The first line of a section's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]


def described_options(section: Any) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of each setting in a section."""
    for key, option in options_of(section).items():
        default = option.get_default(call_default_factory=True)
        shown = "required" if option.is_required() else "none" if default is None else json.dumps(default)
        yield key, _type_name(option.annotation), shown, option.description or ""


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
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "string", int: "integer", float: "number", bool: "true | false"}
    return names.get(annotation, str(annotation))


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
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=changed)


_SECONDS_FOR_RANK_0 = 10
_NEAR = 0.75  # similarity from which a key counts as a typo of another in its section
_SEVERAL = {"enable", "options", "name", "resume"}  # names that mean something else in each section
# The user can correct a full disk, or an error about a file outside the package. Any other error is a bug, which shows
# its traceback.
_PACKAGE = str(Path(__file__).parents[1])


def load_config(argv: list[str], stored: Mapping[str, Any] | None = None) -> JobConfig:
    """Build the configuration from command-line arguments (without the program's name).

    Precedence: command line > TOML file (``--job.config_file``) > ``stored``, settings by section, such as those in a
    checkpoint > default. The folder that `model.from` names sets the model and the tokenizer. ``--help`` prints every
    key and exits. Raises a `ConfigError` with a line for each unknown key, wrong value or unreadable file.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(as_installed(format_help(os.path.basename(sys.argv[0]), JobConfig)))
        raise SystemExit(0)
    overrides, errors = _read_overrides(argv)
    tree = dict(stored or {})
    try:
        tree |= _file_settings(overrides.get("job.config_file"))
    except ConfigError as error:
        errors.append(error)
    if isinstance(job := tree.get("job"), dict) and "config_file" in job:
        reason = "settings are read from one file, which the command line names; leave it out here"
        errors.append(ConfigError("job.config_file", job.pop("config_file"), reason))
    for dotted, value in overrides.items():
        _set_dotted(tree, dotted, value)
    try:
        config = JobConfig.model_validate(tree)
    except ValidationError as error:
        reported = {e.key for e in errors}
        errors += [e for e in _validation_errors(error) if e.key not in reported]
    if errors:
        raise all_of([*errors, *wrong_names(tree)])
    return config if config.model.from_ is None else resolve_name(START)(config)


def run_command(command: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a script's main function and end the process with the project's exit codes.

    0 means done, 1 failed, 2 bad input. Bad input, which includes a file that cannot be opened, gets one sentence on
    stderr, from rank 0 only. A bug shows its traceback. --version prints versions instead. Characters that stdout's
    encoding lacks become question marks.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # Python found the descriptor closed
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # stderr never raises as it is
    try:
        if "--version" in sys.argv[1:]:
            print(f"titan_like {__version__}, torch {version('torch')}")
            raise SystemExit(0)
        code = command(sys.argv[1:])
        print(end="", flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        # Otherwise Python writes once more at exit, and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        is_full, file = error.errno in FULL, str(error.filename or "")
        if not is_full and (not file or file.startswith(_PACKAGE)):
            raise
        place = f"{shortened(printable(file))}: " if file else ""
        _refuse(f"{place}{error.strerror}{'; make room' if is_full else ''}", 2)
    except (ConfigError, RunError) as error:
        _refuse(str(error), 2 if isinstance(error, ConfigError) else 1, error.of_this_process)
    except Exception:
        record_error(traceback.format_exc())
        raise
    raise SystemExit(code or 0)


def _refuse(sentence: str, code: int, of_this_process: bool = False) -> NoReturn:
    if not of_this_process and os.environ.get("RANK", "0") != "0":
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends this rank when rank 0 has failed
        time.sleep(_SECONDS_FOR_RANK_0)  # rank 0 usually prints the same and ends the job first
    sentence = as_installed(f"error: {sentence}")
    print(sentence, file=sys.stderr, flush=True)
    record_error(sentence)
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
    without a value is true, several values make a list, and ``none`` unsets a key whose default is no value. Words that
    belong to no key are refused.
    """
    overrides, errors = _read_overrides(argv)
    if errors:
        raise all_of(errors)
    return overrides


def _read_overrides(argv: list[str]) -> tuple[dict[str, Any], list[ConfigError]]:
    """The result of `parse_overrides`, and every error."""
    groups, errors = _grouped(argv)
    return {dotted: _parse_values(dotted, values) for dotted, values in groups}, errors


def _parse_values(dotted: str, values: list[str]) -> Any:
    kind = str(_annotation_of(dotted))
    # In free tables, such as model.overrides, none is a word.
    if "None" in kind and (values == ["null"] or (values == ["none"] and kind != "None")):
        return None
    is_text = "str" in kind and "int" not in kind and "dict" not in kind
    parsed = [value if is_text and not value.startswith("[") else _parse_value(value) for value in values]
    if "float" in kind and is_text and len(values) > 1:  # paths, perhaps with a weight before each
        weights = [weight_of(value) for value in values]
        if [weight is not None for weight in weights] == [True, False] * (len(values) // 2):
            path = next(filter(os.path.lexists, values[::2]), None)
            reason = f"""is "{path}" a weight or an existing path? Write '[0.7, "web", 0.3, "2024"]', as in TOML"""
            require(path is None, dotted, values, reason)
            parsed[::2] = weights[::2]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def _grouped(argv: list[str]) -> tuple[list[tuple[str, list[str]]], list[ConfigError]]:
    """Each key with its values, and an error for each word that belongs to no key."""
    groups: list[tuple[str, list[str]]] = []
    errors = []
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            groups.append((key, [value] if equals else []))
        elif word.endswith(".toml") and groups and groups[-1][1] and not _takes_several(groups[-1][0]):
            errors.append(ConfigError("command line", word, _name_config(word)))
        elif _annotation_of((bare := word.removeprefix("-")).partition("=")[0]) is not None:
            example = bare if "=" in bare else f"{bare} VALUE"
            errors.append(ConfigError("command line", word, f"a setting needs two dashes; write --{example}"))
            groups.append(("", []))  # collects the words that follow
        elif word.startswith("-") and (hint := hint_for(bare.partition("=")[0])):
            errors.append(ConfigError("command line", word, f"unknown key; {hint}"))
            groups.append(("", []))
        elif groups:
            groups[-1][1].append(word)
        else:
            is_config = word.endswith(".toml") or (SHIPPED / f"{word}.toml").is_file()
            reason = _name_config(word) if is_config else "not a setting; write --section.key value"
            errors.append(ConfigError("command line", word, reason))
    return [(key, values) for key, values in groups if key or not errors], errors


def _takes_several(key: str) -> bool:
    return key == "job.config_file" or "list" in str(_annotation_of(key))  # the former has a sentence of its own


def _name_config(word: str) -> str:
    """The hint for a TOML file without its option: the corrected command, if this process knows all of it."""
    program, *words = sys.argv
    hint = "name a TOML file with --job.config_file"
    if word not in words or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's own words are not known
        return f"{hint} {word}"
    words.insert(words.index(word), "--job.config_file")
    name = os.path.basename(program)
    program = name if name.startswith("titan-") else f"python {program}"
    return f"{hint}: {program} {shlex.join(words)}"


def _file_settings(path: Any) -> dict[str, Any]:
    """The settings in `job.config_file`, if it is set."""
    if path is None:
        return {}
    require(isinstance(path, str), "job.config_file", path, "must be the path of one TOML file")
    with blamed_on("job.config_file", path):
        name = expanded(path)
    return read_toml(find_config(name))


def _parse_value(text: str) -> Any:
    try:
        value = tomli.loads(f"value = {text}")["value"]
        str(value)  # as in `read_toml`
    except (ValueError, KeyError, RecursionError):
        return text
    return value


def _annotation_of(dotted: str) -> Any:
    """The type of a key in the schema; None for keys inside free tables, and for unknown keys."""
    section, _, key = dotted.partition(".")
    fields = _section_fields(section)
    return fields[key].annotation if key in fields else None


def _section_fields(section: str) -> dict[str, Any]:
    field = JobConfig.model_fields.get(section)
    return {} if field is None else options_of(cast(type[BaseModel], field.annotation))


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, key = dotted.split(".")
    for table in tables:
        if not isinstance(tree.get(table), dict):
            tree[table] = {}
        tree = tree[table]
    tree[key] = value


def _validation_errors(error: ValidationError) -> list[ConfigError]:
    """An error for each wrong key, with the nearest valid key or the meaning of this one as a hint."""
    errors = []
    for detail in error.errors(include_url=False):
        dotted = ".".join(str(part) for part in detail["loc"] if not isinstance(part, int))
        section, _, key = dotted.partition(".")
        value, reason = detail["input"], reason_of(detail)
        if detail["type"] == "model_type" and (hint := hint_for(dotted)):  # such as --compile
            reason = f"is a section; {hint}"
        elif detail["type"] != "extra_forbidden":
            option = _section_fields(section).get(key)
            reason += f" ({option.description})" if option else ""
        elif key or not isinstance(value, dict):
            reason = _unknown_key(dotted)
        elif any(hint_for(f"{dotted}.{name}") for name in value):
            keys = {f"{dotted}.{name}": item for name, item in value.items()}
            errors += [ConfigError(name, item, _unknown_key(name)) for name, item in keys.items()]
            continue
        else:
            value, reason = "[table]", unknown("section", dotted, JobConfig.model_fields)
        errors.append(ConfigError(dotted, value, reason))
    return list({e.key: e for e in reversed(errors)}.values())[::-1]


def _unknown_key(dotted: str) -> str:
    """The reason for refusing a key that does not exist, with the equivalent, namesake or nearest key as a hint."""
    if hint := hint_for(dotted):
        return f"unknown key; {hint}"
    section, _, key = dotted.replace("-", "_").rpartition(".")
    keys = {name: list(_section_fields(name)) for name in JobConfig.model_fields}
    if near := difflib.get_close_matches(key, keys.get(section, []), 1, _NEAR):
        return f"unknown key; did you mean {section}.{near[0]}?"
    namesakes = [name for name, names in keys.items() if key in names]
    nearest = difflib.get_close_matches(section, namesakes, 1, _NEAR) or ([] if key in _SEVERAL else namesakes)
    return f"unknown key; did you mean {nearest[0]}.{key}?" if nearest else "unknown key; --help lists them"
