"""The planner's input: a model, a batch and a layout."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.optim.state_size import ADAMW_STATE, OptimizerState
from titan_like.parallel.schedules.tables import stage_ranks


class Workload(NamedTuple):
    """One training step of a run. The names are the configuration's, shortened."""

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
    recompute: str = "none"  # none, full or selective (only the attention core)
    recompute_every: int = 1
    flash: bool = True
    dtype: str = "bfloat16"
    dropout: bool = False
    compiled: bool = False  # a compiler fuses the layers' operators between products
    stage_layers: tuple[int, ...] | None = None  # None: equal stages
    causal: bool = True  # each position attends only to those before it; in BERT (arXiv 1810.04805) it attends to all
    optimizer: OptimizerState = ADAMW_STATE  # what it keeps in our own trainer; its time is AdamW's

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank. Context parallelism splits each sequence."""
        return self.micro_batch_size * self.seq_len / self.context

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
    """Numbers of layers on the pipeline's ranks that the step time depends on."""

    first: int  # on the rank with the embedding
    last: int  # on the rank with the output matrix
    largest: int  # the most on any rank
    ends_together: bool  # one rank holds both ends of the model


class RankStages(NamedTuple):
    """A rank's stages in the order of the forward pass.

    ``layers`` has the layers of each stage. ``first`` and ``last`` say whether the rank holds the pipeline's first and
    last stage.
    """

    layers: tuple[int, ...]
    first: bool
    last: bool


class PipelineRanks(NamedTuple):
    """How a pipeline's ranks share the model's layers."""

    stages: tuple[int, ...]  # layers of each stage
    ranks: tuple[int, ...]  # rank of each stage
    layers: tuple[int, ...]  # layers of each rank, over all its stages
    here: tuple[RankStages, ...]  # stages of each rank
    counts: RankLayers
    largest: tuple[int, ...]  # may be fullest: both ends, and the first rank with each combination of stages


def pipeline_of(work: Workload) -> PipelineRanks:
    """How the ranks of a run's pipeline share its layers."""
    return _pipeline(*_stage_key(work))


@cache
def _pipeline(
    stage_layers: tuple[int, ...] | None, num_layers: int, schedule: str, pipeline: int, virtual: int
) -> PipelineRanks:
    ranks = tuple(stage_ranks(schedule, pipeline, virtual))
    stages = stage_layers or equal_stages(num_layers, len(ranks))
    of_rank: list[list[int]] = [[] for _ in range(pipeline)]
    for rank, count in zip(ranks, stages, strict=True):
        of_rank[rank].append(count)
    layers = tuple(map(sum, of_rank))
    first, last = ranks[0], ranks[-1]
    return PipelineRanks(
        stages,
        ranks,
        layers,
        tuple(RankStages(tuple(counts), rank == first, rank == last) for rank, counts in enumerate(of_rank)),
        RankLayers(layers[first], layers[last], max(layers), first == last),
        tuple(sorted({0, pipeline - 1, *(of_rank.index(counts) for counts in of_rank)})),
    )


def ranks_from(work: Workload, start: int) -> tuple[int, ...]:
    """The first rank with each combination of stages, among the pipeline ranks from ``start`` on."""
    return _ranks_from(*_stage_key(work), start)


def _stage_key(work: Workload) -> tuple[tuple[int, ...] | None, int, str, int, int]:
    """Everything that the stages of a pipeline depend on. Layouts that agree in it share one cached result."""
    return work.stage_layers, work.model.num_layers, work.schedule, work.pipeline, work.virtual_stages


@cache
def _ranks_from(
    stage_layers: tuple[int, ...] | None, num_layers: int, schedule: str, pipeline: int, virtual: int, start: int
) -> tuple[int, ...]:
    here = _pipeline(stage_layers, num_layers, schedule, pipeline, virtual).here
    first: dict[tuple[int, ...], int] = {}
    for rank in range(start, pipeline):
        first.setdefault(here[rank].layers, rank)
    return tuple(first.values())


def equal_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of equal stages. If they do not divide evenly, the middle stages take one more each."""
    base, more = divmod(num_layers, num_stages)
    first = (num_stages - more) // 2
    return tuple(base + (first <= stage < first + more) for stage in range(num_stages))
