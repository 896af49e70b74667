"""One step of one process, planned before it runs: its passes, what it sends, and the most state it holds.

All functions are pure functions of configuration, layout and schedule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.data.lengths import sample_length
from titan_like.models.config import TransformerConfig
from titan_like.models.moe.config import MoEConfig
from titan_like.optim.state_size import optimizer_state
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import holders_of_copies
from titan_like.parallel.schedules.simulate import bubble_fraction, ideal_bubble, max_in_flight, simulate, unit_time
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, Action, schedule_table
from titan_like.parallel.split import layer_costs, layers_per_stage, split_layers
from titan_like.planner.occupancy import steps_as_run
from titan_like.planner.shapes import ParameterSplit, ShardOf, stage_units
from titan_like.planner.step_collectives import Collective, StageTraffic, step_collectives
from titan_like.planner.training_state import RankState, Storage, peak_state, rank_state
from titan_like.planner.workload import BYTES


@dataclass(frozen=True)
class SchedulePlan:
    """What the process computes. Bubbles are idle time over compute time and leave out the time of messages."""

    name: str
    num_stages: int  # in the whole pipeline
    stages_here: list[int]
    microbatches: int
    counts: dict[str, int]  # of F, B, I and W
    bubble: float  # if F, I and W take equally long in every stage
    bubble_of_real_stages: float  # if they take as long as the matrix products of the stage's layers and output
    ideal_bubble: float  # the published formula, or its bound, for equal stages
    in_flight: int  # the most chunks (one microbatch in one stage) whose activations the process holds
    actions: list[Action]


@dataclass(frozen=True)
class StepPlan:
    """One step at the full global batch size."""

    schedule: SchedulePlan
    collectives: list[Collective]
    state: RankState
    peak_state: int  # bytes of weights, gradients and optimizer state


def plan_step(config: JobConfig, model: TransformerConfig, layout: Layout, rank: int) -> StepPlan:
    """Plan one step of a process, without building anything or communicating."""
    pp, _, _ = coordinates_of(layout, rank)
    training, ranks = config.training, layout.stage_ranks
    microbatches = training.global_batch_size // (training.micro_batch_size * layout.data_parallel)
    splits = split_layers(layers_per_stage(config, model, len(ranks)))
    stages = [
        StageTraffic(index, splits[index], stage_units(model, splits[index]))
        for index, rank in enumerate(ranks)
        if rank == pp
    ]
    storage = storage_of(config, model, layout, rank)
    units = {stage.index: stage.units for stage in stages}
    table = schedule_table(layout.schedule, layout.pipeline, layout.virtual_stages, microbatches)
    actions = table[pp]
    # What the process sends. A compiled stage runs whole backward passes, whatever the schedule says.
    holders = {name: {ranks[i] for i in held} for name, held in holders_of_copies(model, splits).items()}
    copies = {name: len(held) - 1 for name, held in holders.items() if pp in held and len(held) > 1}
    splits_backward = layout.schedule in SPLIT_BACKWARD and not config.compile.enable
    steps = steps_as_run(layout, pp, microbatches, splits_backward)
    collectives = step_collectives(config, model, layout, stages, steps, storage, copies)
    # When each pass would run, first with equal stages, then with each stage's share of the matrix products.
    length = sample_length(config, model)
    layers, output = layer_costs(model, length.encoder, length.decoder)
    costs = [sum(layers[n] for n in split.layers) + output * split.is_last for split in splits]
    events = simulate(table, ranks, unit_time)
    real_events = simulate(table, ranks, lambda action: unit_time(action) * costs[action.stage])
    schedule = SchedulePlan(
        name=layout.schedule,
        num_stages=len(ranks),
        stages_here=[stage.index for stage in stages],
        microbatches=microbatches,
        counts=dict(Counter(action.kind for action in actions)),
        bubble=bubble_fraction(events, layout.pipeline),
        bubble_of_real_stages=bubble_fraction(real_events, layout.pipeline),
        ideal_bubble=ideal_bubble(layout.schedule, layout.pipeline, layout.virtual_stages, microbatches),
        in_flight=max_in_flight(table)[pp],
        actions=actions,
    )
    # How much state that makes the process hold.
    passes = [step for step in steps if step.kind in ("F", "B", "I", "W")]
    peak = peak_state(units, passes, storage)
    state = rank_state((unit for stage in stages for unit in stage.units), storage)
    return StepPlan(schedule, collectives, state, peak)


def coordinates_of(layout: Layout, rank: int) -> tuple[int, int, int]:
    """A rank's pp, dp_shard and tp. The last dimension of `Layout.mesh` varies fastest."""
    rest, tp = divmod(rank, layout.tensor)
    rest, dp_shard = divmod(rest, layout.weight_shards)
    return rest // layout.replicate, dp_shard, tp


def storage_of(config: JobConfig, model: TransformerConfig, layout: Layout, rank: int) -> Storage:
    """How a process keeps parameters, gradients and optimizer state."""
    _, dp_shard, tp = coordinates_of(layout, rank)
    training, zero_stage, compute = config.training, config.parallelism.zero_stage, BYTES[config.training.dtype]
    master = max(compute, BYTES["float32"])
    shard = ShardOf(layout.weight_shards, dp_shard) if zero_stage else ShardOf()
    split, sharers = ParameterSplit(ShardOf(layout.tensor, tp), shard), layout.data_parallel * layout.context
    if layout.splits_experts and isinstance(model, MoEConfig):
        group, own = divmod(dp_shard * layout.tensor + tp, layout.expert)
        of_experts = ShardOf(layout.expert_shards, group) if zero_stage else ShardOf()
        split = ParameterSplit(split.tensor, shard, ShardOf(layout.expert, own), of_experts)
        sharers = max(sharers, layout.replicate * layout.expert_shards)
    return Storage(
        zero_stage=zero_stage,
        split=split,
        data_parallel=sharers,
        master=master,
        compute=compute,
        reduce=BYTES[training.reduce_dtype] if compute < master else master,
        optimizer=optimizer_state(config.optimizer),
    )
