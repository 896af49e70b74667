"""Turn a settings file of another tool into a TOML: python scripts/import_config.py FILE --output my.toml

FILE is a TOML of torchtitan 0.1 to 0.3 or the JSON of its Python configuration, a shell script or list with options of
Megatron-LM, the JSON of Hugging Face TrainingArguments, Python assignments of nanoGPT, or a YAML of axolotl; its
content tells which. Nothing in it is run. Each of its keys gets a line: what became of it, why it is not needed, or
what a run lacks without it. docs/coming_from.md lists the keys. Exit codes: 0 done, 2 the file or its result is wrong.
"""

import json
import re
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from titan_like.config.entry_points import names_of
from titan_like.config.errors import ConfigError, first_line, printable, require, shortened
from titan_like.config.foreign import read_foreign
from titan_like.config.formulas import evaluate, names_in, parsed
from titan_like.config.load import load_config, run_command
from titan_like.config.options import OptionParser, check_output_file, write_output_file
from titan_like.config.paths import to_toml
from titan_like.config.schema import JobConfig
from titan_like.config.section import options_of
from titan_like.config.synonyms import GPUS, Tool, pairs, shown_key, table

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # values of keys that change nothing
_NAME = "imported"  # of the flavor with a shape of the tool
_SECRET = re.compile(r"hub_token|api_key|password|secret")
_WIDTH = 60  # characters of a value that are printed


def build_parser() -> OptionParser:
    """The command line's options."""
    parser = OptionParser(description=__doc__)
    parser.add_path("FILE", "settings file of another tool", metavar="FILE")
    parser.add_path("--output", "TOML file to write (default: print it, and the account of its keys to stderr)", "TOML")
    meaning = "processes of the job, where the batch depends on them"
    parser.add_number("--gpus", int, least=1, most=2**20, metavar="N", help=meaning)
    return parser


def main(argv: list[str]) -> int:
    """Print what became of each key, write the TOML, and check it."""
    options = build_parser().parse_args(argv)
    check_output_file("--output", options.output)
    tool, settings, unread = read_foreign(options.FILE)
    imported = Import(tool, settings, options.gpus)
    name = Path(options.FILE).name
    lines, lacking = imported.account(unread)
    head = f"From {printable(name)} ({tool.title}), by titan-import{'. Not taken:' if lacking else ''}"
    text = to_toml(imported.tree, [head, *lacking])
    print(f"{tool.title}:", *lines, sep="\n", file=sys.stdout if options.output else sys.stderr)
    if options.output:
        write_output_file(options.output, text)
        print(f"wrote {options.output}")
    else:
        print(text)
    check(imported.tree, imported.gpus)
    return 0


def check(tree: dict[str, dict[str, Any]], gpus: int | None) -> None:
    """Raise the `ConfigError` of what a run would refuse. Rules about a model that is not on this machine are left out.

    ``gpus``: the number of processes; None: as many as the layout has at least.
    """
    from titan_like.parallel.layout import resolve_layout
    from titan_like.train.environment import dry_run_world
    from titan_like.train.rules import broken_rules, resolve_settings

    has_length = {"steps", "samples", "tokens", "epochs"} & tree.get("training", {}).keys()
    require(
        has_length, "training.steps", None, "the file gives the run no length; set steps, samples, tokens or epochs"
    )
    source = tree.get("model", {}).get("from")
    if source is None or Path(source).exists():
        config = load_config([], stored=tree)
        resolve_settings(config, gpus or dry_run_world(config))
        return
    config = JobConfig.model_validate(tree)
    for error in broken_rules(config, None, resolve_layout(config.parallelism, gpus or dry_run_world(config))):
        raise error
    print(f"(not checked with its model: {printable(source)} is not a folder here)", file=sys.stderr)


