"""How single modules are split over the processes of a tensor-parallel group: `ParallelStyle`s for torch's
`parallelize_module`, which a family's plan names by the keys of `STYLES`.

Each style makes the module's own parameters DTensors, of which a rank holds a shard or a copy, and replaces its forward
pass by one on plain local tensors: torch's own styles dispatch every operation on DTensors, which takes 1.2 to 1.6
times the processor time of a step of a small model. They can stand in a plan beside these, where no "region" encloses
them: both would sum a gradient.

Between layers activations are whole and equal on every rank, or with sequence parallelism each rank has a contiguous
part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.random import generator_of
from titan_like.models.transformer import PaddingMask
from titan_like.parallel.collectives import CopyToTensorRegion, Group, ReduceFromTensorRegion
from titan_like.parallel.weight_gradients import linear


class LocalStyle(ParallelStyle):
    """A style whose module computes on this rank's shards: `forward` in place of the module's own."""

    placements: ClassVar[dict[str, Placement]] = {}  # of the module's own parameters
    partial_gradients: ClassVar[tuple[str, ...]] = ()  # where each rank has a part of the sequence
    enters: ClassVar[bool] = False  # its input comes whole from between the layers: `CopyToTensorRegion`
    leaves: ClassVar[bool] = False  # its outputs are added up over the ranks: `ReduceFromTensorRegion`

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, self.placements)
        replace_forward(module, partial(self.forward, module, Group.of(device_mesh)))
        if self.sequence_parallel and self.partial_gradients:
            mark_partial(module, *self.partial_gradients)
        return module

    def forward(self, module: Any, group: Group, x: torch.Tensor) -> torch.Tensor:
        """What the module computes from now on."""
        raise NotImplementedError


class Region(LocalStyle):
    """Attention or MLP: its first matrices are split by columns and its last by rows."""

    enters = True

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replace_forward(module, partial(self.enter, module.forward, Group.of(device_mesh)))
        return module

    def enter(self, forward: Callable, group: Group, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """The module's own pass over whole activations. x: what lies between layers."""
        return forward(CopyToTensorRegion.apply(x, self.sequence_parallel, group), *inputs)


class ColumnLinear(LocalStyle):
    """The output features are split; the input is whole."""

    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, module: nn.Linear, group: Group, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, in] → [batch, seq, out of this rank]."""
        bias = None if module.bias is None else local(module.bias)
        return linear(module, x, module.weight, local(module.weight), bias)


class RowLinear(LocalStyle):
    """The input features are split; the ranks' products are added up, and then the bias once."""

    leaves = True
    placements: ClassVar = {"weight": Shard(1), "bias": Replicate()}
    partial_gradients = ("bias",)

    def forward(self, module: nn.Linear, group: Group, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, in of this rank] → what lies between layers."""
        product = linear(module, x, module.weight, local(module.weight), None)
        x = ReduceFromTensorRegion.apply(product, self.sequence_parallel, group)
        return x if module.bias is None else x + local(module.bias)


class Norm(LocalStyle):
    """Every rank has the weights; with sequence parallelism it normalises its part of the sequence."""

    placements: ClassVar = {"weight": Replicate(), "bias": Replicate()}
    partial_gradients = ("weight", "bias")

    def forward(self, module: nn.LayerNorm | nn.RMSNorm, group: Group, x: torch.Tensor) -> torch.Tensor:
        """As the module does."""
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, local(module.weight), local(module.bias), module.eps)
        return F.rms_norm(x, module.normalized_shape, local(module.weight), module.eps)


class VocabularyEmbedding(LocalStyle):
    """The rows of the table are split; tokens of other ranks' rows are zero here, and the ranks' results added up."""

    leaves = True
    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, module: nn.Embedding, group: Group, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] → what lies between layers.

        Raises:
            ValueError: sequence parallelism cannot cut the sequence into equal parts.
        """
        if self.sequence_parallel and tokens.shape[1] % group.size:
            length = f"a sequence of {tokens.shape[1]} tokens"
            raise ValueError(f"{length} cannot be cut into {group.size} equal parts, as sequence parallelism does")
        here = group.vocabulary(module.num_embeddings)
        elsewhere = (tokens < here.start) | (tokens >= here.stop)
        rows = (tokens - here.start).masked_fill(elsewhere, 0)
        x = F.embedding(rows, local(module.weight)).masked_fill(elsewhere[..., None], 0)
        return ReduceFromTensorRegion.apply(x, self.sequence_parallel, group)


