"""How tensor parallelism splits each kind of module: `ParallelStyle`s for torch's `parallelize_module`.

A family's plan names them by the keys of `STYLES`. Each style turns the module's own parameters into DTensors, of which
a rank holds a shard or a copy, and computes its output from plain local tensors. torch's own styles dispatch
every operation on DTensors, which takes 1.2 to 1.6 times the CPU time of a small model's step. A plan may also name
torch's styles, except inside a "region", where both would sum the same gradient.

Between layers, activations are [batch, seq, hidden] and equal on every rank. With sequence parallelism they are
[batch, seq / ranks, hidden], and each rank has a contiguous part of the sequence.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.cross_entropy import TokenLoss, Vocabulary, scaled_loss
from titan_like.models.layers.init import generator_of
from titan_like.models.transformer import PaddingMask, VocabularyBias
from titan_like.parallel.collectives import (
    CopyFromFirstRank,
    CopyToTensorRegion,
    Group,
    ReduceFromTensorRegion,
    all_gather,
)
from titan_like.parallel.weight_gradients import linear


class LocalStyle(ParallelStyle):
    """A style whose `forward` replaces the module's own and computes on this rank's shards."""

    placements: ClassVar[dict[str, Placement]] = {}  # of the module's own parameters
    partial_gradients: ClassVar[tuple[str, ...]] = ()  # parameters whose gradients sequence parallelism leaves partial
    enters: ClassVar[int] = 0  # number of activations between layers that it takes through `CopyToTensorRegion`
    leaves: ClassVar[int] = 0  # number of outputs that it sums over the ranks with `ReduceFromTensorRegion`

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Without communication, because every rank has the full value, or none on the meta device.
        for name, parameter in list(module.named_parameters(recurse=False)):
            distributed = distribute_tensor(parameter.data, device_mesh, [self.placements[name]], src_data_rank=None)
            if distributed.to_local().numel() == 0:
                size = f"{tuple(parameter.shape)} cannot be split over {device_mesh.size()} processes"
                raise ValueError(f"{size}: one would hold nothing")
            module.register_parameter(name, nn.Parameter(distributed))
        self.take_over(module, device_mesh)
        if self.sequence_parallel and self.partial_gradients:
            # `sum_partial_gradients` sums them once per step: as they appear, each would cost a small collective.
            module.partial_gradients = self.partial_gradients  # type: ignore[assignment]
        return module

    def take_over(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let this style compute the module's output from now on."""
        module.tensor_style, module.tensor_group = self, Group.of(mesh)  # type: ignore[assignment]
        module.__class__ = split_class(type(module))  # type: ignore[arg-type]  # classes have a hash

    def run(self, module: Any, *inputs: Any, **named: Any) -> Any:
        """What the module's forward pass does."""
        return self.forward(module, module.tensor_group, *inputs, **named)

    def forward(self, module: Any, group: Group, x: torch.Tensor) -> torch.Tensor:
        """Compute the module's output from this rank's shards. Each style says what the shapes are."""
        raise NotImplementedError


@cache
def split_class(whole: type[nn.Module]) -> type[nn.Module]:
    """A subclass of modules whose style computes their output. Its attribute ``whole`` is the class itself.

    If each module had a forward pass of its own instead, the compiler would make a graph for each layer.
    """

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        return self.tensor_style.run(self, *inputs, **named)

    return type(whole.__name__, (whole,), {"forward": forward, "whole": whole})


class Region(LocalStyle):
    """Attention or MLP: the first matrices are split by columns, the last by rows."""

    enters = 1

    def run(self, module: Any, x: torch.Tensor, *inputs: Any, **named: Any) -> torch.Tensor:
        """Run the module's own forward pass on full activations.

        x: activation between layers → the module's result: activation between layers.
        """
        x = CopyToTensorRegion.apply(x, self.sequence_parallel, module.tensor_group)
        return module.whole.forward(module, x, *inputs, **named)


class CrossRegion(Region):
    """A region that takes a second activation between layers: attention of one sequence to another."""

    enters = 2

    def run(self, module: Any, x: torch.Tensor, *inputs: Any, **named: Any) -> torch.Tensor:
        """Run the module's own forward pass on both full activations.

        x and memory: activations between layers → activation between layers.
        """
        memory, *others = inputs
        memory = CopyToTensorRegion.apply(memory, self.sequence_parallel, module.tensor_group)
        return Region.run(self, module, x, memory, *others, **named)


