"""A trained model in one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from titan_like.checkpoint.compatible import check_same_model
from titan_like.checkpoint.manager import checkpoint_folder, checkpoint_path, complete_steps, load_checkpoint
from titan_like.config.errors import ConfigError, RunError
from titan_like.config.schema import JobConfig
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer


def load_for_inference(config: JobConfig, device: torch.device) -> tuple[Transformer, Path]:
    """The run's model with the weights of its newest checkpoint, or of `checkpoint.load_step`, and where they lay.

    Raises:
        ConfigError: there is no such checkpoint, or it is of another model.
        RunError: the checkpoint is damaged.
    """
    folder, wanted = checkpoint_folder(config), config.checkpoint.load_step
    steps = complete_steps(folder)
    if wanted is not None and wanted not in steps:
        raise ConfigError("checkpoint.load_step", wanted, f"{folder} has the steps {steps}; name one of them")
    if not steps:
        problem = "holds no checkpoint; train with checkpoint.enable first, or set checkpoint.folder or job.dump_folder"
        raise ConfigError("checkpoint.folder", str(folder), problem)
    path = checkpoint_path(folder, steps[-1] if wanted is None else wanted)
    shape = model_config(config.model)
    check_same_model(path, config, shape)
    with torch.device("meta"):
        model = build_model(shape, config.model.family)
    model.to_empty(device=device)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted
            load_checkpoint(path, model)
    except Exception as error:  # whatever a damaged file raises
        raise RunError(f"{path} cannot be loaded ({error}); choose another checkpoint.load_step") from error
    return model.eval(), path
