"""Compare train.py with peers on one GPU, in at most nine minutes: python benchmarks/peers.py --json peers.json

ours        train.py on the standard library's source files, without checkpoints and validations
bare        a minimal loop over `plain_models.py`, compiled: in float32 under autocast, with random tokens in GPU memory
trainer     the same model of transformers with its Trainer: torch_compile, sdpa, fused AdamW
torchtitan  version 0.2, for Llamas, with compiled layers and random tokens

All sides train in bfloat16 with float32 master weights, on one GPU, without dropout and recomputation, one microbatch a
step, and clip gradients at norm 1. A side that is not installed is left out. Every case is a process of its own with a
time limit. Cases start in the order of `CASES`, and one that would not fit into the nine minutes is not run; `--only`
runs what is left. The file is written after each case.

All sides have the same clock, a hook in torch.optim that puts an event on the GPU when an optimizer step ends. A step
lasts from one such event to the next. Tokens per second are a step's tokens over the median step of the second half.
MFU counts a model's FLOPs without recomputation and with the full attention matrix (`mfu_model` in docs/metrics.md)
and is the same function of tokens per second for all sides. Memory is the allocator's peak. Losses are in nats per
token. "First step" is the time from the start of the process to the end of its first step; every case begins with an
empty compile cache.

Without a GPU, or with --tiny, all sides train small models on the CPU to test the script; the figures mean nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import ROOT, arguments, parser_of, write

STARTED = time.monotonic()
LIMIT = 525.0  # seconds for all cases

Row = dict[str, Any]  # a case: "model", "side", "command", and figures or "problem"


@dataclass(frozen=True)
class Model:
    """A model and the batches that it is trained on."""

    title: str
    family: str
    flavor: str
    batch: int
    seq_len: int
    steps: int
    overrides: dict[str, Any]


# torchtitan's Llama has an output matrix of its own, so all sides have one.
MODELS = {
    "124m": Model("GPT-2 124M", "gpt", "gpt2_124m", 16, 1024, 40, {"dropout": 0.0}),
    "llama1b": Model("Llama 3.2 1B, untied", "llama", "llama3.2_1b", 4, 2048, 30, {"tied_embeddings": False}),
    "1558m": Model("GPT-2 1558M", "gpt", "gpt2_1558m", 8, 1024, 24, {"dropout": 0.0}),
    "llama8b": Model("Llama 3.1 8B, 8 layers", "llama", "llama3.1_8b", 2, 4096, 20, {"num_layers": 8}),
    "124m_32": Model("GPT-2 124M", "gpt", "gpt2_124m", 32, 1024, 40, {"dropout": 0.0}),
}
SMALL = {"num_layers": 2, "hidden_size": 64, "vocab_size": 512}
TINY_MODELS = {
    "gpt": Model("GPT", "gpt", "debug", 2, 64, 6, SMALL),
    "llama": Model("Llama", "llama", "debug", 2, 64, 6, SMALL | {"ffn_hidden_size": 192}),
}
# Model, side and the seconds that the case takes on an H100, most of them to compile.
CASES = [
    ("124m", "ours", 45), ("124m", "bare", 60), ("124m", "trainer", 65),
    ("llama1b", "ours", 45), ("llama1b", "torchtitan", 45), ("llama1b", "trainer", 95), ("llama1b", "bare", 45),
    ("1558m", "ours", 50), ("1558m", "bare", 50),
    ("llama8b", "ours", 45), ("llama8b", "torchtitan", 45), ("llama8b", "bare", 50), ("llama8b", "trainer", 60),
    ("124m_32", "ours", 45), ("124m_32", "bare", 60), ("124m_32", "trainer", 65),
    ("1558m", "trainer", 65),
]  # fmt: skip
# Many times what they take, because nothing is measured.
TINY_CASES = [
    *[("gpt", side, 60) for side in ("ours", "bare", "trainer")],
    *[("llama", side, 60) for side in ("ours", "torchtitan", "trainer", "bare")],
]
PACKAGES = {"trainer": ["transformers", "accelerate"], "torchtitan": ["torchtitan"]}


def settings_of(model: Model, side: str, tiny: bool) -> list[str]:
    """The settings of train.py, which the other sides read too."""
    settings = {
        "model.family": model.family,
        "model.flavor": model.flavor,
        **{f"model.overrides.{name}": value for name, value in model.overrides.items()},
        "data.dataset": "stdlib",
        "training.seq_len": model.seq_len,
        "training.micro_batch_size": model.batch,
        "training.global_batch_size": model.batch,
        "training.steps": model.steps,
        "training.max_norm": 1.0,
        "training.dtype": "float32" if tiny else "bfloat16",
        "lr_scheduler.decay": "constant",
        "compile.enable": not (tiny and side == "ours"),  # it would generate code, which takes long on a CPU
        "checkpoint.enable": False,
        "evaluation.interval": 0,
        "metrics.log_interval": 10,
    }
    return arguments(settings)


def limit_of(left: float, expected: float) -> float | None:
    """Seconds after which a case is stopped, of those that are left for all; None if it would not fit any more."""
    return None if left < expected else min(left, 3 * expected)


def rate_of(step_seconds: Sequence[float], tokens: int) -> float:
    """Tokens per second: those of a step over the median step of the second half."""
    return tokens / statistics.median(step_seconds[len(step_seconds) // 2 :])


def mfu_of(settings: list[str], tokens_per_second: float, peak_tflops: float | None) -> float | None:
    """Share of a GPU's peak, without recomputation and with the full attention matrix; None if the peak is unknown."""
    from titan_like.config import load_config
    from titan_like.metrics.flops import model_flops_per_token
    from titan_like.models.registry import model_config

    if peak_tflops is None:
        return None
    config = load_config(settings)
    flops = model_flops_per_token(model_config(config.model), config.training.seq_len)
    return flops * tokens_per_second / (peak_tflops * 1e12)


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """For each model, our tokens per second over those of every other side."""
    rates: dict[str, dict[str, float]] = {}
    for row in rows:
        if "tokens_per_second" in row:
            rates.setdefault(row["model"], {})[row["side"]] = row["tokens_per_second"]
    return {
        model: {side: round(sides["ours"] / rate, 4) for side, rate in sides.items() if side != "ours"}
        for model, sides in rates.items()
        if "ours" in sides
    }


