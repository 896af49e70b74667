"""Kill and stop training runs at random moments until each has finished, and compare them with an undisturbed run.

    python benchmarks/chaos.py --runs 20 --json chaos.json

Every run is train.py's trainer under torchrun on the debug model, with dropout and a checkpoint every second step. A
random rank gets a signal at a random moment (after some seconds, while a checkpoint is being written, or after some
step), and the job is started again until it finishes. Every second signal is kill -9; the others ask to stop, and may
go to torchrun instead of a rank, as from a terminal. Some runs keep their layout, others change it at every start.

It checks that:

- final weights and optimizer state equal those of the reference bit for bit, if the layout was kept. If it changed, the
  largest difference of a weight from the reference on one rank, relative to the tensor's largest element, may be 8
  times that of undisturbed runs in the same layouts, which is rounding.
- a job that said it stopped has saved: the next attempt goes on with the step after its last.
- metrics.jsonl has each step once, with the samples that it has consumed.
- the watchdog prints nothing in a job that was asked to stop.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runs import ROOT, parser_of, read_records, torchrun, write

SETTINGS = [
    "--job.config_file=train_configs/debug_gpt.toml",
    "--model.overrides.num_layers=4",
    "--training.seq_len=32",
    "--training.micro_batch_size=1",
    "--training.global_batch_size=8",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay=constant",
    "--optimizer.lr=0.001",
    "--evaluation.interval=0",
    "--metrics.log_interval=100000",
    "--checkpoint.enable=true",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest=2",
]
BATCH = 8
TENSOR, PIPELINE = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"
ASYNC = "--checkpoint.async=true"
# Processes and settings.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "ZeRO 1 on 2": (2, ["--parallelism.zero_stage=1"]),
    "ZeRO 3 on 2, async": (2, ["--parallelism.zero_stage=3", ASYNC]),
    "tensor 2, async": (2, [f"{TENSOR}=2", "--parallelism.sequence_parallel=true", ASYNC]),
    "pipeline 2": (2, [f"{PIPELINE}=2"]),
    "ZBV 2 × ZeRO 2, async": (
        4,
        [f"{PIPELINE}=2", "--parallelism.pipeline_schedule=zbv_zero_bubble", "--parallelism.zero_stage=2", ASYNC],
    ),
}
REQUESTS = ("SIGINT", "SIGHUP", "SIGTERM", "SIGUSR1")
NOT_PASSED_ON = ("SIGUSR1",)  # torchrun does not forward these
DROPOUT = "--model.overrides.dropout=0.1"  # its masks differ in another layout


@dataclass
class Outcome:
    """The result of one run."""

    keeps_layout: bool
    layouts: list[str]  # of the starts
    signals: dict[str, int]  # that were sent
    signals_in_saves: int
    stops: int  # how often the job said that it stopped
    seconds: float
    lost_to_stops: int  # steps repeated after a job that said that it stopped
    watchdog_spoke: int  # jobs that were asked to stop, but whose watchdog named a rank or failed
    max_difference: float  # of weights and optimizer state from the reference, relative to the largest element
    undisturbed_difference: float  # the same for undisturbed runs in these layouts; 0 if the layout was kept
    identical: bool
    steps_once: bool


class Attempt:
    """One start of a job."""

    def __init__(self, dump: Path, number: int, layout: str, settings: list[str]) -> None:
        processes, degrees = LAYOUTS[layout]
        self.output = dump / f"output-{number}.txt"
        arguments = ["train.py", *settings, *degrees]
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(self.output, "w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*torchrun(processes), *arguments, f"--job.dump_folder={dump}"],
                stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def ranks(self) -> list[int]:
        """Process ids of the ranks that have started."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return []
        return [int(pid) for pid in children]

    def wait(self) -> int:
        """Wait for the job to end; returns its exit code."""
        code = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return code


