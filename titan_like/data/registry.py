"""Names of datasets and where their classes are. Nothing is imported before it is used, torch included."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data

GROUP = "titan_like.datasets"  # entry points of this group add the datasets of other packages
DATASETS = {
    "stdlib": "titan_like.data.packed:TextSource",
    "text": "titan_like.data.packed:TextSource",
}


def find_dataset(section: Data) -> EntryPoint:
    """Where the class of `data.dataset` is.

    Raises:
        ConfigError: no dataset has this name, or two packages have one, or a built-in one is given options.
    """
    name = section.dataset
    if name in DATASETS:
        if section.options:
            raise ConfigError("data.options", section.options, f'dataset "{name}" has no options; leave them out')
        return EntryPoint(name, DATASETS[name], GROUP)
    added = entry_points(group=GROUP)
    found = added.select(name=name)
    if len(found) == 1:
        return found[name]
    if found:
        places = " and ".join(sorted(entry.value for entry in found))
        raise ConfigError("data.dataset", name, f"stands for {places}; uninstall all of these packages but one")
    known = sorted({*DATASETS, *added.names})
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise ConfigError("data.dataset", name, f"no such dataset; {guess}there are {', '.join(known)}")
