"""How single modules are split over the processes of a tensor-parallel group. A model's plan names these functions.

Each function makes the module's parameters DTensors, of which a rank holds a shard or a copy, and replaces its forward
pass by one on plain local tensors: dispatching operations on DTensors costs more time than small layers take.

Between layers activations are whole and equal on every rank, or with sequence parallelism each rank has a contiguous
part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.random import generator_of
from titan_like.models.transformer import PaddingMask
from titan_like.parallel.collectives import Enter, Group, Leave
from titan_like.parallel.weight_gradients import linear


@dataclass(frozen=True)
class TensorParallel:
    """What every split needs to know."""

    mesh: DeviceMesh
    sequence_parallel: bool
    padded_vocab_size: int

    @property
    def group(self) -> Group:
        """The processes to split over."""
        return Group.of(self.mesh)

    @property
    def vocabulary(self) -> range:
        """Tokens whose rows of the embedding table, and logits, are here."""
        (rows,), (first,) = compute_local_shape_and_global_offset((self.padded_vocab_size,), self.mesh, [Shard(0)])
        return range(first, first + rows)


Split = Callable[[Any, TensorParallel], None]
Plan = dict[str, Split]  # by module name; `*` stands for one part of it between dots


def parallel_region(module: nn.Module, tp: TensorParallel) -> None:
    """Attention or MLP: its first matrices are split by columns and its last by rows."""
    replace_forward(module, partial(_region, module.forward, tp.sequence_parallel, tp.group))


def _region(forward: Callable, sequence_parallel: bool, group: Group, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
    return forward(Enter.apply(x, sequence_parallel, group), *inputs)


def column_linear(module: nn.Linear, tp: TensorParallel) -> None:
    """The output features are split; the input is whole."""
    _distribute(module, tp, {"weight": Shard(0), "bias": Shard(0)})
    replace_forward(module, partial(_column_linear, module))


def _column_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else local(module.bias)
    return linear(module, x, module.weight, local(module.weight), bias)


def row_linear(module: nn.Linear, tp: TensorParallel) -> None:
    """The input features are split; the ranks' products are added up, and then the bias once."""
    _distribute(module, tp, {"weight": Shard(1), "bias": Replicate()})
    replace_forward(module, partial(_row_linear, module, tp.sequence_parallel, tp.group))
    if tp.sequence_parallel and module.bias is not None:
        mark_partial(module, "bias")


def _row_linear(module: nn.Linear, sequence_parallel: bool, group: Group, x: torch.Tensor) -> torch.Tensor:
    product = linear(module, x, module.weight, local(module.weight), None)
    x = Leave.apply(product, sequence_parallel, group)
    return x if module.bias is None else x + local(module.bias)


def norm(module: nn.LayerNorm | nn.RMSNorm, tp: TensorParallel) -> None:
    """Every rank has the weights; with sequence parallelism it normalises its part of the sequence."""
    _distribute(module, tp, {"weight": Replicate(), "bias": Replicate()})
    replace_forward(module, partial(_norm, module))
    if tp.sequence_parallel:
        mark_partial(module, "weight", "bias")


def _norm(module: nn.LayerNorm | nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, local(module.weight), local(module.bias), module.eps)
    return F.rms_norm(x, module.normalized_shape, local(module.weight), module.eps)


def vocabulary_embedding(module: nn.Embedding, tp: TensorParallel) -> None:
    """The rows of the table are split; tokens of other ranks' rows are zero here, and the ranks' results added up."""
    _distribute(module, tp, {"weight": Shard(0)})
    replace_forward(module, partial(_vocabulary_embedding, module, tp.vocabulary, tp.sequence_parallel, tp.group))


def _vocabulary_embedding(
    module: nn.Embedding, vocabulary: range, sequence_parallel: bool, group: Group, tokens: torch.Tensor
) -> torch.Tensor:
    if sequence_parallel and tokens.shape[1] % group.size:
        length = f"a sequence of {tokens.shape[1]} tokens"
        raise ValueError(f"{length} cannot be cut into {group.size} equal parts, as sequence parallelism does")
    elsewhere = (tokens < vocabulary.start) | (tokens >= vocabulary.stop)
    rows = (tokens - vocabulary.start).masked_fill(elsewhere, 0)
    x = F.embedding(rows, local(module.weight)).masked_fill(elsewhere[..., None], 0)
    return Leave.apply(x, sequence_parallel, group)


