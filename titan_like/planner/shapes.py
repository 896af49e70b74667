"""Shapes of every parameter, whole and on one process, without building a model. Pure functions.

They say in numbers what the models, `tensor_styles` and `data` do; tests hold them to the built modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from titan_like.models.config import TransformerConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.llama.config import LlamaConfig
from titan_like.parallel.layout import Layout
from titan_like.parallel.split import StageLayers


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one process."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


def coordinates_of(layout: Layout, rank: int) -> Coordinates:
    """Coordinates of a rank: the last dimension of `titan_like.parallel.mesh.DIMENSIONS` varies fastest."""
    rest, tensor = divmod(rank, layout.tensor)
    rest, shard = divmod(rest, layout.shard)
    pipeline, replicate = divmod(rest, layout.replicate)
    return Coordinates(pipeline, replicate, shard, tensor)


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the model."""

    name: str  # in the whole model
    shape: tuple[int, ...]
    tensor_dim: int | None = None  # dimension that tensor parallelism splits; None: every process has it whole
    partial: bool = False  # sequence parallelism leaves its gradient to be summed over the processes
    at_entry: bool = False  # used before the layers, so that its gradient is complete last

    @property
    def can_wait(self) -> bool:
        """Whether its gradient is a product that a split backward pass puts off: a linear layer's matrix."""
        return len(self.shape) == 2 and not self.at_entry


@dataclass(frozen=True)
class Unit:
    """Parameters that data parallelism gathers and reduces together; the root's name is empty."""

    name: str
    parameters: tuple[ParameterShape, ...]


def stage_units(model: TransformerConfig, split: StageLayers) -> list[Unit]:
    """The units of a pipeline stage in the order of its forward pass. The root, which may have no parameters, is last.

    An untied embedding table is a unit of its own; a tied one belongs to the root.
    """
    units, root = [], []
    if split.is_first:
        table = ParameterShape("embedding.weight", _table(model), tensor_dim=0, at_entry=True)
        if model.tied_embeddings:
            root.append(table)
        else:
            units.append(Unit("embedding", (table,)))
        if isinstance(model, GPTConfig):
            shape = (model.max_seq_len, model.hidden_size)
            root.append(ParameterShape("position_embedding.weight", shape, partial=True, at_entry=True))
    for layer in split.layers:
        prefix = f"layers.{layer}"
        parameters = (
            ParameterShape(f"{prefix}.{p.name}", p.shape, p.tensor_dim, p.partial) for p in layer_shapes(model)
        )
        units.append(Unit(prefix, tuple(parameters)))
    if split.is_last:
        root += _norm(model, "norm")
        if not model.tied_embeddings:
            root.append(ParameterShape("output.weight", _table(model), tensor_dim=0))
        elif not split.is_first:
            root.append(ParameterShape("embedding.weight", _table(model), tensor_dim=0))
    return [*units, Unit("", tuple(root))]


def layer_shapes(model: TransformerConfig) -> list[ParameterShape]:
    """The parameters of one layer, named within it."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    qkv = hidden + 2 * model.num_kv_heads * model.head_dim
    if isinstance(model, GPTConfig):
        columns, row = {"attention.qkv": (qkv, hidden), "mlp.fc1": (ffn, hidden)}, "mlp.fc2"
    elif isinstance(model, LlamaConfig):
        columns = {"attention.qkv": (qkv, hidden), "mlp.gate": (ffn, hidden), "mlp.up": (ffn, hidden)}
        row = "mlp.down"
    else:
        raise NotImplementedError(f"the shapes of a {type(model).__name__}'s layers are not written down")
    shapes = [*_norm(model, "attention_norm"), *_norm(model, "mlp_norm")]
    for name, shape in columns.items():
        shapes.append(ParameterShape(f"{name}.weight", shape, tensor_dim=0))
        shapes += [ParameterShape(f"{name}.bias", shape[:1], tensor_dim=0)] if _has_biases(model) else []
    for name, shape in {"attention.proj": (hidden, hidden), row: (hidden, ffn)}.items():
        shapes.append(ParameterShape(f"{name}.weight", shape, tensor_dim=1))
        shapes += [ParameterShape(f"{name}.bias", shape[:1], partial=True)] if _has_biases(model) else []
    return shapes


def _norm(model: TransformerConfig, name: str) -> list[ParameterShape]:
    kinds = ("weight", "bias") if _has_biases(model) else ("weight",)
    return [ParameterShape(f"{name}.{kind}", (model.hidden_size,), partial=True) for kind in kinds]


def _has_biases(model: TransformerConfig) -> bool:
    return isinstance(model, GPTConfig)


def _table(model: TransformerConfig) -> tuple[int, int]:
    return model.padded_vocab_size, model.hidden_size


@dataclass(frozen=True)
class ShardOf:
    """One of several processes that a dimension is split over: equal parts, rounded up, until nothing is left."""

    size: int = 1
    index: int = 0

    def of(self, length: int) -> int:
        """What is here of a dimension."""
        largest = -(-length // self.size)
        return largest if self.index == 0 else min(largest, max(0, length - self.index * largest))

    def largest_of(self, length: int) -> int:
        """What the first process has of it."""
        return -(-length // self.size)


@dataclass(frozen=True)
class ParameterSplit:
    """How one process's part of every parameter is cut out: by tensor parallelism, then over rows by ZeRO."""

    tensor: ShardOf = ShardOf()
    shard: ShardOf = ShardOf()  # of one process where nothing is sharded

    def before_sharding(self, parameter: ParameterShape) -> tuple[int, ...]:
        """Shape of what the processes of a ZeRO group share."""
        dim, shape = parameter.tensor_dim, parameter.shape
        if dim is None or self.tensor.size == 1:
            return shape
        return (*shape[:dim], self.tensor.of(shape[dim]), *shape[dim + 1 :])

    def here(self, parameter: ParameterShape) -> tuple[int, ...]:
        """Shape on this process."""
        shape = self.before_sharding(parameter)
        return shape if self.shard.size == 1 else (self.shard.of(shape[0]), *shape[1:])

    def padded(self, parameter: ParameterShape) -> int:
        """Elements of each process's shard in a collective, where all are as large as the first."""
        rows, *columns = self.before_sharding(parameter)
        return self.shard.largest_of(rows) * prod(columns)
