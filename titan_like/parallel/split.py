"""The assignment of layers to pipeline stages. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig


@dataclass(frozen=True)
class StageLayers:
    """One stage: consecutive layers, plus the embedding in the first stage and the output matrix in the last."""

    layers: range
    is_first: bool
    is_last: bool


def layers_per_stage(config: JobConfig, model: TransformerConfig, num_stages: int) -> list[int]:
    """Number of layers in each stage: `parallelism.pipeline_layers` if given, else balanced."""
    given = config.parallelism.pipeline_layers
    return given or balanced_layers(model.num_layers, num_stages, output_cost(model, config.training.seq_len))


def output_cost(model: TransformerConfig, seq_len: int) -> float:
    """Multiplications of the output matrix and the head per token, in units of one layer's.

    The embedding is a lookup and costs nothing.
    """
    layer = model.parts.matrices + model.parts.attention_cores * 2 * seq_len * model.hidden_size
    return model.parts.head_matrices / layer


def balanced_layers(num_layers: int, num_stages: int, last_extra: float) -> list[int]:
    """Number of layers in each stage such that the slowest stage is as fast as possible.

    Every layer costs 1, and the last stage costs ``last_extra`` more. Of stages that would be equally slow, one in the
    middle takes the next layer, because the ends also hold the embedding or the output matrix.
    """
    counts = [1] * num_stages
    extra = [0.0] * (num_stages - 1) + [last_extra]

    def cost_with_one_more(stage: int) -> tuple[float, bool, int]:
        return counts[stage] + 1 + extra[stage], stage in (0, num_stages - 1), stage

    cheapest = [cost_with_one_more(stage) for stage in range(num_stages)]
    heapify(cheapest)
    for _ in range(num_layers - num_stages):
        stage = cheapest[0][-1]
        counts[stage] += 1
        heapreplace(cheapest, cost_with_one_more(stage))
    return counts


def split_layers(counts: list[int]) -> list[StageLayers]:
    """Turn the number of layers in each stage into consecutive ranges of layers."""
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(StageLayers(range(first, first + count), index == 0, index == len(counts) - 1))
        first += count
    return stages
