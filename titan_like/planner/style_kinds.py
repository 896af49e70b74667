"""What a family's tensor-parallel plan splits, for the planner's closed forms."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_like.models.transformer import Transformer
from titan_like.parallel.tensor import family_plan, styles_of
from titan_like.parallel.tensor_styles import Style


class StyleKind(NamedTuple):
    """The properties of a style on which memory and traffic depend."""

    split: dict[str, int]  # own parameter → the dimension that is split; all others are replicated
    partial_gradients: tuple[str, ...]
    enters: int
    leaves: int


def kind_of(style: ParallelStyle, module: nn.Module) -> StyleKind:
    """Describe what a style does to a module. It knows the styles here, and torch's for linear layers.

    Raises:
        ValueError: it is another style.
    """
    if isinstance(style, Style):
        kind = style.kind
        split = {name: at.dim for name, at in kind.placements.items() if isinstance(at, Shard)}
        return StyleKind(split, kind.partial_gradients, kind.enters, kind.leaves)
    if isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
        return StyleKind({"weight": 0, "bias": 0}, (), enters=1, leaves=0)
    if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear):
        return StyleKind({"weight": 1}, (), enters=0, leaves=1)
    known = "a name in STYLES, or ColwiseParallel or RowwiseParallel for a linear layer"
    raise ValueError(f"how {type(style).__name__} splits a {type(module).__name__} is not known; use {known}")


def styles_by_module(model: Transformer) -> dict[str, StyleKind]:
    """Expand the family's plan: module name → what its style does. Patterns match as in `parallelize_module`.

    Raises:
        ValueError: the plan names a style that does not exist or is not known here.
    """
    styles = styles_of(family_plan(model), model, sequence_parallel=False)
    return {name: kind_of(style, model.get_submodule(name)) for name, style in styles.items()}
