"""Bytes of memory on one GPU of every pipeline rank, by what takes them.

For our own trainer, parameters, gradients and optimizer state come from `training_state`, which is exact, and
activations from `activations`. For other stacks, states follow from their bytes per parameter, and activations from
arXiv 2205.05198, equations 1 to 6, extended to grouped-query attention, gated MLPs and fused attention.
`titan_like.parallel.schedules.tables` says how many microbatches' activations each schedule holds at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from titan_like.metrics.devices import Device
from titan_like.models.config import TransformerConfig
from titan_like.models.parts import LayerParts
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, stages_per_rank
from titan_like.planner.activations import Moment, full_moments, kept_of
from titan_like.planner.dtypes import element_bytes
from titan_like.planner.profile import Profile
from titan_like.planner.shapes import LayerDescription, ParameterSplit, ShardOf, description, units_of_counts
from titan_like.planner.training_state import Storage, rank_state
from titan_like.planner.training_state_fast import Sharing, exact_state, rounds_of, trainer_states
from titan_like.planner.workload import Counts, RankStages, Workload, many_of, pipeline_of, ranks_from, with_count

MEMORY_MARGIN = 0.1  # share of a GPU's memory that a prediction must leave free; nine in ten errors are smaller


class RankMemory(NamedTuple):
    """Bytes on one GPU of a pipeline rank at its fullest moment."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float  # gathered weights, and gradients that are not summed yet
    activations: float
    logits: float
    overhead: float
    total: float


class Memory(NamedTuple):
    """Bytes on the GPUs of a job."""

    ranks: tuple[RankMemory, ...]  # by pipeline rank
    largest: float
    capacity: float

    @property
    def fits(self) -> bool:
        """Whether every rank's total is below the device's memory."""
        return self.largest <= self.capacity


def usable_bytes(device: Device) -> float:
    """Bytes of a GPU's memory that a layout chosen by its prediction may take."""
    return device.memory_bytes * (1 - MEMORY_MARGIN)


def memory(work: Workload, profile: Profile) -> Memory:
    """Memory of all pipeline ranks."""
    ranks = tuple(rank_memories(work, profile, range(work.pipeline)))
    return Memory(ranks, max(rank.total for rank in ranks), profile.device.memory_bytes)


def fits(work: Workload, profile: Profile) -> bool:
    """Whether every rank leaves the margin free, so that a search may choose the layout.

    It stops at the first rank that is too full, which for most layouts is the first one it looks at.
    """
    usable = usable_bytes(profile.device)
    return all(rank.total <= usable for rank in rank_memories(work, profile))


def largest_memory(work: Workload, profile: Profile, exact: bool = True) -> float:
    """The largest total of `memory`, found without computing every rank.

    Candidates are the first and the last rank, and the first rank with each combination of stages: once among all
    ranks, once among those that hold fewer microbatches than the step has. With ``exact`` unset, the trainer's state
    under a schedule that splits backward passes is a much faster estimate.
    """
    return max([rank.total for rank in rank_memories(work, profile, exact=exact)])


def _first_with_gradients(work: Workload) -> int:
    """The first rank that already has gradients when it holds the most activations.

    It does not hold all microbatches of the step at once: solve `in_flight` < v·m for the rank.
    """
    p, m, stages = work.pipeline, work.microbatches, stages_per_rank(work.schedule, work.virtual_stages)
    if work.schedule not in ("1f1b", "interleaved_1f1b"):
        return p
    return p - m + 1 if stages == 1 else ((stages + 1) * p - 1 - stages * m) // 2 + 1


def rank_memories(
    work: Workload, profile: Profile, ranks: Sequence[int] | None = None, exact: bool = True
) -> Iterator[RankMemory]:
    """Memory of some pipeline ranks, by default of those that may be fullest; ``exact`` as in `largest_memory`."""
    if ranks is None and exact and work.schedule in SPLIT_BACKWARD:
        ranks = range(work.pipeline)  # any rank may be the fullest
    held = _held(work.sharded_alike(0), profile, ranks)
    if profile.trainer_state:
        states = _trainer_states(work, held, exact)
    else:
        layers, both = pipeline_of(work).layers, zip(held.ranks, held.here, strict=True)
        states = (_other_state(work, profile, layers[rank], here) for rank, here in both)
    for (parameters, all_gradients, optimizer, gathered), moments in zip(states, held.moments, strict=True):
        share, activations, logits = (
            moments[0]
            if len(moments) == 1
            else max(moments, key=lambda one: all_gradients * one.gradients + one.activations + one.logits)
        )
        gradients = all_gradients * share
        overhead = profile.overhead_bytes + profile.fragmentation * (activations + logits + gathered)
        total = parameters + gradients + optimizer + gathered + activations + logits + overhead
        yield RankMemory(parameters, gradients, optimizer, gathered, activations, logits, overhead, total)


