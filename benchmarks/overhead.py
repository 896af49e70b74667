"""Speed of train.py compared with a bare PyTorch loop and with Hugging Face's Trainer, in float32.

    python benchmarks/overhead.py turns                        # train.py and a bare loop
    python benchmarks/overhead.py turns --compile              # our layers one by one, the bare loop as one graph
    python benchmarks/overhead.py hf --layers 6 --hidden 192 --vocab 50257

All sides train on the same samples, with the same batch size, learning rate, fused AdamW and clipping. train.py runs as
users run it: it loads data, logs and writes metrics.jsonl, which the other sides do not.

`turns` runs train.py with a step of the bare loop before each of its own, in the same process. Both then meet the same
machine, so single steps can be compared. Work of train.py that spreads over its steps, such as log lines, counts as its
own, and so does what another model in the caches costs it. The bare loop must reach train.py's final loss.

`hf` alternates between train.py and Trainer, each run a new process. Both have the same clock: a hook in torch.optim
that reads the time when an optimizer step ends, on a GPU by an event. A step lasts from the end of the previous step to
its own end, so no work between steps is missed. Tokens per second are the tokens of the steps after the warm-up over
their total time; the ratio of median steps is less sensitive to other programs, but hides work that only some steps do.
Measure on an idle machine. `peers.py` compares larger models on a GPU, compiled and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import ROOT, arguments, machine, parser_of, read_records, write

SEQ_LEN, BATCH, LR = 256, 8, 3e-4
STEPS, WARMUP = {"turns": 160, "hf": 13}, {"turns": 10, "hf": 3}


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

    from titan_like.models.batch import Batch
    from titan_like.models.registry import build_model

    config = run.config
    data = samples(run).to(run.device).split(config.training.micro_batch_size)

    with run.device:
        model = build_model(run.model, config.model.family)
    model.init_weights(config.job.seed)

    def loss_of(tokens: Any, labels: Any) -> Any:
        return F.cross_entropy(model(Batch(tokens)).flatten(0, 1), labels.flatten())

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


def train_hf(config: Any, shape: Any, tokens: Any) -> list[float]:
    """Train transformers' model of the same shape with its Trainer, without logging, on tokens [samples, seq].

    Returns the loss of every step, in nats per token.
    """
    import torch
    import transformers

    from titan_like.models.hugging_face import architecture_of

    on_gpu = torch.cuda.is_available()
    # The default bos_token_id and eos_token_id are beyond a small vocabulary.
    fields = shape.family_module("hugging_face").to_fields(shape) | {"bos_token_id": 0, "eos_token_id": 0}
    name = architecture_of(shape, fields["model_type"])
    model_class = getattr(transformers, name)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = model_class(model_class.config_class.from_dict(fields))
    expected, found = shape.num_parameters(padded=False), sum(p.numel() for p in model.parameters())
    if expected != found:
        raise RuntimeError(f"the models differ: {expected:,} parameters here, {found:,} in {name}")
    if model.config._attn_implementation != "sdpa":
        raise RuntimeError(f"{name} would use {model.config._attn_implementation} attention, not sdpa")
    if on_gpu and hasattr(shape, "num_experts") and model.config._experts_implementation != "grouped_mm":
        raise RuntimeError(f"{name} would not use grouped products for experts")
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
        gradient_checkpointing=config.activation_checkpoint.mode == "full",
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

    from titan_like.data.loading.batch_size import total_samples

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
    return read_records(dump_folder)[-1]["loss"]


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
    from titan_like.config import load_config
    from titan_like.train.rules import resolve_settings
    from titan_like.train.setup import prepare_run

    config = load_config(argv)
    clock = StepClock()
    if side == "titan":
        train_titan(argv, config.job.dump_folder)
    elif side == "hf":
        run = prepare_run(resolve_settings(config))
        train_hf(config, run.model, samples(run)[:, 0])
    else:
        train_in_turns(argv, config.job.dump_folder, prepare_run(resolve_settings(config)), output)
        return
    output.write_text(json.dumps(clock.ends))


# Functions that compare them.


def settings_of(args: argparse.Namespace) -> list[str]:
    """The settings of train.py, which the other sides read too."""
    settings = {
        "model.family": "gpt", "model.flavor": "debug", "data.dataset": "stdlib", "training.seq_len": SEQ_LEN,
        "training.micro_batch_size": BATCH, "training.global_batch_size": BATCH, "training.steps": args.steps,
        "training.max_norm": 1.0, "optimizer.lr": LR, "lr_scheduler.decay": "constant", "compile.enable": args.compile,
    }  # fmt: skip
    if args.command == "hf":
        names = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads", "vocab_size": "vocab"}
        settings |= {f"model.overrides.{name}": getattr(args, option) for name, option in names.items()}
    return arguments(settings)


def start(side: str, args: argparse.Namespace, folder: Path) -> Any:
    """Run one side in a new process; returns what it wrote."""
    output = folder / "result.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, __file__, "worker", side, str(output), *settings_of(args)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        [*command, f"--job.dump_folder={folder}/run"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not output.exists():
        raise SystemExit(f"{side} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(output.read_text())


def compare_hf(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both sides in new processes, --pairs times."""
    print("\nhf: titan (train.py) / hf, tokens per second")
    print(f"{'pair':>4} {'hf tok/s':>12} {'titan tok/s':>12} {'ratio':>7} {'ratio of median steps':>22}")
    pairs = []
    for number in range(1, args.pairs + 1):
        steps = {}
        for side in ("hf", "titan"):
            ends = start(side, args, folder)[WARMUP["hf"] - 1 :]
            steps[side] = [after - before for before, after in pairwise(ends)]
        rates = {side: BATCH * SEQ_LEN * len(times) / sum(times) for side, times in steps.items()}
        medians = {side: statistics.median(times) for side, times in steps.items()}
        pair = {"tokens_per_second": rates, "median_step_s": medians, "ratio": rates["titan"] / rates["hf"]}
        pairs.append(pair | {"ratio_of_median_steps": medians["hf"] / medians["titan"]})
        ratios = f"{pairs[-1]['ratio']:7.3f} {pairs[-1]['ratio_of_median_steps']:22.3f}"
        print(f"{number:4d} {rates['hf']:12.1f} {rates['titan']:12.1f} {ratios}", flush=True)
    found = {key: statistics.median(pair[key] for pair in pairs) for key in ("ratio", "ratio_of_median_steps")}
    print(f"{'median':>30} {found['ratio']:7.3f} {found['ratio_of_median_steps']:22.3f}")
    return {"pairs": pairs, **{f"median_{key}": value for key, value in found.items()}}


