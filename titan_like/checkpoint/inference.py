"""A trained model in one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from titan_like.checkpoint.manager import checkpoint_folder, checkpoint_path, complete_steps, load_checkpoint
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer


def load_for_inference(config: JobConfig, device: torch.device) -> tuple[Transformer, Path]:
    """The run's model with the weights of its newest checkpoint, or of `checkpoint.load_step`, and where they lay.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    folder, wanted = checkpoint_folder(config), config.checkpoint.load_step
    steps = complete_steps(folder)
    if wanted is not None and wanted not in steps:
        raise ConfigError("checkpoint.load_step", wanted, f"{folder} has the steps {steps}; name one of them")
    if not steps:
        problem = "holds no checkpoint; train with checkpoint.enable first, or set checkpoint.folder or job.dump_folder"
        raise ConfigError("checkpoint.folder", str(folder), problem)
    path = checkpoint_path(folder, steps[-1] if wanted is None else wanted)
    with torch.device("meta"):
        model = build_model(model_config(config.model), config.model.family)
    model.to_empty(device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted
        load_checkpoint(path, model)
    return model.eval(), path
