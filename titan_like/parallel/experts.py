"""Expert parallelism: each rank of an EP group holds some of a layer's experts (arXiv 2006.16668).

Every rank has tokens of its own: of its samples, of its CP shard of them, and under sequence parallelism of its part of
that. It sends each token's row to the processes with the token's experts, and they send the
results back. Experts are never cut, so a process multiplies with whole matrices.

How many rows a process gets depends on the router. The host must know that to allocate them, and waits for it once in a
layer's forward pass. The exchange of gradients needs no wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_like.models.layers.experts import ExpertLinear, Experts, inverse_of, permuted
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import Group, all_to_all, all_to_all_rows
from titan_like.parallel.extend import extend


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Give each rank of a one-dimensional mesh as many consecutive experts of every layer. Changes the model in place.

    Their matrices become DTensors. Apply it before tensor parallelism, on the meta device or with equal weights on all
    ranks. The mesh's size must divide the number of experts; with a size of 1 nothing is exchanged.
    """
    group = Group.of(mesh)
    for module in list(model.modules()):
        if isinstance(module, ExpertLinear):
            module.weight = torch.nn.Parameter(
                distribute_tensor(module.weight.data, mesh, [Shard(0)], src_data_rank=None)
            )
            module.num_experts //= group.size
            extend(module, SplitExpertLinear)
        elif isinstance(module, Experts) and group.size > 1:
            extend(module, SplitExperts, group=group)


class SplitExpertLinear(ExpertLinear):
    """The matrices of this rank's experts."""

    def matrices(self) -> torch.Tensor:
        """The weight by expert: [experts here, out, in]."""
        assert isinstance(self.weight, DTensor)
        return self.weight.to_local().view(self.num_experts, self.out_features, self.in_features)


class SplitExperts(Experts):
    """Experts of which each rank of a group holds some."""

    group: Group
    microbatches = 1  # of other data-parallel ranks and this, whose rows float8 scales keep apart

    @torch.compiler.disable  # the number of rows differs in every step
    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """As in the base class; ``x`` are the rows of this rank's tokens, and ``offsets`` those of all experts."""
        offsets_on_host = not self.gate.is_one_product(x.dtype)
        input_splits, output_splits, order, offsets = exchange_of(
            offsets, self.group, offsets_on_host, self.microbatches
        )
        inverse = inverse_of(order)
        rows = all_to_all_rows(x, input_splits, output_splits, self.group)
        rows = super().forward(permuted(rows, order, inverse), offsets)
        return all_to_all_rows(permuted(rows, inverse, order), output_splits, input_splits, self.group)


class Exchange(NamedTuple):
    """What the ranks of a group send each other. Rows arrive sorted by the rank that sent them, then by expert."""

    input_splits: list[int]  # rows to each rank
    output_splits: list[int]  # rows from each rank
    order: torch.Tensor  # int64 [rows received], the rows sorted by expert
    offsets: torch.Tensor  # int32 [experts here · microbatches], ends of their rows in this order; on the host if asked


def exchange_of(offsets: torch.Tensor, group: Group, offsets_on_host: bool, microbatches: int = 1) -> Exchange:
    """Tell the ranks how many rows they will get. The host waits for what they tell.

    Args:
        offsets: int32 [E], ends of each expert's rows among the rows of this rank, which are sorted by expert.
        group: the ranks, each of which holds E / ranks experts.
        offsets_on_host: whether to return the result's offsets on the host, or on the device.
        microbatches: into as many parts of neighbouring ranks the offsets divide each expert's rows.
    """
    counts = offsets.diff(prepend=offsets.new_zeros(1)).view(group.size, -1)  # [to rank, experts of a rank]
    arriving = all_to_all(counts, group)  # [from rank, experts here]
    local_offsets = arriving.unflatten(0, (microbatches, -1)).sum(1).t().flatten().cumsum(0).to(torch.int32)
    known = torch.cat((counts.sum(1), arriving.sum(1), local_offsets)).tolist()
    input_splits, output_splits = known[: group.size], known[group.size : 2 * group.size]
    numbers = torch.arange(counts.shape[1], device=offsets.device).repeat(group.size)
    experts = numbers.repeat_interleave(arriving.flatten(), output_size=sum(output_splits))
    order = experts.sort(stable=True).indices
    if offsets_on_host:
        local_offsets = torch.tensor(known[2 * group.size :], dtype=torch.int32)
    return Exchange(input_splits, output_splits, order, local_offsets)
