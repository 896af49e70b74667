"""Loading checkpoints in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titan_like.checkpoint.lock import hold
from titan_like.checkpoint.reader import TensorReader
from titan_like.checkpoint.step_folders import RunState, checkpoint_path, complete_steps, read_run_state, sweep
from titan_like.checkpoint.tensor_names import (
    forget_state,
    materialise_optimizer_state,
    model_tensors,
    optimizer_tensors,
    restore_rng,
    rng_tensors,
)
from titan_like.config.errors import RunError, first_line
from titan_like.parallel.model import ParallelModel


def resume(
    folder: Path, is_usable: Callable[[int], bool], model: ParallelModel, optimizer: torch.optim.Optimizer
) -> RunState | None:
    """Load the newest checkpoint for which ``is_usable(step)`` holds and which is not damaged; print those that are.

    Every rank calls it. It also locks the folder against other runs. Returns None if the folder has no usable
    checkpoint.

    Raises:
        RunError: there are usable checkpoints but none of them loads, or another run writes to the folder.
    """
    found: list[list[int]] = [[]]
    taken = f"another run writes to {folder}; stop it, or set checkpoint.folder to another one"
    refusal: list[str | None] = [hold(folder, taken) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise RunError(refusal[0])
    if dist.get_rank() == 0:
        for name in sweep(folder):
            print(f"checkpoint {folder / name} was never completed and has been removed", flush=True)
        found = [[step for step in complete_steps(folder) if is_usable(step)]]
    dist.broadcast_object_list(found, src=0)  # listings of a network file system may lag behind on other nodes
    for step in reversed(found[0]):
        path = checkpoint_path(folder, step)
        try:
            agree(unreadable(path))  # else ranks that can read it would wait in the collective load
            state = load_checkpoint(path, model, optimizer)
        except Exception as error:  # whatever a damaged file raises
            if dist.get_rank() == 0:
                print(f"checkpoint {path} is damaged and is not used ({first_line(error)})", flush=True)
            continue
        if dist.get_rank() == 0:
            print(f"resumed from {path}", flush=True)
        return state
    if not found[0]:
        return None
    if len(found[0]) == 1:
        raise RunError(f"{path} cannot be loaded; choose another checkpoint.load_step, or move it away to start anew")
    raise RunError(f"none of the checkpoints in {folder} can be loaded; move them away to start anew")


def load_checkpoint(
    path: Path,
    model: ParallelModel | nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    may_lack: tuple[str, ...] = (),
) -> RunState:
    """Load a checkpoint into the model, the optimizer and this rank's random generators, in any layout.

    Random generators are restored if the checkpoint has the state of this rank. Without an optimizer only weights are
    loaded. Weights of the modules ``may_lack`` stay as they are if the checkpoint does not have them.

    Raises:
        Exception: of any type, on every rank, if a file is damaged.
    """
    run = read_run_state(path)
    reader = TensorReader(path)
    stored = reader.read_metadata().state_dict_metadata  # read here for its own error, which dcp.load hides
    new = tuple(f"model.{name}." for name in may_lack)
    tensors = {
        name: tensor for name, tensor in model_tensors(model).items() if name in stored or not name.startswith(new)
    }
    if optimizer is not None:
        forget_state(optimizer)
        if any(name.startswith("optimizer.") for name in stored):  # before the first update there is no state
            materialise_optimizer_state(optimizer)
        tensors |= optimizer_tensors(model, optimizer)
        tensors |= {name: tensor for name, tensor in rng_tensors().items() if name in stored}
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException, raised on every rank
        raise RuntimeError(first_failure(error)) from error
    if isinstance(model, ParallelModel):
        _update_copies(model, optimizer)
    if optimizer is not None:
        restore_rng(tensors)
    return run


def unreadable(path: Path) -> str | None:
    """Why this process cannot read the metadata of a checkpoint; None if it can. Does not read tensors."""
    try:
        read_run_state(path)
        TensorReader(path).read_metadata()
    except Exception as error:  # whatever a damaged file raises
        return first_line(error)
    return None


def first_failure(error: CheckpointException) -> str:
    """The reason of the first rank that failed, in one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    seen: BaseException | None = cause
    while seen is not None and not isinstance(seen, OSError):  # torch's writer hides the system's error
        seen = seen.__cause__ or seen.__context__
    cause = seen or cause
    return f"rank {rank}: {first_line(cause)}"


def agree(problem: str | None) -> None:
    """Raise on every rank if any rank has a problem. Every rank calls it.

    Raises:
        RuntimeError: the first rank's problem.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise RuntimeError(f"rank {rank}: {text}")


@torch.no_grad()
def _update_copies(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy tied tables that this process holds twice, because only one of them was loaded."""
    for copy, original in model.copies():
        copy.copy_(original)
        if optimizer is not None:
            for key, value in optimizer.state.get(original, {}).items():
                optimizer.state[copy][key].copy_(value)