def compare_in_turns(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both sides in one process, step by step, --pairs times."""
    print("\nturns: titan (train.py) / bare, by steps in turn in one process")
    print(f"{'run':>4} {'bare ms':>9} {'titan ms':>9} {'ratio':>7}")
    runs = []
    for number in range(1, args.pairs + 1):
        result = start("turns", args, folder)
        steps = list(zip(result["bare"], result["titan"], strict=False))[WARMUP["turns"] :]  # the last is not timed
        bare, titan = (1000 * statistics.median(times) for times in zip(*steps, strict=True))
        ratio = statistics.median(bare / titan for bare, titan in steps)
        runs.append({"bare_ms": bare, "titan_ms": titan, "steps": len(steps), "ratio": ratio})
        print(f"{number:4d} {bare:9.1f} {titan:9.1f} {ratio:7.3f}", flush=True)
    median = statistics.median(run["ratio"] for run in runs)
    print(f"{'median':>23} {median:8.3f}")
    return {"runs": runs, "median_ratio": median}


def main() -> None:
    """Read the command line, compare, write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("command", choices=STEPS)
    parser.add_argument("--pairs", type=int, default=5, help="runs (default 5)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps a run, warm-up included (default {STEPS})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--layers", type=int, default=12, help="hf: layers (default 12)")
    parser.add_argument("--hidden", type=int, default=256, help="hf: hidden size (default 256)")
    parser.add_argument("--heads", type=int, default=8, help="hf: attention heads (default 8)")
    parser.add_argument("--vocab", type=int, default=8192, help="hf: vocabulary (default 8192)")
    parser.add_argument("--compile", action="store_true", help="compile all sides")
    args = parser.parse_args()
    args.steps = args.steps or STEPS[args.command]
    result = {"train_command": ["train.py", *settings_of(args)], "machine": machine()}
    print(*(f"{key}: {value}" for key, value in result["machine"].items()), sep="  ")
    with tempfile.TemporaryDirectory() as folder:
        compare = compare_in_turns if args.command == "turns" else compare_hf
        write(args.json, result | {args.command: compare(args, Path(folder))})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
