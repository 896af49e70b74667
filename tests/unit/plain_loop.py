"""A short run from its settings to its log, and the optimizer of a plain loop beside it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tests.e2e.jobs import records
from titan_like.config import load_config
from titan_like.config.schema import JobConfig, Optimizer
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import Run, prepare_run

STEPS, BATCH = 30, 4


def run_settings(folder: Path) -> dict[str, object]:
    """Settings of a run over a made-up text in ``folder``."""
    text = folder / "words.txt"
    text.write_text("".join(f"the {number} hidden words of line {number % 7}\n" for number in range(2000)))
    return {
        "model.overrides.num_layers": 2, "model.overrides.hidden_size": 64, "data.dataset": "text",
        "data.paths": f'["{text}"]', "training.seq_len": 64, "training.micro_batch_size": BATCH // 2,
        "training.global_batch_size": BATCH, "training.steps": STEPS, "training.max_norm": 0, "optimizer.lr": 1e-3,
        "training.dtype": "float64",  # the comparison is then of the algorithm alone
        "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay": "constant", "evaluation.interval": 0,
        "job.dump_folder": folder / "out",
    }  # fmt: skip


def prepared(settings: Mapping[str, object]) -> Run:
    """A run that is ready to begin, as a command line with these settings makes it."""
    return prepare_run(resolve_settings(load_config([f"--{key}={value}" for key, value in settings.items()])))


def logged(config: JobConfig) -> list[dict[str, float]]:
    """What the run wrote about each step."""
    return records(Path(config.job.dump_folder))


def plain_adamw(model: nn.Module, section: Optimizer) -> torch.optim.AdamW:
    """torch's own optimizer, which decays matrices alone."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
