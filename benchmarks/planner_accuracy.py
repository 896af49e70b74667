"""Errors of the planner against measured training steps, and against results that it must equal.

    python benchmarks/planner_accuracy.py [--points FILE.csv] [--rows] [--json PATH]

Judges the rows of a file (columns: `measured_rows.py`), or those of published_rows.toml, which include
the ten of arXiv 2104.04473, Table 1, and this trainer's of titan_rows.json. Each row is predicted with the profile
for its GPU and the first word of its notes. For each such group it prints n; the median, mean and p90 of the absolute
error of the step time; the bias (signed median); the worst regret of choosing the layout that is predicted fastest, and
the number of sweeps in which it is at most 2 %; the rank correlation over layouts; the errors of memory, if it was
measured; and rows that ran out of memory.

Without --points it also prints the errors on rows left out of each profile's fit; the pipeline's closed forms against
the simulated tables; the simulation against the real steps that `simulator_check.py` measured; the number of layouts
judged per second; and the time of the searches in `planner_speed.py`. This takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file

import simulator_check
from planner_speed import SEARCHES, layouts, timed_search

from benchmarks.accuracy import SMALL_REGRET, GroupAccuracy, Prediction, Sweep, accuracy, predict_row
from benchmarks.measured_rows import Row, read_rows
from benchmarks.published_rows import published_rows
from titan_like.config.errors import ConfigError
from titan_like.parallel.schedules.simulate import bubble_fraction, ideal_bubble, simulate
from titan_like.parallel.schedules.tables import check_schedule, schedule_table, stage_ranks
from titan_like.planner.memory import largest_memory
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.step_time import step_time

RESULTS = Path(__file__).resolve().parent / "results"
CLOSED_FORMS = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("looped_bfs", 2)]


def main(argv: list[str]) -> int:
    """Predict every row and print the groups."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--points", metavar="FILE.csv", help="measured rows (default: those cited by the package)")
    parser.add_argument("--rows", action="store_true", help="print every row too")
    parser.add_argument("--json", metavar="PATH", help="also write all of it to this file")
    options = parser.parse_args(argv)
    try:
        rows, left_out = read_rows(options.points) if options.points else (published_rows() + own_rows(), [])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    predictions, uncovered = predict_all(rows)
    groups = accuracy(predictions)
    if options.rows:
        print_rows(predictions)
    print_groups(groups)
    print_sweeps([sweep for group in groups for sweep in group.sweeps])
    print_memory(groups)
    for group, count in uncovered.items():
        print(f"no profile covers {group}: {count} rows")
    for reason, count in Counter(line.split(": ", 1)[1] for line in left_out).items():
        print(f"not predicted, {reason}: {count} rows")
    more = {} if options.points else everything_else()
    if options.json:
        result = more | {
            "groups": [group.as_dict() for group in groups],
            "rows": [row_as_dict(prediction) for prediction in predictions],
            "not_predicted": left_out,
            "without_profile": uncovered,
        }
        Path(options.json).write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


def own_rows() -> list[Row]:
    """The rows of this trainer."""
    return read_rows(RESULTS / "titan_rows.json")[0]


def predict_all(rows: list[Row]) -> tuple[list[Prediction], dict[str, int]]:
    """Predictions, and the number of rows in each group that no profile covers."""
    predictions, uncovered = [], Counter[str]()
    for row in rows:
        prediction = predict_row(row)
        if prediction is None:
            uncovered[row.group] += 1
        else:
            predictions.append(prediction)
    return predictions, dict(uncovered)


def print_rows(predictions: list[Prediction]) -> None:
    """Print one line per row."""
    for prediction in predictions:
        row, work = prediction.row, prediction.row.work
        measured = "out of memory" if row.out_of_memory else f"{row.seconds:9.3f} s"
        error = "" if row.out_of_memory else f"{100 * prediction.error:+6.1f} %"
        layout = f"tp{work.tensor} pp{work.pipeline} v{work.virtual_stages} dp{work.data_parallel} z{work.zero_stage}"
        used = f"  {prediction.memory_gib:6.1f} GiB"
        used += f" of {row.memory_gib:6.1f} measured" if row.memory_gib else ""
        print(
            f"{row.study:14s} {row.model:14s} {row.gpus:5d} GPUs  {layout:24s} b{work.micro_batch_size:<3d} "
            f"{measured}  predicted {prediction.seconds:9.3f} s  {error}{used}"
        )
    print()