def position_embedding(module: nn.Embedding, tp: TensorParallel) -> None:
    """Every rank has the table; with sequence parallelism it looks up the positions of its part of the sequence."""
    _distribute(module, tp, {"weight": Replicate()})
    parts, part = (tp.group.size, tp.group.rank) if tp.sequence_parallel else (1, 0)
    replace_forward(module, partial(_position_embedding, module, parts, part))
    if tp.sequence_parallel:
        mark_partial(module, "weight")


def _position_embedding(module: nn.Embedding, parts: int, part: int, positions: torch.Tensor) -> torch.Tensor:
    return F.embedding(positions.chunk(parts)[part], local(module.weight))


def vocabulary_output(module: nn.Module, tp: TensorParallel) -> None:
    """The output matrix, or the use of the embedding table as such: each rank has the logits of its tokens."""
    if isinstance(module, nn.Linear):
        _distribute(module, tp, {"weight": Shard(0)})
    replace_forward(module, partial(_vocabulary_output, module, tp.sequence_parallel, tp.group))


def _vocabulary_output(
    module: nn.Module, sequence_parallel: bool, group: Group, x: torch.Tensor, table: DTensor | None = None
) -> torch.Tensor:
    if table is None:
        assert isinstance(module, nn.Linear)
        weight: torch.Tensor = module.weight
    else:
        weight = table
    return linear(module, Enter.apply(x, sequence_parallel, group), weight, local(weight), None)


def vocabulary_mask(module: PaddingMask, tp: TensorParallel) -> None:
    """Masks the padding among this rank's logits and gives them as a DTensor, split by its last dimension."""
    module.vocab_size = min(max(module.vocab_size - tp.vocabulary.start, 0), len(tp.vocabulary))
    replace_forward(module, partial(_vocabulary_mask, module.forward, tp.mesh, tp.padded_vocab_size))


def _vocabulary_mask(forward: Callable, mesh: DeviceMesh, padded_vocab_size: int, logits: torch.Tensor) -> torch.Tensor:
    batch, seq, _ = logits.shape
    shape = torch.Size((batch, seq, padded_vocab_size))
    stride = (seq * padded_vocab_size, padded_vocab_size, 1)
    return DTensor.from_local(forward(logits), mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


def attention_core(module: AttentionCore, tp: TensorParallel) -> None:
    """Each rank attends with its heads, so that dropout must differ where all else is drawn alike."""
    if module.dropout > 0 and not tp.sequence_parallel:
        replace_forward(module, partial(_attention_core, module, module.forward, tp.group))


def _attention_core(module: AttentionCore, forward: Callable, group: Group, *inputs: torch.Tensor) -> torch.Tensor:
    if not module.training:
        return forward(*inputs)
    # All ranks draw one number, from the CPU's generator: no device is waited for, and where activation checkpointing
    # puts the generators back the number is drawn again.
    seed = int(torch.randint(2**48, ())) * group.size + group.rank
    generator = generator_of(inputs[0].device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        return forward(*inputs)
    finally:
        generator.set_state(state)


def replace_forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    """From now on the module computes this; its hooks stay."""
    setattr(module, "forward", forward)  # noqa: B010


def mark_partial(module: nn.Module, *names: str) -> None:
    """Note parameters whose gradient here is that of a part of the sequence alone.

    Summing them as they appear would cost a small collective for each in every microbatch: see
    `titan_like.parallel.tensor.sum_partial_gradients`.
    """
    module.partial_gradients = names  # type: ignore[assignment]


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter; the shard's gradient becomes the parameter's, split alike."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _distribute(module: nn.Module, tp: TensorParallel, placements: dict[str, Placement]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements[name]
        # No communication: every rank has the whole value, or none as on the meta device.
        distributed = distribute_tensor(parameter.data, tp.mesh, [placement], src_data_rank=None)
        if distributed.to_local().numel() == 0:
            raise ValueError(
                f"{tuple(parameter.shape)} cannot be split over {tp.group.size} processes: one has nothing"
            )
        module.register_parameter(name, nn.Parameter(distributed))
