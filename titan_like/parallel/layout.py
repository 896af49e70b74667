"""The degree of each kind of parallelism. Pure numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_like.config.errors import ConfigError, require
from titan_like.config.schema import JobConfig, Parallelism
from titan_like.models.config import TransformerConfig


class Degree(NamedTuple):
    """One degree of parallelism."""

    name: str  # field of `Layout`
    key: str  # in [parallelism]
    title: str


# The factors of the number of processes, from the outermost dimension of the ranks to the innermost.
FACTORS = (
    Degree("pipeline", "pipeline_parallel_degree", "pipeline"),
    Degree("replicate", "data_parallel_replicate_degree", "replicas"),
    Degree("shard", "data_parallel_shard_degree", "data"),
    Degree("context", "context_parallel_degree", "context"),
    Degree("tensor", "tensor_parallel_degree", "tensor"),
)
# In the order of the fields of `Layout`. Processes that share experts are some of those of data, context and tensor.
DEGREES = (*FACTORS, Degree("expert", "expert_parallel_degree", "experts"))


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The product of `FACTORS` is the number of processes."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int = 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Number of ranks that ZeRO shards over: those that share a sequence need the same weights too."""
        return self.shard * self.context

    @property
    def num_processes(self) -> int:
        """World size of the job."""
        return math.prod(getattr(self, degree.name) for degree in FACTORS)

    @property
    def token_shards(self) -> int:
        """Number of ranks of a stage and replica, each of which has tokens of its own between attention layers."""
        return self.weight_shards * self.tensor

    @property
    def expert_shards(self) -> int:
        """Number of ranks of a replica that hold the same experts, over which ZeRO shards them."""
        return self.token_shards // self.expert

    @property
    def splits_experts(self) -> bool:
        """Whether experts are shared by other ranks than the rest of a layer is."""
        return self.expert > 1 or self.tensor > 1

    @classmethod
    def of(cls, parallelism: Parallelism) -> Layout:
        """The degrees of a configuration that leaves none open."""
        return cls(*(getattr(parallelism, degree.key) for degree in DEGREES))

    def settings(self) -> dict[str, Any]:
        """The settings that ask for this layout, by section and key."""
        return {f"parallelism.{degree.key}": getattr(self, degree.name) for degree in DEGREES}

    def described(self) -> str:
        """The degrees above 1 as text, such as "pipeline 2 × data 4"."""
        degrees = [(degree.title, getattr(self, degree.name)) for degree in DEGREES]
        return " × ".join(f"{title} {size}" for title, size in degrees if size > 1) or "no parallelism"


def resolve_layout(parallelism: Parallelism, world_size: int) -> Layout:
    """Work out the layout of ``world_size`` processes. A shard degree of -1 takes what the other degrees leave.

    Raises:
        ConfigError: the degrees do not multiply to the number of processes.
    """
    shard, key = parallelism.data_parallel_shard_degree, "parallelism.data_parallel_shard_degree"
    require(shard != 0, key, shard, "must be at least 1, or -1 for the processes that the other degrees leave")
    others = [degree for degree in FACTORS[::-1] if degree.name != "shard"]
    sizes = [getattr(parallelism, degree.key) for degree in others]
    product, titles = math.prod(sizes), " × ".join(degree.name for degree in others)
    told = "·".join(map(str, sizes))
    if shard == -1:
        problem = f"{titles} = {told} = {product} does not divide the {world_size} processes"
        require(world_size % product == 0, key, shard, f"{problem}; start a multiple of {product}")
        shard = world_size // product
    elif product * shard != world_size:
        problem = f"{titles} × shard = {told}·{shard} = {product * shard}, but the job has {world_size} processes"
        raise ConfigError(key, shard, f"{problem}; start {product * shard} or use -1")
    return Layout.of(parallelism.model_copy(update={"data_parallel_shard_degree": shard}))


class Method(NamedTuple):
    """How processes that share a sequence attend to all of it."""

    name: str  # "all_gather", "ulysses" or "ring"
    reason: str

    @property
    def told(self) -> str:
        """The method and the reason in words."""
        return f"sequences shared by {self.name} ({self.reason})"


def method_of(config: JobConfig, model: TransformerConfig) -> Method:
    """A run's `context_parallel_method`, with ``auto`` decided by `best_method`: the same on every process."""
    section, data = config.parallelism, config.data
    if section.context_parallel_method != "auto":
        return Method(section.context_parallel_method, "as set")
    # On a GPU, a ring has fast kernels in half types alone, and none for masks other than the causal one.
    may_be_ring = config.training.dtype in ("bfloat16", "float16")
    may_be_ring &= not (data.reset_attention_mask or data.prefix_lm)
    return best_method(model, section.context_parallel_degree, section.tensor_parallel_degree, may_be_ring)


_SMALL = 0.5  # gathered keys and values, relative to what else a layer keeps


def best_method(model: TransformerConfig, size: int, tensor: int, may_be_ring: bool) -> Method:
    """What ``auto`` stands for if ``size`` processes share each sequence: the method that sends least and fits.

    With h heads and k key-value heads of d elements, a layer moves 2kd elements a token of the sequence with
    all_gather, and (2h + 2k)d / size with ulysses. For each token of a slice, gathered keys and values are 2kd · size
    elements. What else a layer keeps is about four times the widths of residual stream, attention and MLP.
    """
    heads, kv_heads = model.num_attention_heads, model.num_kv_heads
    if model.has_decoder:
        return Method("all_gather", "others have no biases of positions")
    sent = (heads + kv_heads) / (size * kv_heads)
    if kv_heads // tensor % size == 0 and sent < 1:
        return Method("ulysses", f"sends {sent:.0%} of what all_gather does")
    others = 4 * (model.hidden_size + model.attention_size + model.ffn_hidden_size)
    gathered = 2 * size * kv_heads * model.head_dim / others
    told = f"all keys and values are {gathered:.0%} of a layer's other activations"
    return Method("ring" if may_be_ring and gathered > _SMALL else "all_gather", told)
