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
- every sample is trained on once. Each rank logs the indices of its samples. In the surviving history, which has the
  last attempt at each step, every index from 0 on must occur exactly once.
- a job that said it stopped has saved, so no step is trained again after it.
- metrics.jsonl has each step once.
- the watchdog prints nothing in a job that was asked to stop.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
    lost_steps: int  # steps repeated after a kill, or after a request before the first step
    lost_to_stops: int  # steps repeated after a job that said that it stopped
    watchdog_spoke: int  # jobs that were asked to stop, but whose watchdog named a rank or failed
    max_difference: float  # of weights and optimizer state from the reference, relative to the largest element
    undisturbed_difference: float  # the same for undisturbed runs in these layouts; 0 if the layout was kept
    identical: bool
    samples_once: bool
    steps_once: bool


def worker(log: str, argv: list[str]) -> None:
    """One rank: train.py with its samples logged."""
    sys.path.insert(0, str(ROOT))
    from titan_like.train.signals import StopSignals

    with StopSignals() as signals:  # as in train.py
        train_logged(log, argv, signals)


def train_logged(log: str, argv: list[str], signals: Any) -> None:
    """Train and write the samples of each step to a file."""
    import torch

    import train
    from titan_like.config.load import run_command
    from titan_like.data.packed import PackedDataset
    from titan_like.train.trainer import Trainer

    torch.set_num_threads(1)
    known: dict[bytes, int] = {}
    read, step = PackedDataset.__getitem__, Trainer.train_step

    def watched_read(self: Any, index: int) -> torch.Tensor:
        sample = read(self, index)
        known[sample.numpy().tobytes()] = index
        return sample

    def logged_step(self: Any, data: Any) -> Any:
        seen: list[int] = []

        def watched() -> Any:
            for batch in data:
                seen.extend(known[sample.numpy().tobytes()] for sample in batch)
                yield batch

        issued = step(self, watched())
        if self.mesh["tp"].get_local_rank() == 0 and self.mesh["pp"].get_local_rank() == 0:
            with open(f"{log}-{os.environ['RANK']}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": issued.step, "samples": seen}) + "\n")
        return issued

    PackedDataset.__getitem__ = watched_read  # type: ignore[method-assign]
    Trainer.train_step = logged_step  # type: ignore[method-assign]
    sys.argv = ["train.py", *argv]
    run_command(partial(train.main, signals=signals))


class Attempt:
    """One start of a job."""

    def __init__(self, dump: Path, number: int, layout: str, settings: list[str]) -> None:
        processes, degrees = LAYOUTS[layout]
        self.output = dump / f"output-{number}.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        arguments = [__file__, "--worker", str(dump / f"samples-{number}"), *settings, *degrees]
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(self.output, "w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*command, *arguments, f"--job.dump_folder={dump}"],
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


def check_samples(dump: Path, attempts: int, steps: int) -> tuple[bool, list[int]]:
    """Whether each sample is in the surviving history exactly once, and how many steps each attempt repeated."""
    history: dict[int, list[int]] = {}
    again = [0] * attempts
    for number in range(attempts):
        by_step: dict[int, list[int]] = {}
        for path in dump.glob(f"samples-{number}-*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    entry = json.loads(line)
                    by_step.setdefault(entry["step"], []).extend(entry["samples"])
        for step in [step for step in history if by_step and step >= min(by_step)]:
            del history[step]
            again[number] += 1
        history |= by_step
    counted = Counter(sample for samples in history.values() for sample in samples)
    return counted == Counter(range(BATCH * steps)) and sorted(history) == list(range(1, steps + 1)), again


def run(
    dump: Path, layouts: list[str], settings: list[str], steps: int, num_signals: int, moments: random.Random
) -> dict[str, Any]:
    """Train in ``dump`` through that many signals; the attempts cycle through ``layouts``."""
    dump.mkdir(parents=True)
    used, signals, in_saves, began = [], Counter[str](), 0, time.monotonic()
    stopped: list[bool] = []  # for each attempt, whether it said so
    spoke = 0
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
        stopped.append(" stopped by SIG" in output)
        was_asked = sent is not None and sent[0] != "SIGKILL"
        spoke += was_asked and ("error: rank" in output or "the watchdog of rank" in output)
        if code == 0 and not stopped[-1]:
            break
        if len(used) > 10 * (num_signals + 1):
            raise RuntimeError(f"the run does not finish: {output[-2000:]}")
    once, again = check_samples(dump, len(used), steps)
    after_stops = sum(again[number] for number in range(1, len(used)) if stopped[number - 1])
    logged = [json.loads(line)["step"] for line in (dump / "metrics.jsonl").read_text().splitlines()]
    return {
        "layouts": list(dict.fromkeys(used)), "signals": dict(signals), "signals_in_saves": in_saves,
        "stops": sum(stopped), "seconds": round(time.monotonic() - began, 1), "lost_steps": sum(again),
        "lost_to_stops": after_stops, "watchdog_spoke": spoke, "samples_once": once,
        "steps_once": logged == list(range(1, steps + 1)),
    }  # fmt: skip


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--signals", type=int, default=3, help="in each run")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH")
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

        titles = ("signals", "in saves", "stops", "again", "weights", "samples", "steps", "seconds")
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
            marks = ["once" if good else "WRONG" for good in (outcome.samples_once, outcome.steps_once)]
            sent = sum(outcome.signals.values())
            again = f"{outcome.lost_steps} ({outcome.lost_to_stops})"
            cells = (sent, outcome.signals_in_saves, outcome.stops, again, same, *marks, round(outcome.seconds))
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
        "samples_once": all(outcome.samples_once for outcome in outcomes),
        "steps_once": all(outcome.steps_once for outcome in outcomes),
    }
    print(json.dumps(summary, indent=2))
    if options.json:
        result = summary | {"outcomes": [asdict(outcome) for outcome in outcomes]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
