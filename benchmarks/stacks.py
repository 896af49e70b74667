"""Other people's software: what it runs in place of this trainer's operators, and what it keeps in memory.

A stack's operators are a transformation of the traced ones. Its weights, gradients and optimizer state follow from
bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import gcd

from benchmarks.stack_profiles import profiles
from titan_like.parallel.schedules.simulate import max_in_flight
from titan_like.parallel.schedules.tables import schedule_table
from titan_like.planner import memory as own_trainer
from titan_like.planner.data_parallel import shard_groups
from titan_like.planner.memory import Memory, RankMemory
from titan_like.planner.profile import Profile
from titan_like.planner.stages import Source, stages_of_rank
from titan_like.planner.step_time import StepTime, step_time
from titan_like.planner.trace import TraceKey, trace
from titan_like.planner.trace.program import Attention, Gemm, Pass, Program, Segment
from titan_like.planner.workload import Workload, element_bytes

_HALF = {"gradient_state": 2.0, "optimizer_state": 16.0}  # sums in half precision, copied to float32 for the update
_MOSAIC = {"fused_loss": True, "logit_state": 2.0}  # MPT uses flash-attention's loss operator


Passes = tuple[Pass, Pass, Pass]


@dataclass(frozen=True)
class Stack:
    """What differs from this trainer. States are resident bytes per parameter."""

    fused_loss: bool = False  # the loss is one operator each way and writes the gradient over the logits
    recompute_whole: bool = True  # recomputation also repeats a layer's last product and sum
    weight_state: float = 2.0
    gradient_state: float = 4.0
    optimizer_state: float = 12.0  # master weights and moments
    buffer_state: float = 0.0  # flat buffers for sums and gathers
    logit_state: float = 8.0  # bytes per logit at the loss, apart from the logit: float32 copies, gradients

    def programs(self, work: Workload, flash: bool) -> Source:
        """What the stack runs in place of the traced programs of a run; ``flash``: with fused attention."""
        return _programs(self, work.dropout, flash)


# By the profile's name. This trainer's has none.
STACKS: dict[str, Stack] = {
    "selene_2021": Stack(**_HALF),
    "selene_2021_zero3": Stack(),
    "selene_2022": Stack(**_HALF),
    "vtrain_a100": Stack(**_HALF),
    "vtrain_a100_node": Stack(**_HALF),
    "jean_zay_a100": Stack(**_HALF),
    "jean_zay_a100_early": Stack(**_HALF),
    "jean_zay_v100": Stack(**_HALF, buffer_state=4.0),  # a flat copy of gradients and weights
    "jean_zay_v100_zero3": Stack(),
    "dgx2_v100": Stack(**_HALF),
    "fsdp_a100": Stack(**_MOSAIC),
    "fsdp_h100": Stack(**_MOSAIC),
    "torchtitan_h100": Stack(logit_state=10.0),  # float32 logarithms and gradients, and gradients in bf16
    "megatron_lm_h100": Stack(),
    "megatron_bridge_h100": Stack(),
    "megatron_bridge_gb200": Stack(),
    "megatron_bridge_gb300": Stack(),
    "nemo_h100": Stack(),
    "megatron_bridge_experts_gb200_old": Stack(),
    "megatron_bridge_experts_gb200": Stack(),
    "megatron_bridge_experts_gb300_old": Stack(),
    "megatron_bridge_experts_gb300": Stack(),
    "megatron_bridge_experts_b200": Stack(),
    "megatron_bridge_experts_h100": Stack(),
}


@cache
def _programs(stack: Stack, dropout: bool, flash: bool) -> Source:
    """One object for equal runs, because composed stages are kept by the source of their programs."""

    @cache
    def programs(key: TraceKey) -> Program:
        traced, element = trace(key), element_bytes(key.dtype)

        def as_run(segment: Segment, is_layer: bool = False) -> Segment:
            passes = _passes(stack, key.recompute, dropout, element, flash, segment, is_layer)
            return replace(segment, **dict(zip(("forward", "backward", "weights"), passes, strict=True)))

        ends = {name: as_run(getattr(traced, name)) for name in ("entry", "inputs", "head")}
        return replace(traced, **ends, layers=[as_run(layer, True) for layer in traced.layers])

    return programs


def _passes(
    stack: Stack, recompute: str, dropout: bool, element: int, flash: bool, segment: Segment, is_layer: bool
) -> Passes:
    forward, backward, weights = segment.passes
    if any(gemm.recomputed for gemm in backward.gemms) and stack.recompute_whole and recompute == "full":
        backward = _repeating(backward, forward)
    elif recompute == "selective":  # of attention cores alone, if they are not fused
        backward = _only_cores_again(backward, flash)
    if not is_layer and forward.gemms:
        forward, backward = _plain_loss(forward, backward, element, stack.fused_loss)
    if not flash:
        forward, backward = (_with_matrices(one, element, dropout) for one in (forward, backward))
    return forward, backward, weights


def _repeating(backward: Pass, forward: Pass) -> Pass:
    """The backward pass, with all of the forward pass repeated."""
    once = {key: count for key, count in backward.gemms.items() if not key.recomputed}
    cores = {key: count for key, count in backward.attention.items() if not key.recomputed}
    sent = {key: both for key, both in backward.collectives.items() if not key.recomputed}
    again = ({key._replace(recomputed=True): n for key, n in of.items()} for of in (forward.gemms, forward.attention))
    eager, fused = (
        (whole - repeated + new, new)
        for (whole, repeated), (new, _) in (
            (backward.eager_bytes, forward.eager_bytes),
            (backward.fused_bytes, forward.fused_bytes),
        )
    )
    return replace(
        backward,
        gemms=once | next(again),
        attention=cores | next(again),
        collectives=sent | {key._replace(recomputed=True): both for key, both in forward.collectives.items()},
        eager_bytes=eager,
        fused_bytes=fused,
    )


def _only_cores_again(backward: Pass, flash: bool) -> Pass:
    kept = {key: n for key, n in backward.attention.items() if not (key.recomputed and flash)}
    return replace(
        backward,
        gemms={key: n for key, n in backward.gemms.items() if not key.recomputed},
        attention=kept,
        collectives={key: both for key, both in backward.collectives.items() if not key.recomputed},
        eager_bytes=(backward.eager_bytes[0] - backward.eager_bytes[1], 0),
        fused_bytes=(backward.fused_bytes[0] - backward.fused_bytes[1], 0),
    )


def _plain_loss(forward: Pass, backward: Pass, element: int, fused: bool) -> tuple[Pass, Pass]:
    """The logits of all tokens at once, whose gradient the backward pass makes."""
    first = next(iter(forward.gemms))
    n, k, alignment = first.n, first.k, first.alignment
    tokens = sum(count * gemm.m for gemm, count in forward.gemms.items() if (gemm.n, gemm.k) == (n, k))
    logits, stream = tokens * n, tokens * k * element
    there = round(2 * stream + logits * (element + (0 if fused else 20)))
    back = round(4 * stream + logits * (element + (element if fused else 8)))
    products = [Gemm(tokens, n, k, 1, False, alignment), Gemm(tokens, k, n, 1, False, alignment)]
    products.append(Gemm(n, k, tokens, 1, False, alignment))
    return (
        replace(forward, gemms={products[0]: 1}, eager_bytes=(there, 0), fused_bytes=(there, 0), launches=20),
        replace(
            backward, gemms=dict.fromkeys(products[1:], 1), eager_bytes=(back, 0), fused_bytes=(back, 0), launches=20
        ),
    )


def _with_matrices(one: Pass, element: int, dropout: bool) -> Pass:
    """With attention whose matrices go through memory for softmax, dropout and mask."""
    gemms, more, launches = dict(one.gemms), [0, 0], 0
    for core, count in one.attention.items():
        batch, repeats = core.batch * core.heads, count * (1 + core.backward)
        for n, k in ((core.keys, core.head_dim), (core.head_dim, core.keys)):
            gemm = Gemm(core.queries, n, k, batch, core.recomputed, gcd(16, core.keys, core.head_dim))
            gemms[gemm] = gemms.get(gemm, 0) + repeats
        is_fused = batch % 4 == 0  # Megatron-LM's scale, mask and softmax take four matrices of scores at once
        moved = ((2 if is_fused else 8) + core.backward) * element + (2 * element + 1) * dropout
        more[core.recomputed] += count * batch * core.queries * core.keys * moved
        launches += count * (3 + 2 * core.backward + (0 if is_fused else 6 - 2 * core.backward))
    eager, fused = ((whole + sum(more), again + more[1]) for whole, again in (one.eager_bytes, one.fused_bytes))
    sizes = {"eager_bytes": eager, "fused_bytes": fused}
    return replace(one, gemms=gemms, attention={}, launches=one.launches + launches, **sizes)


def predicted(work: Workload, name: str) -> StepTime:
    """The step of a run on a stack with unfused attention."""
    return step_time(work, profiles()[name], STACKS[name].programs(work, flash=False))


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory(work: Workload, profile: Profile, stack: Stack | None, flash: bool) -> Memory:
    """Memory of all pipeline ranks; that of this trainer without a stack."""
    if stack is None:
        return own_trainer.memory(work, profile)
    ranks = tuple(_rank_memories(work, profile, stack, flash))
    return Memory(ranks, max(rank.total for rank in ranks), profile.device.memory_bytes)


def _rank_memories(work: Workload, profile: Profile, stack: Stack, flash: bool) -> Iterator[RankMemory]:
    table = schedule_table(work.schedule, work.pipeline, work.virtual_stages, work.microbatches)
    for rank, held in enumerate(max_in_flight(table)):
        stages, matrices, most = stages_of_rank(work, rank).values(), 0.0, 0.0
        own = own_trainer.rank_memory(work, rank)
        for stage in () if flash else stages:
            cores = {segment: _matrices(segment, work) for segment, is_layer, _ in stage.counts if is_layer}
            here = sum(count * cores.get(segment, 0.0) for segment, _, count in stage.counts)
            matrices, most = matrices + here * (work.recompute == "none"), max(most, *cores.values(), 0.0)
        activations = own.activations + matrices * held / len(stages) + most * (work.recompute != "none")
        logits = 0.0
        if any(stage.is_last for stage in stages):
            tokens = work.micro_batch_size * work.seq_len / work.context
            count = tokens * work.model.padded_vocab_size / work.tensor
            logits = count * (stack.logit_state + element_bytes(work.dtype))
        yield own_trainer.with_overhead(profile, *_state(work, stack, stages), activations + logits)


def _matrices(segment: Segment, work: Workload) -> float:
    """Bytes that unfused attention keeps in a layer: the softmax, and with dropout its mask and result."""
    element = element_bytes(work.dtype)
    kept = element + (element + 1 if work.dropout else 0)
    return kept * sum(count * _elements(core) for core, count in segment.forward.attention.items())


def _elements(core: Attention) -> int:
    return core.batch * core.heads * core.queries * core.keys


def _state(work: Workload, stack: Stack, stages) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients and optimizer state, and of temporary copies of the first two."""
    count, zero = sum(stage.elements for stage in stages), work.zero_stage
    shard, _ = next(iter(shard_groups(work).values()))  # ranks that share a sequence also share the shards
    weights, gradients = stack.weight_state * count, stack.gradient_state * count
    # Two layers exist unsharded at a time: their gradients before the reduce-scatter, with ZeRO 3 also their weights.
    layer = max(sum(one.elements.values()) for stage in stages for one in stage.layers)
    whole = min(2 * layer, count) * (1 - 1 / shard)
    gathered = whole * ((zero == 3) * stack.weight_state + (zero >= 2) * stack.gradient_state)
    gathered += stack.buffer_state * count if zero < 3 else 0.0
    return (
        weights / shard if zero == 3 else weights,
        gradients / shard if zero >= 2 else gradients,
        stack.optimizer_state * count / (shard if zero else 1),
        gathered,
    )
