"""Parameters that several pipeline stages hold: tied embeddings, and what the layers of several stages share.

Each such stage has a copy. All copies begin with the same value, and the sum of their gradients updates each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_like.models.config import TransformerConfig
from titan_like.models.parts import layers_of, one_of_each, shared_parameters
from titan_like.models.transformer import shared_modules
from titan_like.parallel.model import ParallelModel
from titan_like.parallel.split import StageLayers, kinds_of_layers


def holders_of_copies(model: TransformerConfig, splits: Sequence[StageLayers]) -> dict[str, tuple[int, ...]]:
    """Name of each parameter that several stages hold → numbers of these stages."""
    small, kinds = one_of_each(model), kinds_of_layers(model)
    uses = [shared_modules(layer) for layer in layers_of(small)]
    found = {}
    for name, _ in shared_parameters(small):
        module = name.partition(".")[0]
        found[name] = [i for i, split in enumerate(splits) if any(module in uses[kinds[n]] for n in split.layers)]
    if model.tied_embeddings:
        found["embedding.weight"] = [i for i, split in enumerate(splits) if split.is_first or split.is_last]
    return {name: tuple(stages) for name, stages in found.items() if len(stages) > 1}


@torch.no_grad()
def sum_gradients_of_copies(model: ParallelModel, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Replace the gradients of each parameter's copies by their sum.

    ``group`` is the pipeline's process group, and ``ranks`` has the rank of every stage. Copies are sharded alike over
    data and tensor ranks, so each process exchanges its part with those that hold the same part in other stages. All of
    them add in the order of the ranks, so the sums are bitwise equal.
    """
    here = dist.get_rank(group)
    exchange, sums = [], []
    for name, stages in model.copies_in.items():
        gradients = [_local(p.grad) for p in model.copies_of(name)]
        if not gradients:
            continue
        mine = gradients[0]
        for other in gradients[1:]:
            mine += other
        parts = {here: mine}
        for rank in sorted({ranks[stage] for stage in stages} - {here}):
            parts[rank] = torch.empty_like(mine)
            exchange.append(dist.P2POp(dist.isend, mine, group=group, group_peer=rank))
            exchange.append(dist.P2POp(dist.irecv, parts[rank], group=group, group_peer=rank))
        sums.append((gradients, parts))
    for work in dist.batch_isend_irecv(exchange) if exchange else []:
        work.wait()
    for gradients, parts in sums:
        total, *others = [parts[rank] for rank in sorted(parts)]
        for other in others:
            total += other
        for gradient in gradients:
            gradient.copy_(total)


def _local(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, "a copy received no gradient"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
