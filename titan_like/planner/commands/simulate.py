"""The pipeline of one step, pass by pass, as text or picture, and next to a measured step if one is given."""

import argparse
import json
from pathlib import Path

from titan_like.config.errors import blamed_on, require
from titan_like.config.options import OptionParser
from titan_like.metrics import timeline_report as report
from titan_like.metrics.step_timeline import StepTimeline, chrome_trace, read_trace
from titan_like.metrics.timeline_plot import check_picture, draw
from titan_like.planner.commands.outcome import Outcome, add_profile, does_not_fit, read_run
from titan_like.planner.predict import predict
from titan_like.planner.profile import Profile
from titan_like.planner.step_time import timeline
from titan_like.planner.workload import Workload


def add_options(parser: OptionParser) -> None:
    """Add the options that are not settings of the run."""
    add_profile(parser)
    text = "width of the text's lanes in columns (default 100)"
    parser.add_number("--width", int, least=10, most=10000, default=100, help=text)
    text = "draw every microbatch (default: of many, the first and the last round)"
    parser.add_argument("--whole", action="store_true", help=text)
    parser.add_path("--picture", "also draw it into this .png or .svg file; needs matplotlib")
    parser.add_path("--out", "write it in the format of the trainer's measured timelines", "FILE.json")
    parser.add_path("--measured", "compare it with this timeline from the trainer", "FILE.json")


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Simulate a step, and compare and draw it if asked to."""
    check_picture("--picture", options.picture)
    forecast = predict(*read_run(options, settings)[:2])
    predicted = timeline(forecast.work, forecast.profile)
    steps, compared, note = {"predicted": predicted}, list[report.PartOfSteps](), ""
    if options.measured is not None:
        steps["measured"] = measured_timeline(options.measured, predicted)
        compared = report.differences(predicted, steps["measured"])
    titles = {name: report.headline(step) for name, step in steps.items()}
    if not (options.whole or options.measured):
        steps["predicted"], note = ends_of(forecast.work, forecast.profile, predicted)
    if options.picture is not None:
        suffix = f"; {note}" if note else ""
        draw([(f"{name}: {titles[name]}{suffix}", step) for name, step in steps.items()], Path(options.picture))
    summary, parts = report.figures(predicted), report.parts_of(predicted)
    lines = [f"{titles['predicted']}; profile {forecast.profile.name} on {forecast.profile.device.name}"]
    lines += [*drawn(steps, options.width), report.LEGEND]
    lines += [note] if note else []
    lines += report.sentences(summary, parts)
    lines += table(compared) if compared else []
    lines += does_not_fit(forecast)
    result = {
        "seconds": predicted.seconds,
        "bubble_fraction": summary.bubble_fraction,
        "bubble_fraction_ideal": summary.bubble_fraction_ideal,
        "parts": parts,
        "compared": [part._asdict() for part in compared],
    }
    files = {Path(options.out): json.dumps(chrome_trace(predicted)) + "\n"} if options.out else {}
    return Outcome("\n".join(lines), {"simulate": result}, files=files)


def ends_of(work: Workload, profile: Profile, whole: StepTimeline) -> tuple[StepTimeline, str]:
    """A step's first and last round of as many microbatches as ranks, if four or more lie between, and what they take.

    A schedule's beginning and end do not depend on the rounds between them, which are alike.
    """
    p, m = work.pipeline, work.microbatches
    rounds = m // p - 2
    if rounds < 4:
        return whole, ""
    shown = m - rounds * p
    step = timeline(work._replace(global_batch_size=shown * work.micro_batch_size * work.data_parallel), profile)
    for number, event in enumerate(step.passes):
        if (microbatch := event.action.microbatch) >= p:
            step.passes[number] = event._replace(action=event.action._replace(microbatch=microbatch + rounds * p))
    duration = report.milliseconds((whole.seconds - step.seconds) / rounds)
    return step, f"left out: {rounds} rounds of {p} after microbatch {p - 1}, which take {duration} ms each"


def measured_timeline(path: str, predicted: StepTimeline) -> StepTimeline:
    """Read a timeline; a `ConfigError` if it is none of the same pipeline."""
    with blamed_on("--measured", path, after="; give a step-N.json that the trainer wrote"):
        step = read_trace(Path(path))
    given, expected = (report.headline(candidate).split(";")[0] for candidate in (step, predicted))
    require(given == expected, "--measured", path, f"has {given}; the run has {expected}")
    return step


def drawn(steps: dict[str, StepTimeline], width: int) -> list[str]:
    """Lanes of all steps on one time axis."""
    end = max(step.seconds for step in steps.values())
    lines = []
    for name, step in steps.items():
        if len(steps) > 1:
            lines.append(name)
        lines += [f"rank {rank:3d} |{lane}" for rank, lane in enumerate(report.lanes(step, width, end))]
    last = f"{report.milliseconds(end)} ms"
    return [*lines, f"{'':10}0{last:>{width - 1}}"]


def table(parts: list[report.PartOfSteps]) -> list[str]:
    """Predicted next to measured, with the difference in ms and as a share of the measured step."""
    total = parts[-1].measured
    lines = [f"{'ms, mean of the ranks':24s}{'predicted':>12s}{'measured':>12s}{'difference':>12s}{'of the step':>13s}"]
    for name, predicted, measured in parts:
        difference = predicted - measured
        numbers = "".join(f"{report.milliseconds(value):>12s}" for value in (predicted, measured, difference))
        lines.append(f"{name:24s}{numbers}{difference / total:>+12.1%}")
    return lines
