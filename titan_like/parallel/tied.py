"""Tied embeddings under pipeline parallelism, where the first and the last stage each hold a copy of the table."""

from __future__ import annotations

import torch
import torch.distributed as dist

from titan_like.optim.grad_norm import local_gradients
from titan_like.parallel.model import ParallelModel, holds_tied_table


@torch.no_grad()
def sum_table_gradients(model: ParallelModel, group: dist.ProcessGroup, first_rank: int, last_rank: int) -> None:
    """Replace the gradients of the table's two copies by their sum.

    ``group`` is the pipeline's process group; ``first_rank`` and ``last_rank`` hold the two ends. Both copies are
    sharded alike over data and tensor ranks, so each process exchanges its part with one other process. Addition
    commutes, so the two sums are bitwise equal.
    """
    tables = [stage.module.embedding.weight for stage in model.stages if holds_tied_table(stage)]
    gradients = local_gradients(tables)
    assert len(gradients) == len(tables), "a tied table received no gradient"
    if len(gradients) == 2:
        gradients[0] += gradients[1]
        gradients[1].copy_(gradients[0])
    elif gradients and first_rank != last_rank:
        mine = gradients[0]
        other = torch.empty_like(mine)
        peer = last_rank if dist.get_rank(group) == first_rank else first_rank
        exchange = [
            dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine += other
