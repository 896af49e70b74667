"""How tensor parallelism splits each kind of module. A family's plan names these kinds by the keys of `STYLES`.

Each kind extends the module, and turns the module's own parameters into DTensors, of which a rank holds a shard or a
copy. It computes its output from plain local tensors: torch's own styles dispatch every operation on DTensors, which
takes 1.2 to 1.6 times the CPU time of a small model's step. A plan may also name torch's styles, except inside a
"region", where both would sum the same gradient.

Between layers, activations are [batch, seq, hidden] and equal on every rank. With sequence parallelism they are
[batch, seq / ranks, hidden], and each rank has a contiguous part of the sequence.
"""

import contextlib
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_like.models.layers.cross_entropy import Vocabulary, scaled_loss
from titan_like.models.layers.norms import factor_of, normalise
from titan_like.parallel.collectives import CopyFromFirstRank, Group, SumOfRanks, all_gather
from titan_like.parallel.tensor_base import TensorParallel, local
from titan_like.parallel.tensor_heads import OwnRandomNumbers, SharedChannels, SplitChannels, SplitHeads
from titan_like.parallel.weight_gradients import LinearGemms


class Region(TensorParallel):
    """Attention or MLP: the first matrices are split by columns, the last by rows."""

    def forward(self, x: torch.Tensor, *inputs: Any, **named: Any) -> torch.Tensor:
        """Activation between layers → activation between layers."""
        return super().forward(self.copy_to_region(x), *inputs, **named)


class CrossRegion(Region):
    """A region that takes a second activation between layers: attention of one sequence to another."""

    def forward(self, x: torch.Tensor, *inputs: Any, **named: Any) -> torch.Tensor:
        """x and memory: activations between layers → activation between layers."""
        memory, *rest = inputs
        return super().forward(x, self.copy_to_region(memory), *rest, **named)


