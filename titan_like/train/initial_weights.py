"""Weights from a checkpoint or a Hugging Face folder with which a new run begins."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.checkpoint.loader import agree, is_checkpoint, load_checkpoint, model_tensors, unreadable
from titan_like.checkpoint.step_folders import RUN_FILE, RunState, complete_steps, read_run_state
from titan_like.config.errors import ConfigError, RunError, first_line, require
from titan_like.config.paths import file_problem
from titan_like.config.schema import JobConfig, LoRA
from titan_like.data.special_tokens import read_json
from titan_like.hugging_face.folder import is_hugging_face, local_folder, open_hugging_face, slice_reader
from titan_like.hugging_face.peft import ADAPTER_CONFIG, base_of, check_peft, fingerprint, is_peft, read_peft
from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import fill_part
from titan_like.models.layers.init import local_parts
from titan_like.parallel.model import ParallelModel

_KEY = "checkpoint.initial_load_path"


def check_initial_weights(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a `checkpoint.initial_load_path` without weights of this model. Reads no tensors."""
    text = config.checkpoint.initial_load_path
    cure = f"adapters need the weights that they adapt; name them by {_KEY}"
    require(text is not None or not config.lora.rank, "lora.rank", config.lora.rank, cure)
    if text is None:
        return
    path, named = initial_folder(text), local_folder(text, _KEY)
    if is_peft(named):
        fields = read_json(named / ADAPTER_CONFIG)
        cure = f"{text} holds adapters; set it to {fields.get('r')}, and lora.alpha to {fields.get('lora_alpha')}"
        require(config.lora.rank, "lora.rank", config.lora.rank, cure)
        check_peft(named, _KEY, model, config.lora)
    may_differ = model.not_in_weights
    if is_checkpoint(path):
        problem = unreadable(path)
        require(not problem, _KEY, str(path), f"cannot be loaded ({problem}); name another checkpoint")
        state = read_run_state(path)
        cure = f"holds adapters of {state.base.get('folder')} alone; merge them by scripts/convert.py to-hf --merge"
        require(not state.base, _KEY, text, cure)
        family, shape = state.config["model"]["family"], state.model
    elif is_hugging_face(path):
        source = open_hugging_face(path, _KEY)
        family, shape = source.family, source.model.model_dump(mode="json")
        may_differ |= {"vocab_multiple"}
    else:
        problem = file_problem(path / RUN_FILE)
        is_readable = problem in (None, "does not exist")
        require(is_readable, _KEY, text, f"{path / RUN_FILE} {problem}; name a folder that you may read")
        steps = complete_steps(path)
        cure = f"name {path}/step-{steps[-1]}" if steps else "name one with run.json or with config.json"
        raise ConfigError(_KEY, text, f"neither a checkpoint's step-N folder nor a Hugging Face folder; {cure}")
    is_same = family == config.model.family
    require(is_same, "model.family", config.model.family, f'{path} holds a "{family}"; choose that')
    if "tokens" not in model.predictions:  # then there is no output matrix
        may_differ |= {"tied_embeddings"}
    for name, value in model.model_dump(mode="json").items():
        problem = f"{path} holds weights of a model with {shape.get(name)}; set it to that, or name another {_KEY}"
        require(name in may_differ or shape.get(name) == value, f"model.overrides.{name}", value, problem)


def check_base(config: JobConfig, state: RunState) -> None:
    """Refuse to go on with adapters on other weights than those that they were trained on."""
    text, base = config.checkpoint.initial_load_path, state.base
    problem = f"the adapters of step {state.step} were trained on {base.get('folder')}, and these are others; name that"
    require(base_state(str(text))["fingerprint"] == base.get("fingerprint"), _KEY, text, problem)


def base_state(path: str) -> dict[str, str]:
    """What `RunState.base` says of the weights that `checkpoint.initial_load_path` names."""
    return {"folder": base_of(path, _KEY), "fingerprint": fingerprint(initial_folder(path))}


def initial_folder(path: str) -> Path:
    """The folder of weights that `checkpoint.initial_load_path` names; one of the hub is downloaded, once."""
    return local_folder(base_of(path, _KEY), _KEY)


def load_adapters(path: str, model: ParallelModel, section: LoRA) -> None:
    """Read the adapters of a PEFT folder, if it is one, into a model in any layout."""
    if is_peft(folder := local_folder(path, _KEY)):
        read_peft(folder, model, section)
        if dist.get_rank() == 0:
            print(f"adapters from {path}", flush=True)


def load_initial_weights(path: str, model: ParallelModel) -> None:
    """Read weights into a model in any layout. Every rank reads its part; a `RunError` says if files are damaged."""
    folder = initial_folder(path)
    try:
        if is_checkpoint(folder):
            agree(unreadable(folder))  # all ranks fail together, or some would wait for the others in the load
            load_checkpoint(folder, model, may_lack=model.stages[0].module.may_be_new, base=True)
        else:
            agree(_read_hugging_face(folder, model))
    except Exception as error:  # a damaged file may raise anything
        raise RunError(f"{path} cannot be loaded ({first_line(error)}); name another {_KEY}") from error
    if dist.get_rank() == 0:
        print(f"weights from {folder}", flush=True)


@torch.no_grad()
def _read_hugging_face(folder: Path, model: ParallelModel) -> str | None:
    """Read this process's part of the weights. Returns the reason if that fails, else None."""
    try:
        source = open_hugging_face(folder, _KEY)
        shape = model.stages[0].module.config
        tensors = model_tensors(model, base=True)
        read = slice_reader(source.tensors)
        may_lack = tuple(f"{name}." for name in model.stages[0].module.may_be_new)
        for stored in source.stored_parameters(shape):
            tensor = tensors.get(f"model.{stored.name}")
            is_new = stored.name.startswith(may_lack) and not stored.sources.keys() <= source.tensors.keys()
            if tensor is not None and not is_new:  # otherwise another pipeline stage holds it
                for part, offset in local_parts(tensor):
                    fill_part(part, offset, stored, read)
        for copy, original in model.copies():
            copy.copy_(original)
    except Exception as error:  # a damaged file may raise anything
        return str(error).strip() or type(error).__name__
    return None