class PositionEmbedding(LocalStyle):
    """Every rank has the table; with sequence parallelism it looks up the positions of its part of the sequence."""

    placements: ClassVar = {"weight": Replicate()}
    partial_gradients = ("weight",)

    def forward(self, module: nn.Embedding, group: Group, positions: torch.Tensor) -> torch.Tensor:
        """positions [seq] → [seq of this rank, hidden]."""
        if self.sequence_parallel:
            positions = positions.chunk(group.size)[group.rank]
        return F.embedding(positions, local(module.weight))


class VocabularyOutput(LocalStyle):
    """The output matrix, or the use of the embedding table as such: each rank has the logits of its tokens."""

    enters = True
    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, module: nn.Module, group: Group, x: torch.Tensor, table: DTensor | None = None) -> torch.Tensor:
        """What lies between layers → [batch, seq, tokens of this rank]."""
        weight = module.weight if table is None else table
        assert isinstance(weight, torch.Tensor)
        return linear(module, CopyToTensorRegion.apply(x, self.sequence_parallel, group), weight, local(weight), None)


class VocabularyMask(LocalStyle):
    """Masks the padding among this rank's logits and gives them as a DTensor, split by its last dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, PaddingMask)
        here = Group.of(device_mesh).vocabulary(module.padded_vocab_size)
        module.vocab_size = min(max(module.vocab_size - here.start, 0), len(here))
        replace_forward(module, partial(self.mask, module, module.forward, device_mesh))
        return module

    @staticmethod
    def mask(module: PaddingMask, forward: Callable, mesh: DeviceMesh, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, tokens of this rank] → [batch, seq, padded vocab]."""
        batch, seq, size = *logits.shape[:2], module.padded_vocab_size
        shape, stride = torch.Size((batch, seq, size)), (seq * size, size, 1)
        return DTensor.from_local(forward(logits), mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


class SplitHeads(LocalStyle):
    """Each rank attends with its heads, so that dropout must differ where all else is drawn alike."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AttentionCore)
        if module.dropout > 0 and not self.sequence_parallel:
            replace_forward(module, partial(self.attend, module, module.forward, Group.of(device_mesh)))
        return module

    @staticmethod
    def attend(module: AttentionCore, forward: Callable, group: Group, *inputs: torch.Tensor) -> torch.Tensor:
        """The module's own pass, with a random stream of this rank's."""
        if not module.training:
            return forward(*inputs)
        # All ranks draw one number, from the CPU's generator: no device is waited for, and where activation
        # checkpointing puts the generators back the number is drawn again.
        seed = int(torch.randint(2**48, ())) * group.size + group.rank
        generator = generator_of(inputs[0].device)
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            return forward(*inputs)
        finally:
            generator.set_state(state)


STYLES: dict[str, type[LocalStyle]] = {
    "region": Region,
    "column_linear": ColumnLinear,
    "row_linear": RowLinear,
    "norm": Norm,
    "split_heads": SplitHeads,
    "position_embedding": PositionEmbedding,
    "vocabulary_embedding": VocabularyEmbedding,
    "vocabulary_output": VocabularyOutput,
    "vocabulary_mask": VocabularyMask,
}


class StyleKind(NamedTuple):
    """What a style does to a module, as far as memory and traffic depend on it."""

    split: dict[str, int]  # own parameter → the dimension that is split; those not named are whole on every rank
    partial_gradients: tuple[str, ...]
    enters: bool
    leaves: bool


def kind_of(style: ParallelStyle, module: nn.Module) -> StyleKind:
    """What one of our styles, or of torch's for linear layers, does to a module.

    Raises:
        ValueError: another style, which does not say.
    """
    if isinstance(style, LocalStyle):
        split = {name: at.dim for name, at in style.placements.items() if isinstance(at, Shard)}
        return StyleKind(split, style.partial_gradients, style.enters, style.leaves)
    if isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
        return StyleKind({"weight": 0, "bias": 0}, (), enters=True, leaves=False)
    if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear):
        return StyleKind({"weight": 1}, (), enters=False, leaves=True)
    known = "LocalStyle, or ColwiseParallel or RowwiseParallel for a linear layer"
    raise ValueError(f"what {type(style).__name__} splits of a {type(module).__name__} is not known; use a {known}")


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


def distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Make a module's own parameters DTensors. No communication: every rank has the whole value, or none as on meta.

    Raises:
        ValueError: a process would have nothing of a parameter.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter.data, mesh, [placements[name]], src_data_rank=None)
        if distributed.to_local().numel() == 0:
            raise ValueError(f"{tuple(parameter.shape)} cannot be split over {mesh.size()} processes: one has nothing")
        module.register_parameter(name, nn.Parameter(distributed))