class ColumnLinear(TensorParallel, LinearGemms):
    """Splits the output features of a linear layer. Every rank has the full input."""

    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0), "lora_a": Replicate(), "lora_b": Shard(0)}
    always_partial: ClassVar[tuple[str, ...]] = ("lora_a",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[..., in] → [..., out of this rank]."""
        return self.gemm(x, self.weight, local(self.weight), None if self.bias is None else local(self.bias))

    def dropped(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """As in the base class. With sequence parallelism random numbers differ, so each rank draws for its part."""
        if not self.sequence_parallel:
            return super().dropped(x, rate)
        mask = F.dropout(torch.ones_like(x.chunk(self.tensor_group.size, 1)[0]), rate)
        return x * all_gather(mask, 1, self.tensor_group)


class RowLinear(OwnRandomNumbers, LinearGemms):
    """Splits the input features of a linear layer. The ranks' products are summed, then the bias is added once."""

    placements: ClassVar = {"weight": Shard(1), "bias": Replicate(), "lora_a": Shard(1), "lora_b": Replicate()}
    partial_gradients = ("bias",)
    always_partial = ("lora_b",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[batch, seq, in of this rank] → activation between layers."""
        x = self.reduce_from_region(self.gemm(x, self.weight, local(self.weight), None))
        return x if self.bias is None else x + local(self.bias)

    def dropped(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """As in the base class. Each rank has features of its own."""
        with contextlib.nullcontext() if self.sequence_parallel else self.own_random_numbers(x.device):
            return super().dropped(x, rate)


class ReplicatedLinear(ColumnLinear):
    """Replicates a linear layer outside regions. With sequence parallelism each rank has its part of the sequence."""

    placements: ClassVar = dict.fromkeys(("weight", "bias", "lora_a", "lora_b"), Replicate())
    partial_gradients: ClassVar[tuple[str, ...]] = ("weight", "bias", "lora_a", "lora_b")
    always_partial = ()

    def dropped(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """As in the base class, of this rank's positions."""
        return LinearGemms.dropped(self, x, rate)


class PooledLinear(ReplicatedLinear):
    """Replicates a linear layer over the first token, which all ranks compute alike, so its gradient is complete."""

    partial_gradients = ()


class ReplicatedRouter(TensorParallel):
    """Replicates a router. Sequence parallelism gives each rank tokens of its own to route."""

    placements: ClassVar = {"weight": Replicate(), "logit_bias": Replicate()}
    partial_gradients = ("weight", "logit_bias")
    logit_bias: torch.Tensor | None

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """[tokens of this rank, hidden] and the padding of all ranks' tokens → what the router decides about them."""
        if padding_mask is not None and self.sequence_parallel:
            padding_mask = padding_mask.chunk(self.tensor_group.size, dim=1)[self.tensor_group.rank]
        return super().forward(x, padding_mask)

    def linear(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in the router itself, from copies on this rank."""
        return local(self.weight), None if self.logit_bias is None else local(self.logit_bias)


class FirstTokenOfAll(TensorParallel):
    """Gives every rank the first token, which with sequence parallelism only the first rank has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activation between layers → [batch, 1, hidden], equal on every rank."""
        return CopyFromFirstRank.apply(x[:, :1], self.tensor_group) if self.sequence_parallel else x[:, :1]


class DropoutOfAll(TensorParallel):
    """Dropout of the first rank's mask, because with sequence parallelism their random numbers differ."""

    p: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, hidden], equal on every rank → the same shape, equal on every rank."""
        if not (self.sequence_parallel and self.training and self.p > 0):
            return super().forward(x)
        mask = F.dropout(torch.ones_like(x), self.p)
        return x * all_gather(mask[None], 0, self.tensor_group)[0]


class Norm(TensorParallel):
    """Replicates the weights. With sequence parallelism each rank normalises its part of the sequence."""

    placements: ClassVar = {"weight": Replicate(), "bias": Replicate()}
    partial_gradients = ("weight", "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the activation between layers; x and the result have the same shape."""
        weight, bias = (getattr(self, name, None) for name in ("weight", "bias"))
        weight, bias = (None if parameter is None else local(parameter) for parameter in (weight, bias))
        return normalise(self, x, weight, bias)  # type: ignore[arg-type]


class HeadNorm(Norm):
    """A norm over each head in a region: the weights are replicated, and a rank normalises its own heads."""

    always_partial = ("weight", "bias")


class SplitNorm(TensorParallel):
    """An RMSNorm over all heads in a region: each rank has its own heads, and their part of the weight."""

    placements: ClassVar = {"weight": Shard(0)}
    normalized_shape: Any
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width of this rank] → the same shape. The ranks' sums of squares are added up."""
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = SumOfRanks.apply(values.square().sum(-1, keepdim=True), self.tensor_group)
        root = (squares / self.normalized_shape[0] + self.eps).rsqrt()
        return (values * root * factor_of(self, local(self.weight))).to(x.dtype)


class SplitNormOfHeads(TensorParallel):
    """Splits the weights of a `NormOfHeads` in a region: each rank has its own heads."""

    placements: ClassVar = {"weight": Shard(0)}
    head_dim: int

    def weights(self) -> torch.Tensor:
        """Return the weights of this rank's heads."""
        return local(self.weight).view(-1, self.head_dim)


class VocabularyEmbedding(TensorParallel):
    """Splits the rows of the table. A rank gives zeros for tokens in other ranks' rows, and the results are summed."""

    placements: ClassVar = {"weight": Shard(0)}
    num_embeddings: int

    def forward(self, tokens: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [batch, seq] → activation between layers, by rows of the module's own table or of another one.

        Raises a `ValueError` if sequence parallelism cannot split the sequence into equal parts.
        """
        size = self.tensor_group.size
        if self.sequence_parallel and tokens.shape[1] % size:
            raise ValueError(f"sequence parallelism cannot split {tokens.shape[1]} tokens into {size} equal parts")
        vocabulary = self.tensor_group.vocabulary(self.num_embeddings)
        elsewhere = (tokens < vocabulary.start) | (tokens >= vocabulary.stop)
        rows = (tokens - vocabulary.start).masked_fill(elsewhere, 0)
        x = F.embedding(rows, local(self.weight if table is None else table)).masked_fill(elsewhere[..., None], 0)
        return self.reduce_from_region(x)


class PositionEmbedding(TensorParallel):
    """Replicates the table. With sequence parallelism each rank looks up the positions of its part of the sequence."""

    placements: ClassVar = {"weight": Replicate()}
    partial_gradients = ("weight",)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [seq] or [batch, seq] → [seq of this rank, hidden], with the batch before it if there is one."""
        if self.sequence_parallel:
            positions = positions.chunk(self.tensor_group.size, dim=-1)[self.tensor_group.rank]
        return F.embedding(positions, local(self.weight))


class HeadTable(TensorParallel):
    """Splits a table [rows, heads] by its columns. Each rank looks up what its own heads need."""

    placements: ClassVar = {"weight": Shard(1)}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Integers of any shape → [..., heads of this rank]."""
        return F.embedding(rows, local(self.weight))


class VocabularyOutput(TensorParallel, LinearGemms):
    """Splits the rows of the output matrix or tied table. Each rank computes the logits of its own tokens.

    Training enters through `VocabularyLoss` instead.
    """

    placements: ClassVar = {"weight": Shard(0)}

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """Activation between layers → [batch, seq, tokens of this rank]."""
        weight = self.weight if table is None else table
        return self.gemm(self.copy_to_region(x), weight, local(weight), None)


class VocabularyLoss(TensorParallel):
    """Computes the loss from each rank's own logits, as in Megatron-LM (arXiv 1909.08053, section 3).

    A chunk of positions needs one small all-gather. The gradient of the hidden states is a partial sum on each rank.
    """

    chunk: int | None
    softcap: float

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        factor: torch.Tensor,
    ) -> torch.Tensor:
        """x is an activation between layers; all else is as in `TokenLoss`, where weight and bias are split."""
        group = self.tensor_group
        rows = group.vocabulary(self.padded_vocab_size)
        tokens = min(max(self.vocab_size - rows.start, 0), len(rows))
        most = -(-self.padded_vocab_size // group.size)
        sizes = tokens, self.vocab_size, most, rows.start
        vocabulary = Vocabulary(*sizes, partial(combine, group), self.chunk, self.softcap)
        bias = None if bias is None else local(bias)
        return scaled_loss(self.copy_to_region(x), local(weight), bias, labels, factor, vocabulary)


def combine(group: Group, parts: torch.Tensor) -> torch.Tensor:
    """Each rank's [2, positions], log of its part of the denominator and label's logit or 0 → of all ranks."""
    denominators, targets = all_gather(parts[None], 0, group).unbind(1)  # each [ranks, positions]
    return torch.stack((denominators.logsumexp(0), targets.sum(0)))


class SplitBias(TensorParallel):
    """Splits the bias of the logits like the rows of the output matrix."""

    placements: ClassVar = {"bias": Shard(0)}

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, tokens of this rank] → the same tensor, changed in place."""
        return logits.add_(local(self.bias))


class VocabularyMask(TensorParallel):
    """Masks the padding among this rank's logits and wraps them as a DTensor split over the vocabulary."""

    mesh: DeviceMesh

    @classmethod
    def split(cls, module: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """As in the base class; the mask gets the number of this rank's tokens."""
        super().split(module, mesh, sequence_parallel)
        assert isinstance(module, VocabularyMask)
        vocabulary, module.mesh = module.tensor_group.vocabulary(module.padded_vocab_size), mesh
        module.vocab_size = min(max(module.vocab_size - vocabulary.start, 0), len(vocabulary))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, tokens of this rank] → DTensor [batch, seq, padded vocab]."""
        return split_logits(super().forward(logits), self.mesh, self.padded_vocab_size)


def split_logits(part: torch.Tensor, mesh: DeviceMesh, padded_vocab_size: int) -> DTensor:
    """[batch, seq, tokens of this rank] → DTensor [batch, seq, padded vocab]."""
    shape = torch.Size((*part.shape[:2], padded_vocab_size))
    stride = (shape[1] * shape[2], shape[2], 1)
    return DTensor.from_local(part, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


class SharedLinear(ColumnLinear):
    """Replicates, in a region, a linear layer whose output all ranks' heads read."""

    placements: ClassVar = dict.fromkeys(("weight", "bias", "lora_a", "lora_b"), Replicate())
    always_partial: ClassVar[tuple[str, ...]] = ("weight", "bias", "lora_a", "lora_b")


STYLES: dict[str, type[TensorParallel]] = {
    "region": Region,
    "column_linear": ColumnLinear,
    "row_linear": RowLinear,
    "cross_region": CrossRegion,
    "norm": Norm,
    "head_norm": HeadNorm,
    "split_norm": SplitNorm,
    "norm_of_heads": SplitNormOfHeads,
    "replicated_linear": ReplicatedLinear,
    "router": ReplicatedRouter,
    "split_heads": SplitHeads,
    "split_channels": SplitChannels,
    "shared_channels": SharedChannels,
    "shared_linear": SharedLinear,
    "first_token": FirstTokenOfAll,
    "pooled_linear": PooledLinear,
    "pooled_dropout": DropoutOfAll,
    "position_embedding": PositionEmbedding,
    "head_table": HeadTable,
    "vocabulary_embedding": VocabularyEmbedding,
    "vocabulary_output": VocabularyOutput,
    "vocabulary_bias": SplitBias,
    "vocabulary_mask": VocabularyMask,
    "vocabulary_loss": VocabularyLoss,
}