def cause_of(output: str) -> str:
    """The line of a failed program's output that says why: its last exception, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.match(r"(\[rank0\]: *)?[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines)[-1][:400]


def missing_of(side: str, tiny: bool) -> str | None:
    """Why a side cannot run on this machine, if it cannot."""
    absent = [name for name in PACKAGES.get(side, ()) if importlib.util.find_spec(name) is None]
    if absent:
        return f"not run: {' and '.join(absent)} not installed"
    return "not run: torchtitan needs a GPU" if side == "torchtitan" and tiny else None


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed, or without its metadata."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def run_case(model: Model, side: str, tiny: bool, limit: float) -> Row:
    """Run a case in a process of its own, on one GPU or none, without a network and with an empty compile cache."""
    arguments = ["benchmarks/peer_sides.py", side, *settings_of(model, side, tiny)]
    row: Row = {"command": shlex.join(["python", *arguments])}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        open(f"{name}/output", "w+", errors="replace") as output,
    ):
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "" if tiny else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "TORCHINDUCTOR_CACHE_DIR": f"{name}/compiled",
            "TRITON_CACHE_DIR": f"{name}/compiled/triton",
            "HF_HUB_OFFLINE": "1",
            "PEERS_STARTED": repr(time.time()),
        }
        process = subprocess.Popen(
            [sys.executable, *arguments, f"--job.dump_folder={name}/run"],
            cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            row["problem"] = f"stopped after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
            process.wait()
        figures = Path(name, "run", "figures.json")
        if figures.exists():
            return {"command": row["command"]} | json.loads(figures.read_text())
        output.seek(0)
        text = output.read()
        problem = f"exit code {process.returncode}: {cause_of(text)}"
        return {"problem": problem} | row | {"output": text.splitlines()[-20:]}


HEAD = (
    f"{'model, microbatch':34} {'side':10} {'tokens/s':>9} {'step ms':>8} {'MFU':>6} {'GB':>6} {'1st step':>8} "
    f"{'loss':>7} {'to':>7} {'ours ÷':>7}"
)


def line_of(row: Row, ratios: dict[str, dict[str, float]]) -> str:
    """A row of the table."""
    head = f"{row['model']:34} {row['side']:10}"
    if "problem" in row:
        return f"{head} {row['problem']}"
    mfu, ratio = row["mfu"], ratios.get(row["model"], {}).get(row["side"])
    return (
        f"{head} {row['tokens_per_second']:9,.0f} {row['step_ms']:8.1f} {'' if mfu is None else f'{mfu:.1%}':>6} "
        f"{row['peak_memory_bytes'] / 1e9:6.2f} {row['first_step_s']:6.1f} s {row['first_loss']:7.3f} "
        f"{row['last_loss']:7.3f} {'' if ratio is None else f'{ratio:.3f}':>7}  {row['remark']}"
    )


def commit() -> str | None:
    """The commit of this checkout, marked if files differ; None without git."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return None


