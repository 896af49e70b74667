"""Names of datasets and the classes they refer to. Nothing is imported before it is used, torch included."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from titan_like.config.entry_points import DATASETS, find_entry
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data


def find_dataset(section: Data) -> EntryPoint:
    """Find the class that `data.dataset` refers to, without importing it. Built-in ones have no `data.options`."""
    entry = find_entry("data.dataset", section.dataset)
    if section.dataset in DATASETS and section.options:
        reason = f'dataset "{section.dataset}" has no options; leave them out'
        raise ConfigError("data.options", section.options, reason)
    return entry
