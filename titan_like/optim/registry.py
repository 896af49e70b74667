"""Names of update rules and the functions they refer to. Nothing is imported before it is used, torch included."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from titan_like.config.entry_points import find_entry
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Optimizer

GROUP = "titan_like.optimizers"  # entry points of this group add the rules of other packages
RULES = {name: f"titan_like.optim.rules:{name}" for name in ("adafactor", "adamw", "muon", "sgd")}


def find_rule(section: Optimizer) -> EntryPoint:
    """Find the function that `optimizer.name` refers to, without importing it.

    Raises:
        ConfigError: there is no such rule, or `optimizer.options` are given to a built-in one, which has none.
    """
    entry = find_entry("optimizer.name", section.name, GROUP, RULES)
    if section.name in RULES and section.options:
        raise ConfigError("optimizer.options", section.options, f"{section.name} has no options; leave them out")
    return entry
