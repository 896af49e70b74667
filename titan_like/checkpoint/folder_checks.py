"""The checks of the folders that a run writes to, before it starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from titan_like.checkpoint.compatible import check_readable, check_same_run
from titan_like.checkpoint.lock import lock_path, lock_problem
from titan_like.checkpoint.step_folders import checkpoint_path, complete_steps, leftover_bytes
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.models.parts import one_of_each
from titan_like.optim.state_size import optimizer_state


def check_writable(key: str, folder: Path, make: bool) -> None:
    """Check that a folder can be written to. If ``make``, it is created.

    Raises:
        ConfigError: it cannot; ``key`` is the setting to blame.
    """
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        problem = f"the folder cannot be created ({error.strerror}); name one that you may write to"
        raise ConfigError(key, str(folder), problem) from None
    if not there.is_dir():
        problem = f"the folder cannot be created ({there} is a file); name one that you may write to"
        raise ConfigError(key, str(folder), problem)
    if not os.access(there, os.W_OK):
        raise ConfigError(key, str(folder), f"the folder {there} is not writable; name one that is")


def check_checkpoints(config: JobConfig, model: TransformerConfig, folder: Path, make: bool) -> bool:
    """Check that the run can save to its checkpoint folder, and resume from what is there.

    Args:
        config: the run's.
        model: its model.
        folder: the checkpoint folder.
        make: create the folder.

    Returns:
        Whether there is a checkpoint to resume from.

    Raises:
        ConfigError: the folder cannot be used, or its checkpoints are of another run.
    """
    check_writable("checkpoint.folder", folder, make)
    problem = lock_problem(folder)
    if problem is not None:
        raise ConfigError("checkpoint.folder", str(folder), f"{lock_path(folder)} {problem}")
    steps, wanted = complete_steps(folder), config.checkpoint.load_step
    if wanted is not None and wanted not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
        raise ConfigError("checkpoint.load_step", wanted, f"no such checkpoint in {folder}; {there}")
    cure = "move it away to start anew, or name another folder"
    check_readable(folder, steps if wanted is None else [wanted], cure)
    for step in steps[-1:] if wanted is None else [wanted]:
        check_same_run(checkpoint_path(folder, step), config, model)
    return bool(steps)


def check_room(folder: Path, needed: int) -> None:
    """Check that the disk of a checkpoint folder has room for a checkpoint of ``needed`` bytes.

    Raises:
        ConfigError: it has not.
    """
    free = shutil.disk_usage(folder).free + leftover_bytes(folder)
    if free < needed:
        problem = f"a checkpoint takes {needed / 2**30:.3g} GiB, but the disk has {free / 2**30:.3g} GiB left"
        raise ConfigError("checkpoint.folder", str(folder), f"{problem}; make room, or name a folder on another disk")


def checkpoint_bytes(config: JobConfig, model: TransformerConfig) -> int:
    """Approximate size of a checkpoint: master weights and the optimizer's state."""
    element, state = 8 if config.training.dtype == "float64" else 4, optimizer_state(config.optimizer)
    values: float = model.num_parameters()
    small = one_of_each(model)
    counts = {f"layers.{kind}": count for kind, count in zip(small.layers, model.layer_counts, strict=True)}
    for name, parameter in small.named_parameters():
        values += state.of(name, parameter.shape) * counts.get(".".join(name.split(".")[:2]), 1)
    return int(element * values)