class _Held(NamedTuple):
    """What some ranks hold, apart from state. Each field has an entry per rank."""

    ranks: Sequence[int]
    here: tuple[RankStages, ...]
    moments: list[list[Moment]]  # see `full_moments`


@lru_cache(maxsize=4096)
def _held(work: Workload, profile: Profile, ranks: Sequence[int] | None) -> _Held:
    pipeline, m = pipeline_of(work), work.microbatches
    if ranks is None:
        ranks, start = pipeline.largest, _first_with_gradients(work)
        if 0 < start < work.pipeline:
            ranks = *ranks, *ranks_from(work, start)
    here, moments = tuple([pipeline.here[rank] for rank in ranks]), []
    if profile.trainer_state:
        one, of_layers = kept_of(work, profile.device), []
    else:
        one, of_layers = None, layer_activations(work)
    for rank, (stages, *ends) in zip(ranks, here, strict=True):
        chunks, layers = in_flight(work.schedule, work.pipeline, len(stages), m, rank), pipeline.layers[rank]
        if one is not None:
            moments.append(full_moments(work, one, layers, chunks, len(stages), ends))
        else:
            microbatches = chunks / len(stages)
            found = _activations(work, of_layers, layers, microbatches, ends, profile.logit_state)
            moments.append([Moment(1, *found)])
    return _Held(ranks, here, moments)


def _activations(
    work: Workload,
    of_layers: list[tuple[float, float]],
    layers: Counts,
    held: float,
    ends: Sequence[bool],
    logit_state: float,
) -> tuple[float, float]:
    """Bytes of activations and of logits for other stacks.

    Args:
        work: the run.
        of_layers: the result of `layer_activations`.
        layers: layers on the rank, by kind.
        held: microbatches whose activations all the rank's layers hold.
        ends: whether the rank has the first stage, and whether it has the last.
        logit_state: bytes per logit at the loss, apart from the logit itself.
    """
    activations = 0.0
    for (chunk, _), count in zip(of_layers, layers, strict=True):
        activations += held * chunk * count
    activations += max(working * (count > 0) for (_, working), count in zip(of_layers, layers, strict=True))
    element = element_bytes(work.dtype)
    if ends[0]:
        activations += held * work.positions * work.model.hidden_size * element
    logits = work.labelled * work.model.padded_vocab_size / work.tensor * (logit_state + element) if ends[1] else 0.0
    return activations, logits


def in_flight(schedule: str, pipeline: int, stages: int, microbatches: int, rank: int) -> int:
    """The most chunks (one microbatch in one of the rank's stages) held at once; the formulas are those of `tables`."""
    everything = stages * microbatches
    if schedule in ("gpipe", "looped_bfs"):
        return everything
    if schedule == "1f1b" or (schedule == "interleaved_1f1b" and stages == 1):
        return min(everything, pipeline - rank)
    if schedule == "interleaved_1f1b":
        return min(everything, (stages - 1) * pipeline + 2 * (pipeline - rank) - 1)
    return min(everything, stages * pipeline + (schedule == "dualpipe_v"))


def layer_kept(work: Workload, profile: Profile) -> float:
    """Bytes that one layer, of the smallest kind, keeps of one microbatch; a rank holds `in_flight` of them."""
    if profile.trainer_state:
        return min(kept_of(work, profile.device).layers)
    return min(kept for kept, _ in layer_activations(work))


def layer_activations(work: Workload) -> list[tuple[float, float]]:
    """Bytes that one layer of each kind keeps of a microbatch until its backward pass, and that it needs to run.

    arXiv 2205.05198, per token, with e bytes an element:

    - residual stream, divided by t with sequence parallelism: inputs and outputs of two norms 4eh, dropout masks 2h;
    - divided by t: queries, keys, values and the heads' output e(2h + 2kv), and 2f elements of an MLP (gated: 3f);
    - the unfused attention matrix, divided by t: the softmax, and with dropout its mask and result, 5as for e = 2.
    """
    kinds = zip(description(work.model).kinds, work.model.parts.kinds, strict=True)
    return [_layer_activations(work, kind, parts) for kind, parts in kinds]