def last_step(dump: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        lines = (dump / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:  # not yet, or renamed by an attempt that begins anew
        return 0
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def signal_once(attempt: Attempt, dump: Path, moments: random.Random, steps: int) -> tuple[str, bool] | None:
    """Signal a random rank or torchrun: after some time, while a checkpoint is written, or after some step.

    Returns the signal and whether a checkpoint was being written, or None if the job ended first.
    """
    name = moments.choice(REQUESTS) if moments.random() < 0.5 else "SIGKILL"
    to_torchrun = name != "SIGKILL" and name not in NOT_PASSED_ON and moments.random() < 0.5
    kind, began = moments.choice(("time", "save", "step")), time.monotonic()
    patience, step = moments.uniform(0.5, 10.0), moments.randint(min(last_step(dump) + 1, steps - 1), steps - 1)
    while True:
        if attempt.process.poll() is not None:
            return None
        is_writing = bool(list((dump / "checkpoint").glob("*.unfinished")))
        if kind == "time" and time.monotonic() > began + patience:
            break
        if kind == "save" and is_writing and attempt.ranks():
            time.sleep(moments.uniform(0, 0.02))
            break
        if kind == "step" and last_step(dump) >= step:
            break
        time.sleep(0.002)
    ranks = attempt.ranks()
    if not ranks or attempt.process.poll() is not None:
        return None
    os.kill(attempt.process.pid if to_torchrun else moments.choice(ranks), getattr(signal, name))
    return name, is_writing


def final_tensors(dump: Path, steps: int) -> dict[str, Any]:
    """The full tensors of the last checkpoint, without random generators, which differ by rank."""
    sys.path.insert(0, str(ROOT))
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    from titan_like.checkpoint.reader import TensorReader

    reader = TensorReader(dump / "checkpoint" / f"step-{steps}")
    described = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in described.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[bool, float]:
    """Whether all tensors are bit-identical, and the largest relative difference."""
    import torch

    assert found.keys() == wanted.keys()
    identical = all(torch.equal(found[name], wanted[name]) for name in wanted)
    scale = {name: wanted[name].double().abs().max().item() or 1.0 for name in wanted}
    worst = max(
        (found[name].double() - wanted[name].double()).abs().max().item() / scale[name]
        for name in wanted
        if name.startswith("model.")
    )
    return identical, worst


def run(
    dump: Path, layouts: list[str], settings: list[str], steps: int, num_signals: int, moments: random.Random
) -> dict[str, Any]:
    """Train in ``dump`` through that many signals; the attempts cycle through ``layouts``."""
    dump.mkdir(parents=True)
    used, signals, in_saves, began = [], Counter[str](), 0, time.monotonic()
    stops = lost = spoke = 0
    expected = None  # the first step of the next attempt
    while True:
        layout = layouts[len(used) % len(layouts)]
        attempt = Attempt(dump, len(used), layout, [*settings, f"--training.steps={steps}"])
        used.append(layout)
        sent = signal_once(attempt, dump, moments, steps) if signals.total() < num_signals else None
        if sent is not None:
            signals[sent[0]] += 1
            in_saves += sent[1]
        code = attempt.wait()
        output = attempt.output.read_text()
        resumed = re.search(r"^resumed from .*step-(\d+)$", output, re.MULTILINE)
        if expected is not None:
            lost += expected - (int(resumed[1]) if resumed else 0)
        stopped = re.search(r"^ stopped by \w+ after step (\d+)$", output, re.MULTILINE)
        expected, stops = int(stopped[1]) if stopped else None, stops + bool(stopped)
        was_asked = sent is not None and sent[0] != "SIGKILL"
        spoke += was_asked and ("error: rank" in output or "the watchdog of rank" in output)
        if code == 0 and not stopped:
            break
        if len(used) > 10 * (num_signals + 1):
            raise RuntimeError(f"the run does not finish: {output[-2000:]}")
    logged = [(record["step"], record["consumed_samples"]) for record in read_records(dump)]
    return {
        "layouts": list(dict.fromkeys(used)), "signals": dict(signals), "signals_in_saves": in_saves, "stops": stops,
        "seconds": round(time.monotonic() - began, 1), "lost_to_stops": lost, "watchdog_spoke": spoke,
        "steps_once": logged == [(step, BATCH * step) for step in range(1, steps + 1)],
    }  # fmt: skip


def main() -> None:
    """Run everything and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--signals", type=int, default=3, help="in each run")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references: dict[tuple[str, bool], dict[str, Any]] = {}

        def reference(layout: str, dropout: bool) -> dict[str, Any]:
            if (layout, dropout) not in references:
                dump = folder / f"reference {len(references)}"
                run(dump, [layout], [*SETTINGS, *([DROPOUT] if dropout else [])], options.steps, 0, moments)
                references[layout, dropout] = final_tensors(dump, options.steps)
            return references[layout, dropout]

        titles = ("signals", "in saves", "stops", "lost", "weights", "steps", "seconds")
        print(f"{'layouts':58}" + "".join(f" {title:>15}" for title in titles))
        outcomes = []
        for number in range(options.runs):
            keeps = number % 2 == 0
            names = list(LAYOUTS)
            layouts = [names[number // 2 % len(names)]] if keeps else moments.sample(names, 3)
            dump = folder / f"run {number}"
            found = run(
                dump, layouts, [*SETTINGS, *([DROPOUT] if keeps else [])], options.steps, options.signals, moments
            )
            wanted = reference(layouts[0], True) if keeps else reference("one rank", False)
            identical, worst = compare(final_tensors(dump, options.steps), wanted)
            rounding = 0.0 if keeps else max(compare(reference(name, False), wanted)[1] for name in layouts)
            outcome = Outcome(
                keeps, **found, identical=identical, max_difference=worst, undisturbed_difference=rounding
            )
            outcomes.append(outcome)
            same = "identical" if identical else f"{worst:.1e}/{rounding:.1e}"
            mark, sent = "once" if outcome.steps_once else "WRONG", sum(outcome.signals.values())
            counts = (sent, outcome.signals_in_saves, outcome.stops, outcome.lost_to_stops)
            cells = (*counts, same, mark, round(outcome.seconds))
            print(f"{', '.join(outcome.layouts):58}" + "".join(f" {cell:>15}" for cell in cells), flush=True)
    kept = [outcome for outcome in outcomes if outcome.keeps_layout]
    changed = [outcome for outcome in outcomes if not outcome.keeps_layout]
    summary = {
        "runs": len(outcomes),
        "signals": dict(sum((Counter(outcome.signals) for outcome in outcomes), Counter())),
        "signals_in_saves": sum(outcome.signals_in_saves for outcome in outcomes),
        "stops": sum(outcome.stops for outcome in outcomes),
        "lost_to_stops": sum(outcome.lost_to_stops for outcome in outcomes),
        "watchdog_spoke": sum(outcome.watchdog_spoke for outcome in outcomes),
        "same_layout_identical": all(outcome.identical for outcome in kept),
        "other_layouts_within_rounding": all(o.max_difference <= 8 * o.undisturbed_difference for o in changed),
        "steps_once": all(outcome.steps_once for outcome in outcomes),
    }
    print(json.dumps(summary, indent=2))
    write(options.json, summary | {"outcomes": [asdict(outcome) for outcome in outcomes]})


if __name__ == "__main__":
    main()
