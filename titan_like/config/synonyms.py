"""Other tools' names for the settings, for titan-import and messages about unknown keys: the table is synonyms.toml."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tomli

from titan_like.config.formulas import names_in

TOOLS = {
    "torchtitan": "torchtitan",
    "megatron": "Megatron-LM",
    "transformers": "Hugging Face TrainingArguments",
    "nanogpt": "nanoGPT",
    "axolotl": "axolotl",
}
GPUS = "gpus"  # in formulas: the number of processes
_NEEDLESS, _MISSING = "not needed: ", "no equivalent: "


@dataclass(frozen=True)
class Tool:
    """What synonyms.toml says about a tool; ``needless`` and ``missing`` by the tool's names, perhaps with ``*``."""

    title: str
    keys: dict[str, str]
    defaults: dict[str, Any]
    same: dict[str, str]
    needless: dict[str, str]
    missing: dict[str, str]

    @cached_property
    def uses(self) -> dict[str, list[str]]:
        """The tool's names → our keys whose formula is the name, or if there are none, contains it."""
        uses: dict[str, list[str]] = {}
        for key, formula in self.keys.items():
            for name in names_in(formula):
                uses.setdefault(name, []).append(key)
        uses.pop(GPUS, None)
        return {name: [key for key in keys if self.keys[key] == name] or keys for name, keys in uses.items()}

    def reason(self, name: str) -> tuple[str | None, str | None]:
        """Why a name, or the table that it is in, is not needed, and what a run lacks without it."""
        return _matching(name, self.needless), _matching(name, self.missing)

    def knows(self, name: str) -> bool:
        """Whether the table has this name."""
        return name in self.same or name in self.uses or any(self.reason(name))


def _matching(name: str, reasons: dict[str, str]) -> str | None:
    found = (why for pattern, why in reasons.items() if fnmatchcase(name, pattern) or name.startswith(f"{pattern}."))
    return next(found, None)


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [" ".join(word.split()) for word in text.split(",") if word.strip()]


def pairs(text: str) -> dict[str, str]:
    """The pairs of a list of them. A word alone is a pair with itself."""
    return {name: value or name for name, _, value in (word.partition("=") for word in words(text))}


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


@cache
def table() -> dict[str, Any]:
    """The content of synonyms.toml."""
    return tomli.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))


def _inverted(groups: dict[str, str]) -> dict[str, str]:
    return {name: what for what, names in groups.items() for name in words(names)}


@cache
def tools() -> dict[str, Tool]:
    """The tools by their names in synonyms.toml."""
    known = {}
    for name, title in TOOLS.items():
        part = table()[name]
        keys = pairs(part["renamed"]) | {key: " ".join(formula.split()) for key, formula in part["keys"].items()}
        defaults = {key: _value(value) for key, value in pairs(part["defaults"]).items()}
        reasons = _inverted(part["needless"]), _inverted(part["missing"])
        known[name] = Tool(title, keys, defaults, pairs(part.get("same", "")), *reasons)
    return known


def shown_key(key: str) -> str:
    """A key of the table as it is in a TOML: a field of the model is in model.overrides."""
    return "model.flavor" if key == "model" else key.replace("shape.", "model.overrides.")


def hint_for(name: str) -> str | None:
    """The hint for a setting of another tool, as a part of a sentence; None for any other name.

    ``name`` may have a section, and may be written as on a command line: tensor-model-parallel-size.
    """
    name = name.lower().replace("-", "_")
    if name in _hints():
        return _hints()[name]
    for tool in tools().values():
        for why, word in zip(tool.reason(name), (_NEEDLESS, _MISSING), strict=True):
            if why:
                return word + why
    return _hints().get(name.rpartition(".")[2])


def key_of(name: str) -> str | None:
    """The key that another tool calls ``name``; None if there is no single one."""
    found = re.fullmatch(r"did you mean (.*)\?", hint_for(name) or "")
    return found and found[1]


@cache
def _hints() -> dict[str, str]:
    """Other name → hint. Names in any section come first, then the tools in their order."""
    advice = _inverted(table()["advice"])
    hints = advice | {name: f"did you mean {shown_key(key)}?" for name, key in _inverted(table()["names"]).items()}
    for tool in tools().values():
        found = {}
        for name, keys in tool.uses.items():
            formula, key = tool.keys[keys[0]], shown_key(keys[0])
            computes = not re.search(r" if | or ", formula) and re.search(r" [*/] |^\[", formula)
            found[name] = f"set {key} to {formula}" if computes else f"did you mean {key}?"
            if formula != name:
                found[name] = advice.get(name.rpartition(".")[2], found[name])
        hints = found | {name: found[other] for name, other in tool.same.items() if other in found} | hints
    # A key with a section is also known without it, if that is no key of ours in another section.
    ours = {key.rpartition(".")[2] for tool in tools().values() for key in tool.keys}
    bare = {name.rpartition(".")[2]: hint for name, hint in hints.items() if name.rpartition(".")[2] not in ours}
    return bare | hints
