"""The one account of a run's layout: every degree, and which ranks share what. Pure numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titan_like.config.errors import require
from titan_like.config.schema import JobConfig, Parallelism
from titan_like.models.config import TransformerConfig
from titan_like.parallel.schedules.tables import stage_ranks, stages_per_rank


class Degree(NamedTuple):
    """One degree of parallelism. A new axis is a new entry here and a field of `Layout`."""

    name: str  # field of `Layout`
    key: str  # in [parallelism]
    title: str
    short: str  # in names of searched layouts
    dimension: str  # of the device mesh; neighbouring factors may share one


# The factors of the number of processes, from the outermost dimension of the ranks to the innermost. CP ranks hold the
# same weights, so they are part of the dimension that ZeRO shards over.
FACTORS = (
    Degree("pipeline", "pipeline_parallel_degree", "pipeline", "pp", "pp"),
    Degree("replicate", "data_parallel_replicate_degree", "replicas", "rep", "dp_replicate"),
    Degree("shard", "data_parallel_shard_degree", "data", "dp", "dp_shard"),
    Degree("context", "context_parallel_degree", "context", "cp", "dp_shard"),
    Degree("tensor", "tensor_parallel_degree", "tensor", "tp", "tp"),
)
# In the order of the fields of `Layout`. These two are part of a replica's data, context and tensor ranks.
DEGREES = (
    *FACTORS,
    Degree("expert", "expert_parallel_degree", "experts", "ep", "ep"),
    Degree("expert_tensor", "expert_tensor_parallel_degree", "expert tensor", "etp", "etp"),
)
KEYS = {degree.name: degree.key for degree in DEGREES} | {
    "schedule": "pipeline_schedule",
    "virtual_stages": "virtual_stages_per_rank",
    "sequence_parallel": "sequence_parallel",
}  # field of `Layout` → key in [parallelism]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and the pipeline's schedule. The product of `FACTORS` is the number of processes.

    Without pipeline parallelism the schedule is 1F1B. ``virtual_stages`` is the number of stages on each rank, as the
    schedule prescribes it. Without tensor parallelism there is neither sequence nor expert tensor parallelism.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1  # 1 or `tensor`: each expert is whole, or split over the tensor ranks
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        schedule = self.schedule if self.pipeline > 1 else "1f1b"
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "virtual_stages", stages_per_rank(schedule, self.virtual_stages))
        object.__setattr__(self, "sequence_parallel", self.sequence_parallel and self.tensor > 1)
        object.__setattr__(self, "expert_tensor", min(self.expert_tensor, self.tensor))

    @property
    def num_processes(self) -> int:
        """World size of the job."""
        return math.prod(getattr(self, degree.name) for degree in FACTORS)

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each dimension of the device mesh, from the outermost to the innermost."""
        sizes = dict.fromkeys((degree.dimension for degree in FACTORS), 1)
        for degree in FACTORS:
            sizes[degree.dimension] *= getattr(self, degree.name)
        return sizes

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Number of ranks of a replica that hold the same dense parameters, over which ZeRO shards them."""
        return self.shard * self.context

    @property
    def weight_ranks(self) -> int:
        """Number of ranks of all replicas that hold the same dense parameters."""
        return self.replicate * self.weight_shards

    @property
    def token_shards(self) -> int:
        """Number of ranks of a stage and replica, each of which has tokens of its own between attention layers."""
        return self.weight_shards * self.tensor

    @property
    def expert_shards(self) -> int:
        """Number of ranks of a replica that hold the same parts of the same experts, over which ZeRO shards them."""
        return self.token_shards // self.expert_tensor // self.expert

    @property
    def splits_experts(self) -> bool:
        """Whether the ranks that hold the same experts are not those that hold the same dense parameters."""
        return self.expert > 1 or self.tensor > 1

    @property
    def context_chunks(self) -> int:
        """Number of load-balanced chunks of each sequence, of which every CP rank has two."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def sequence_shards(self) -> int:
        """Number of ranks, each of which has its own part of a sequence between attention layers."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    @property
    def stage_ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.pipeline, self.virtual_stages)

    def ranks_per_kv_head(self, num_kv_heads: int) -> int:
        """Number of neighbouring tensor ranks that share a key-value head: more than 1 if there are more ranks."""
        return max(1, self.tensor // num_kv_heads)

    def data_rank(self, rank: int) -> int:
        """Number of a rank among the `data_parallel` ranks that see different samples."""
        return rank // (self.context * self.tensor) % self.data_parallel

    @classmethod
    def of(cls, parallelism: Parallelism) -> Layout:
        """The layout of a configuration. A shard degree of -1 stays; `resolve_layout` resolves it."""
        return cls(**{name: getattr(parallelism, key) for name, key in KEYS.items()})

    def settings(self) -> dict[str, Any]:
        """The settings that ask for this layout, by section and key."""
        return {f"parallelism.{key}": getattr(self, name) for name, key in KEYS.items()}

    def described(self) -> str:
        """The degrees above 1 as text, such as "pipeline 2 × data 4"."""
        degrees = [(degree.title, getattr(self, degree.name)) for degree in DEGREES]
        return " × ".join(f"{title} {size}" for title, size in degrees if size > 1) or "no parallelism"


def resolve_layout(parallelism: Parallelism, world_size: int) -> Layout:
    """Work out the layout of ``world_size`` processes. A shard degree of -1 takes what the other degrees leave.

    Raises a `ConfigError` if the degrees do not multiply to the number of processes.
    """
    layout, key = Layout.of(parallelism), "parallelism.data_parallel_shard_degree"
    shard, product = layout.shard, replace(layout, shard=1).num_processes
    require(shard != 0, key, shard, "must be at least 1, or -1 for the processes that the other degrees leave")
    names = [degree.name for degree in FACTORS[::-1] if degree.name != "shard"]
    titles, factors = " × ".join(names), "·".join(str(getattr(layout, name)) for name in names)
    if shard == -1:
        reason = f"{titles} = {factors} = {product} does not divide the {world_size} processes"
        require(world_size % product == 0, key, shard, f"{reason}; start a multiple of {product}")
        return replace(layout, shard=world_size // product)
    product *= shard
    reason = f"{titles} × shard = {factors}·{shard} = {product}, but the job has {world_size} processes"
    require(product == world_size, key, shard, f"{reason}; start {product} or use -1")
    return layout


class Method(NamedTuple):
    """How the ranks of a CP group attend to all of their sequences."""

    name: str  # "all_gather", "ulysses" or "ring"
    reason: str

    @property
    def message(self) -> str:
        """The method and the reason in words."""
        return f"context parallelism by {self.name} ({self.reason})"


def method_of(config: JobConfig, model: TransformerConfig) -> Method:
    """A run's `context_parallel_method`, with ``auto`` decided by `best_method`: the same on every process."""
    method, layout, data = config.parallelism.context_parallel_method, Layout.of(config.parallelism), config.data
    if method != "auto":
        return Method(method, "as set")
    # On a GPU, a ring has fast kernels in 16-bit types alone, and none for soft caps and masks but the causal one.
    may_be_ring = config.training.dtype in ("bfloat16", "float16")
    may_be_ring &= not (data.reset_attention_mask or data.prefix_lm)
    may_be_ring &= not any(core.window or core.has_softcap for kind in model.parts.kinds for core in kind.cores)
    return best_method(model, layout.context, layout.tensor, may_be_ring)


