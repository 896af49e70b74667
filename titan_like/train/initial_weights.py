"""Weights from a checkpoint or a Hugging Face folder with which a new run begins."""

import os
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titan_like.checkpoint.loader import is_checkpoint, load_checkpoint, on_each_rank, readable_by_all
from titan_like.checkpoint.step_folders import RunState, read_run_state
from titan_like.config.errors import RunError, first_line, require
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig, LoRA
from titan_like.config.urls import is_url, path_of
from titan_like.data.text.special_tokens import read_json
from titan_like.hugging_face.folder import local_folder, open_hugging_face
from titan_like.hugging_face.peft import ADAPTER_CONFIG, base_of, check_peft, fingerprint, is_peft, read_peft
from titan_like.hugging_face.start import free_fields, plain, read_start, read_weights
from titan_like.models.config import TransformerConfig
from titan_like.parallel.model import ParallelModel

_KEY = "checkpoint.initial_load_path"


def check_initial_weights(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a `checkpoint.initial_load_path` without weights of this model. Reads no tensors."""
    text = config.checkpoint.initial_load_path
    hint = f"adapters need the weights that they adapt; name them by model.from or {_KEY}"
    require(text is not None or not config.lora.rank, "lora.rank", config.lora.rank, hint)
    if text is None:
        return
    key = _key(config)
    path, named, ignore = initial_folder(text, key), local_folder(text, key), config.model.ignore_fields
    start = read_start(text, key, ignore)
    if is_peft(named):
        fields = read_json(named / ADAPTER_CONFIG)
        hint = f"{text} holds adapters; set it to {fields.get('r', 8)}, and lora.alpha to {fields.get('lora_alpha', 8)}"
        require(config.lora.rank, "lora.rank", config.lora.rank, hint)
        check_peft(named, path, key, model, config.lora)
    if is_checkpoint(path):
        base = read_run_state(path).base
        hint = f"holds adapters of {base.get('folder')} alone; merge them by scripts/convert.py to-hf --merge"
        require(not base, key, text, hint)
    else:
        open_hugging_face(path, key, ignore)
    is_same = start.family == config.model.family
    require(is_same, "model.family", config.model.family, f'{path} holds a "{start.family}"; choose that')
    free = free_fields(config, model, start)
    values = plain(model.model_dump(mode="json"))
    for name in type(model).model_fields:
        value, stored_value = values.get(name), start.shape.get(name)
        reason = f"{path} holds weights of a model with {stored_value}; set it to that, or name another {key}"
        require(name in free or stored_value == value, f"model.overrides.{name}", value, reason)


def _key(config: JobConfig) -> str:
    """The setting that names the initial weights."""
    return "model.from" if config.model.from_ else _KEY


def with_base(config: JobConfig, state: RunState) -> JobConfig:
    """The configuration of a run that resumes adapters, with their own base in place of a folder that is gone or of a
    run's folder, which may have a newer checkpoint by now.
    """
    text = str(config.checkpoint.initial_load_path)
    path, base = path_of(text if is_url(text) else os.path.abspath(text)), path_of(state.base.get("folder", text))
    if path.exists() and base.parent not in (path, path / "checkpoint"):
        return config
    return edit(config, {"checkpoint.initial_load_path": str(base)})


def check_base(config: JobConfig, state: RunState) -> None:
    """Refuse to resume adapters on other weights than they were trained on."""
    text, base = config.checkpoint.initial_load_path, state.base
    reason = f"the adapters of step {state.step} were trained on {base.get('folder')}, and these are others; name that"
    require(base_state(str(text))["fingerprint"] == base.get("fingerprint"), _key(config), text, reason)


def base_state(path: str) -> dict[str, str]:
    """`RunState.base` for the weights, or the PEFT folder, that `checkpoint.initial_load_path` names."""
    adapters = {"adapters": path} if is_peft(local_folder(path, _KEY)) else {}
    return {"folder": base_of(path, _KEY), "fingerprint": fingerprint(initial_folder(path))} | adapters


def initial_folder(path: str, key: str = _KEY) -> Path:
    """The folder of weights that `checkpoint.initial_load_path` names; one of the hub is downloaded, once."""
    return local_folder(base_of(path, key), key)


def load_adapters(path: str, model: ParallelModel, section: LoRA) -> None:
    """Read the adapters of a PEFT folder, if it is one, into a model in any layout."""
    if is_peft(folder := local_folder(path, _KEY)):
        read_peft(folder, initial_folder(path), model, section)
        if dist.get_rank() == 0:
            print(f"adapters from {path}", flush=True)


def load_initial_weights(path: str, model: ParallelModel, ignore: Collection[str] = ()) -> None:
    """Read weights into a model in any layout. Every rank reads its part. Damaged files raise a `RunError`."""
    folder, may_lack = initial_folder(path), model.stages[0].module.may_be_new
    try:
        if is_checkpoint(folder):
            load_checkpoint(folder, model, may_lack=may_lack, base=True, reader=readable_by_all(folder))
        elif reason := on_each_rank(partial(read_weights, folder, model, may_lack, ignore)):
            raise RunError(reason)
    except Exception as error:  # a damaged file may raise anything
        raise RunError(f"{path} cannot be loaded ({first_line(error)}); name another {_KEY}") from error
    if dist.get_rank() == 0:
        print(f"weights from {folder}", flush=True)
