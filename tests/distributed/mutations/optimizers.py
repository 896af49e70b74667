"""Bugs in optimizers that look at whole matrices."""

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.mutations import bug, under
from tests.distributed.mutations.updates import after_init
from titan_like.optim import adafactor, muon
from titan_like.optim.muon import MatrixExchange, Muon
from titan_like.optim.shards import Partial, ShardedOptimizer, local
from titan_like.parallel import apply
from titan_like.train.trainer import Trainer


def _not_summed_along(dim: int) -> Any:
    original = adafactor.shard_groups

    def shard_groups(parameter: torch.Tensor, along: int | None = None, in_matrix: bool = False) -> Any:
        return () if along == dim else original(parameter, along, in_matrix)

    return patch.object(adafactor, "shard_groups", shard_groups)


@under(lambda: _not_summed_along(1))
def row_means_of_own_columns() -> None:
    """Adafactor's mean of a row is over the columns that a process holds."""


@under(lambda: _not_summed_along(0))
def column_means_of_own_rows() -> None:
    """Adafactor's mean of a column is over the rows that a process holds."""


@bug(adafactor._Update, "divide")
def clipped_by_the_norm_of_a_shard(original: Any, self: Any) -> Partial:
    """Adafactor clips each shard of an update by itself."""
    return original(self)._replace(groups=())


@bug(ShardedOptimizer, "assign")
def skipped_steps_counted_as_updates(original: Any, self: Any, old: torch.Tensor, new: torch.Tensor) -> None:
    """Adafactor's decay rate goes on in a skipped step."""
    if old.dtype == torch.float32 and old.ndim == 0:
        old.copy_(new)
    else:
        original(self, old, new)


@bug(muon, "_exchange_of")
def shards_orthogonalised_alone(_original: Any, *_: Any) -> Any:
    """Muon takes a process's part of a matrix for the whole."""
    return None


@bug(apply, "mark_stacks")
def sharded_stacks_taken_for_one_matrix(original: Any, model: torch.nn.Module) -> None:
    """Experts' weights that a process holds a part of lose the note that they are stacks."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        original(model)


@bug(Muon, "_take_factors")
def factor_not_applied_to_matrices(original: Any, self: Muon) -> None:
    """Muon's momentum takes gradients that are not clipped."""
    factor, self.factor = self.factor, None
    original(self)
    self.factor = factor


@bug(MatrixExchange, "gather")
def parts_put_together_in_reverse(original: Any, self: MatrixExchange, parts: Any) -> Any:
    """Muon's owner of a matrix takes the first process's part for the last one's."""
    owned, self.owned_parts = self.owned_parts, self.owned_parts[::-1]
    wholes = original(self, parts)
    self.owned_parts = owned
    return wholes


@after_init
def momentum_forgotten_in_later_stages(self: Trainer) -> None:
    """Stages after the first begin every step without momentum."""

    def forget(*_: Any) -> None:
        for state in self.state.optimizer.state.values():
            if "momentum_buffer" in state and self.mesh["pp"].get_local_rank() > 0:
                local(state["momentum_buffer"]).zero_()

    self.state.optimizer.register_step_post_hook(forget)
