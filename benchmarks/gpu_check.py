"""Check everything that needs a GPU, in at most four minutes: scripts/gpu_check.sh --json gpu_check.json

waits      how often the host waits for the GPU in a step that logs nothing.
checkpoint a run resumed from a checkpoint has bit-identical losses to one that never stopped.
memory     the allocator's peak in a step against the planner's prediction, by model and recomputation.
parity     what scripts/verify.py compares, on the GPU, for each layout that fits on one GPU.
speed      tokens/s, TFLOP/s and MFU of a 124M and a 1.3B GPT, eager and compiled, as train.py logs them.

Nothing but speed depends on what else runs, so the other parts run beside each other, and with them the models of
`speed`, with two layers, to compile; then speed is measured alone. Each case runs in its own processes, so a failure
does not affect the others; the file is written after each part, which names the cases that time did not reach. Without
a GPU, or with --tiny, the same code runs on small models to test the script; its times mean nothing.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.readme_table import checks_of
from benchmarks.runs import ROOT, forget_tuning, machine, origin, parser_of, read_records, trainer_of, write

LIMIT, ALONE = 235.0, 90.0  # seconds for the whole check, and the last of them for speed
BESIDE, SHARES = 8, 4  # processes beside each other, and those among which parity is shared
SIZE = ["--training.micro_batch_size=2", "--training.global_batch_size=4", "--training.seq_len=32"]
ONE = ["--parallelism.data_parallel_shard_degree=1"]
QUIET = ["--data.dataset=stdlib", "--evaluation.interval=0", "--training.max_norm=1.0"]
COMPILED, GRAPHS = "--compile.enable=true", "--compile.cudagraphs=true"
SELECTIVE, OFFLOAD = "--activation_checkpoint.mode=selective", "--activation_checkpoint.offload=true"
BUDGET = ["--activation_checkpoint.mode=budget", "--activation_checkpoint.budget=0.5"]
OUTSIDE = ["--checkpoint.enable=false", "--metrics.log_interval=10"]
DOCUMENTS = ["--data.reset_position_ids=true", "--data.reset_attention_mask=true", "--data.eod_mask_loss=true"]

Row = dict[str, Any]  # the result of one case: "case", "ok", and figures or "problem"

PARITY = {
    "gpt, gradient accumulation": ["debug_gpt.toml", "--training.global_batch_size=16"],
    "gpt, full recomputation, compiled": ["debug_gpt.toml", "--activation_checkpoint.mode=full", COMPILED],
    "gpt, CUDA graphs": ["debug_gpt.toml", GRAPHS],
    "gpt, float16": ["debug_gpt.toml", "--training.dtype=float16"],
    "llama, ZeRO 3, bfloat16": ["debug_llama.toml", "--parallelism.zero_stage=3", "--training.dtype=bfloat16"],
    "llama, document masks": ["debug_llama.toml", *DOCUMENTS],
    "gpt, prefixes in documents, compiled": ["debug_gpt.toml", *DOCUMENTS, "--data.prefix_lm=true", COMPILED],
    "llama, document masks, selective recomputation": ["debug_llama.toml", *DOCUMENTS, SELECTIVE],
    "llama, selective recomputation": ["debug_llama.toml", SELECTIVE],
    "llama, offload": ["debug_llama.toml", OFFLOAD],
    "llama, offload, recomputation by budget, compiled": ["debug_llama.toml", OFFLOAD, *BUDGET, COMPILED],
    "moe, offload, compiled": ["debug_moe.toml", OFFLOAD, COMPILED],
}
MEMORY = {
    f"{family} {flavor} {mode}": (family, flavor, mode)
    for family, flavor in (("gpt", "gpt3_350m"), ("llama", "llama3.2_1b"))
    for mode in ("none", "selective", "full")
}
SPEED = {
    "124M eager": ("gpt2_124m", 16, []),
    "124M compiled": ("gpt2_124m", 16, [COMPILED]),
    "124M compiled, CUDA graphs": ("gpt2_124m", 16, [COMPILED, GRAPHS]),
    "1.3B eager": ("gpt3_1.3b", 8, []),
    "1.3B compiled": ("gpt3_1.3b", 8, [COMPILED]),
}
WAITS = {"eager": [], "compiled": [COMPILED], "document masks": DOCUMENTS, "CUDA graphs": [GRAPHS]}
CHECKPOINT = {"bfloat16": [], "float16": []}


class OutOfTimeError(Exception):
    """The time is up; the message is what the last program has printed by then."""


def speed(cases: Row, tiny: bool, *more: str) -> Iterator[Row]:
    """Train each model for a few steps, with ``more`` settings."""
    for case, (flavor, micro_batch_size, how) in cases.items():
        steps, leave_out = (6, 2) if tiny else (24, 10)
        settings = SIZE
        if not tiny:
            settings = [f"--model.flavor={flavor}", "--model.overrides.dropout=0.0", "--training.seq_len=1024"]
            settings += [f"--training.micro_batch_size={micro_batch_size}", "--training.dtype=bfloat16"]
            settings += [f"--training.global_batch_size={2 * micro_batch_size}", *how]
        with tempfile.TemporaryDirectory() as folder:
            done = train(folder, f"--training.steps={steps}", *OUTSIDE, *settings, *more)
            records = read_records(folder)[leave_out:]
        row: Row = {"case": case, "ok": done.returncode == 0 and bool(records), **problem_of(done)}
        for name in ("step_time_s", "tokens_per_second", "tflops_per_device", "mfu_model", "hfu", "data_time_s"):
            values = [record[name] for record in records if record.get(name) is not None]
            row |= {name: statistics.median(values)} if values else {}
        yield row | {"peak_memory_bytes": max((record["peak_memory_bytes"] for record in records), default=0)}


def compiles(cases: Row, tiny: bool) -> Iterator[Row]:
    """Compile what `speed` will measure, with fewer layers, because those of a kind share their kernels."""
    wanted = {case: value for case, value in cases.items() if COMPILED in value[2]}
    return speed({} if tiny else wanted, tiny, "--model.overrides.num_layers=2")


def waits(cases: Row, tiny: bool) -> Iterator[Row]:
    """Count host waits in a separate process."""
    for case, settings in cases.items():
        done = worker("waits", "--metrics.log_interval=1000", *settings)
        row = {"case": case, **result_of(done)}
        yield row | {"ok": done.returncode == 0 and row["waits"] == 0}


def checkpoint(cases: Row, tiny: bool) -> Iterator[Row]:
    """Train six steps, then repeat the last three from the checkpoint of the third."""
    often = ["--checkpoint.enable=true", "--checkpoint.interval=3", "--job.deterministic=true", "--training.steps=6"]
    for dtype in cases:
        settings = [*SIZE, *often, f"--training.dtype={'float32' if tiny else dtype}"]
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


def memory(cases: Row, tiny: bool) -> Iterator[Row]:
    """Measure each model's peak and compare it with the prediction."""
    for case, (family, flavor, mode) in cases.items():
        size = ["--model.overrides.num_layers=8", "--training.seq_len=1024", "--training.micro_batch_size=4"]
        size += ["--training.global_batch_size=16", "--training.dtype=bfloat16", f"--model.flavor={flavor}"]
        settings = [f"--model.family={family}", f"--activation_checkpoint.mode={mode}"]
        done = worker("peak", *settings, *(["--model.flavor=debug"] if tiny else size))
        row: Row = {"case": case, **result_of(done)}
        if row.get("measured_bytes"):  # only a GPU's allocator reports it
            row["off"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        yield row | {"ok": done.returncode == 0 and abs(row.get("off", 0.0)) <= 0.05}


def parity(cases: Row, tiny: bool) -> Iterator[Row]:
    """Verify all layouts in one process; after one that is not the same, the others get a new process."""
    left = list(cases)
    while left:
        try:
            done = python([__file__, "worker", "verify", "cpu" if tiny else "cuda:0", *left])
        except OutOfTimeError as error:
            yield from rows_in(str(error))
            raise
        rows = rows_in(done.stdout) or [{"case": left[0], "ok": False, "outcome": "failed", **problem_of(done)}]
        yield from rows
        left = left[len(rows) :]


# Each takes the settings of its cases by name, and whether models are tiny.
PARTS: dict[str, tuple[Callable[[Row, bool], Iterator[Row]], Row]] = {
    "parity": (parity, PARITY),
    "memory": (memory, MEMORY),
    "waits": (waits, WAITS),
    "checkpoint": (checkpoint, CHECKPOINT),
    "speed": (speed, SPEED),
}


def python(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository.

    Raises:
        OutOfTimeError: the time is up.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise OutOfTimeError
    try:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired as error:
        raise OutOfTimeError((error.stdout or b"").decode()) from None  # bytes even where text is asked for


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


def rows_in(printed: str) -> list[Row]:
    """The rows that a worker printed."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]


def problem_of(done: subprocess.CompletedProcess[str]) -> Row:
    """The error of a program that failed, or its last lines if it has no traceback."""
    from titan_like.verify.processes import error_in

    printed = done.stdout + done.stderr
    return {} if done.returncode == 0 else {"problem": error_in(printed) or "\n".join(printed.splitlines()[-12:])}


# Functions that run in separate processes.


def peak(settings: list[str]) -> Iterator[Row]:
    """Peak bytes of a step: the allocator's and the planner's."""
    import torch

    from titan_like.planner.memory import candidates, rank_memory
    from titan_like.planner.workload import workload_of

    trainer, data = trainer_of(settings)
    on_gpu = trainer.run.device.type == "cuda"
    trainer.train_step(data)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train_step(data)
    data.close()
    torch.distributed.destroy_process_group()  # for that of the trace
    work = workload_of(trainer.config, trainer.run.model, trainer.run.layout)
    ranks = [rank_memory(work, rank) for rank in candidates(work)]
    yield {
        "predicted_bytes": max(rank.total for rank in ranks),
        "measured_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def host_waits(settings: list[str]) -> Iterator[Row]:
    """How often the fourth step waits for the GPU, and where. On a CPU it counts reads of tensors' values instead."""
    import torch

    trainer, data = trainer_of(settings)
    for _ in range(3):  # the third records a CUDA graph
        trainer.train_step(data)
    if trainer.run.device.type == "cpu":
        reads: list[str] = []
        with ExitStack() as patches:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patches.enter_context(patch.object(torch.Tensor, name, noting(reads, getattr(torch.Tensor, name))))
            trainer.train_step(data)
        data.close()
        yield {"waits": len(reads)}
        return
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train_step(data)
    torch.cuda.set_sync_debug_mode("default")
    data.close()
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    yield {"waits": len(places), "places": sorted(set(places))}


def noting(calls: list[str], method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a method to record its calls by this package; torch itself reads only mesh ranks, which are on the host."""

    def call(self: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(str(ROOT / "titan_like")):
            calls.append(method.__name__)
        return method(self)

    return call


def verify(arguments: list[str]) -> Iterator[Row]:
    """Verify layouts, given a device and their names, until one is not the same. This process does all the work."""
    import torch

    from titan_like.checkpoint import saver
    from titan_like.commands.verify import format_verdict
    from titan_like.config import load_config
    from titan_like.parallel.mesh import build_mesh
    from titan_like.train import trainer as trainer_module
    from titan_like.train.job import process_group
    from titan_like.verify.shrink import Options, resolve, shrink
    from titan_like.verify.verify import Verifier

    device, *cases = arguments
    meshes = patch.object(trainer_module, "build_mesh", cache(build_mesh))  # all runs share their process groups
    background = patch.object(saver, "background_group", cache(saver.background_group))
    with process_group(torch.device(device)), meshes, background:
        for case in cases:
            began, (file, *settings) = time.monotonic(), PARITY[case]
            config = load_config([f"--job.config_file={ROOT}/train_configs/{file}", *ONE, *settings])
            small = shrink(config, resolve(config, 1), Options(2, on_gpus=device != "cpu"))
            verifier = Verifier(small, most=1, start=partial(Here, device))
            verdict = verifier.verify()
            seconds, ok = time.monotonic() - began, verdict.outcome == "same"
            problem = {} if ok else {"problem": format_verdict(verdict, verifier.kinds, seconds)}
            yield {"case": case, "ok": ok, "outcome": verdict.outcome, "seconds": round(seconds, 1), **problem}
            if not ok:  # it may have left the GPU in no state for others
                return


class Here:
    """Runs a function of the verifier in this process, as `titan_like.verify.processes.Group` does in another one."""

    def __init__(self, device: str, function: Callable, world_size: int, *arguments: Any) -> None:
        assert world_size == 1
        self.device, self.call = device, lambda member: function(member, *arguments)

    def wait(self, *limits: float | None) -> list[Any]:
        """Run it, however long it takes, and return how it ended."""
        import torch

        from titan_like.verify.processes import DONE, FAILED, Member, Outcome, error_in

        torch.compiler.reset()  # a new process would have nothing compiled
        with tempfile.TemporaryDirectory() as folder:
            try:
                return [Outcome(0, DONE, "", self.call(Member(0, 1, Path(folder), 0, self.device)), "", 0)]
            except Exception:
                printed = traceback.format_exc()
                return [Outcome(0, FAILED, error_in(printed), None, printed, 1)]


WORKERS: dict[str, Callable[[list[str]], Iterator[Row]]] = {"peak": peak, "waits": host_waits, "verify": verify}


def main() -> int:
    """Run the parts, print a line for each case and write the file; returns 1 if a check failed or was not reached."""
    global deadline
    import torch

    parser = parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models (the default without a GPU)")
    parser.add_argument("--only", choices=PARTS, action="append", help="run only these parts")
    options = parser.parse_args()
    tiny = options.tiny or not torch.cuda.is_available()
    began, chosen = time.monotonic(), [name for name in PARTS if name in (options.only or PARTS)]
    cases = {name: list(PARTS[name][1].items())[: 1 if tiny else None] for name in chosen}
    result: dict[str, Any] = {"machine": machine(), "tiny": tiny, **origin()}
    result |= {name: [] for name in chosen} | {f"{name}_not_reached": [] for name in chosen}

    def run(name: str, part: Callable[[Row, bool], Iterator[Row]], own: Row) -> None:
        rows: list[Row] = []
        try:
            for row in part(own, tiny):
                rows.append(row)
                show(name, row)
        except OutOfTimeError:
            print(f"{name:10} NOT OK: no time for {', '.join(list(own)[len(rows) :])}", flush=True)
        with writing:
            if part is not compiles:
                result[name] += rows
                result[f"{name}_not_reached"] += list(own)[len(rows) :]
            result["seconds"] = round(time.monotonic() - began, 1)
            write(options.json, result)

    writing, deadline = Lock(), began + LIMIT - (ALONE if "speed" in chosen else 0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "2"}  # of each process
        with ThreadPoolExecutor(1 if tiny else BESIDE) as pool:
            shares = [(name, k) for name in chosen for k in range(SHARES if name == "parity" and not tiny else 1)]
            started = []
            for name, share in shares:
                own = dict(cases[name][share :: SHARES if name == "parity" and not tiny else 1])
                started.append(pool.submit(run, name, compiles if name == "speed" else PARTS[name][0], own))
        for future in started:
            future.result()
        forget_tuning(cache)
        deadline = began + LIMIT
        if "speed" in chosen:
            run("speed", speed, dict(cases["speed"]))
    print(checks_of(result))
    return 0 if all(all(row["ok"] for row in result[n]) and not result[f"{n}_not_reached"] for n in chosen) else 1


def show(part: str, row: Row) -> None:
    """Print a line for a case, and its problem."""
    figures = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float | int) and key != "ok"]
    print(f"{part:10} {row['case']:34} {'ok' if row['ok'] else 'NOT OK':6} {'  '.join(figures)}", flush=True)
    if row.get("problem"):
        print(row["problem"], flush=True)


deadline = math.inf  # of the part that runs
if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        for line in WORKERS[sys.argv[2]](sys.argv[3:]):
            print(json.dumps(line), flush=True)
    else:
        sys.exit(main())
