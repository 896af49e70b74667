"""Speed of train.py compared with a bare PyTorch loop and with Hugging Face's Trainer.

    python benchmarks/overhead.py                              # both comparisons
    python benchmarks/overhead.py overhead --pairs 7 --json overhead.json
    python benchmarks/overhead.py hf --layers 6 --hidden 192 --vocab 50257
    python benchmarks/overhead.py turns                        # on a machine whose speed changes from run to run
    python benchmarks/overhead.py turns --compile              # our layers one by one, the bare loop as one graph

Each comparison alternates between its two sides. Each run is a new process with the same number of threads. All sides
train in float32 on the same samples, with the same batch size, learning rate, fused AdamW and clipping. train.py runs
as users run it: it loads data, logs and writes metrics.jsonl, which the other sides do not.

All sides use the same clock: a hook in torch.optim that reads the time when an optimizer step ends, on a GPU by an
event. A step lasts from the end of the previous step to its own end, so no work between steps is missed. Tokens per
second are the tokens of the steps after the warm-up over their total time. The median step is given too: it is less
sensitive to other programs on the machine, but hides work that only some steps do, such as log lines. Measure on an
idle machine: other load can make a run ten times as long. The bare loop must reach train.py's final loss, otherwise the
benchmark fails. `peers.py` compares larger models on a GPU, compiled and in bfloat16.

`turns` runs train.py with a step of the bare loop before each of its own, in the same process. Both then meet the same
machine, so single steps can be compared. Work of train.py that spreads over its steps, such as log lines, counts as its
own, and so does what another model in the caches costs it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN = 256
BATCH = 8
LR = 3e-4
# The first side is the denominator of the ratio.
SIDES = {"overhead": ("bare", "titan"), "hf": ("hf", "titan")}
STEPS = {"overhead": 80, "hf": 13, "turns": 160}
WARMUP = {"overhead": 10, "hf": 3, "turns": 10}


# Functions that run in the new processes.


class StepClock:
    """Records when the optimizer's steps end. It makes the host wait for a GPU only once, after the first step.

    The optimizer is the one with the most steps: train.py also tries one step of a small one, to see what it allocates.
    """

    def __init__(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._on_gpu = torch.cuda.is_available()
        # Of each optimizer: when its first step ended, by time.time(), and the ends of its steps, which are events
        # among a GPU's kernels or seconds of the host's clock.
        self._steps: dict[Any, tuple[float, list[Any]]] = {}
        register_optimizer_step_post_hook(self._stamp)

    def _stamp(self, optimizer: Any, *_: Any) -> None:
        import torch

        if self._on_gpu:
            end: Any = torch.cuda.Event(enable_timing=True)
            end.record()
        else:
            end = time.perf_counter()
        if optimizer not in self._steps:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._steps[optimizer] = time.time(), []
        self._steps[optimizer][1].append(end)

    @property
    def first_ended(self) -> float:
        """When the first step ended, as time.time() tells it."""
        return max(self._steps.values(), key=lambda steps: len(steps[1]))[0]

    @property
    def ends(self) -> list[float]:
        """Seconds from the end of the first step to the end of each."""
        _, ends = max(self._steps.values(), key=lambda steps: len(steps[1]))
        if not self._on_gpu:
            return [end - ends[0] for end in ends]
        ends[-1].synchronize()
        return [ends[0].elapsed_time(end) / 1000 for end in ends]


def bare_steps(run: Any) -> Iterator[Any]:
    """Train our model with a minimal loop over tensors in memory. Yields the loss of each step."""
    import torch.nn.functional as F

    from titan_like.models.registry import build_model

    config = run.config
    data = samples(run).to(run.device).split(config.training.micro_batch_size)

    with run.device:
        model = build_model(run.model, config.model.family)
    model.init_weights(config.job.seed)

    def loss_of(tokens: Any, labels: Any) -> Any:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    if config.compile.enable:  # as one graph, with the loss
        import torch

        loss_of = torch.compile(loss_of)
    yield from bare_loop(config, loss_of, list(model.parameters()), data)


def bare_loop(
    config: Any, loss_of: Callable[[Any, Any], Any], parameters: list[Any], data: Iterable[Any]
) -> Iterator[Any]:
    """Train for each batch of ``data``, tokens and labels [batch, 2, seq], one step.

    Yields the loss of each step, a scalar on the device.
    """
    import torch

    section = config.optimizer
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    is_half = config.training.dtype == "bfloat16"
    for batch in data:
        tokens, labels = batch.unbind(1)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=is_half):
            loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def train_bare(run: Any) -> float:
    """Train with the bare loop. Returns the last loss."""
    *_, loss = bare_steps(run)
    return loss.item()


def train_hf(config: Any, shape: Any, tokens: Any) -> list[float]:
    """Train transformers' model of the same shape with its Trainer, without logging, on tokens [samples, seq].

    Returns the loss of every step, in nats per token.
    """
    import torch
    import transformers

    on_gpu = torch.cuda.is_available()
    mapping = shape.family_module("hugging_face")
    model_class = getattr(transformers, mapping.ARCHITECTURE)
    # The default bos_token_id and eos_token_id are beyond a small vocabulary.
    fields = mapping.to_fields(shape) | {"bos_token_id": 0, "eos_token_id": 0}
    with torch.device("cuda" if on_gpu else "cpu"):
        model = model_class(model_class.config_class.from_dict(fields))
    expected, found = shape.num_parameters(padded=False), sum(p.numel() for p in model.parameters())
    if expected != found:
        raise RuntimeError(f"the models differ: {expected:,} parameters here, {found:,} in {mapping.ARCHITECTURE}")
    if model.config._attn_implementation != "sdpa":
        raise RuntimeError(f"{mapping.ARCHITECTURE} would use {model.config._attn_implementation} attention, not sdpa")
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(config.job.dump_folder) / "hf"),
        per_device_train_batch_size=config.training.micro_batch_size,
        max_steps=config.training.steps,
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.training.max_norm,
        bf16=config.training.dtype == "bfloat16",
        torch_compile=config.compile.enable,
        torch_compile_backend=compile_backend() if config.compile.enable else None,
        use_cpu=not on_gpu,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    losses: list[Any] = []

    class NotingTrainer(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach().clone())
            return loss

    # The models shift the labels themselves.
    NotingTrainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]).train()
    return torch.stack(losses).tolist()


def compile_backend() -> str:
    """The compiler of the sides that are not train.py: on a CPU, one that traces but generates no code."""
    import torch

    return "inductor" if torch.cuda.is_available() else "aot_eager"


def samples(run: Any) -> Any:
    """The samples that train.py consumes in this run, int64 [samples, 2, seq]: inputs and labels."""
    import torch

    from titan_like.data.batch_size import total_samples

    dataset = run.datasets["train"]
    return torch.stack([torch.stack(dataset[i][:2]) for i in range(total_samples(run.config.training))])


def train_titan(argv: list[str], dump_folder: str) -> float:
    """Train with train.py, as ``python train.py`` runs it. Returns the last loss."""
    sys.argv = ["train.py", *argv]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    return json.loads((Path(dump_folder) / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def train_in_turns(argv: list[str], dump_folder: str, run: Any, output: Path) -> None:
    """Train with train.py and the bare loop, a step each in turn. Writes the seconds of each side's steps."""
    from titan_like.train.trainer import Trainer

    bare, original = bare_steps(run), Trainer.train_step
    seconds: dict[str, list[float]] = {"bare": [], "titan": []}
    losses: list[float] = []
    bare_ended = 0.0

    def step(self: Any, data: Any) -> Any:
        nonlocal bare_ended
        began = time.perf_counter()
        losses.append(next(bare).item())
        if bare_ended:
            seconds["titan"].append(began - bare_ended)  # the step before, with all that follows it
        bare_ended = time.perf_counter()
        seconds["bare"].append(bare_ended - began)
        return original(self, data)

    Trainer.train_step = step  # type: ignore[method-assign]
    last = train_titan(argv, dump_folder)
    if abs(last - losses[-1]) > 1e-3:
        raise SystemExit(f"the two sides trained differently: losses {losses[-1]} and {last}")
    output.write_text(json.dumps(seconds))


