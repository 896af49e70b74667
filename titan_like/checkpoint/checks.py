"""Checks before a run starts: its folders are writable, and a checkpoint belongs to the run."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from titan_like.checkpoint import step_folders
from titan_like.checkpoint.changes import schedule_of
from titan_like.config.errors import ConfigError, require
from titan_like.config.schema import Data, JobConfig, LoRA
from titan_like.config.urls import RemotePath
from titan_like.data.text.tokenizer import build_tokenizer, tokenizer_in
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import filled_shape
from titan_like.optim.schedule import check_decay
from titan_like.optim.state_size import optimizer_state


class OtherRunError(ConfigError):
    """A checkpoint in the run's folder belongs to another model, optimizer or data."""


_MAY_CHANGE = {"dropout"}
_OF_LENGTH = ("training.seq_len", "training.decoder_seq_len", "model.overrides.max_seq_len")
# Optimizer state fits only its own optimizer, and the data cursor counts samples of the same data in the same order.
_MUST_STAY = {
    "optimizer": ("name", "beta1"),
    "job": ("seed",),
    "training": ("seq_len", "decoder_seq_len"),
    "lora": ("rank", "alpha", "modules"),
    "data": (
        *("dataset", "options", "split", "tokenizer", "mlm_probability", "mlm_whole_words", "mlm_max_ngram"),
        *("noise_density", "mean_noise_span_length", "sentence_objective"),
    ),
}


def check_same_run(path: Path, config: JobConfig, model: TransformerConfig, resumes: bool = True) -> None:
    """Refuse a checkpoint of another model and, if the run ``resumes`` from it, of another optimizer or data.

    A damaged checkpoint passes and fails when it is loaded. Raises an `OtherRunError` for the first difference.
    """
    try:
        state = step_folders.read_run_state(path)
    except (OSError, ValueError):
        return
    compared, now = _of_model(state, config, model), config.model_dump(mode="json")
    then = {"lora": LoRA().model_dump()} | state.config  # older versions had none
    if resumes and state.step > 0:  # at step 0 there is no cursor and no optimizer state
        of_run = ((section, key) for section, keys in _MUST_STAY.items() for key in keys)
        compared += [(f"{s}.{key}", now[s][key], then[s].get(key, now[s][key])) for s, key in of_run]
    for key, value, saved in compared:
        if key == "data.tokenizer" and value != saved and _is_copied(value, path, config.data):
            continue
        if value != saved:
            then_text = "none" if saved is None else saved
            hint = "keep that, or name another folder"
            if key in _OF_LENGTH or key.startswith("model.overrides.rope_"):
                hint = f'keep that, or start a run from these weights: model.from = "{path}", another job.dump_folder'
            if key == "model.overrides.max_seq_len" and "max_seq_len" not in model.not_in_weights:
                hint = "that many positions are learned; keep that, and training.seq_len within it"
            raise OtherRunError(key, value, f"{path} was saved with {then_text}; {hint}")


def _is_copied(spec: str, path: Path, section: Data) -> bool:
    """Whether a tokenizer has the same tokens for every text as the checkpoint's."""
    try:
        stored = tokenizer_in(path)
        specs = () if stored is None else (spec, stored)
        return len({build_tokenizer(name, options=section.token_options).digest for name in specs}) == 1
    except ConfigError:
        return False


def _of_model(state: step_folders.RunState, config: JobConfig, model: TransformerConfig) -> list[tuple[str, Any, Any]]:
    """(setting, value, value in the checkpoint) for the model's family and shape."""
    shape, fields = model.model_dump(mode="json"), type(model).model_fields
    family = ("model.family", config.model.family, state.config["model"]["family"])
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in shape}
    saved = defaults | filled_shape(family[2], state.model)  # an older one may lack a newer field
    return [family, *((f"model.overrides.{k}", v, saved[k]) for k, v in shape.items() if k not in _MAY_CHANGE)]


def usable_steps(folder: Path, load_step: int | None) -> list[int]:
    """The steps of a run's checkpoints, or only ``load_step``. Raises a `ConfigError` if that is missing."""
    steps = step_folders.complete_steps(folder)
    if load_step is None:
        return steps
    hint = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
    require(load_step in steps, "checkpoint.load_step", load_step, f"no such checkpoint in {folder}; {hint}")
    return [load_step]


def saved_state(config: JobConfig) -> step_folders.RunState | None:
    """The newest readable `run.json` from which a run may resume; None without one. `resume` reports damaged ones."""
    folder = step_folders.checkpoint_folder(config)
    for step in reversed(usable_steps(folder, config.checkpoint.load_step) if config.checkpoint.enable else []):
        with suppress(OSError, ValueError):
            return step_folders.read_run_state(step_folders.checkpoint_path(folder, step))
    return None


def check_writable(key: str, folder: Path, make: bool) -> None:
    """Refuse a folder, which setting ``key`` names, that cannot be written to. If ``make``, create it."""
    if isinstance(folder, RemotePath):
        probe = folder / f".probe-{uuid4().hex}"
        try:
            probe.exists()
            if make:
                probe.write_bytes(b"")
                probe.unlink()
        except OSError as error:
            reason = f"cannot be written to ({error.strerror}); correct the URL, the credentials or the network"
            raise ConfigError(key, str(folder), reason) from None
        return
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        reason = f"the folder cannot be created ({error.strerror}); name one that you may write to"
        raise ConfigError(key, str(folder), reason) from None
    reason = f"the folder cannot be created ({parent} is a file); name one that you may write to"
    require(parent.is_dir(), key, str(folder), reason)
    require(os.access(parent, os.W_OK), key, str(folder), f"the folder {parent} is not writable; name one that is")


def check_checkpoints(config: JobConfig, model: TransformerConfig, folder: Path, make: bool) -> bool:
    """Check that the run can save to its checkpoint folder and resume from it. If ``make``, create the folder.

    Returns whether there is a checkpoint to resume from. Raises a `ConfigError` if the folder cannot be used, its
    checkpoints belong to another run, or the learning rate's decay does not fit the resumed run.
    """
    check_writable("checkpoint.folder", folder, make)
    steps = usable_steps(folder, config.checkpoint.load_step)
    if config.training.epochs is None:  # else the length depends on the data
        check_schedule(config)
    for step in steps[-1:]:
        check_same_run(step_folders.checkpoint_path(folder, step), config, model)
    return bool(steps)


def check_schedule(config: JobConfig) -> None:
    """Raise a `ConfigError` if the learning rate's decay does not fit the new or resumed run."""
    schedule = schedule_of(config, saved_state(config))
    check_decay(schedule.shape, schedule.length)


def check_room(folder: Path, needed: int) -> None:
    """Refuse a checkpoint folder whose disk has no room for a checkpoint of ``needed`` bytes."""
    if isinstance(folder, RemotePath):
        return
    free = shutil.disk_usage(folder).free + step_folders.leftover_bytes(folder)
    reason = f"a checkpoint needs {needed / 2**30:.3g} GiB, but the disk has {free / 2**30:.3g} GiB left"
    require(free >= needed, "checkpoint.folder", str(folder), f"{reason}; make room, or name a folder on another disk")


def checkpoint_bytes(config: JobConfig, model: TransformerConfig) -> int:
    """Approximate size of a checkpoint: master weights and optimizer state, as for the layers' matrices."""
    element, state = 8 if config.training.dtype == "float64" else 4, optimizer_state(config.optimizer)
    trained = model.num_parameters()
    if config.lora.rank:
        from titan_like.parallel.lora import adapter_parameters

        trained = adapter_parameters(model, config.lora)
    return int(element * trained * (1 + state.layers.element))
