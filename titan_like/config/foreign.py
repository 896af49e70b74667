"""Settings files of other tools, read as data: nothing in them is run. The tool is known by the file's content."""

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from titan_like.config.errors import ConfigError, require
from titan_like.config.formulas import evaluate, parsed
from titan_like.config.paths import blaming, parse_json, user_file
from titan_like.config.synonyms import TOOLS, Tool, tools

_LARGEST = 2**18  # characters of a file
_ASSIGNED = re.compile(r"\s*(?:export\s+|local\s+)?(\w+)=(?!\()(.*)")
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_POSITIONAL = re.compile(r"ARGUMENT_\d+")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ENDS_OPTIONS = re.compile(r"[|;&\\{}<]|[&\d]?>.*|.*\.py")  # words of a shell after which no value follows


def read_foreign(path: str) -> tuple[Tool, dict[str, Any], list[str]]:
    """Read a file of another tool.

    Returns:
        The tool, its settings by name (with a dot in tables), and the names whose values cannot be read.

    Raises:
        ConfigError: the file cannot be read, or is of no tool that is known.
    """
    text = ""
    with user_file(Path(path), blaming("FILE", path, "name a settings file"), may_stream=True):
        text = Path(path).read_text(encoding="utf-8").removeprefix("\ufeff")
    require(len(text) <= _LARGEST, "FILE", path, f"is larger than {_LARGEST:,} characters, so no settings file")
    for parse, names in _PARSERS.items():
        try:
            settings, unread = parse(text)
        except Exception:  # each parser has its own; the text is of another format
            continue
        scores = {name: sum(map(tools()[name].knows, settings)) for name in names}
        if scores[best := max(names, key=scores.__getitem__)] >= min(2, len(settings) or 1):
            is_ours = parse is _toml and any(name.startswith("data.") for name in settings)
            require(not is_ours, "FILE", path, "is a TOML of titan_like already; name it with --job.config_file")
            return tools()[best], settings, unread
    reason = f"is no file with settings of {', '.join(TOOLS.values())}"
    if "Trainer.Config(" in text:
        reason = "is torchtitan's Python code; set debug.save_config_file there, and import the JSON that it writes"
    raise ConfigError("FILE", path, reason)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted names. A list of tables becomes a table of lists."""
    if not isinstance(tree, dict):
        raise ValueError("not a table")
    values: dict[str, Any] = {}
    for name, value in tree.items():
        name = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            keys = dict.fromkeys(key for item in value for key in item)
            value = {key: [item[key] for item in value if key in item] for key in keys}
        values |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return values


def _json(text: str) -> tuple[dict[str, Any], list[str]]:
    return _flat(parse_json(text)), []


def _toml(text: str) -> tuple[dict[str, Any], list[str]]:
    return _flat(tomli.loads(text)), []


def _yaml(text: str) -> tuple[dict[str, Any], list[str]]:
    import yaml

    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise ValueError("has aliases")  # of which a small file can make a huge one
    tree = _flat(yaml.safe_load(text))
    return {name: _number(value) if isinstance(value, str) else value for name, value in tree.items()}, []


def _python(text: str) -> tuple[dict[str, Any], list[str]]:
    """Assignments to names at the top level, as far as they are literals, arithmetic and names that are read."""
    values: dict[str, Any] = {}
    unread: list[str] = []
    for line in ast.parse(text).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names and isinstance(line, ast.Assign | ast.AnnAssign) and line.value:
            try:
                values |= dict.fromkeys(names, evaluate(line.value, values.__getitem__))
            except (ArithmeticError, LookupError, TypeError, ValueError):
                unread += names
    return values, unread


def _number(text: str) -> Any:
    for kind in (int, float) if _NUMBER.fullmatch(text) else ():
        with suppress(ValueError):
            return kind(text)
    return text


def _arguments(text: str) -> tuple[dict[str, Any], list[str]]:
    """The options in a shell script or a list of them, with plain assignments to variables resolved.

    A variable without a value, such as an argument of the script, becomes its own name. All branches are read.
    """
    variables: dict[str, str] = {}
    values: dict[str, Any] = {}
    size = 0

    def expand(match: re.Match[str]) -> str:
        nonlocal size
        name = match[1] or match[3]
        value = variables.get(name) or (match[2] or (f"ARGUMENT_{name}" if name.isdecimal() else name)).strip("\"'")
        size += len(value)
        if size > _LARGEST:
            raise ValueError("expands to a huge text")
        return value

    def compute(match: re.Match[str]) -> str:
        with suppress(ArithmeticError, LookupError, SyntaxError, TypeError, ValueError):
            return str(evaluate(parsed(match[1].strip()), lambda name: int(variables[name])))
        return match[1]

    lines = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    for line in re.sub(r"\\[ \t]*\n", " ", lines).splitlines():
        line = re.sub(r"\$\{\w+\[@\]\}", "", line)
        while (expanded := _REFERENCE.sub(expand, line)) != line:
            line = expanded
        line = re.sub(r"\$\(\(([^()]*)\)\)", compute, line)
        if (assigned := _ASSIGNED.match(line)) and "--" not in assigned[2]:
            name, value = assigned[1], assigned[2].strip().strip("\"'")
            variables[name] = name if _POSITIONAL.fullmatch(value) else value
            continue
        option = ""
        for word in re.sub(r"[\"'()]", " ", line).split():
            if word.startswith("--"):
                option, equals, value = word[2:].replace("-", "_").partition("=")
                values[option] = _number(word.partition("=")[2]) if equals else True
                option = "" if equals else option
            elif _ENDS_OPTIONS.fullmatch(word):
                option = ""
            elif option:
                before = values[option]
                several = before if isinstance(before, list) else [before]
                values[option] = _number(word) if before is True else [*several, _number(word)]
    return values, []


_PARSERS: dict[Callable[[str], tuple[dict[str, Any], list[str]]], tuple[str, ...]] = {
    _json: ("torchtitan", "transformers"),
    _toml: ("torchtitan",),
    _python: ("nanogpt",),
    _arguments: ("megatron",),
    _yaml: ("axolotl", "transformers"),
}
