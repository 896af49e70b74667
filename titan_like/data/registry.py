"""Names of datasets and the classes they refer to. Nothing is imported before it is used, torch included."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from titan_like.config.entry_points import find_entry
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data

GROUP = "titan_like.datasets"  # entry points of this group add the datasets of other packages
DATASETS = {
    "stdlib": "titan_like.data.packed:TextSource",
    "text": "titan_like.data.packed:TextSource",
    "indexed": "titan_like.data.packed:IndexedSource",
    "hf": "titan_like.data.stream:StreamSource",
    "conversations": "titan_like.data.conversations:ConversationSource",
    "race": "titan_like.data.race:RaceSource",
}


def find_dataset(section: Data) -> EntryPoint:
    """Find the class that `data.dataset` refers to, without importing it.

    Raises:
        ConfigError: no dataset has this name, two packages have one, or `data.options` are given to a built-in one.
    """
    entry = find_entry("data.dataset", section.dataset, GROUP, DATASETS)
    if section.dataset in DATASETS and section.options:
        problem = f'dataset "{section.dataset}" has no options; leave them out'
        raise ConfigError("data.options", section.options, problem)
    return entry
