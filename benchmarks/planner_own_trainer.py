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

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import ROOT, machine, parser_of, torchrun, train, write

WARM_UP = 3
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
BATCH = ["--training.seq_len=256", "--training.micro_batch_size=4", "--training.global_batch_size=8"]
SMALL = ["--training.seq_len=256", "--training.micro_batch_size=2", "--training.global_batch_size=16"]
WIDE = ["--model.overrides.hidden_size=512", "--model.overrides.num_attention_heads=8"]
RECOMPUTED = ["--activation_checkpoint.mode=full", "--model.overrides.vocab_size=16000"]
DATA, TENSOR, PIPELINE = (
    [f"--parallelism.{axis}_degree=2"] for axis in ("data_parallel_shard", "tensor_parallel", "pipeline_parallel")
)
RUNS: dict[str, tuple[int, list[str]]] = {  # processes, settings
    "gpt": (1, ["--model.family=gpt", *BATCH]),
    "gpt, hidden size 512": (1, ["--model.family=gpt", *WIDE, *BATCH]),
    "llama": (1, ["--model.family=llama", *BATCH]),
    "llama, recomputed, 16,000 tokens": (1, ["--model.family=llama", *RECOMPUTED, *BATCH]),
    "gpt, data 2": (2, ["--model.family=gpt", *DATA, *BATCH]),
    "gpt, hidden size 512, tensor 2": (2, ["--model.family=gpt", *TENSOR, *WIDE, *BATCH]),
    "llama, tensor 2": (2, ["--model.family=llama", *TENSOR, *BATCH]),
    "gpt, hidden size 512, pipeline 2": (2, ["--model.family=gpt", *PIPELINE, *WIDE, *SMALL]),
}


def plan(launcher: list[str], *words: str) -> None:
    """Run a command of plan.py, which exits with 1 if a run does not fit."""
    command = [*launcher, "scripts/plan.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | THREADS, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    print(done.stdout, flush=True)


def compare(name: str, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Predicted and measured figures of a run."""
    processes, settings = RUNS[name]
    profile, target = folder / f"processes_{processes}.toml", folder / "predict.json"
    if not profile.exists():
        plan(torchrun(processes), "microbenchmark", f"--out={profile}")
    plan([sys.executable], "predict", f"--profile={profile}", f"--json={target}", "--training.steps=4", *settings)
    found = json.loads(target.read_text())["predict"]
    more = [f"--training.steps={WARM_UP + steps}", "--data.dataset=stdlib"]
    runs = [train([*settings, *more], folder / f"{name} {number}", processes, **THREADS) for number in range(rounds)]
    times = [[line["step_time_s"] for line in lines[WARM_UP:]] for lines in runs]
    total, seconds = found["step_seconds"]["total"], min(map(min, times))
    predicted, memory = found["memory_bytes"][0]["total"], max(lines[-1]["peak_memory_bytes"] for lines in runs)
    return {
        "run": name,
        "processes": processes,
        "predicted_s": round(total, 4),
        "measured_s": round(seconds, 4),
        "error": round(total / seconds - 1, 4),
        "medians_of_rounds_s": [round(statistics.median(steps_of), 4) for steps_of in times],
        "predicted_gib": round(predicted / 2**30, 3),
        "measured_gib": round(memory / 2**30, 3),
        "memory_error": round(predicted / memory - 1, 4),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure, compare, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a run, after three of warm-up")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.runs:
            rows.append(compare(name, options.rounds, options.steps, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    summary = {}
    for name in ("error", "memory_error"):
        errors = [abs(row[name]) for row in rows]
        summary |= {f"median_{name}": round(statistics.median(errors), 4), f"largest_{name}": max(errors)}
    print(", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in summary.items()))
    write(options.json, machine() | summary | {"runs": rows})


if __name__ == "__main__":
    main()
