"""A dry run as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from titan_like.config.options import write_json
from titan_like.config.schema import JobConfig
from titan_like.metrics.console import parameters_told
from titan_like.parallel.schedules.tables import Action
from titan_like.planner.dry_run import DryRun, ParameterReport, StageReport, dry_run
from titan_like.planner.predict import FLOAT8_NOTE
from titan_like.planner.step_plan import SchedulePlan

_WHOLE_ROW = 64  # the most actions that are printed in full


def print_dry_run(config: JobConfig, json_path: str | None) -> None:
    """Do a dry run, print it, and write it to a file if one is named.

    Raises:
        ConfigError: the user has to change something.
    """
    result = dry_run(config)
    print(format_dry_run(result))
    if config.float8.enable:
        print(f"\n{FLOAT8_NOTE}")
    write_json(json_path, result.as_dict())


def format_dry_run(run: DryRun) -> str:
    """The dry run as a page of text."""
    replicas, shards = run.mesh["dp_replicate"][1], run.mesh["dp_shard"][1] // run.context
    context = f", context {run.context}" if run.context > 1 else ""
    lines = [
        f"{run.family} {run.flavor}: {parameters_told(run.num_parameters, run.active_parameters)}, {run.steps:,} steps "
        f"of {run.global_batch_size} samples × {run.seq_len} tokens, data parallel {replicas} × {shards}{context}, "
        f"ZeRO {run.zero_stage}; "
        f"{run.samples:,} samples, {run.tokens:,} tokens",
        f"data: {run.data}",
        *run.notes,
        "",
        f"rank {run.rank} of {_several(run.world_size, 'process', 'es')}: " + ", ".join(_places(run)),
    ]
    for stage in run.stages:
        lines += ["", *_format_stage(stage, run.plan.schedule.num_stages)]
    lines += ["", *_format_memory(run), "", *_format_schedule(run.plan.schedule), "", *_format_collectives(run)]
    return "\n".join(lines)


def _places(run: DryRun) -> list[str]:
    mesh = sorted(run.mesh.items(), key=lambda dimension: dimension[0] in ("expert_shard", "ep"))
    if run.context > 1:  # the innermost ranks of dp_shard
        (coordinate, size), at = run.mesh["dp_shard"], [name for name, _ in mesh].index("dp_shard")
        (shard, context), shards = divmod(coordinate, run.context), size // run.context
        mesh[at : at + 1] = [("dp_shard", (shard, shards)), ("cp", (context, run.context))]
    places = [f"{name} {coordinate} of {size}" for name, (coordinate, size) in mesh]
    return places if run.node is None else [*places, f"node {run.node[0]}, GPU {run.node[1]}"]


def _format_stage(stage: StageReport, num_stages: int) -> list[str]:
    first, last = stage.layers
    count = last - first + 1
    layers = f"layer {first}" if count == 1 else f"layers {first}–{last}"
    title = f"stage {stage.index} of {num_stages}: {layers}" if num_stages > 1 else layers
    rows = [(title, "whole", "here", "")]
    for name, parameters in _collapse(stage.parameters):
        indent = ""
        if name:
            rows.append((name, "", "", ""))
            indent = "  "
        rows += [(indent + p.name, _shape(p.shape), _shape(p.local_shape), _split(p.split)) for p in parameters]
    return _aligned(rows, "<>><")


def _aligned(rows: Sequence[tuple[str, ...]], sides: str) -> list[str]:
    """Lines of a table. ``sides`` has < or > for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _collapse(parameters: list[ParameterReport]) -> Iterator[tuple[str, list[ParameterReport]]]:
    """Parameters by layer, with runs of equal layers as one entry. Those outside layers have an empty name."""
    blocks = []
    for layer, group in groupby(parameters, key=lambda p: _layer_of(p.name)):
        blocks.append((layer, [replace(p, name=p.name.removeprefix(f"layers.{layer}.")) for p in group]))
    for (in_layers, same), layers in groupby(blocks, key=lambda block: (block[0] is not None, block[1])):
        numbers = [number for number, _ in layers]
        name = f"layers.{numbers[0]}" + (f"–{numbers[-1]}" if len(numbers) > 1 else "")
        yield name if in_layers else "", same


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


def _split(split: dict[str, int]) -> str:
    """The dimension that each group splits; tensor parallelism comes first because it is applied first."""
    groups = sorted(split, key=lambda group: group != "tp")
    return ", ".join(f"{('rows', 'columns')[split[group]]} over {group}" for group in groups)


def _format_memory(run: DryRun) -> list[str]:
    state = run.state
    share = 100 * state.num_parameters / run.num_parameters
    copies = run.plan.state.copies
    between = state.parameters + state.optimizer + copies
    copied = f", copies in the half type {_size(copies)}" if copies else ""
    return [
        f"parameters here: {state.num_parameters:,} of {run.num_parameters:,} ({share:.3g} %)",
        f"memory: parameters {_size(state.parameters)}, gradients {_size(state.gradients)}, optimizer "
        f"{_size(state.optimizer)}{copied}; {_size(between)} between steps, at most {_size(run.plan.peak_state)} in a "
        "step",
        "        (activations and buffers of collectives come on top)",
    ]


def _size(count: float) -> str:
    """Bytes in a unit that leaves at most four digits before the decimal point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def _format_schedule(schedule: SchedulePlan) -> list[str]:
    counts = ", ".join(f"{count} {kind}" for kind, count in schedule.counts.items())
    microbatches = _several(schedule.microbatches, "microbatch", "es")
    if schedule.num_stages == 1:
        return [f"schedule: {microbatches} ({counts}), one after the other"]
    bubbles = (schedule.bubble, schedule.ideal_bubble, schedule.bubble_of_real_stages)
    unit, ideal, real = (f"{100 * share:.3g} %" for share in bubbles)
    stages = len(schedule.stages_here)
    held = _several(schedule.in_flight, "microbatch", "es") if stages == 1 else _several(schedule.in_flight, "chunk")
    return [
        f"schedule: {schedule.name}, {microbatches} ({counts})",
        f"bubble: {unit} of compute time where all stages take equally long (formula: {ideal}), {real} by their sizes",
        f"in flight here: at most {held}" + (f" of {stages} stages" if stages > 1 else ""),
        "order: " + _order(schedule.actions, stages > 1),
    ]


def _several(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{plural if count != 1 else ''}"


def _order(actions: list[Action], names_stages: bool) -> str:
    words = [f"{a.kind}{a.microbatch}" + f":{a.stage}" * names_stages for a in actions]
    if len(words) > _WHOLE_ROW:
        words = [*words[: _WHOLE_ROW // 4], "…", *words[-_WHOLE_ROW // 4 :]]
    return " ".join(words)


def _format_collectives(run: DryRun) -> list[str]:
    if not run.plan.collectives:
        return ["nothing is sent"]
    rows = [("in one step", "kind", "of", "calls", "bytes")]
    for c in sorted(run.plan.collectives, key=lambda c: (c.group, c.kind, c.what)):
        rows.append((f"{c.group} ({c.size})", c.kind, c.what, f"{c.count:,}", _size(c.bytes)))
    return _aligned(rows, "<<<>>")