def print_groups(groups: list[GroupAccuracy]) -> None:
    """Print one line per group."""
    print(
        f"{'GPU and study':36s} {'n':>4s} {'median':>7s} {'mean':>7s} {'p90':>7s} {'worst':>7s} {'bias':>7s} "
        f"{'sweeps':>6s} {'≤ 2 %':>6s} {'regret':>7s} {'ranks':>6s}   {'memory: n':>9s} {'median':>7s} {'p90':>7s}  "
        "profile"
    )
    for group in groups:
        if not group.n:  # only rows that ran out of memory
            continue
        print(
            f"{group.name:36s} {group.n:4d} {_percent(group.median)} {_percent(group.mean)} {_percent(group.p90)} "
            f"{_percent(group.largest)} {_percent(group.bias, sign=True)} {len(group.sweeps):6d} "
            f"{group.small_regrets:6d} {_percent(group.worst_regret)} {_number(group.rank_correlation)}   "
            f"{group.memory_n:9d} {_percent(group.memory_median)} {_percent(group.memory_p90)}  "
            f"{', '.join(group.profiles)}"
        )


def print_sweeps(sweeps: list[Sweep]) -> None:
    """Print the sweeps in which a slower layout is chosen, with the spread of repeated measurements of one layout."""
    if not sweeps:
        return
    small = sum(sweep.regret <= SMALL_REGRET for sweep in sweeps)
    print(f"\nchoice: within {100 * SMALL_REGRET:.0f} % of the fastest in {small} of {len(sweeps)} sweeps; the others:")
    for sweep in sorted(sweeps, key=lambda sweep: -sweep.regret):
        if sweep.regret > SMALL_REGRET:
            noise = "" if sweep.noise is None else f", one layout measured up to {_percent(sweep.noise).strip()} apart"
            ranks = f"{sweep.layouts} layouts, ranks {sweep.rank_correlation:.2f}"
            print(f"  {_percent(sweep.regret)}  {sweep.name} ({ranks}{noise})")


def print_memory(groups: list[GroupAccuracy]) -> None:
    """Print whether runs that fitted into memory are predicted to fit, and those that did not are not."""
    ran, too_large = sum(group.memory_n for group in groups), sum(group.wrongly_too_large for group in groups)
    failed, fits = sum(group.out_of_memory for group in groups), sum(group.wrongly_fits for group in groups)
    print(f"\nmemory: of {failed} runs that did not fit {fits} predicted to fit; ", end="")
    print(f"of {ran} that ran, with measured memory, {too_large} predicted not to fit")


def everything_else() -> dict[str, Any]:
    """Print everything that needs no rows, and return it for JSON."""
    left_out = print_left_out()
    bubble, measured, speed = closed_forms(), simulated_steps(), evaluations_per_second()
    print(f"\npipeline: closed forms and simulated tables, equal stages and no messages: {bubble:.1e} apart at most")
    print(
        f"pipeline: simulated and measured steps of sleeping stages, {len(measured)} cases: median error "
        f"{_percent(statistics.median(measured)).strip()}, largest {_percent(max(measured)).strip()}"
    )
    print(
        f"speed: {speed[0]:,.0f} layouts a second on one core, {speed[1]:,.0f} when seen again (time and memory each)"
    )
    return {
        "searches": {name: timed_search(name, gpus) for name, gpus in SEARCHES.items()},
        "left_out": left_out,
        "bubble_deviation": bubble,
        "simulated_step_errors": measured,
        "layouts_per_second": speed,
    }


