"""Weights from a checkpoint or a Hugging Face folder with which a new run begins."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from titan_like.checkpoint.loader import agree, is_checkpoint, load_checkpoint, unreadable
from titan_like.config.errors import RunError, first_line, require
from titan_like.config.schema import JobConfig
from titan_like.hugging_face.folder import local_folder, open_hugging_face
from titan_like.hugging_face.start import may_differ, read_start, read_weights
from titan_like.models.config import TransformerConfig
from titan_like.parallel.model import ParallelModel

_KEY = "checkpoint.initial_load_path"


def check_initial_weights(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a `checkpoint.initial_load_path` without weights of this model. Reads no tensors."""
    text = config.checkpoint.initial_load_path
    if text is None:
        return
    key = "model.from" if config.model.from_ else _KEY
    path, start = local_folder(text, key), read_start(text, key)
    if not is_checkpoint(path):
        open_hugging_face(path, key)
    is_same = start.family == config.model.family
    require(is_same, "model.family", config.model.family, f'{path} holds a "{start.family}"; choose that')
    free = may_differ(model) | start.free
    for name, value in model.model_dump(mode="json").items():
        theirs = start.shape.get(name)
        problem = f"{path} holds weights of a model with {theirs}; set it to that, or name another {key}"
        require(name in free or theirs == value, f"model.overrides.{name}", value, problem)


def initial_folder(path: str) -> Path:
    """The folder that `checkpoint.initial_load_path` names; one of the hub is downloaded, once."""
    return local_folder(path, _KEY)


def load_initial_weights(path: str, model: ParallelModel) -> None:
    """Read weights into a model in any layout. Every rank reads its part; a `RunError` says if files are damaged."""
    folder, may_lack = initial_folder(path), model.stages[0].module.may_be_new
    try:
        if is_checkpoint(folder):
            agree(unreadable(folder))  # all ranks fail together, or some would wait for the others in the load
            load_checkpoint(folder, model, may_lack=may_lack)
        else:
            agree(_problem_of_reading(folder, model, may_lack))
    except Exception as error:  # a damaged file may raise anything
        raise RunError(f"{path} cannot be loaded ({first_line(error)}); name another {_KEY}") from error
    if dist.get_rank() == 0:
        print(f"weights from {path}", flush=True)


def _problem_of_reading(folder: Path, model: ParallelModel, may_lack: tuple[str, ...]) -> str | None:
    try:
        read_weights(folder, model, may_lack)
    except Exception as error:  # a damaged file may raise anything
        return str(error).strip() or type(error).__name__
    return None