class ColumnLinear(LocalStyle):
    """Splits the output features of a linear layer. Every rank has the full input."""

    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, module: nn.Linear, group: Group, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out of this rank]."""
        bias = None if module.bias is None else local(module.bias)
        return linear(module, x, module.weight, local(module.weight), bias)


class RowLinear(LocalStyle):
    """Splits the input features of a linear layer. The ranks' products are summed, then the bias is added once."""

    leaves = 1
    placements: ClassVar = {"weight": Shard(1), "bias": Replicate()}
    partial_gradients = ("bias",)

    def forward(self, module: nn.Linear, group: Group, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, in of this rank] → activation between layers."""
        product = linear(module, x, module.weight, local(module.weight), None)
        x = ReduceFromTensorRegion.apply(product, self.sequence_parallel, group)
        return x if module.bias is None else x + local(module.bias)


class ReplicatedLinear(ColumnLinear):
    """Replicates a linear layer outside regions. With sequence parallelism each rank has its part of the sequence."""

    placements: ClassVar = {"weight": Replicate(), "bias": Replicate()}
    partial_gradients: ClassVar[tuple[str, ...]] = ("weight", "bias")


class RouterStyle(ReplicatedLinear):
    """Replicates a router. Sequence parallelism gives each rank tokens of its own to route."""

    partial_gradients = ("weight",)

    def forward(self, module: Any, group: Group, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """[tokens of this rank, hidden] and the padding of all ranks' tokens → what the router decides about them."""
        if padding_mask is not None and self.sequence_parallel:
            padding_mask = padding_mask.chunk(group.size, dim=1)[group.rank]
        return module.whole.forward(module, x, padding_mask, local(module.weight))


class PooledLinear(ReplicatedLinear):
    """Replicates a linear layer over the first token, which all ranks compute alike, so its gradient is complete."""

    partial_gradients = ()


class FirstTokenOfAll(LocalStyle):
    """Gives every rank the first token, which with sequence parallelism only the first rank has."""

    def forward(self, module: nn.Module, group: Group, x: torch.Tensor) -> torch.Tensor:
        """Activation between layers → [batch, 1, hidden], equal on every rank."""
        return CopyFromFirstRank.apply(x[:, :1], group) if self.sequence_parallel else x[:, :1]


class DropoutOfAll(LocalStyle):
    """Dropout that is the same on every rank. With sequence parallelism their random numbers differ, so the first
    rank's mask is taken.
    """

    def forward(self, module: Any, group: Group, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, hidden], equal on every rank → the same shape, equal on every rank."""
        if not (self.sequence_parallel and module.training and module.p > 0):
            return F.dropout(x, module.p, module.training)
        mask = F.dropout(torch.ones_like(x), module.p)
        return x * all_gather(mask[None], 0, group)[0]


class Norm(LocalStyle):
    """Replicates the weights. With sequence parallelism each rank normalises its part of the sequence."""

    placements: ClassVar = {"weight": Replicate(), "bias": Replicate()}
    partial_gradients = ("weight", "bias")

    def forward(self, module: nn.LayerNorm | nn.RMSNorm, group: Group, x: torch.Tensor) -> torch.Tensor:
        """Normalise the activation between layers; x and the result have the same shape."""
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, local(module.weight), local(module.bias), module.eps)
        return F.rms_norm(x, module.normalized_shape, local(module.weight), module.eps)


class VocabularyEmbedding(LocalStyle):
    """Splits the rows of the table. A rank gives zeros for tokens in other ranks' rows, and the results are summed."""

    leaves = 1
    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, module: nn.Embedding, group: Group, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] → activation between layers.

        Raises:
            ValueError: sequence parallelism cannot split the sequence into equal parts.
        """
        if self.sequence_parallel and tokens.shape[1] % group.size:
            length = f"a sequence of {tokens.shape[1]} tokens"
            raise ValueError(f"{length} cannot be split into {group.size} equal parts for sequence parallelism")
        here = group.vocabulary(module.num_embeddings)
        elsewhere = (tokens < here.start) | (tokens >= here.stop)
        rows = (tokens - here.start).masked_fill(elsewhere, 0)
        x = F.embedding(rows, local(module.weight)).masked_fill(elsewhere[..., None], 0)
        return ReduceFromTensorRegion.apply(x, self.sequence_parallel, group)


class PositionEmbedding(LocalStyle):
    """Replicates the table. With sequence parallelism each rank looks up the positions of its part of the sequence."""

    placements: ClassVar = {"weight": Replicate()}
    partial_gradients = ("weight",)

    def forward(self, module: nn.Embedding, group: Group, positions: torch.Tensor) -> torch.Tensor:
        """positions [seq] or [batch, seq] → [seq of this rank, hidden], with the batch before it if there is one."""
        if self.sequence_parallel:
            positions = positions.chunk(group.size, dim=-1)[group.rank]
        return F.embedding(positions, local(module.weight))


class HeadTable(LocalStyle):
    """Splits a table [rows, heads] by its columns. Each rank looks up what its own heads need."""

    placements: ClassVar = {"weight": Shard(1)}

    def forward(self, module: nn.Embedding, group: Group, rows: torch.Tensor) -> torch.Tensor:
        """Integers of any shape → [..., heads of this rank]."""
        return F.embedding(rows, local(module.weight))


class VocabularyOutput(LocalStyle):
    """Splits the rows of the output matrix or tied table. Each rank computes the logits of its own tokens.

    Training enters through `VocabularyLoss` instead.
    """

    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, module: nn.Module, group: Group, x: torch.Tensor, table: DTensor | None = None) -> torch.Tensor:
        """Activation between layers → [batch, seq, tokens of this rank]."""
        weight = module.weight if table is None else table
        assert isinstance(weight, torch.Tensor)
        return linear(module, CopyToTensorRegion.apply(x, self.sequence_parallel, group), weight, local(weight), None)


class VocabularyLoss(LocalStyle):
    """Computes the loss from each rank's own logits, as in Megatron-LM (arXiv 1909.08053, section 3).

    A chunk of positions needs one small all-gather. The gradient of the hidden states is a partial sum on each rank.
    """

    enters = 1

    def forward(  # type: ignore[override]
        self,
        module: TokenLoss,
        group: Group,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        factor: torch.Tensor,
    ) -> torch.Tensor:
        """x is an activation between layers; all else is as in `TokenLoss`, where weight and bias are split."""
        x, here = CopyToTensorRegion.apply(x, self.sequence_parallel, group), group.vocabulary(module.padded_vocab_size)
        tokens = min(max(module.vocab_size - here.start, 0), len(here))
        most = -(-module.padded_vocab_size // group.size)
        vocabulary = Vocabulary(tokens, module.vocab_size, most, here.start, partial(combine, group), module.chunk)
        return scaled_loss(x, local(weight), None if bias is None else local(bias), labels, factor, vocabulary)


def combine(group: Group, parts: torch.Tensor) -> torch.Tensor:
    """Each rank's [2, positions], log of its part of the denominator and label's logit or 0 → those of all ranks."""
    denominators, targets = all_gather(parts[None], 0, group).unbind(1)  # each [ranks, positions]
    return torch.stack((denominators.logsumexp(0), targets.sum(0)))


class VocabularyBiasPart(LocalStyle):
    """Splits the bias of the logits like the rows of the output matrix."""

    placements: ClassVar = {"bias": Shard(0)}

    def forward(self, module: VocabularyBias, group: Group, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, tokens of this rank] → the same tensor, changed in place."""
        return logits.add_(local(module.bias))


