"""Objects that a setting selects by name: built in, and entry points of installed packages.

This module imports neither torch nor any of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli

from titan_like.config.errors import ConfigError, first_line, require, unknown

if TYPE_CHECKING:
    from titan_like.config.schema import Data

FAMILIES = {
    "decoder": "titan_like.models.decoder.config:DecoderConfig",
    "gpt": "titan_like.models.gpt.config:GPTConfig",
    "llama": "titan_like.models.llama.config:LlamaConfig",
    "moe": "titan_like.models.moe.config:MoEConfig",
    "bert": "titan_like.models.bert.config:BertConfig",
    "t5": "titan_like.models.t5.config:T5Config",
}


class DataFormat(NamedTuple):
    """A built-in dataset: its class, and the properties of its samples."""

    source: str
    has_files: bool = True  # in `data.paths`
    is_tokenized: bool = False  # before the run, perhaps with another tokenizer
    is_stream: bool = False  # read in order, and of unknown length
    is_chat: bool = False  # several conversations share a sample, and only answers have labels
    has_options: bool = False  # samples are the options of questions


DATA_FORMATS = {
    "stdlib": DataFormat("titan_like.data.text.packed:TextSource", has_files=False),
    "text": DataFormat("titan_like.data.text.packed:TextSource"),
    "indexed": DataFormat("titan_like.data.text.packed:IndexedSource", is_tokenized=True),
    "hf": DataFormat("titan_like.data.loading.stream:StreamSource", is_stream=True),
    "conversations": DataFormat("titan_like.data.chat.conversations:ConversationSource", is_chat=True),
    "race": DataFormat("titan_like.data.objectives.race:RaceSource", has_options=True),
}
DATASETS = {name: data_format.source for name, data_format in DATA_FORMATS.items()}
RULES = {  # of updates
    "adamw": "titan_like.optim.optimizer:adamw",
    "adafactor": "titan_like.optim.adafactor:Adafactor",
    "muon": "titan_like.optim.optimizer:muon",
    "sgd": "titan_like.optim.optimizer:sgd",
}
MIXERS = {
    "attention": "titan_like.models.decoder.mixers:SoftmaxMixer",
    "latent": "titan_like.models.decoder.mixers:LatentMixer",
    "gated_delta_net": "titan_like.models.decoder.mixers:DeltaMixer",
    "kimi_delta": "titan_like.models.decoder.mixers:KimiDeltaMixer",
    "mamba2": "titan_like.models.decoder.mixers:MambaMixer",
}
START = "titan_like.hugging_face.start:with_start"  # what `model.from` calls
NAMED = {  # setting → this package's own objects, and the group of entry points that adds other packages'
    "model.family": (FAMILIES, "titan_like.models"),
    "data.dataset": (DATASETS, "titan_like.datasets"),
    "optimizer.name": (RULES, "titan_like.optimizers"),
    "mixer": (MIXERS, "titan_like.mixers"),  # of a kind of the decoder's layers
}


def format_of(dataset: str) -> DataFormat:
    """The properties of `data.dataset`, all at their defaults for another package's dataset."""
    return DATA_FORMATS.get(dataset, DataFormat(""))


def names_of(key: str, with_built_in: bool = True) -> list[str]:
    """The names that setting ``key`` may have: this package's if ``with_built_in``, then other packages'."""
    built_in, group = NAMED.get(key, ({}, ""))
    added = sorted(_installed(group, tuple(sys.path)).names - built_in.keys()) if group else []
    return [*(built_in if with_built_in else ()), *added]


def is_added(file: str) -> bool:
    """Whether a module's file is, by its path, in the package of one of other packages' objects."""
    path = Path(file).with_suffix("")
    roots = [root for root in map(Path, filter(None, sys.path)) if path.is_relative_to(root)]
    # Of a file that an import hook found elsewhere, any folder may be the package.
    names = path.relative_to(max(roots, key=lambda root: len(root.parts))).parts[:1] if roots else path.parts
    entries = (entry for _, group in NAMED.values() for entry in _installed(group, tuple(sys.path)))
    return any(entry.module.partition(".")[0] in names for entry in entries)


def find_entry(key: str, name: str) -> EntryPoint:
    """Find the object that setting ``key``, one of `NAMED`, refers to by ``name``.

    Raises a `ConfigError` if nothing has this name, or several packages define it, this one included.
    """
    built_in, group = NAMED[key]
    local = [EntryPoint(name, built_in[name], group)] if name in built_in else []
    entries = [*local, *_installed(group, tuple(sys.path)).select(name=name)]
    if len(entries) == 1:
        return entries[0]
    definitions = " and ".join(sorted(entry.value for entry in entries))
    reason = f"is defined by {definitions}; rename it in the entry points of all packages but one, or uninstall them"
    require(not entries, key, name, reason)
    raise ConfigError(key, name, unknown("name", name, names_of(key)))


def find_dataset(section: Data) -> EntryPoint:
    """Find the class of `data.dataset`. Built-in datasets have no `data.options`."""
    dataset, options = section.dataset, section.options
    reason = f'dataset "{dataset}" has no options; leave them out'
    require(not options or dataset not in DATASETS, "data.options", options, reason)
    return find_entry("data.dataset", dataset)


def load_entry(key: str, entry: EntryPoint) -> Any:
    """Import the object. Raises a `ConfigError` if that fails."""
    try:
        return entry.load()
    except Exception as error:  # whatever the package raises on import
        reason = f"its entry point, {entry.value}, cannot be imported ({first_line(error)}); correct the package"
        raise ConfigError(key, entry.name, reason) from error


def read_flavors(package: str) -> dict[str, dict[str, Any]]:
    """Read the flavors.toml of a family's package: flavor name → fields."""
    return tomli.loads(resources.files(package).joinpath("flavors.toml").read_text(encoding="utf-8"))


def check_flavor(family: str, flavor: str, known: Iterable[str]) -> None:
    """Refuse a flavor that the family does not have; ``known`` are its flavors."""
    known = list(known)
    require(flavor in known, "model.flavor", flavor, unknown(f"flavor of {family}", flavor, known))


def wrong_names(settings: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each unknown name or flavor in ``settings``, by section and key, which need not be valid."""
    tables = {section: table for section, table in settings.items() if isinstance(table, dict)}
    given = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    for key in NAMED:
        try:
            entry = find_entry(key, given[key]) if isinstance(given.get(key), str) else None
            if key == "model.family" and entry is not None and isinstance(given.get("model.flavor"), str):
                known = read_flavors(entry.module.rpartition(".")[0]) | given.get("model.flavors", {})
                check_flavor(entry.name, given["model.flavor"], known)
        except ConfigError as error:
            yield error
        except Exception:  # whatever the family's package raises on import
            continue


@lru_cache(maxsize=16)
def _installed(group: str, _path: tuple[str, ...]) -> EntryPoints:
    """The entry points of all packages on the path, each of which has a file to read."""
    return entry_points(group=group)