class Import:
    """The settings of another tool as ours: ``tree``, by section and key, and what became of each of its keys."""

    def __init__(self, tool: Tool, settings: dict[str, Any], gpus: int | None) -> None:
        """Apply the tool's formulas. Raises a `ConfigError` if one needs the number of processes and it is None."""
        self.tool, self.settings = tool, settings
        renamed = {tool.same[name]: value for name, value in settings.items() if name in tool.same}
        self.given = renamed | {name: value for name, value in settings.items() if name not in tool.same}
        self.values = tool.defaults | {name: value for name, value in self.given.items() if value is not None}
        launched = [self.values.get("nproc_per_node"), self.values.get("nnodes", 1)]
        self.gpus = gpus or (prod(launched) if all(isinstance(count, int) for count in launched) else None)
        self.tree: dict[str, dict[str, Any]] = {}
        self.outcomes: dict[str, str] = {}  # our key → what is printed
        self.refused: dict[str, str] = {}  # our key → why its value is not taken
        for key, formula in tool.keys.items():
            value = self._value(key, formula)
            if isinstance(value, str) and value.startswith("!"):
                self.refused[key] = value[1:]
            elif value is not None:
                self._take(key, value)
        self._finish_model()

    def _value(self, key: str, formula: str) -> Any:
        """The value of our key; None if nothing sets it."""

        def value_of(name: str) -> Any:
            reason = f"{key} depends on the number of processes here; give it, such as --gpus 8"
            require(name != GPUS or self.gpus, "--gpus", None, reason)
            return self.gpus if name == GPUS else self.values.get(name)

        if all(self.values.get(name) is None for name in names_in(formula)):
            return None
        try:
            value = evaluate(parsed(formula), value_of)
        except ConfigError:
            raise
        except (ArithmeticError, TypeError, ValueError):  # a name that has no value, or one of another type
            return None
        return None if isinstance(value, list) and None in value else value

    def _take(self, key: str, value: Any) -> None:
        """Set our key to a value, in our words, or note why it cannot have it."""
        section, _, name = key.partition(".")
        words, remark = pairs(table()["values"].get(key, "")), ""
        if isinstance(value, str) and words:
            value, _, remark = words.get(value.lower(), value if key == "model" else value.lower()).partition("; ")
        shown = {"model": "model.family/flavor"}.get(key, key.replace("shape.", f"model.flavors.{_NAME}."))
        if key == "model":  # an unknown one remains, so that the run is refused until it is described
            family, _, flavor = value.partition("/")
            family = family if family in names_of("model.family") else "decoder"
            self.tree["model"] = {"family": family, "flavor": flavor}
        elif section == "shape":
            if not isinstance(value, str | int | float):
                self.refused[key] = f"{name} should be one value"
                return
            model = self.tree.setdefault("model", {})
            model["flavor"] = _NAME
            model.setdefault("flavors", {_NAME: {}})[_NAME][name] = value
        else:
            try:
                require(key != "optimizer.name" or value in names_of(key), key, value, "unknown name")
                default = getattr(getattr(JobConfig(), section), _field(name))
                value = [value] if isinstance(default, list) and not isinstance(value, list) else value
                taken = getattr(getattr(JobConfig.model_validate({section: {name: value}}), section), _field(name))
            except (ConfigError, ValidationError) as error:
                self.refused[key] = first_line(error)
                return
            is_given = any(name in self.given for name in names_in(self.tool.keys[key])) and value is not False
            if is_given or taken != default or section == "model":
                self.tree.setdefault(section, {})[name] = value
        self.outcomes[key] = f"{shown} = {json.dumps(value, ensure_ascii=False)}{f' ({remark})' if remark else ''}"

    def _finish_model(self) -> None:
        """Leave out fields that the family does not have, and a shape if the model comes from a folder."""
        from titan_like.models.registry import config_class, flavors

        model = self.tree.get("model", {})
        if "from" in model:
            self.tree["model"] = {"from": model["from"]}
            self.outcomes = {key: text for key, text in self.outcomes.items() if not key.startswith("shape.")}
        elif shape := model.get("flavors", {}).get(_NAME):
            for name in shape.keys() - config_class(model["family"]).model_fields.keys():
                del shape[name], self.outcomes[f"shape.{name}"]
                self.refused[f"shape.{name}"] = f"{model['family']} has no {name}"
        elif model:
            longest = flavors(model["family"]).get(model["flavor"], {}).get("max_seq_len", 0)
            if 0 < longest < (length := self.tree.get("training", {}).get("seq_len", 0)):
                model["overrides"] = {"max_seq_len": length}
        for section, field in JobConfig.model_fields.items():  # in the order of the schema
            if found := self.tree.pop(section, None):
                self.tree[section] = {
                    key: found[key] for key in options_of(cast(type[BaseModel], field.annotation)) if key in found
                }

    def account(self, unread: list[str]) -> tuple[list[str], list[str]]:
        """A line for each key of the source, by what became of it, and the keys whose effect the run lacks."""
        taken, needless, lacking = [], [], []
        for given, value in self.settings.items():
            name = self.tool.same.get(given, given)
            text = "…" if _SECRET.search(given) else shortened(printable(json.dumps(value, default=str)), _WIDTH)
            why, lacks = self.tool.reason(name)
            keys = self.tool.uses.get(name, [])
            outcomes = ", ".join(self.outcomes[key] for key in keys if key in self.outcomes)
            refusal = next((self.refused[key] for key in keys if key in self.refused), lacks)
            if outcomes:
                taken.append(f"  {given} = {text} → {outcomes}{f'; {refusal}' if refusal else ''}")
            elif why or value in _OFF:
                needless.append(f"  {given} = {text}: {why or 'it is off'}")
            elif refusal or not keys:
                lacking.append(f"  {given} = {text}: {refusal or 'is not a key that titan-import knows'}")
            else:
                needless.append(f"  {given} = {text}: it changes nothing with these values")
        told = {key for given in self.settings for key in self.tool.uses.get(self.tool.same.get(given, given), [])}
        by_default = {key: why for key, why in self.refused.items() if key not in told and why in self.tool.keys[key]}
        lacking += [f"  {shown_key(key)}: {why}" for key, why in by_default.items()]
        lacking += [f"  {name}: is not a literal or simple arithmetic; set it by hand" for name in unread]
        if "from" not in self.tree.get("model", {}):
            missed = {name[1:]: why for name, why in self.tool.missing.items() if name.startswith("!")}
            lacking += [f"  {name}: {why}" for name, why in missed.items() if not self.values.get(name)]
        assumed = [f"  {text}" for key, text in self.outcomes.items() if self._is_assumed(key)]
        parts = {"taken": taken, f"{self.tool.title}'s defaults": assumed, "not needed": needless, "not there": lacking}
        return [line for head, lines in parts.items() if lines for line in (f"{head}:", *lines)], lacking

    def _is_assumed(self, key: str) -> bool:
        """Whether our key follows from the tool's defaults alone, and differs from our default."""
        section, _, name = key.partition(".")
        is_written = section in ("model", "shape") or name in self.tree.get(section, {})
        return is_written and not any(name in self.given for name in names_in(self.tool.keys[key]))


def _field(key: str) -> str:
    return {"from": "from_", "async": "async_"}.get(key, key)  # words of Python


run = partial(run_command, main)
