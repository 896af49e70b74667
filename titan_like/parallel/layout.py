"""The degree of each kind of parallelism. Pure numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Parallelism


class Degree(NamedTuple):
    """One degree of parallelism."""

    name: str  # field of `Layout`
    key: str  # in [parallelism]
    title: str


# From the outermost dimension of the ranks to the innermost, in the order of the fields of `Layout`.
DEGREES = (
    Degree("pipeline", "pipeline_parallel_degree", "pipeline"),
    Degree("replicate", "data_parallel_replicate_degree", "replicas"),
    Degree("shard", "data_parallel_shard_degree", "data"),
    Degree("context", "context_parallel_degree", "context"),
    Degree("tensor", "tensor_parallel_degree", "tensor"),
)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Their product is the number of processes."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

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
        return math.prod(getattr(self, degree.name) for degree in DEGREES)

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
    if shard == 0:
        raise ConfigError(key, shard, "must be at least 1, or -1 for the processes that the other degrees leave")
    others = [degree for degree in DEGREES[::-1] if degree.name != "shard"]
    sizes = [getattr(parallelism, degree.key) for degree in others]
    product, titles = math.prod(sizes), " × ".join(degree.name for degree in others)
    told = "·".join(map(str, sizes))
    if shard == -1:
        if world_size % product:
            problem = f"{titles} = {told} = {product} does not divide the {world_size} processes"
            raise ConfigError(key, shard, f"{problem}; start a multiple of {product}")
        shard = world_size // product
    elif product * shard != world_size:
        problem = f"{titles} × shard = {told}·{shard} = {product * shard}, but the job has {world_size} processes"
        raise ConfigError(key, shard, f"{problem}; start {product * shard} or use -1")
    return Layout.of(parallelism.model_copy(update={"data_parallel_shard_degree": shard}))


def method_of(parallelism: Parallelism) -> str:
    """How processes that share a sequence attend: `context_parallel_method`, where ``auto`` is ``all_gather``."""
    method = parallelism.context_parallel_method
    return "all_gather" if method == "auto" else method
