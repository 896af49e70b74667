"""Checkpoints that are complete or absent, loadable in any layout.

``<folder>/step-<N>/`` holds the sharded tensors that torch.distributed.checkpoint writes and ``run.json``: the step,
the data cursor, the loss scaler and the configuration. It is written as ``step-<N>.unfinished``, flushed to disk and
renamed, so a crash at any instant leaves the checkpoints before it whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from titan_like.checkpoint.reader import TensorReader
from titan_like.config.errors import RunError
from titan_like.config.schema import JobConfig
from titan_like.parallel.model import ParallelModel

_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


@dataclass(frozen=True)
class RunState:
    """The part of a checkpoint that is numbers, not tensors."""

    step: int
    consumed_samples: int  # the whole data cursor
    consumed_tokens: int
    skipped_steps: int  # steps whose update was left out; the learning rate does not count them
    loss_scale: float
    loss_scale_good_steps: int
    model: dict[str, Any]  # the resolved shape
    config: dict[str, Any]  # the whole configuration


def checkpoint_folder(config: JobConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.checkpoint.folder or Path(config.job.dump_folder) / "checkpoint")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of one checkpoint."""
    return folder / f"step-{step}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def save_checkpoint(
    folder: Path, model: ParallelModel, optimizer: torch.optim.Optimizer, run: RunState, keep_latest: int = 0
) -> Path:
    """Write a checkpoint. Every rank calls it; when it returns, the checkpoint is on disk.

    ``keep_latest`` above 0 then removes all but that many: this one and the newest before it.
    """
    final = checkpoint_path(folder, run.step)
    unfinished = final.with_name(final.name + _UNFINISHED)
    is_writer = dist.get_rank() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        unfinished.mkdir()
    dist.barrier()
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer) | rng_tensors()
    try:
        dcp.save(tensors, storage_writer=FileSystemWriter(unfinished, sync_files=True))
    except CheckpointException as error:
        raise RunError(f"{final} cannot be written ({_cause(error)}); the checkpoints before it are whole") from error
    if is_writer:
        _write_durably(unfinished / "run.json", json.dumps(asdict(run), indent=2))
        _flush_folder(unfinished)
        if final.exists():  # a run that went back with load_step passes this step again
            os.rename(final, final.with_name(final.name + _REPLACED))
        os.rename(unfinished, final)
        _flush_folder(folder)
        steps = complete_steps(folder)
        kept = [step for step in steps if step <= run.step][-keep_latest:]  # the run may have gone back with load_step
        for step in sorted(set(steps) - set(kept)) if keep_latest else []:
            path = checkpoint_path(folder, step)
            os.rename(path, path.with_name(path.name + _UNFINISHED))
        sweep(folder)
    dist.barrier()
    return final


def sweep(folder: Path) -> None:
    """Remove what interrupted saves left; a checkpoint whose replacement never arrived gets its name back.

    One process calls it, while no other writes to the folder.
    """
    for path in folder.glob(f"step-*{_REPLACED}"):
        original = path.with_name(path.name.removesuffix(_REPLACED))
        if original.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, original)
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path)


def load_checkpoint(
    path: Path, model: ParallelModel | nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> RunState:
    """Read a checkpoint into the model, the optimizer and this rank's random generators, in any layout.

    Random generators are restored where the checkpoint holds this rank's state. Without an optimizer only weights are
    read. Damaged files raise an exception of no particular type, on every rank.
    """
    run = read_run_state(path)
    reader = TensorReader(path)
    stored = reader.read_metadata().state_dict_metadata  # here, for its own error: torch's loading hides it
    tensors = model_tensors(model)
    if optimizer is not None:
        optimizer.state.clear()
        if run.step > run.skipped_steps:  # before the first update there is no state
            materialise_optimizer_state(optimizer)
        tensors |= optimizer_tensors(model, optimizer)
        tensors |= {name: tensor for name, tensor in rng_tensors().items() if name in stored}
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # no Exception but a BaseException, raised on every rank
        raise RuntimeError(_cause(error)) from error
    if isinstance(model, ParallelModel):
        _update_copies(model, optimizer)
    if optimizer is not None:
        _restore_rng(tensors)
    return run


@torch.no_grad()
def _update_copies(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> None:
    """A table that this process holds twice was read once."""
    for copy, original in model.copies():
        copy.copy_(original)
        if optimizer is not None:
            for key, value in optimizer.state.get(original, {}).items():
                optimizer.state[copy][key].copy_(value)


def unreadable(path: Path) -> str | None:
    """Why this process cannot read what describes a checkpoint; None where it can. Tensors are not read."""
    try:
        read_run_state(path)
        TensorReader(path).read_metadata()
    except Exception as error:  # whatever a damaged file raises
        return str(error).strip() or type(error).__name__
    return None


def _cause(error: CheckpointException) -> str:
    """The first rank's reason, in one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {str(cause).strip() or type(cause).__name__}".splitlines()[0]


def read_run_state(path: Path) -> RunState:
    """The numbers of a checkpoint."""
    return RunState(**json.loads((path / "run.json").read_text(encoding="utf-8")))


def model_tensors(model: ParallelModel | nn.Module) -> dict[str, torch.Tensor]:
    """Weights by name; a sharded weight is a DTensor that knows its place in the whole."""
    return {f"model.{name}": parameter.detach() for name, parameter in _by_name(model).items()}


def optimizer_tensors(model: ParallelModel | nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state by the name of its parameter."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _by_name(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _by_name(model: ParallelModel | nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name; of a table's copies the first."""
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameters.setdefault(name, parameter)
    return parameters


def materialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, by a step that changes nothing."""
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = lr


def rng_tensors() -> dict[str, torch.Tensor]:
    """State of this rank's random generators."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"rng.cpu.rank{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.rank{rank}"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(tensors: dict[str, torch.Tensor]) -> None:
    for name, state in tensors.items():
        if name.startswith("rng.cpu."):
            torch.set_rng_state(state)
        elif name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(state)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