def _layer_activations(work: Workload, kind: LayerDescription, parts: LayerParts) -> tuple[float, float]:
    model, t, e, hidden = work.model, work.tensor, element_bytes(work.dtype), work.model.hidden_size
    outside, lengths = t if work.sequence_parallel else 1, (work.seq_len, work.decoder_seq_len)
    whole = cores = 0.0
    for stack, tokens in enumerate(work.stack_tokens):
        if not tokens:
            continue
        regions = [region for region in kind.regions if region.stack == stack]
        norms = kind.norm_stacks.count(stack)
        stream = (2 * norms * e * hidden + (len(regions) * hidden if work.dropout else 0)) / outside
        inside = 0.0  # per region, the results of its first products and the inputs of its last
        for region in regions:
            # A compiler recomputes what depends on several results, such as the product inside a gated MLP.
            is_made_again = work.compiled and not region.cores and region.columns > region.rows
            inside += e * (region.columns + (0 if is_made_again else region.rows)) / t
        heads, core = model.num_attention_heads / t, 0.0
        for keys in [lengths[core.keys] for core in parts.cores if core.queries == stack]:
            core += 4 * heads if work.flash else heads * keys * (e + (e + 1 if work.dropout else 0))
        whole += tokens * (stream + inside + core)
        whole += work.stack_tokens[1 - stack] * sum(region.memory for region in regions) * e / t
        cores += tokens * core
    if work.recompute == "none":
        return whole, 0.0
    if work.recompute == "selective":
        return (whole, 0.0) if work.flash else (whole - cores, cores)
    kept = work.positions * e * hidden / outside
    return kept + (whole - kept) * (1 - 1 / work.recompute_every), whole


State = tuple[float, float, float, float]
"""Bytes of parameters, gradients and optimizer state, and of temporary copies of the first two."""


def _trainer_states(work: Workload, held: _Held, exact: bool) -> Iterable[State]:
    """The state of our own trainer on each rank."""
    m, shard, split = work.microbatches, work.shard if work.zero_stage else 1, work.schedule in SPLIT_BACKWARD
    several, element = work.data_parallel > 1, element_bytes(work.dtype)
    sharing = Sharing(work.tensor, shard, several, work.zero_stage if several else 0, element, work.optimizer)
    if exact and split:
        # More than three rounds of microbatches through the ranks repeat the same moments.
        shape, few = (work.schedule, work.pipeline, work.virtual_stages), min(m, 3 * work.pipeline)
        ranks = zip(held.here, held.ranks, strict=True)
        return (exact_state(work.model, here, *shape, rank, few, sharing) for here, rank in ranks)
    turns = split, rounds_of(work.schedule, work.pipeline, m), m > 1
    return trainer_states(work.model, held.here, *turns, sharing)


def _other_state(work: Workload, profile: Profile, layers: Counts, here: RankStages) -> State:
    """The state of another stack, from its bytes per parameter."""
    count = rank_parameters(work.model, layers, here.first, here.last, work.tensor)
    zero, shard = work.zero_stage, work.shard * work.context  # ranks that share a sequence also share the shards
    weights = profile.weight_state * count
    gradients = profile.gradient_state * count
    # Two layers exist unsharded at a time: their gradients before the reduce-scatter, with ZeRO 3 also their weights.
    whole = min(2 * work.model.layer_parameters / work.tensor, count) * (1 - 1 / shard)
    gathered = whole * ((zero == 3) * profile.weight_state + (zero >= 2) * profile.gradient_state)
    gathered += profile.buffer_state * count if zero < 3 else 0.0
    return (
        weights / shard if zero == 3 else weights,
        gradients / shard if zero >= 2 else gradients,
        profile.optimizer_state * count / (shard if zero else 1),
        gathered,
    )


@lru_cache(maxsize=4096)
def rank_parameters(model: TransformerConfig, counts: Counts, is_first: bool, is_last: bool, tensor: int) -> int:
    """The exact number of parameters on one GPU before ZeRO. All layers of a kind have the same number."""
    if (kind := many_of(counts)) is not None:
        two, one = (rank_parameters(model, with_count(counts, kind, few), is_first, is_last, tensor) for few in (2, 1))
        return two + (counts[kind] - 2) * (two - one)
    split = ParameterSplit(tensor=ShardOf(tensor))
    units = units_of_counts(model, counts, is_first, is_last)
    return rank_state(units, Storage(0, split)).num_parameters