def print_left_out() -> dict[str, dict[str, Any]]:
    """Print the errors on rows left out of each profile's fit, from the profiles' files."""
    print(
        f"\n{'rows left out of the fit':24s} {'rows':>5s} {'groups':>6s} {'median':>7s} {'mean':>7s} {'p90':>7s} "
        f"{'sweeps':>6s} {'≤ 2 %':>6s} {'regret':>7s} {'ranks':>6s} {'noise':>7s}   {'memory: n':>9s} {'median':>7s} "
        f"{'p90':>7s} {'not to fit':>10s}"
    )
    found = {}
    for profile in builtin_profiles().values():
        judged = profile.judged
        print(
            f"{profile.name:24s} {judged['rows']:5.0f} {judged['groups']:6.0f} {_percent(profile.error_median)} "
            f"{_percent(judged['mean'])} {_percent(profile.error_p90)} {judged.get('sweeps', 0):6.0f} "
            f"{judged.get('small_regrets', 0):6.0f} {_percent(judged.get('worst_regret'))} "
            f"{_number(judged.get('rank_correlation'))} {_percent(judged.get('noise'))}   "
            f"{judged.get('memory_rows', 0):9.0f} {_percent(judged.get('memory_median'))} "
            f"{_percent(judged.get('memory_p90'))} {judged.get('memory_too_large', 0):10.0f}"
        )
        found[profile.name] = {
            "fitted_on": profile.fitted_on,
            "median": profile.error_median,
            "p90": profile.error_p90,
            **judged,
        }
    return found


def closed_forms() -> float:
    """Largest difference between (p - 1)/m or (p - 1)/(v m) and the bubble of the simulated table, over schedules,
    degrees and microbatches; passes take as long on every stage, messages no time."""
    largest = 0.0
    for (schedule, virtual), degree, rounds in product(CLOSED_FORMS, (2, 4, 8), (1, 2, 6)):
        microbatches = degree * rounds
        if check_schedule(schedule, degree, virtual, microbatches):
            continue
        table, ranks = schedule_table(schedule, degree, virtual, microbatches), stage_ranks(schedule, degree, virtual)
        events = simulate(table, ranks, lambda action: 2.0 if action.kind == "B" else 1.0)
        expected = (degree - 1) / (virtual * microbatches)
        for value in (bubble_fraction(events, degree), ideal_bubble(schedule, degree, virtual, microbatches)):
            largest = max(largest, abs(value - expected))
    return largest


def simulated_steps() -> list[float]:
    """Errors of the simulated steps in the result of `simulator_check.py`."""
    found = json.loads((RESULTS / "simulator_check_cpu.json").read_text(encoding="utf-8"))
    times = simulator_check.Times(**found["seconds_of_a_microbatch"])
    extra = simulator_check.Overheads(**found["overheads_s"])
    errors = []
    for case in found["cases"]:
        layout = (case["schedule"], found["ranks"], case["virtual_stages"], case["microbatches"])
        errors.append(abs(simulator_check.predicted(*layout, times, extra) / case["measured_s"] - 1))
    return errors


def evaluations_per_second() -> tuple[float, float]:
    """Layouts of 175B parameters on 1,536 GPUs judged per second of processor time: the first time, and again."""
    works, profile = layouts(), builtin_profiles()["selene_2021"]
    rates = []
    for _ in range(2):
        start = time.process_time()
        for work in works:
            step_time(work, profile)
            largest_memory(work, profile)
        rates.append(len(works) / (time.process_time() - start))
    return rates[0], rates[1]


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return f"{'-':>7s}"
    return f"{100 * value:+5.1f} %" if sign else f"{100 * value:5.1f} %"


def _number(value: float | None) -> str:
    return f"{'-':>6s}" if value is None else f"{value:6.2f}"


def row_as_dict(prediction: Prediction) -> dict[str, object]:
    """A row as JSON."""
    row, work = prediction.row, prediction.row.work
    return {
        "group": row.group,
        "source": row.source,
        "model": row.model,
        "gpus": row.gpus,
        "tensor": work.tensor,
        "pipeline": work.pipeline,
        "virtual_stages": work.virtual_stages,
        "data_parallel": work.data_parallel,
        "zero_stage": work.zero_stage,
        "micro_batch_size": work.micro_batch_size,
        "global_batch_size": work.global_batch_size,
        "measured_seconds": None if row.out_of_memory else row.seconds,
        "predicted_seconds": prediction.seconds,
        "error": None if row.out_of_memory else prediction.error,
        "out_of_memory": row.out_of_memory,
        "fits": prediction.fits,
        "measured_memory_gib": row.memory_gib,
        "predicted_memory_gib": prediction.memory_gib,
        "profile": prediction.profile,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
