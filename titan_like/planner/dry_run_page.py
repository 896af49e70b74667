"""A dry run as a page of text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from titan_like.config.options import write_json
from titan_like.config.schema import JobConfig
from titan_like.metrics.console import describe_parameters
from titan_like.parallel.schedules.tables import Action
from titan_like.planner.dry_run import DryRun, ParameterReport, Schedule, StageReport, dry_run
from titan_like.planner.predict import FLOAT8_NOTE

_WHOLE_ROW = 64  # the most actions that are printed in full


def print_dry_run(config: JobConfig, json_path: str | None) -> None:
    """Do a dry run, print it, and write it to a file if one is named.

    Raises a `ConfigError` if the user has to change something.
    """
    result = dry_run(config)
    print(format_dry_run(result))
    if config.float8.enable:
        print(f"\n{FLOAT8_NOTE}")
    write_json(json_path, result.as_dict())


def format_dry_run(run: DryRun) -> str:
    """The dry run as a page of text."""
    (_, replicas), (_, shards), context = run.mesh["dp_replicate"], run.mesh["dp_shard"], run.groups["cp"]
    degrees = f"{replicas} × {shards // context}" + f", context {context}" * (context > 1)
    steps, total = f"{run.steps:,} steps", f"; {run.samples:,} samples, {run.samples * run.seq_len:,} tokens"
    if not run.steps:
        steps, total = "steps", "; how many follows from training.epochs once the data is tokenized"
    base, active = (number - run.adapters for number in (run.num_parameters, run.active_parameters))
    lines = [
        f"{run.family} {run.flavor}: {describe_parameters(base, active, run.adapters)}, {steps} "
        f"of {run.global_batch_size} samples × {run.seq_len} tokens, data parallel {degrees}, "
        f"ZeRO {run.zero_stage}{total}",
        f"data: {run.data}",
        *run.notes,
        "",
        f"rank {run.rank} of {_several(run.world_size, 'process', 'es')}: " + ", ".join(_places(run)),
    ]
    for stage in run.stages:
        lines += ["", *_format_stage(stage, run.schedule.num_stages)]
    lines += ["", *_format_memory(run), "", *_format_schedule(run.schedule, len(run.stages)), "", *_format_traffic(run)]
    return "\n".join(lines)


def _places(run: DryRun) -> Iterator[str]:
    for name, (coordinate, size) in sorted(run.mesh.items(), key=lambda item: item[0] in ("expert_shard", "ep", "etp")):
        context = run.groups["cp"] if name == "dp_shard" else 1  # its innermost ranks
        yield f"{name} {coordinate // context} of {size // context}"
        if context > 1:
            yield f"cp {coordinate % context} of {context}"
    if run.node is not None:
        yield f"node {run.node[0]}, GPU {run.node[1]}"


def _format_stage(stage: StageReport, num_stages: int) -> list[str]:
    first, last = stage.layers
    layers = f"layers {first}–{last}" if last > first else f"layer {first}"
    title = f"stage {stage.index} of {num_stages}: {layers}" if num_stages > 1 else layers
    rows = [(title, "whole", "here", "")]
    for name, parameters in _collapse(stage.parameters):
        rows += [(name, "", "", "")] if name else []
        indent = "  " if name else ""
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
    """Parameters by layer, with runs of equal layers as one entry. Parameters outside layers have an empty name."""
    blocks = []
    for layer, group in groupby(parameters, lambda p: p.name.split(".")[1] if p.name.startswith("layers.") else None):
        blocks.append((layer, [replace(p, name=p.name.removeprefix(f"layers.{layer}.")) for p in group]))
    for (in_layers, reports), layers in groupby(blocks, key=lambda block: (block[0] is not None, block[1])):
        numbers = [number for number, _ in layers]
        name = f"layers.{numbers[0]}" + (f"–{numbers[-1]}" if len(numbers) > 1 else "")
        yield name if in_layers else "", reports


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


def _split(split: dict[str, int]) -> str:
    """The dimension that each group splits; tensor parallelism comes first because it is applied first."""
    groups = sorted(split, key=lambda group: group != "tp")
    return ", ".join(f"{('rows', 'columns')[split[group]]} over {group}" for group in groups)


def _format_memory(run: DryRun) -> list[str]:
    state, peak = run.state, run.peak
    copies = f", copies in the 16-bit type {_size(run.copies)}" if run.copies else ""
    trained = f", of which {run.trained:,} are trained" if run.adapters else ""
    return [
        f"parameters here: {state.num_parameters:,} of {run.num_parameters:,} "
        f"({100 * state.num_parameters / run.num_parameters:.3g} %)" + trained,
        f"memory: parameters {_size(state.parameters)}, optimizer {_size(state.optimizer)}{copies}; "
        f"{_size(state.parameters + state.optimizer + run.copies)} between steps",
        f"        at most {_size(peak.total)} in a step, of which activations {_size(peak.activations)}, gradients "
        f"{_size(peak.gradients)}, gathered parameters {_size(peak.gathered)}",
        f"        forward and backward passes {_size(run.in_passes)}, optimizer step {_size(run.in_update)}",
    ]


def _size(count: float) -> str:
    """Bytes in a unit that leaves at most four digits before the decimal point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def _format_schedule(schedule: Schedule, stages: int) -> list[str]:
    counts = ", ".join(f"{count} {kind}" for kind, count in schedule.counts.items())
    microbatches = _several(schedule.microbatches, "microbatch", "es")
    if schedule.num_stages == 1:
        return [f"schedule: {microbatches} ({counts}), one after the other"]
    held = _several(schedule.in_flight, "microbatch", "es")
    held = held if stages == 1 else f"{_several(schedule.in_flight, 'chunk')} of {stages} stages"
    return [
        f"schedule: {schedule.name}, {microbatches} ({counts})",
        f"bubble: {100 * schedule.bubble:.3g} % of compute time where all stages take equally long, "
        f"{100 * schedule.bubble_by_flops:.3g} % by their FLOPs",
        f"in flight here: at most {held}",
        "order: " + _order(schedule.actions, stages > 1),
    ]


def _several(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{plural if count != 1 else ''}"


def _order(actions: list[Action], names_stages: bool) -> str:
    words = [f"{a.kind}{a.microbatch}" + f":{a.stage}" * names_stages for a in actions]
    if len(words) > _WHOLE_ROW:
        words = [*words[: _WHOLE_ROW // 4], "…", *words[-_WHOLE_ROW // 4 :]]
    return " ".join(words)


def _format_traffic(run: DryRun) -> list[str]:
    rows = [("in one step", "kind", "of", "calls", "bytes")]
    for (group, kind, what), (calls, size) in sorted(run.traffic.items()):
        rows.append((f"{group} ({run.groups[group]})", kind, what, f"{calls:,}", _size(size)))
    return _aligned(rows, "<<<>>") if run.traffic else ["nothing is sent"]