def main() -> int:
    """Run the cases, write the file and print the table; returns 1 if a case of ours failed."""
    import torch

    from titan_like.metrics.hardware import peak_tflops

    parser = parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU (the default without a GPU)")
    parser.add_argument("--only", choices=MODELS, action="append", help="run only this model; may be repeated")
    options = parser.parse_args()
    tiny = options.tiny or not torch.cuda.is_available()
    cases: list[Row] = []
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "commit": commit(),
        "versions": {name: version_of(name) for name in ("torch", "transformers", "accelerate", "torchtitan")},
        "tiny": tiny,
        "tokens_per_second_is": "tokens of a step over the median step of the second half",
        "mfu_is": "model FLOPs without recomputation, full attention matrix, over the dense bfloat16 peak",
        "first_step_is": "from the start of the process to the end of its first step, seconds, empty compile cache",
    }
    for name, side, expected in TINY_CASES if tiny else CASES:
        if not tiny and options.only and name not in options.only:
            continue
        model = (TINY_MODELS if tiny else MODELS)[name]
        limit = limit_of(LIMIT - (time.monotonic() - STARTED), expected)
        problem = missing_of(side, tiny) or ("not run: no time left" if limit is None else None)
        row: Row = {"model": f"{model.title}, {model.batch} × {model.seq_len}", "side": side}
        row |= {"problem": problem} if limit is None or problem else run_case(model, side, tiny, limit)
        if "problem" not in row:
            result["machine"], tokens = row.pop("machine"), model.batch * model.seq_len
            gpu, rate = result["machine"]["gpu"], rate_of(row["step_seconds"], tokens)
            mfu = mfu_of(settings_of(model, side, tiny), rate, peak_tflops(gpu, "bfloat16") if gpu else None)
            row |= {"tokens_per_second": round(rate, 1), "step_ms": round(1000 * tokens / rate, 2), "mfu": mfu}
        cases.append(row)
        result |= {"seconds": round(time.monotonic() - STARTED, 1), "ratios": ratios_of(cases), "cases": cases}
        print(f"{result['seconds']:5.0f} s  {line_of(row, result['ratios'])}", flush=True)
        write(options.json, result)
    print("", *(f"{key}: {value}" for key, value in (result.get("machine", {}) | result["versions"]).items()), sep="\n")
    print(HEAD, *(line_of(row, result["ratios"]) for row in cases), sep="\n")
    failed = [row for row in cases if row["side"] == "ours" and not row.get("problem", "not run").startswith("not run")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
