"""The planner against the trainer on this machine: step time and memory, with a freshly measured profile.

    python benchmarks/planner_own_trainer.py
    python benchmarks/planner_own_trainer.py --rounds 5 --json planner_own_trainer.json
    python benchmarks/planner_own_trainer.py --runs "gpt" "llama, tensor 2"

Measures the machine with as many processes as each run has (plan.py microbenchmark), then runs train.py in new
processes. Nothing is fitted on the runs. The measured time is the shortest step after a run's first three, just as the
microbenchmark takes the shortest of its runs, because other programs can only make them longer. The median is given
too. Every process computes with one thread. Measure on an idle machine; `load` says how idle it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}
BATCH = ["--training.seq_len=256", "--training.micro_batch_size=4", "--training.global_batch_size=8"]
WIDE = ["--model.overrides.hidden_size=512", "--model.overrides.num_attention_heads=8"]
VOCABULARY = ["--model.overrides.vocab_size=16000"]
RUNS: dict[str, tuple[int, list[str]]] = {  # processes, settings
    "gpt": (1, ["--model.family=gpt", *BATCH]),
    "gpt, hidden size 512": (1, ["--model.family=gpt", *WIDE, *BATCH]),
    "llama": (1, ["--model.family=llama", *BATCH]),
    "llama, recomputed, 16,000 tokens": (
        1,
        ["--model.family=llama", "--activation_checkpoint.mode=full", *VOCABULARY, *BATCH],
    ),
    "gpt, data 2": (2, ["--model.family=gpt", "--parallelism.data_parallel_shard_degree=2", *BATCH]),
    "gpt, hidden size 512, tensor 2": (
        2,
        ["--model.family=gpt", "--parallelism.tensor_parallel_degree=2", *WIDE, *BATCH],
    ),
    "llama, tensor 2": (2, ["--model.family=llama", "--parallelism.tensor_parallel_degree=2", *BATCH]),
    "gpt, hidden size 512, pipeline 2": (
        2,
        [
            "--model.family=gpt",
            "--parallelism.pipeline_parallel_degree=2",
            *WIDE,
            "--training.seq_len=256",
            "--training.micro_batch_size=2",
            "--training.global_batch_size=16",
        ],
    ),
}


def torchrun(processes: int, *words: str) -> str:
    """Run a script of this repository and return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*launcher, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def predict(profile: Path, settings: list[str], folder: Path) -> dict[str, Any]:
    """The prediction of plan.py for a run."""
    target = folder / "predict.json"
    words = ["--profile", str(profile), "--json", str(target), "--training.steps=4", *settings]
    command = [sys.executable, "scripts/plan.py", "predict", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1 means that it does not fit
        raise SystemExit(f"predict failed:\n{done.stderr}")
    return json.loads(target.read_text())["predict"]


def measure(processes: int, settings: list[str], steps: int, folder: Path) -> tuple[list[float], float]:
    """Run train.py; returns the seconds of the steps after warm-up and the peak memory of rank 0."""
    dump = folder / "run"
    words = [f"--training.steps={WARM_UP + steps}", f"--job.dump_folder={dump}", "--data.dataset=stdlib"]
    torchrun(processes, "train.py", *words, *settings)
    lines = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    return [line["step_time_s"] for line in lines[WARM_UP:]], lines[-1]["peak_memory_bytes"]


def compare(names: list[str], rounds: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Predicted and measured figures, a row for each run."""
    profiles = {}
    for processes in sorted({RUNS[name][0] for name in names}):
        profiles[processes] = folder / f"processes_{processes}.toml"
        told = torchrun(processes, "scripts/plan.py", "microbenchmark", "--out", str(profiles[processes]))
        print(told, flush=True)
    rows = []
    for name in names:
        processes, settings = RUNS[name]
        found = predict(profiles[processes], settings, folder)
        runs = [measure(processes, settings, steps, folder) for _ in range(rounds)]
        times, memory = [time for run in runs for time in run[0]], max(run[1] for run in runs)
        seconds = min(times)
        total, in_memory = found["step_seconds"]["total"], sum(found["memory_bytes"][0].values()) / 2
        rows.append(
            {
                "run": name,
                "processes": processes,
                "predicted_s": round(total, 4),
                "measured_s": round(seconds, 4),
                "error": round(total / seconds - 1, 4),
                "median_s": round(statistics.median(times), 4),
                "medians_of_rounds_s": [round(statistics.median(run[0]), 4) for run in runs],
                "predicted_gib": round(in_memory / 2**30, 3),
                "measured_gib": round(memory / 2**30, 3),
                "memory_error": round(in_memory / memory - 1, 4),
                "load": round(os.getloadavg()[0], 2),
            }
        )
        show(rows[-1:])
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows."""
    for row in rows:
        time = f"{row['predicted_s']:>8.3f} s predicted {row['measured_s']:>8.3f} s measured {row['error']:>+7.1%}"
        memory = f"{row['predicted_gib']:.2f} and {row['measured_gib']:.2f} GiB {row['memory_error']:>+7.1%}"
        print(
            f"{row['run']:<34} {time} (median {row['median_s']:.3f} s)   memory {memory}   load {row['load']:.1f}",
            flush=True,
        )


def main() -> None:
    """Measure the machine, then the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run, after three of warm-up")
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(options.runs, options.rounds, options.steps, Path(folder))
    errors = [abs(row["error"]) for row in rows]
    summary = {
        "median_error": round(statistics.median(errors), 4),
        "largest_error": max(errors),
        "median_memory_error": round(statistics.median(abs(row["memory_error"]) for row in rows), 4),
    }
    print(
        f"step time: median error {summary['median_error']:.1%}, largest {summary['largest_error']:.1%}; memory: ",
        end="",
    )
    print(f"median error {summary['median_memory_error']:.1%}")
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        Path(options.json).write_text(json.dumps(machine | summary | {"runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
