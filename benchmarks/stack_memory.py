"""Bytes of memory on one GPU of every pipeline rank, on stacks other than this project's trainer.

Weights, gradients and optimizer state follow from the profile's bytes per parameter, and activations from arXiv
2205.05198, equations 1 to 6, extended to grouped-query attention, gated MLPs and fused attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from titan_like.models.config import TransformerConfig
from titan_like.models.parts import LayerParts
from titan_like.planner import memory as own_trainer
from titan_like.planner.memory import Memory, RankMemory, in_flight, with_overhead
from titan_like.planner.profile import Profile
from titan_like.planner.shapes import LayerDescription, ParameterSplit, ShardOf, description, units_of_counts
from titan_like.planner.workload import Counts, RankStages, Workload, element_bytes, pipeline_of


def memory(work: Workload, profile: Profile) -> Memory:
    """Memory of all pipeline ranks; that of our own trainer if the profile is of it."""
    if profile.trainer_state:
        return own_trainer.memory(work, profile)
    ranks = tuple(_rank_memories(work, profile))
    return Memory(ranks, max(rank.total for rank in ranks), profile.device.memory_bytes)


def _rank_memories(work: Workload, profile: Profile) -> Iterator[RankMemory]:
    pipeline, of_layers, element = pipeline_of(work), layer_activations(work), element_bytes(work.dtype)
    for rank, (layers, here) in enumerate(zip(pipeline.layers, pipeline.here, strict=True)):
        stages = len(here.layers)
        held = in_flight(work.schedule, work.pipeline, stages, work.microbatches, rank) / stages  # microbatches
        activations = sum(held * chunk * count for (chunk, _), count in zip(of_layers, layers, strict=True))
        activations += max(working * (count > 0) for (_, working), count in zip(of_layers, layers, strict=True))
        activations += here.first * held * work.positions * work.model.hidden_size * element
        logits = work.labelled * work.model.padded_vocab_size / work.tensor * (profile.logit_state + element)
        yield with_overhead(profile, *_state(work, profile, layers, here), activations, here.last * logits)


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


def _state(work: Workload, profile: Profile, layers: Counts, here: RankStages) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients and optimizer state, and of temporary copies of the first two."""
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
    """The exact number of parameters on one GPU before ZeRO."""
    split, units = ParameterSplit(tensor=ShardOf(tensor)), units_of_counts(model, counts, is_first, is_last)
    return sum(times * prod(split.here(parameter)) for unit, times in units for parameter in unit.parameters)
