"""The assignment of layers to pipeline stages and to units of communication. Pure functions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from titan_like.config.schema import JobConfig
from titan_like.data.loading.lengths import sample_length
from titan_like.models.config import TransformerConfig

LAYER_UNIT_BYTES = 32 << 20  # up to which small layers share messages, and the host's work for these
GRADIENT_UNIT_BYTES = 256 << 20  # of gradients in a 16-bit dtype that wait to be added up


@dataclass(frozen=True)
class StageLayers:
    """One stage: consecutive layers, plus the embedding in the first stage and the output matrix in the last."""

    layers: range
    is_first: bool
    is_last: bool


def layers_per_stage(config: JobConfig, model: TransformerConfig, num_stages: int) -> list[int]:
    """Number of layers in each stage: `parallelism.pipeline_layers` if given, else balanced."""
    counts = config.parallelism.pipeline_layers
    if counts:
        return counts
    length = sample_length(config, model)
    layers, output = layer_costs(model, length.encoder, length.decoder)
    if len(set(layers)) == 1:
        return balanced_layers(len(layers), num_stages, output)
    return balanced_costs(layers, num_stages, output)


def layer_costs(model: TransformerConfig, seq_len: int, decoder_seq_len: int = 0) -> tuple[list[float], float]:
    """Multiplications of each layer, and of the output matrix and the head, for one sample.

    The unit is the first layer's. The embedding is a lookup and costs nothing.
    """
    parts, lengths = model.parts, (seq_len, decoder_seq_len)
    of_kind = [kind.products(lengths) + 2 * model.attention_size * kind.scores(lengths) for kind in parts.kinds]
    of_layer = [of_kind[kind] for kind in model.layer_kinds]
    output = parts.head_matrices * (decoder_seq_len if model.has_decoder else seq_len)
    return [cost / of_layer[0] for cost in of_layer], output / of_layer[0]


def balanced_costs(costs: Sequence[float], num_stages: int, last_extra: float) -> list[int]:
    """`balanced_layers` for layers of different costs, by dynamic programming over the stages.

    It minimises the cost of the slowest stage, and among equal ones the sum of squared costs.
    """
    before = list(itertools.accumulate(costs, initial=0.0))
    # For each number of layers: the best split of the first ones into the stages so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        left = num_stages - 1 - stage
        extra = 0.0 if left else last_extra
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, len(costs) - left + 1) if left else [len(costs)]:
            choices = []
            for start, (slowest, squares, counts) in best.items():
                if start < end:
                    cost = before[end] - before[start] + extra
                    choices.append((max(slowest, cost), squares + cost**2, (*counts, end - start)))
            following[end] = min(choices)
        best = following
    return list(best[len(costs)][2])


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


def units_of_layers(sizes: Sequence[int], most: int | None = None) -> list[int]:
    """Number of layers in each unit of communication: as many as fit into ``most`` bytes, at least one.

    ``most`` is `LAYER_UNIT_BYTES` if it is not given.

    ``sizes``: bytes of a stage's layers on one tensor-parallel process, in the type in which they compute.
    """
    units: list[int] = []
    room = 0
    for size in sizes:
        if not units or size > room:
            units.append(0)
            room = LAYER_UNIT_BYTES if most is None else most
        units[-1] += 1
        room -= size
    return units
