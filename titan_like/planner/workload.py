"""What is predicted: a model, a batch and a layout."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.parallel.schedules.tables import stage_ranks, stages_per_rank


class Workload(NamedTuple):
    """One training step of a run. Names are those of the configuration's sections, shortened."""

    model: TransformerConfig
    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    recompute: str = "none"  # none, full, selective (attention core)
    recompute_every: int = 1
    flash: bool = True
    dtype: str = "bfloat16"
    dropout: bool = False
    compiled: bool = False  # the layers' operators between products are fused by a compiler
    stage_layers: tuple[int, ...] | None = None  # None: equal stages
    causal: bool = True  # a position attends to those before it alone; BERT's (arXiv 1810.04805) to all

    @property
    def data_parallel(self) -> int:
        """Processes that see different samples."""
        return self.replicate * self.shard

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.pipeline * self.context * self.replicate * self.shard

    @property
    def microbatches(self) -> int:
        """Microbatches of one data-parallel rank in one step, rounded up."""
        return -(-self.global_batch_size // (self.micro_batch_size * self.replicate * self.shard))


class RankLayers(NamedTuple):
    """How many layers the pipeline's ranks hold, as far as the step time needs it."""

    first: int  # on the rank that embeds
    last: int  # on the rank with the output matrix
    largest: int  # on any rank
    ends_together: bool  # one rank holds both ends


@cache
def equal_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers in equal stages; where they do not divide, the middle ones take one more."""
    base, more = divmod(num_layers, num_stages)
    first = (num_stages - more) // 2
    return tuple(base + (first <= stage < first + more) for stage in range(num_stages))


@cache
def ranks_of_stages(schedule: str, pipeline: int, virtual: int) -> tuple[int, ...]:
    """Pipeline rank of each stage."""
    return tuple(stage_ranks(schedule, pipeline, virtual))


@cache
def layers_of_ranks(stage_layers: tuple[int, ...], schedule: str, pipeline: int, virtual: int) -> tuple[int, ...]:
    """Layers of each pipeline rank, all its stages together."""
    counts = [0] * pipeline
    for rank, layers in zip(ranks_of_stages(schedule, pipeline, virtual), stage_layers, strict=True):
        counts[rank] += layers
    return tuple(counts)


@cache
def rank_layers(stage_layers: tuple[int, ...], schedule: str, pipeline: int, virtual: int) -> RankLayers:
    """The summary of `layers_of_ranks`."""
    counts = layers_of_ranks(stage_layers, schedule, pipeline, virtual)
    ranks = ranks_of_stages(schedule, pipeline, virtual)
    return RankLayers(counts[ranks[0]], counts[ranks[-1]], max(counts), ranks[0] == ranks[-1])


def stages_of(work: Workload) -> tuple[int, ...]:
    """Layers of every stage."""
    if work.stage_layers is not None:
        return work.stage_layers
    return equal_stages(work.model.num_layers, work.pipeline * stages_per_rank(work.schedule, work.virtual_stages))
