"""Compare train.py with peers on one GPU in at most eight minutes: python benchmarks/peers.py --waves --json peers.json

ours        train.py on the standard library's source files, without checkpoints and validations
bare        a minimal loop over `plain_models.py`, compiled: in float32 under autocast, with random tokens in GPU memory
trainer     the same model of transformers with its Trainer: torch_compile, sdpa, grouped experts, fused AdamW
torchtitan  version 0.2, for Llamas, with compiled layers and random tokens

All sides train in bfloat16 with float32 master weights, on one GPU, without dropout, one microbatch a step, and clip
gradients at norm 1. They recompute nothing, except all layers of sequences of 32k tokens. A side that is not installed
is left out. Every case is a process of its own with a time limit. Cases start in the order of `CASES`, and one that
would not fit into the time is not run; `--only` runs what is left. The file is written after each case, and
`readme_table.py` makes a table of it.

With --waves, the cases first compile beside each other for one cache, with two layers where layers are compiled one by
one, and are then timed one after the other. Which kernels autotuning chose meanwhile is forgotten.

All sides have the same clock, a hook in torch.optim that puts an event on the GPU when an optimizer step ends. A step
lasts from one such event to the next. Tokens per second are a step's tokens over the median step of the second half.
MFU counts a model's FLOPs without recomputation and with the full attention matrix (`mfu_model` in docs/metrics.md)
and is the same function of tokens per second for all sides. Memory is the allocator's peak. Losses are in nats per
token. "First step" is the time from the imports, which overlap with the case before, to the end of the first step.
Without --waves, every case begins with an empty compile cache.

Without a GPU, or with --tiny, all sides train small models on the CPU to test the script; the figures mean nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.peer_sides import WHOLE
from benchmarks.readme_table import table_of
from benchmarks.runs import ROOT, arguments, forget_tuning, origin, parser_of, write

STARTED = time.monotonic()
LIMIT = 470.0  # seconds for all cases
BESIDE, THREADS = 10, 2  # of cases that compile beside each other: the most, threads each
START = 15  # seconds of a case that has been compiled and imported

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
    settings: dict[str, Any] = field(default_factory=dict)


class Case(NamedTuple):
    """A model and a side, the seconds that the case takes on an H100 with an empty cache, most of them to compile, and
    the memory that it takes while it only compiles. 0: it compiles when it is timed.
    """

    model: str
    side: str
    seconds: float
    gigabytes: int = 0


# torchtitan's Llama has an output matrix of its own, so all sides have one. A host may take longer to issue the layers
# of the smallest model than their kernels take, so ours launches them as a CUDA graph.
MODELS = {
    "124m": Model("GPT-2 124M", "gpt", "gpt2_124m", 16, 1024, 40, {"dropout": 0.0}, {"compile.cudagraphs": True}),
    "llama1b": Model("Llama 3.2 1B, untied", "llama", "llama3.2_1b", 4, 2048, 30, {"tied_embeddings": False}),
    "1558m": Model("GPT-2 1558M", "gpt", "gpt2_1558m", 8, 1024, 24, {"dropout": 0.0}),
    "llama8b": Model("Llama 3.1 8B, 8 layers", "llama", "llama3.1_8b", 2, 4096, 20, {"num_layers": 8}),
    "llama8b_float8": Model(
        *("Llama 3.1 8B, 8 layers, float8", "llama", "llama3.1_8b", 2, 4096, 20, {"num_layers": 8}),
        {"float8.enable": True},
    ),
    "olmoe": Model("OLMoE, 4 layers", "moe", "olmoe_1b_7b", 4, 2048, 24, {"num_layers": 4}),
    "llama1b_32k": Model(
        *("Llama 3.2 1B, untied, recomputed", "llama", "llama3.2_1b", 1, 32768, 12, {"tied_embeddings": False}),
        {"activation_checkpoint.mode": "full"},
    ),
}
SMALL = {"num_layers": 2, "hidden_size": 64, "vocab_size": 512}
TINY_MODELS = {
    "gpt": Model("GPT", "gpt", "debug", 2, 64, 6, SMALL),
    "llama": Model("Llama", "llama", "debug", 2, 64, 6, SMALL | {"ffn_hidden_size": 192}),
    "moe": Model("MoE", "moe", "debug", 2, 64, 6, SMALL | {"qk_norm": "all"}, {"activation_checkpoint.mode": "full"}),
}
CASES = [
    Case("124m", "ours", 45, 5), Case("124m", "bare", 60, 12), Case("124m", "trainer", 65, 12),
    Case("llama1b", "ours", 45, 14), Case("llama1b", "torchtitan", 45, 16), Case("llama1b", "trainer", 95, 31),
    Case("llama8b", "ours", 45, 30), Case("llama8b", "torchtitan", 45, 23),
    Case("llama8b_float8", "ours", 60, 30), Case("llama8b_float8", "torchtitan", 60, 23),
    Case("olmoe", "ours", 60, 22), Case("olmoe", "trainer", 70, 26),
    Case("1558m", "ours", 50, 6), Case("1558m", "bare", 50, 7),
    Case("llama1b_32k", "ours", 60, 16), Case("llama1b_32k", "torchtitan", 60), Case("llama1b", "bare", 45),
    Case("1558m", "trainer", 65), Case("llama8b", "bare", 50), Case("llama8b", "trainer", 60),
]  # fmt: skip
# Many times what they take, because nothing is measured.
TINY_CASES = [
    Case(model, side, 60, 40)
    for model in ("gpt", "llama", "moe")
    for side in ("ours", "torchtitan", "trainer", "bare")
    if side in {"gpt": "ours trainer bare", "moe": "ours trainer"}.get(model, side).split()
]
PACKAGES = {"trainer": ["transformers", "accelerate"], "torchtitan": ["torchtitan"]}


def settings_of(model: Model, side: str, tiny: bool, **changes: Any) -> list[str]:
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
        **model.settings,
    }
    return arguments(settings | changes)


def limit_of(left: float, expected: float) -> float | None:
    """Seconds after which a case is stopped, of those that are left for all; None if it would not fit any more."""
    return None if left < expected else min(left, 3 * expected)


def rate_of(step_seconds: Sequence[float], tokens: int) -> float:
    """Tokens per second: those of a step over the median step of the second half."""
    return tokens / statistics.median(step_seconds[len(step_seconds) // 2 :])


def shape_of(settings: list[str]) -> tuple[Any, Any]:
    """The configuration that settings describe, and its model's."""
    from titan_like.config import load_config
    from titan_like.models.registry import model_config

    config = load_config(settings)
    return config, model_config(config.model)