_SMALL = 0.5  # gathered keys and values, relative to what else a layer keeps


def best_method(model: TransformerConfig, size: int, tensor: int, may_be_ring: bool) -> Method:
    """Choose the method for ``auto`` in CP groups of ``size`` ranks: the one that sends least and fits.

    With h heads and k key-value heads of d elements, a layer moves 2kd elements a token of the sequence with
    all_gather, and (2h + 2k)d / size with ulysses. For each token of a CP shard, gathered keys and values are 2kd ·
    size elements. What else a layer keeps is about four times the widths of residual stream, attention and MLP.
    """
    heads, kv_heads = model.num_attention_heads, max(model.num_kv_heads, tensor)
    if model.has_decoder:
        return Method("all_gather", "other methods have no position biases")
    sent = (heads + kv_heads) / (size * kv_heads)
    if kv_heads // tensor % size == 0 and sent < 1:
        return Method("ulysses", f"sends {sent:.0%} of what all_gather does")
    activations = 4 * (model.hidden_size + model.attention_size + model.ffn_hidden_size)
    gathered = 2 * size * kv_heads * model.head_dim / activations
    reason = f"all keys and values are {gathered:.0%} of a layer's other activations"
    return Method("ring" if may_be_ring and gathered > _SMALL else "all_gather", reason)