def worker(side: str, output: Path, argv: list[str]) -> None:
    """Train one side in this process and write its times."""
    sys.path.insert(0, str(ROOT))
    import torch

    from titan_like.config import load_config

    config = load_config(argv)
    assert config.training.steps is not None
    if side == "turns":
        from titan_like.train.rules import resolve_settings
        from titan_like.train.setup import prepare_run

        train_in_turns(argv, config.job.dump_folder, prepare_run(resolve_settings(config)), output)
        return
    clock = StepClock()
    if side == "titan":
        loss = train_titan(argv, config.job.dump_folder)
    else:
        from titan_like.train.rules import resolve_settings
        from titan_like.train.setup import prepare_run

        run = prepare_run(resolve_settings(config))
        loss = train_bare(run) if side == "bare" else train_hf(config, run.model, samples(run)[:, 0])[-1]
    result = {"ends": clock.ends, "loss": loss, "threads": torch.get_num_threads()}
    output.write_text(json.dumps(result))


# Functions that compare them.


def settings_of(command: str, args: argparse.Namespace) -> list[str]:
    """The settings of train.py, which the other sides read too."""
    settings = {
        "model.family": "gpt",
        "model.flavor": "debug",
        "data.dataset": "stdlib",
        "training.seq_len": SEQ_LEN,
        "training.micro_batch_size": BATCH,
        "training.global_batch_size": BATCH,
        "training.steps": args.steps or STEPS[command],
        "training.max_norm": 1.0,
        "optimizer.lr": LR,
        "lr_scheduler.decay": "constant",
    }
    if args.compile:
        settings["compile.enable"] = "true"
    if command == "hf":
        settings["model.overrides.num_layers"] = args.layers
        settings["model.overrides.hidden_size"] = args.hidden
        settings["model.overrides.num_attention_heads"] = args.heads
        settings["model.overrides.vocab_size"] = args.vocab
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def start(side: str, command: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], int]:
    """Run one side in a new process; returns what it wrote, and the steps of its warm-up."""
    output = folder / "result.json"
    output.unlink(missing_ok=True)
    warmup = min(WARMUP[command], (args.steps or STEPS[command]) - 2)
    argv = [*settings_of(command, args), "--job.dump_folder", str(folder / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        [sys.executable, __file__, "worker", side, str(output), *argv],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode or not output.exists():
        raise SystemExit(f"{side} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(output.read_text()), warmup


def measure(side: str, command: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one side in a new process; returns tokens per second, the time of a step and the loss."""
    result, warmup = start(side, command, args, folder)
    ends = result["ends"][warmup - 1 :]
    steps = [after - before for before, after in pairwise(ends)]
    return {
        "tokens_per_second": round(BATCH * SEQ_LEN * len(steps) / sum(steps), 1),
        "median_step_ms": round(1000 * statistics.median(steps), 3),
        "mean_step_ms": round(1000 * statistics.mean(steps), 3),
        "steps": len(steps),
        "loss": result["loss"],
        "threads": result["threads"],
    }


def compare(command: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the pairs of one comparison and print each when it is done."""
    base, titan = SIDES[command]
    print(f"\n{command}: titan (train.py) / {base}, tokens per second")
    print(f"{'pair':>4} {base + ' tok/s':>12} {'titan tok/s':>12} {'ratio':>7} {'ratio of median steps':>22}")
    pairs = []
    for number in range(1, args.pairs + 1):
        pair: dict[str, Any] = {side: measure(side, command, args, folder) for side in (base, titan)}
        pair["ratio"] = round(pair[titan]["tokens_per_second"] / pair[base]["tokens_per_second"], 4)
        pair["ratio_of_median_steps"] = round(pair[base]["median_step_ms"] / pair[titan]["median_step_ms"], 4)
        difference = abs(pair[titan]["loss"] - pair[base]["loss"])
        if command == "overhead" and difference > 1e-3:
            raise SystemExit(f"the two sides trained differently: the losses of the last step differ by {difference}")
        pairs.append(pair)
        rates = [pair[side]["tokens_per_second"] for side in (base, titan)]
        print(
            f"{number:4d} {rates[0]:12.1f} {rates[1]:12.1f} {pair['ratio']:7.3f} {pair['ratio_of_median_steps']:22.3f}",
            flush=True,
        )
    medians = {key: statistics.median(pair[key] for pair in pairs) for key in ("ratio", "ratio_of_median_steps")}
    print(f"{'median':>30} {medians['ratio']:7.3f} {medians['ratio_of_median_steps']:22.3f}")
    settings = " ".join(settings_of(command, args))
    return {
        "train_command": f"python train.py {settings}",
        "parameters": count_parameters(command, args),
        "tokens_per_second_is": "tokens of the steps after warm-up / time from the end of warm-up to the last step",
        "pairs": pairs,
        "median_ratio": medians["ratio"],
        "median_ratio_of_median_steps": medians["ratio_of_median_steps"],
    }


def compare_in_turns(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both sides in one process, step by step, --pairs times."""
    print("\nturns: titan (train.py) / bare, by steps in turn in one process")
    print(f"{'run':>4} {'bare ms':>9} {'titan ms':>9} {'ratio':>7}")
    runs = []
    for number in range(1, args.pairs + 1):
        result, warmup = start("turns", "turns", args, folder)
        steps = list(zip(result["bare"], result["titan"], strict=False))[warmup:]  # the last one is not timed
        bare, titan = (1000 * statistics.median(times) for times in zip(*steps, strict=True))
        ratio = statistics.median(bare / titan for bare, titan in steps)
        runs.append(
            {"bare_ms": round(bare, 2), "titan_ms": round(titan, 2), "steps": len(steps), "ratio": round(ratio, 4)}
        )
        print(f"{number:4d} {bare:9.1f} {titan:9.1f} {ratio:7.3f}", flush=True)
    median = statistics.median(run["ratio"] for run in runs)
    print(f"{'median':>23} {median:8.3f}")
    settings = " ".join(settings_of("turns", args))
    return {"train_command": f"python train.py {settings}", "runs": runs, "median_ratio": median}


def count_parameters(command: str, args: argparse.Namespace) -> int:
    """Number of parameters of the model, with embeddings and without vocabulary padding."""
    sys.path.insert(0, str(ROOT))
    from titan_like.config import load_config
    from titan_like.models.registry import model_config

    return model_config(load_config(settings_of(command, args)).model).num_parameters(padded=False)


def machine() -> dict[str, Any]:
    """A description of the machine."""
    import torch

    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def main() -> None:
    """Read the command line, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["all", *SIDES, "turns"], default="all")
    parser.add_argument("--pairs", type=int, default=5, help="alternating pairs of runs (default 5)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps a run, warm-up included (default {STEPS})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--layers", type=int, default=12, help="hf: layers (default 12)")
    parser.add_argument("--hidden", type=int, default=256, help="hf: hidden size (default 256)")
    parser.add_argument("--heads", type=int, default=8, help="hf: attention heads (default 8)")
    parser.add_argument("--vocab", type=int, default=8192, help="hf: vocabulary (default 8192)")
    parser.add_argument("--compile", action="store_true", help="compile all sides")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 4:
        parser.error("--steps must be at least 4")

    result: dict[str, Any] = {"command": " ".join(["python benchmarks/overhead.py", *sys.argv[1:]])}
    result["machine"] = machine()
    print("  ".join(f"{key}: {value}" for key, value in result["machine"].items()))
    with tempfile.TemporaryDirectory() as folder:
        for command in SIDES if args.command == "all" else [args.command]:
            found = compare_in_turns(args, Path(folder)) if command == "turns" else compare(command, args, Path(folder))
            result[command] = found
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
