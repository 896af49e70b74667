"""One case of `peers.py`, in this process: python benchmarks/peer_sides.py SIDE SETTINGS </dev/null

SETTINGS are those of train.py, and every side takes the model, batch and optimizer from them. The figures are written
to figures.json in `job.dump_folder`. Each side returns the losses of the first and the last step, and a remark.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Layers up to which a model is compiled as a whole. Compiling 16 layers takes 95 s on a machine with an H100, and 48
# several minutes. Layers that are compiled one by one train a large model as fast, but leave Trainer's loss uncompiled.
WHOLE = {"bare": 12, "trainer": 16}

IMPORTS = {
    "ours": ["titan_like.commands.train", "titan_like.train.trainer"],
    "bare": [],
    "trainer": ["transformers.trainer", "accelerate"],
    "torchtitan": ["torchtitan.train"],
}

Outcome = tuple[float, float, str]


def train_ours(config: Any, shape: Any, argv: list[str]) -> Outcome:
    """Train with train.py."""
    from benchmarks.overhead import train_titan
    from benchmarks.runs import read_records

    train_titan(argv, config.job.dump_folder)
    records = read_records(config.job.dump_folder)
    logged = statistics.median(record["tokens_per_second"] for record in records[len(records) // 2 :])
    return records[0]["loss"], records[-1]["loss"], f"metrics.jsonl has {logged:,.0f} tokens/s"


def train_bare(config: Any, shape: Any, argv: list[str]) -> Outcome:
    """Train a plain model in a minimal loop on random tokens."""
    import torch
    import torch.nn.functional as F

    from benchmarks.overhead import bare_loop, compile_backend
    from benchmarks.plain_models import PlainTransformer

    torch.manual_seed(config.job.seed)
    torch.set_float32_matmul_precision("high")
    device, training = torch.device("cuda" if torch.cuda.is_available() else "cpu"), config.training
    with device:
        model = PlainTransformer(shape, training.seq_len)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=compile_backend(), fullgraph=True)

    def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    whole = is_whole("bare", shape)
    if whole:
        loss_of = compiled(lambda tokens, labels: token_loss(model(tokens), labels))
    else:
        for block in model.blocks:
            block.forward = compiled(block.forward)
        compiled_loss = compiled(token_loss)

        def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return compiled_loss(model(tokens), labels)

    size = 2, training.micro_batch_size, training.seq_len
    data = (torch.randint(shape.vocab_size, size, device=device).transpose(0, 1) for _ in range(training.steps))
    losses = list(bare_loop(config, loss_of, list(model.parameters()), data))
    return losses[0].item(), losses[-1].item(), remark_of(whole)


def is_whole(side: str, shape: Any) -> bool:
    """Whether a side compiles the model as a whole, or the one that it stands for here."""
    return int(os.environ.get("PEERS_LAYERS") or shape.num_layers) <= WHOLE[side]


def remark_of(whole: bool) -> str:
    """How a model was compiled."""
    return "whole model compiled" if whole else "layers compiled one by one"


def train_trainer(config: Any, shape: Any, argv: list[str]) -> Outcome:
    """Train with transformers on random tokens."""
    import torch

    from benchmarks.overhead import train_hf

    whole = is_whole("trainer", shape)
    if not whole:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    samples = config.training.micro_batch_size * config.training.steps
    losses = train_hf(config, shape, torch.randint(shape.vocab_size, (samples, config.training.seq_len)))
    return losses[0], losses[-1], remark_of(whole)


def train_torchtitan(config: Any, shape: Any, argv: list[str]) -> Outcome:
    """Train torchtitan's Llama of the same shape on random tokens."""
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= one_process | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # 0: any free port
    import tomli_w
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    training = config.training
    size = 2, training.micro_batch_size, training.seq_len

    class RandomTokens(BaseDataLoader):
        def __iter__(self) -> Iterator[Any]:
            while True:
                tokens, labels = torch.randint(shape.vocab_size, size)
                yield {"input": tokens}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    spec = get_train_spec()
    model = TransformerModelArgs(
        dim=shape.hidden_size,
        n_layers=shape.num_layers,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_kv_heads,
        vocab_size=shape.padded_vocab_size,
        # The width of its MLP is ⌊multiplier·⌊8/3·dim⌋⌋, rounded up to a multiple.
        ffn_dim_multiplier=(shape.ffn_hidden_size - 0.5) / (8 * shape.hidden_size // 3),
        multiple_of=2,
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
    )
    spec.model_args, spec.build_dataloader_fn = {"shape": model}, lambda **_: RandomTokens()
    spec.build_tokenizer_fn = spec.state_dict_adapter = None
    register_train_spec("peers", spec)
    sizes = {"local_batch_size": training.micro_batch_size, "seq_len": training.seq_len, "steps": training.steps}
    settings = {
        "job": {"dump_folder": config.job.dump_folder},
        "model": {"name": "peers", "flavor": "shape", "converters": ["quantize.linear.float8"] * config.float8.enable},
        "training": sizes | {"max_norm": training.max_norm},
        "optimizer": {"lr": config.optimizer.lr, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 2},
        "activation_checkpoint": {"mode": config.activation_checkpoint.mode},
        "compile": {"enable": config.compile.enable},
        "quantize": {"linear": {"float8": {"filter_fqns": ["output"]}}},  # as float8 here leaves it out
        "metrics": {"log_freq": config.metrics.log_interval},
    }
    path = Path(config.job.dump_folder) / "torchtitan.toml"
    path.write_text(tomli_w.dumps(settings))
    trainer = Trainer(ConfigManager().parse_args(["--job.config_file", str(path)]))
    found, expected = sum(p.numel() for p in trainer.model_parts[0].parameters()), shape.num_parameters()
    if found != expected:
        raise RuntimeError(f"the models differ: {expected:,} parameters here, {found:,} in torchtitan")
    losses, processor = [], trainer.metrics_processor
    log = processor.log

    def noting_log(step: int, loss: float, *rest: Any, **more: Any) -> None:
        losses.append(float(loss))
        log(step, loss, *rest, **more)

    processor.log = noting_log
    processor.device_memory_monitor.reset_peak_stats = lambda: None  # it would forget the peak at every log line
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    return losses[0], losses[-1], remark_of(False)


SIDES = {"ours": train_ours, "bare": train_bare, "trainer": train_trainer, "torchtitan": train_torchtitan}


def main(side: str, argv: list[str]) -> None:
    """Train one side and write its figures."""
    from benchmarks.overhead import StepClock
    from benchmarks.runs import machine

    clock = StepClock()
    import torch
    import torch._inductor.compile_fx  # every side imports it later

    from titan_like.config import load_config
    from titan_like.metrics.hardware import peak_memory_bytes
    from titan_like.models.registry import model_config

    for package in IMPORTS[side]:
        importlib.import_module(package)
    sys.stdin.readline()  # `peers.py` says when it is this case's turn
    started, config = time.time(), load_config(argv)
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("PEERS_LAYERS") and side != "ours":  # it only compiles, and has no use for the optimizer's state
        torch.optim.AdamW.step = lambda *_: None
    first_loss, last_loss, remark = SIDES[side](config, model_config(config.model), argv)
    ends = clock.ends
    if len(ends) != config.training.steps:
        raise RuntimeError(f"{len(ends)} optimizer steps ended, not {config.training.steps}")
    figures = {
        "step_seconds": [round(after - before, 6) for before, after in pairwise(ends)],
        "first_step_s": round(clock.first_ended - started, 2),
        "peak_memory_bytes": peak_memory_bytes(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
        "first_loss": first_loss,
        "last_loss": last_loss,
        "remark": remark,
        "machine": machine(),
    }
    (folder / "figures.part").write_text(json.dumps(figures))
    (folder / "figures.part").rename(folder / "figures.json")  # this process may be killed at any moment


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