def mfu_of(settings: list[str], tokens_per_second: float, peak_tflops: float | None) -> float | None:
    """Share of a GPU's peak, without recomputation and with the full attention matrix; None if the peak is unknown."""
    from titan_like.metrics.flops import model_flops_per_token

    if peak_tflops is None:
        return None
    config, shape = shape_of(settings)
    return model_flops_per_token(shape, config.training.seq_len) * tokens_per_second / (peak_tflops * 1e12)


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


def compile_all(cases: Sequence[Case], tiny: bool, cache: str, limit: float) -> dict[str, Row]:
    """Train each case for three steps beside others, as far as memory lasts: each one's seconds, and its problem."""
    import torch

    whole = 80 if tiny else int(torch.cuda.mem_get_info()[1] / 1e9) - 4  # the rest for contexts
    free, changed, found = whole, Condition(), dict[str, Row]()
    models, ends = TINY_MODELS if tiny else MODELS, time.monotonic() + limit

    def run(case: Case) -> None:
        nonlocal free
        model, need = models[case.model], max(case.gigabytes, whole // BESIDE)
        layers = shape_of(settings_of(model, case.side, tiny))[1].num_layers
        few = {} if layers <= WHOLE.get(case.side, 0) else {"model.overrides.num_layers": 2}
        with changed:
            changed.wait_for(lambda: free >= need)
            free -= need
        began = time.monotonic()
        settings = settings_of(model, case.side, tiny, **few, **{"training.steps": 3})
        row = Running(settings, case.side, tiny, cache, layers, THREADS).finish(max(1.0, ends - time.monotonic()))
        with changed:
            free += need
            changed.notify_all()
        seconds = {"seconds": round(time.monotonic() - began, 1)}
        found[f"{case.model} {case.side}"] = {key: row[key] for key in row if key in ("problem", "output")} | seconds

    first = sorted((case for case in cases if case.gigabytes), key=lambda case: -case.seconds)
    with ThreadPoolExecutor(len(first)) as pool:
        list(pool.map(run, first))
    forget_tuning(cache)
    return found


class Running:
    """A case in a process of its own, on one GPU or none, without a network. It waits for `finish` once it has imported
    what it needs.
    """

    def __init__(
        self, settings: list[str], side: str, tiny: bool, cache: str | None, layers: int = 0, threads: int = 0
    ) -> None:
        """``cache`` None: an empty one. ``layers`` are those of the model for which the case compiles, ``threads``
        those of its compiler; 0: by itself.
        """
        arguments = ["benchmarks/peer_sides.py", side, *settings]
        self.command, self.folder = shlex.join(["python", *arguments]), tempfile.mkdtemp()
        compiled = cache or f"{self.folder}/compiled"
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "" if tiny else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "TORCHINDUCTOR_CACHE_DIR": compiled,
            "TRITON_CACHE_DIR": f"{compiled}/triton",
            "HF_HUB_OFFLINE": "1",
            "PEERS_LAYERS": str(layers or ""),
        } | ({"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} if threads else {})  # fmt: skip
        with open(f"{self.folder}/output", "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments, f"--job.dump_folder={self.folder}/run"],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def finish(self, limit: float) -> Row:
        """Let it train, at most for ``limit`` seconds: its command, and figures or a problem."""
        row: Row = {"command": self.command}
        try:
            self.process.communicate(b"\n", limit)
        except subprocess.TimeoutExpired:
            row["problem"] = f"stopped after {limit:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that compile for it
        self.process.wait()
        figures, text = (
            Path(self.folder, "run", "figures.json"),
            Path(self.folder, "output").read_text(errors="replace"),
        )
        if figures.exists():
            row = {"command": self.command} | json.loads(figures.read_text())
        else:
            row = {"problem": f"exit code {self.process.returncode}: {cause_of(text)}"} | row
            row["output"] = text.splitlines()[-20:]
        shutil.rmtree(self.folder, ignore_errors=True)
        return row


def line_of(row: Row) -> str:
    """What a case found, or its problem."""
    head = f"{row['model']:34} {row['side']:10}"
    if "problem" in row:
        return f"{head} {row['problem']}"
    return (
        f"{head} {row['tokens_per_second']:9,.0f} tokens/s {row['step_ms']:8.1f} ms  first {row['first_step_s']:.1f} s"
        f"  loss {row['first_loss']:.3f} to {row['last_loss']:.3f}  {row['remark']}"
    )


def main() -> int:
    """Run the cases, write the file and print the table; returns 1 if a case of ours failed."""
    import torch

    from titan_like.metrics.hardware import peak_tflops

    parser = parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU (the default without a GPU)")
    parser.add_argument("--only", choices=MODELS, action="append", help="run only this model; may be repeated")
    parser.add_argument("--waves", action="store_true", help="compile all cases beside each other, then time each")
    options = parser.parse_args()
    tiny = options.tiny or not torch.cuda.is_available()
    wanted = TINY_CASES if tiny else [case for case in CASES if case.model in (options.only or MODELS)]
    chosen = [(case, missing_of(case.side, tiny)) for case in wanted]
    cases: list[Row] = []
    allowed = 3600.0 if tiny else LIMIT
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        **origin(),
        "versions": {name: version_of(name) for name in ("torch", "transformers", "accelerate", "torchtitan")},
        "tiny": tiny,
        "tokens_per_second_is": "tokens of a step over the median step of the second half",
        "mfu_is": "model FLOPs without recomputation, full attention matrix, over the dense bfloat16 peak",
        "first_step_is": "seconds from the imports to the end of the first step, "
        + ("most kernels compiled before" if options.waves else "empty compile cache"),
    }
    with ExitStack() as stack:
        cache = None
        if options.waves:
            cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            result["compiled"] = compile_all(
                [case for case, problem in chosen if not problem], tiny, cache, allowed / 2
            )
            print(*(f"compiled {name}: {row}" for name, row in result["compiled"].items()), sep="\n", flush=True)

        def start(number: int) -> Running | None:
            if number >= len(chosen) or chosen[number][1]:
                return None
            case, model = chosen[number][0], (TINY_MODELS if tiny else MODELS)[chosen[number][0].model]
            return Running(settings_of(model, case.side, tiny), case.side, tiny, cache if case.gigabytes else None)

        upcoming = start(0)
        for number, (case, problem) in enumerate(chosen):
            model = (TINY_MODELS if tiny else MODELS)[case.model]
            settings = settings_of(model, case.side, tiny)
            expected = START if cache and case.gigabytes and not tiny else case.seconds
            limit = limit_of(allowed - (time.monotonic() - STARTED), expected)
            row: Row = {"model": f"{model.title}, {model.batch} × {model.seq_len}", "side": case.side}
            running, upcoming = upcoming, start(number + 1)  # the next one imports meanwhile
            if running is None or limit is None:
                row["problem"] = problem or "not run: no time left"
                if running is not None:
                    running.finish(0)
            else:
                row |= running.finish(limit)
            if "problem" not in row:
                result["machine"], tokens = row.pop("machine"), model.batch * model.seq_len
                gpu, rate = result["machine"]["gpu"], rate_of(row["step_seconds"], tokens)
                mfu = mfu_of(settings, rate, peak_tflops(gpu, "bfloat16") if gpu else None)
                row |= {"tokens_per_second": round(rate, 1), "step_ms": round(1000 * tokens / rate, 2), "mfu": mfu}
            cases.append(row)
            result |= {"seconds": round(time.monotonic() - STARTED, 1), "cases": cases}
            print(f"{result['seconds']:5.0f} s  {line_of(row)}", flush=True)
            write(options.json, result)
    print("", *(f"{key}: {value}" for key, value in (result.get("machine", {}) | result["versions"]).items()), sep="\n")
    if "machine" in result:
        print(table_of([result]))
    failed = [row for row in cases if row["side"] == "ours" and not row.get("problem", "not run").startswith("not run")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
