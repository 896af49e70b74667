"""Check everything that needs a GPU, in at most nine minutes: scripts/gpu_check.sh --json gpu_check.json

1. parity     scripts/verify.py on the GPU, for each layout that fits on one GPU.
2. memory     the allocator's peak in a step against the planner's formulas, by model and recomputation.
3. speed      tokens/s, TFLOP/s and MFU of a 124M and a 1.3B GPT, eager and compiled, as train.py logs them.
4. waits      how often the host waits for the GPU in a step that logs nothing.
5. checkpoint a run resumed from a checkpoint has bit-identical losses to one that never stopped.

Each part runs in its own processes, so a failure does not affect the others; the file is written after each part.
Without a GPU, or with --tiny, the same code runs on small models to test the script; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MOST_WAITS = 0  # of a step: its numbers are read later
LIMIT = 530.0  # seconds for the whole check
ONE = ["--parallelism.data_parallel_shard_degree=1"]
QUIET = ["--data.dataset=stdlib", "--evaluation.interval=0", "--training.max_norm=1.0"]
OUTSIDE = ["--checkpoint.enable=false", "--metrics.log_interval=10"]

DOCUMENTS = ["--data.reset_position_ids=true", "--data.reset_attention_mask=true", "--data.eod_mask_loss=true"]

Row = dict[str, Any]  # the result of one case: "case", "ok", and figures or "problem"

PARITY = {
    "gpt, gradient accumulation": ["debug_gpt.toml", "--training.global_batch_size=16"],
    "gpt, full recomputation, compiled": [
        "debug_gpt.toml",
        "--activation_checkpoint.mode=full",
        "--compile.enable=true",
    ],
    "gpt, float16": ["debug_gpt.toml", "--training.dtype=float16"],
    "llama, ZeRO 3, bfloat16": ["debug_llama.toml", "--parallelism.zero_stage=3", "--training.dtype=bfloat16"],
    "llama, document masks": ["debug_llama.toml", *DOCUMENTS],
    "gpt, document masks and prefixes, compiled": [
        *["debug_gpt.toml", *DOCUMENTS, "--data.prefix_lm=true", "--compile.enable=true"],
    ],
    "llama, selective recomputation, document masks": [
        *["debug_llama.toml", *DOCUMENTS, "--activation_checkpoint.mode=selective"],
    ],
    "llama, selective recomputation": ["debug_llama.toml", "--activation_checkpoint.mode=selective"],
}
MEMORY = [
    (family, flavor, mode)
    for family, flavor in (("gpt", "gpt3_350m"), ("llama", "llama3.2_1b"))
    for mode in ("none", "selective", "full")
]
SPEED = {
    "124M eager": ("gpt2_124m", 16, False),
    "124M compiled": ("gpt2_124m", 16, True),
    "1.3B eager": ("gpt3_1.3b", 8, False),
    "1.3B compiled": ("gpt3_1.3b", 8, True),
}


def parity(tiny: bool, on_gpu: bool) -> Iterator[Row]:
    """Run the verifier on each layout."""
    for case, (config, *settings) in list(PARITY.items())[: 1 if tiny else None]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "verdict.json"
            command = ["scripts/verify.py", "--processes", "1", "--steps", "2", "--json", str(path)]
            command += ["--gpus"] if on_gpu else []
            done = python([*command, "--job.config_file", f"train_configs/{config}", *ONE, *settings])
            outcome = json.loads(path.read_text())["outcome"] if path.exists() else "failed"
            yield {"case": case, "ok": done.returncode == 0, "outcome": outcome, **problem_of(done)}


def memory(tiny: bool, on_gpu: bool) -> Iterator[Row]:
    """Measure each model's peak and compare it with the formulas."""
    for family, flavor, mode in [("gpt", "debug", "none")] if tiny else MEMORY:
        size = ["--model.overrides.num_layers=8", "--training.seq_len=1024", "--training.micro_batch_size=4"]
        size += ["--training.global_batch_size=16", "--training.dtype=bfloat16"]
        settings = [f"--model.family={family}", f"--model.flavor={flavor}", f"--activation_checkpoint.mode={mode}"]
        done = worker("peak", *settings, *([] if tiny else size))
        row: Row = {"case": f"{family} {flavor} {mode}", **result_of(done)}
        if row.get("measured_bytes"):  # only a GPU's allocator reports it
            row["off"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        yield row | {"ok": done.returncode == 0 and abs(row.get("off", 0.0)) <= 0.05}


def speed(tiny: bool, on_gpu: bool) -> Iterator[Row]:
    """Train each model for a few steps."""
    for case, (flavor, micro_batch_size, compiled) in list(SPEED.items())[: 1 if tiny else None]:
        steps, leave_out = (6, 2) if tiny else (24, 10)
        settings = ["--training.micro_batch_size=2", "--training.global_batch_size=4", "--training.seq_len=32"]
        if not tiny:
            settings = [f"--model.flavor={flavor}", "--model.overrides.dropout=0.0", "--training.seq_len=1024"]
            settings += [f"--training.micro_batch_size={micro_batch_size}", "--training.dtype=bfloat16"]
            settings += [f"--training.global_batch_size={2 * micro_batch_size}", f"--compile.enable={compiled}".lower()]
        with tempfile.TemporaryDirectory() as folder:
            done = train(folder, f"--training.steps={steps}", *OUTSIDE, *settings)
            records = read_records(folder)[leave_out:]
        row: Row = {"case": case, "ok": done.returncode == 0 and bool(records), **problem_of(done)}
        for name in ("step_time_s", "tokens_per_second", "tflops_per_device", "mfu_model", "hfu", "data_time_s"):
            values = [record[name] for record in records if record.get(name) is not None]
            row |= {name: statistics.median(values)} if values else {}
        yield row | {"peak_memory_bytes": max((record["peak_memory_bytes"] for record in records), default=0)}


def waits(tiny: bool, on_gpu: bool) -> Iterator[Row]:
    """Count host waits in a separate process."""
    cases = {"eager": [], "compiled": ["--compile.enable=true"], "document masks": DOCUMENTS}
    for case, settings in list(cases.items())[: 1 if tiny else None]:
        done = worker("waits", "--metrics.log_interval=1000", *settings)
        row = {"case": case, **result_of(done)}
        yield row | {"ok": done.returncode == 0 and row["waits"] <= MOST_WAITS}


def checkpoint(tiny: bool, on_gpu: bool) -> Iterator[Row]:
    """Train six steps, then repeat the last three from the checkpoint of the third."""
    size = ["--training.micro_batch_size=2", "--training.global_batch_size=4", "--training.seq_len=32"]
    size += ["--checkpoint.enable=true", "--checkpoint.interval=3", "--job.deterministic=true", "--training.steps=6"]
    for dtype in ["float32"] if tiny else ["bfloat16", "float16"]:
        settings = [*size, f"--training.dtype={dtype}"]
        with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as again:
            done = train(whole, *settings)
            folder = [f"--checkpoint.folder={whole}/checkpoint", "--checkpoint.load_step=3"]
            second = train(again, *settings, *folder) if done.returncode == 0 else done
            wanted, found = (
                {record["step"]: record["loss"] for record in read_records(name) if record["step"] > 3}
                for name in (whole, again)
            )
        same = bool(wanted) and wanted == found
        yield {"case": dtype, "ok": second.returncode == 0 and same, "bit_identical": same, **problem_of(second)}


PARTS: dict[str, Callable[[bool, bool], Iterator[Row]]] = {
    "parity": parity, "memory": memory, "speed": speed, "waits": waits, "checkpoint": checkpoint,
}  # fmt: skip


def python(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository; it is stopped when the time of the whole check is up."""
    left = LIMIT - (time.monotonic() - STARTED)
    command = [sys.executable, *arguments]
    if left <= 0:
        return subprocess.CompletedProcess(command, 1, "", "not run: no time was left")
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"stopped after {left:.0f} s")


def train(folder: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run train.py in one process, with its files in a folder."""
    return python(["train.py", f"--job.dump_folder={folder}", *QUIET, *settings])


def worker(name: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run one of `WORKERS` in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        return python([__file__, "worker", name, f"--job.dump_folder={folder}", *QUIET, *OUTSIDE, *settings])


def result_of(done: subprocess.CompletedProcess[str]) -> Row:
    """The last line that a worker printed, or the problem if there is none."""
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else problem_of(done)


def problem_of(done: subprocess.CompletedProcess[str]) -> Row:
    """The last lines of a program that failed."""
    return {} if done.returncode == 0 else {"problem": "\n".join((done.stdout + done.stderr).splitlines()[-12:])}


def read_records(folder: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    path = Path(folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# Functions that run in separate processes.


def peak(settings: list[str]) -> Row:
    """Peak bytes of a step: the allocator's and the planner's."""
    import torch

    from titan_like.metrics.devices import find_device
    from titan_like.planner.memory import memory as planned
    from titan_like.planner.predict import workload_of
    from titan_like.planner.profile import builtin_profiles

    trainer, data = trainer_of(settings)
    on_gpu = trainer.run.device.type == "cuda"
    trainer.train_step(data)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train_step(data)
    data.close()
    device = find_device(torch.cuda.get_device_name() if on_gpu else "A100")
    tensors = {"trainer_state": True, "overhead_bytes": 0.0, "fragmentation": 0.0}
    profile = builtin_profiles()["fsdp_a100"].changed(device=device, **tensors)
    predicted = planned(workload_of(trainer.config, trainer.run.model, trainer.run.layout), profile).largest
    return {
        "predicted_bytes": int(predicted),
        "measured_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def host_waits(settings: list[str]) -> Row:
    """How often the third step waits for the GPU, and where. On a CPU it counts reads of tensors' values instead."""
    import torch

    trainer, data = trainer_of(settings)
    for _ in range(2):
        trainer.train_step(data)
    if trainer.run.device.type == "cpu":
        reads: list[str] = []
        with ExitStack() as patches:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patches.enter_context(patch.object(torch.Tensor, name, noting(reads, getattr(torch.Tensor, name))))
            trainer.train_step(data)
        data.close()
        return {"waits": len(reads)}
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train_step(data)
    torch.cuda.set_sync_debug_mode("default")
    data.close()
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    return {"waits": len(places), "places": sorted(set(places))}


def noting(calls: list[str], method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a method to record its calls by this package; torch itself reads only mesh ranks, which are on the host."""

    def call(self: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(str(ROOT / "titan_like")):
            calls.append(method.__name__)
        return method(self)

    return call


def trainer_of(settings: list[str]) -> Any:
    """A trainer in a process group of one process, and its data."""
    from titan_like.config import load_config
    from titan_like.train.job import process_group
    from titan_like.train.rules import resolve_settings
    from titan_like.train.setup import prepare_run
    from titan_like.train.trainer import Trainer

    run = prepare_run(resolve_settings(load_config([*settings, "--training.steps=10"])))
    process_group(run.device).__enter__()  # released when the process ends
    trainer = Trainer(run)
    return trainer, trainer._load_data()


WORKERS: dict[str, Callable[[list[str]], Row]] = {"peak": peak, "waits": host_waits}


def main() -> int:
    """Run the parts, print a line for each case and write the file; returns 1 if a check failed."""
    import torch

    from benchmarks.overhead import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models (the default without a GPU)")
    parser.add_argument("--only", choices=PARTS, action="append", help="run only these parts")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not options.tiny
    result: dict[str, Any] = {"machine": machine(), "tiny": not on_gpu}
    for name in options.only or PARTS:
        began, result[name] = time.monotonic(), []
        for row in PARTS[name](not on_gpu, on_gpu):
            result[name].append(row)
            figures = [
                f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float | int) and key != "ok"
            ]
            print(f"{name:10} {row['case']:34} {'ok' if row['ok'] else 'NOT OK':6} {'  '.join(figures)}", flush=True)
            if row.get("problem"):
                print(row["problem"], flush=True)
        result[f"{name}_seconds"] = round(time.monotonic() - began, 1)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["ok"] for name in PARTS for row in result.get(name, [])) else 1


STARTED = time.monotonic()
if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps(WORKERS[sys.argv[2]](sys.argv[3:])))
    else:
        sys.exit(main())
