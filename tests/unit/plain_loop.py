"""30 steps of training, and the same in a plain loop over transformers' model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from tests.unit.hugging_face_cases import reference_of
from titan_like.config import load_config
from titan_like.config.schema import JobConfig, Optimizer
from titan_like.data.batch import Batch, collate
from titan_like.models.registry import build_model
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import Run, prepare_run

STEPS, BATCH = 30, 4


def run_settings(folder: Path) -> dict[str, object]:
    """Settings of a run over a made-up text in ``folder``."""
    text = folder / "words.txt"
    text.write_text("".join(f"the {number} hidden words of line {number % 7}\n" for number in range(2000)))
    return {
        "model.overrides.num_layers": 2,
        "model.overrides.hidden_size": 64,
        "data.dataset": "text",
        "data.paths": f'["{text}"]',
        "training.seq_len": 64,
        "training.micro_batch_size": BATCH // 2,
        "training.global_batch_size": BATCH,
        "training.steps": STEPS,
        "training.max_norm": 0,
        "training.dtype": "float64",  # the comparison is then of the algorithm alone
        "optimizer.lr": 1e-3,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay": "constant",
        "evaluation.interval": 0,
        "job.dump_folder": folder / "out",
    }


def prepared(settings: Mapping[str, object]) -> Run:
    """A run that is ready to begin, as a command line with these settings makes it."""
    return prepare_run(resolve_settings(load_config([f"--{key}={value}" for key, value in settings.items()])))


def logged(config: JobConfig) -> list[dict[str, float]]:
    """What the run wrote about each step."""
    return [json.loads(line) for line in (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()]


def untrained_reference(run: Run) -> nn.Module:
    """transformers' model with the weights with which the run begins, in float64."""
    ours = build_model(run.model, run.config.model.family).double()
    ours.init_weights(run.config.job.seed)
    return reference_of(ours).train()


def plain_adamw(model: nn.Module, section: Optimizer) -> torch.optim.AdamW:
    """torch's own optimizer, which decays matrices alone."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def plain_losses(run: Run, theirs: nn.Module, terms_of: Callable[[Batch], list[torch.Tensor]]) -> list[list[float]]:
    """The terms of the loss at each step, whose sum a plain loop minimises.

    Args:
        run: whose samples and optimizer settings these are.
        theirs: the model.
        terms_of: a global batch → the terms.
    """
    optimizer, samples, found = plain_adamw(theirs, run.config.optimizer), run.masks.over(run.datasets["train"]), []
    for step in range(run.config.training.steps):
        size = run.config.training.global_batch_size
        batch = collate([samples[index] for index in range(step * size, (step + 1) * size)])
        terms = terms_of(batch)
        sum(terms).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([term.item() for term in terms])
    return found