class VocabularyMask(LocalStyle):
    """Masks the padding among this rank's logits and wraps them as a DTensor split over the vocabulary."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, PaddingMask)
        here = Group.of(device_mesh).vocabulary(module.padded_vocab_size)
        module.vocab_size = min(max(module.vocab_size - here.start, 0), len(here))
        self.mesh = device_mesh
        return super()._apply(module, device_mesh)

    def run(self, module: Any, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, tokens of this rank] → DTensor [batch, seq, padded vocab]."""
        return split_logits(module.whole.forward(module, logits), self.mesh, module.padded_vocab_size)


def split_logits(part: torch.Tensor, mesh: DeviceMesh, padded_vocab_size: int) -> DTensor:
    """[batch, seq, tokens of this rank] → DTensor [batch, seq, padded vocab]."""
    shape = torch.Size((*part.shape[:2], padded_vocab_size))
    stride = (shape[1] * shape[2], shape[2], 1)
    return DTensor.from_local(part, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


class SplitHeads(LocalStyle):
    """Gives each rank its own attention dropout, because it has its own heads. All other random numbers are shared."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AttentionCore)
        if module.dropout > 0 and not self.sequence_parallel:
            self.take_over(module, device_mesh)
        return module

    def run(self, module: Any, *inputs: Any) -> torch.Tensor:
        """Run the module's own pass on [batch, heads here, seq, head_dim], with a random stream of this rank."""
        group = module.tensor_group
        if not module.training:
            return module.whole.forward(module, *inputs)
        # All ranks draw the same number from the CPU's generator, which needs no wait for the device. Activation
        # checkpointing restores that generator, so a recomputation draws the same number again.
        seed = int(torch.randint(2**48, ())) * group.size + group.rank
        generator = generator_of(inputs[0].device)
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            return module.whole.forward(module, *inputs)
        finally:
            generator.set_state(state)


STYLES: dict[str, type[LocalStyle]] = {
    "region": Region,
    "column_linear": ColumnLinear,
    "row_linear": RowLinear,
    "cross_region": CrossRegion,
    "norm": Norm,
    "replicated_linear": ReplicatedLinear,
    "router": RouterStyle,
    "split_heads": SplitHeads,
    "first_token": FirstTokenOfAll,
    "pooled_linear": PooledLinear,
    "pooled_dropout": DropoutOfAll,
    "position_embedding": PositionEmbedding,
    "head_table": HeadTable,
    "vocabulary_embedding": VocabularyEmbedding,
    "vocabulary_output": VocabularyOutput,
    "vocabulary_bias": VocabularyBiasPart,
    "vocabulary_mask": VocabularyMask,
    "vocabulary_loss": VocabularyLoss,
}


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
    if isinstance(style, LocalStyle):
        split = {name: at.dim for name, at in style.placements.items() if isinstance(at, Shard)}
        return StyleKind(split, style.partial_gradients, style.enters, style.leaves)
    if isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
        return StyleKind({"weight": 0, "bias": 0}, (), enters=1, leaves=0)
    if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear):
        return StyleKind({"weight": 1}, (), enters=0, leaves=1)
    known = "LocalStyle, or ColwiseParallel or RowwiseParallel for a linear layer"
    raise ValueError(f"how {type(style).__name__} splits a {type(module).__name__} is not known; use a {known}")


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter of any shape. Its gradient becomes the parameter's, with the same placement."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
