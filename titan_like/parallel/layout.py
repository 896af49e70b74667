"""The degree of each kind of parallelism. Pure numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Parallelism


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
    def num_processes(self) -> int:
        """World size of the job."""
        return self.pipeline * self.data_parallel * self.context * self.tensor

    def described(self) -> str:
        """The degrees above 1 as text, such as "pipeline 2 × data 4"."""
        degrees = {
            "pipeline": self.pipeline,
            "replicas": self.replicate,
            "data": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }
        return " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "no parallelism"


def resolve_layout(parallelism: Parallelism, world_size: int) -> Layout:
    """Work out the layout of ``world_size`` processes. A shard degree of -1 takes what the other degrees leave.

    Raises:
        ConfigError: the degrees do not multiply to the number of processes.
    """
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    context, replicate = parallelism.context_parallel_degree, parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    key = "parallelism.data_parallel_shard_degree"
    if shard == 0:
        raise ConfigError(key, shard, "must be at least 1, or -1 for the processes that the other degrees leave")
    others = tensor * pipeline * context * replicate
    if shard == -1:
        if world_size % others:
            product = f"tensor × pipeline × context × replicate = {tensor}·{pipeline}·{context}·{replicate} = {others}"
            raise ConfigError(
                key, shard, f"{product} does not divide the {world_size} processes; start a multiple of {others}"
            )
        shard = world_size // others
    elif others * shard != world_size:
        raise ConfigError(
            key,
            shard,
            f"tensor × pipeline × context × replicate × shard = {tensor}·{pipeline}·{context}·{replicate}·{shard} = "
            f"{others * shard}, but the job has {world_size} processes; start {others * shard} or use -1",
        )
    return Layout(pipeline, replicate, shard, context, tensor)
