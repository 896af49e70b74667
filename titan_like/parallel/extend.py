"""The one way in which an axis alters what a module computes (docs/architecture.md)."""

from functools import cache
from typing import Any

from torch import nn


def extend(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Put ``kind`` in front of a module's class, in place, and set attributes that ``kind`` reads.

    What ``kind`` defines is found first, and it reaches what the module did before by ``super()``, as in FSDP2's
    `fully_shard`. Parameters, names, hooks and subclass checks stay. Modules of one class share a class afterwards too,
    so the compiler makes one graph for all layers, which it would not with a forward pass of its own in each module.
    """
    module.__class__ = _extended(kind, type(module))  # type: ignore[arg-type]  # classes have a hash
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _extended(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (kind, base), {"__module__": base.__module__})
