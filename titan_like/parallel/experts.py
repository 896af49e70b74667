"""Expert parallelism: each rank of an EP group holds some of a layer's experts (arXiv 2006.16668).

Every rank has tokens of its own: of its samples, of its CP shard of them, and under sequence parallelism of its part of
that. It sends each token's row to the processes with the token's experts, and they send the
results back.

Tensor parallelism leaves experts whole, or splits each expert's first two matrices by columns and its last by rows over
the tensor ranks. Then these gather each other's rows, and the partial sums go back to where a row is from, as with
Megatron-LM's expert tensor parallelism.

How many rows a process gets depends on the router. The host must know that to allocate them, and waits for it once in a
layer's forward pass. The exchange of gradients needs no wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from titan_like.models.layers.experts import ExpertLinear, Experts, inverse_of, permuted
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import (
    Group,
    all_gather,
    all_to_all,
    all_to_all_rows,
    gather_rows,
    reduce_scatter_rows,
)
from titan_like.parallel.extend import extend
from titan_like.torch_private import StridedShard


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Give each rank of the mesh the same number of consecutive experts of every layer. Changes the model in place.

    A second dimension of the mesh has the tensor ranks that split each expert. The matrices become DTensors. Apply it
    before tensor parallelism, on the meta device or with equal weights on all ranks. The mesh's sizes must divide the
    number of experts and an expert's width; with a size of 1 nothing is exchanged.
    """
    assert mesh.mesh_dim_names is not None
    group, *tensor_groups = (Group.of(mesh[name]) for name in mesh.mesh_dim_names)
    tensor = tensor_groups[0].size if tensor_groups else 1
    for module in list(model.modules()):
        if not isinstance(module, Experts):
            continue
        for linear in (module.gate, module.up, module.down):
            linear.num_experts //= group.size
            by_rows = StridedShard(0, split_factor=linear.num_experts)
            for name, parameter in list(linear.named_parameters()):
                # Each tensor rank adds its part of `down`'s biases to its partial sums, so that they are added once.
                split = Shard(1) if linear is module.down and name == "weight" else by_rows
                placements: Sequence[Placement] = [Shard(0), split][: mesh.ndim]
                distributed = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
                linear.register_parameter(name, torch.nn.Parameter(distributed))
            extend(linear, SplitExpertLinear)
        if tensor_groups:
            module.down.first_bias = module.down.out_features // tensor * tensor_groups[0].rank
        module.gate.out_features = module.up.out_features = module.down.in_features = module.down.in_features // tensor
        if mesh.size() > 1:
            extend(module, SplitExperts, group=group, tensor_group=tensor_groups[0] if tensor_groups else None)


class SplitExpertLinear(ExpertLinear):
    """The matrices of this rank's experts, or its parts of them."""

    def matrices(self) -> torch.Tensor:
        """The weight by expert: [experts here, out, in]."""
        assert isinstance(self.weight, DTensor)
        return self.weight.to_local().view(self.num_experts, self.out_features, self.in_features)

    def biases(self) -> torch.Tensor:
        """The biases by expert: [experts here, outputs whose biases this rank adds]."""
        assert isinstance(self.bias, DTensor)
        return self.bias.to_local().view(self.num_experts, -1)


class SplitExperts(Experts):
    """Experts of which each rank of a group holds some, or parts that a tensor-parallel group has together."""

    group: Group
    tensor_group: Group | None
    microbatches = 1  # of other data-parallel ranks and this, whose rows float8 scales keep apart

    @torch.compiler.disable  # the host waits, and sends other numbers of rows in every step
    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """As in the base class; ``x`` are the rows of this rank's tokens, ``offsets`` all experts' offsets."""
        exchange, tensor = self.exchange(x, offsets), self.tensor_group
        inverse = inverse_of(exchange.order)
        rows = all_to_all_rows(x, exchange.input_splits, exchange.output_splits, self.group)
        if tensor is not None:
            rows = gather_rows(rows, exchange.gathered, tensor)
        rows = self.compute(permuted(rows, exchange.order, inverse), exchange.offsets)
        rows = permuted(rows, inverse, exchange.order)
        if tensor is not None:
            rows = reduce_scatter_rows(rows, exchange.gathered, tensor)
        return all_to_all_rows(rows, exchange.output_splits, exchange.input_splits, self.group)

    def exchange(self, x: torch.Tensor, offsets: torch.Tensor) -> Exchange:
        """What ranks send each other of ``x``, the rows of this rank's tokens."""
        offsets_on_host = not self.gate.is_one_product(x.dtype)
        return exchange_of(offsets, self.group, self.tensor_group, offsets_on_host, self.microbatches)

    def compute(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of the rows that they got; as in the base class."""
        return super().forward(rows, offsets)


class Exchange(NamedTuple):
    """What ranks send each other. Rows arrive sorted by tensor rank, by the rank that sent them, and by expert."""

    input_splits: list[int]  # rows to each rank
    output_splits: list[int]  # rows from each rank
    gathered: list[int]  # rows of each tensor rank after that
    order: torch.Tensor  # int64 [rows], all of them sorted by expert
    offsets: torch.Tensor  # int32 [experts here · microbatches], ends of their rows in this order; on the host if asked


def exchange_of(
    offsets: torch.Tensor, group: Group, tensor_group: Group | None, offsets_on_host: bool, microbatches: int = 1
) -> Exchange:
    """Exchange the numbers of rows that ranks will send each other. The host waits for them.

    Args:
        offsets: int32 [E], ends of each expert's rows among the rows of this rank, which are sorted by expert.
        group: the ranks, each of which holds E / ranks experts.
        tensor_group: the ranks that hold the other parts of the same experts, if they are split.
        offsets_on_host: whether to return the result's offsets on the host, or on the device.
        microbatches: number of parts, of neighbouring ranks, into which the offsets divide each expert's rows.
    """
    counts = offsets.diff(prepend=offsets.new_zeros(1)).view(group.size, -1)  # [to rank, experts of a rank]
    arriving = all_to_all(counts, group)  # [from rank, experts here]
    gathered = arriving[None] if tensor_group is None else all_gather(arriving[None], 0, tensor_group)
    parts = gathered.sum(0).unflatten(0, (microbatches, -1)).sum(1)  # [microbatches, experts here]
    local_offsets = parts.t().flatten().cumsum(0).to(torch.int32)
    known = torch.cat((counts.sum(1), arriving.sum(1), gathered.sum((1, 2)), local_offsets)).tolist()
    sizes, known = known[: 2 * group.size], known[2 * group.size :]
    of_tensor_ranks, ends = known[: len(gathered)], known[len(gathered) :]
    numbers = torch.arange(counts.shape[1], device=offsets.device).repeat(gathered.shape[0] * group.size)
    experts = numbers.repeat_interleave(gathered.flatten(), output_size=sum(of_tensor_ranks))
    order = experts.sort(stable=True).indices
    if offsets_on_host:
        local_offsets = torch.tensor(ends, dtype=torch.int32)
    return Exchange(sizes[: group.size], sizes[group.size :], of_tensor_ranks, order, local_offsets)
