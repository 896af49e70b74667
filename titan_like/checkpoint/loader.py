"""Tensors of a run by their names in a checkpoint, and loading them in any layout or one by one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from titan_like.checkpoint import step_folders
from titan_like.checkpoint.best import names_best
from titan_like.checkpoint.reader import TensorReader
from titan_like.config.errors import ConfigError, RunError, first_line, require
from titan_like.config.paths import unreadable_reason
from titan_like.config.schema import Data, TokenOptions
from titan_like.config.urls import StorageError
from titan_like.models.hugging_face import family_module
from titan_like.models.layers.init import local_parts
from titan_like.models.registry import config_class
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.shards import ShardedOptimizer
from titan_like.parallel.model import ParallelModel
from titan_like.torch_private import LocalShardsWrapper, StridedShard, with_local_tensor

T = TypeVar("T")
_BUFFERS = "buffers."
_TIME_TO_END = 10.0  # seconds to wait for a stopped job to end
_TOKEN_KEYS = ("dataset", "tokenizer", *TokenOptions._fields)


def model_tensors(model: ParallelModel | nn.Module, base: bool = False) -> dict[str, torch.Tensor]:
    """Weights by name, as DTensors if they are sharded, and persistent buffers, such as the loads of experts.

    With ``base``, the weights of a model without adapters, else the trained weights.
    """
    modules = [model] if isinstance(model, nn.Module) else [stage.module for stage in model.stages]
    params = {name for module in modules for name, _ in module.named_parameters()}
    buffers = {name: value for module in modules for name, value in module.state_dict().items() if name not in params}
    weights = _by_name(model, base)
    return {f"model.{name}": parameter.detach() for name, parameter in weights.items()} | {
        f"{_BUFFERS}{name}": value for name, value in buffers.items()
    }


def optimizer_tensors(model: ParallelModel | nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state by the name of its parameter."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _by_name(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def in_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with shards of several parts as a `LocalShardsWrapper`, which torch's checkpoints support."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor
        if isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], StridedShard):
            parts = local_parts(tensor)
            shards = LocalShardsWrapper([part for part, _ in parts], [offset for _, offset in parts])
            result[name] = with_local_tensor(tensor, shards)
    return result


def _by_name(model: ParallelModel | nn.Module, base: bool = False) -> dict[str, nn.Parameter]:
    """Parameters by name, as in `model_tensors`; only the first copy of a tied table."""
    parameters: dict[str, nn.Parameter] = {}
    named = model.base_parameters() if base and isinstance(model, ParallelModel) else model.named_parameters()
    for name, parameter in named:
        parameters.setdefault(name, parameter)
    return parameters


def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Free an optimizer's state."""
    if isinstance(optimizer, FusedAdamW):
        optimizer.forget_state()
    else:
        optimizer.state.clear()


def materialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state by a step with learning rate 0, which changes no weight."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.init_state()  # without the collectives of a step
        return
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = lr


def hold_folder(key: str, folder: Path, lock: Path) -> None:
    """Lock a folder, which the setting ``key`` names, until `release` or the end of rank 0's process.

    Every rank calls this. The lock file is next to the path ``lock``. Raises a `ConfigError` if another job has locked
    the folder and does not end soon, or if the lock cannot be used.
    """
    taken = "another job writes to this folder; stop it, or name another folder"
    refusal = None
    if dist.get_rank() == 0:
        refusal = step_folders.hold(lock, taken, 0.0)
        if refusal == taken:
            print(f"another job is writing to {folder}; waiting {_TIME_TO_END:.0f} s for it to end", flush=True)
            refusal = step_folders.hold(lock, taken, _TIME_TO_END)
    refusal = from_first_rank(refusal)
    require(refusal is None, key, str(folder), refusal or "")


def from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """The ``value`` of rank 0 on every rank of ``group``, by default of the job."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def resume(
    folder: Path, is_usable: Callable[[int], bool], model: ParallelModel, optimizer: torch.optim.Optimizer
) -> step_folders.RunState | None:
    """Load the newest undamaged checkpoint for which ``is_usable(step)`` is true, and print the damaged ones.

    Every rank calls this. It first locks the folder, as `hold_folder` does. Returns None if the folder has no usable
    checkpoint. Raises a `RunError` if there are usable checkpoints but none of them loads.
    """
    hold_folder("checkpoint.folder", folder, folder)
    usable: list[int] = []
    if dist.get_rank() == 0:
        for name in step_folders.sweep(folder):
            print(f"checkpoint {folder / name} was never completed and has been removed", flush=True)
        usable = [step for step in step_folders.complete_steps(folder) if is_usable(step)]
    usable = from_first_rank(usable)  # listings of a network file system may lag behind on other nodes
    for step in reversed(usable):
        path = step_folders.checkpoint_path(folder, step)
        try:
            state = load_checkpoint(path, model, optimizer, reader=readable_by_all(path))
        except Exception as error:  # whatever a damaged file raises
            if dist.get_rank() == 0:
                print(f"checkpoint {path} is damaged and is not used ({first_line(error)})", flush=True)
            continue
        if dist.get_rank() == 0:
            print(f"resumed from {path}", flush=True)
        return state
    if not usable:
        return None
    if len(usable) == 1:
        raise RunError(f"{path} cannot be loaded; choose another checkpoint.load_step, or move it away to start anew")
    raise RunError(f"none of the checkpoints in {folder} can be loaded; move them away to start anew")


def load_checkpoint(
    path: Path,
    model: ParallelModel | nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    may_lack: tuple[str, ...] = (),
    base: bool = False,
    reader: TensorReader | None = None,
) -> step_folders.RunState:
    """Load a checkpoint into the model and the optimizer, in any layout.

    Without an optimizer only weights and buffers are loaded, with ``base`` as in `model_tensors`. Weights of the
    modules ``may_lack``, and buffers, keep their values if the checkpoint lacks them. ``reader`` may have read the
    metadata already. If a file is damaged, every rank raises an exception of any type.
    """
    run = step_folders.read_run_state(path)
    reader = reader or TensorReader(path)
    stored = reader.read_metadata().state_dict_metadata  # read here for its own error, which dcp.load hides
    new = (_BUFFERS, *(f"model.{name}." for name in may_lack))
    tensors = model_tensors(model, base)
    tensors = {name: tensor for name, tensor in tensors.items() if name in stored or not name.startswith(new)}
    if optimizer is not None:
        forget_state(optimizer)
        if any(name.startswith("optimizer.") for name in stored):  # before the first update there is no state
            materialise_optimizer_state(optimizer)
        tensors |= optimizer_tensors(model, optimizer)
    try:
        dcp.load(in_parts(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException, raised on every rank
        raise RuntimeError(first_failure(error)) from error
    if isinstance(model, ParallelModel):
        model.update_copies()
        if optimizer is not None:
            for copy, original in model.copies():
                for key, value in optimizer.state.get(original, {}).items():
                    optimizer.state[copy][key].copy_(value)
    return run


def readable_by_all(path: Path) -> TensorReader:
    """A reader of a checkpoint, with its metadata. Every rank calls this.

    Raises a `RunError` on every rank if one of them cannot read it, or the others would wait for it in the load.
    """
    reader = TensorReader(path)
    agree(unreadable(path, reader))
    return reader


def unreadable(path: Path, reader: TensorReader | None = None) -> str | None:
    """Why this process cannot read the metadata of a checkpoint; None if it can. Does not read tensors."""
    try:
        step_folders.read_run_state(path)
        (reader or TensorReader(path)).read_metadata()
    except StorageError:  # not damage: the job ends instead of resuming from an older checkpoint
        raise
    except Exception as error:  # whatever a damaged file raises
        return first_line(error)
    return None


def first_failure(error: BaseException) -> str:
    """The first line of an error, or the reason of the first rank that failed."""
    if not isinstance(error, CheckpointException):
        return first_line(error)
    rank, (cause, _) = next(iter(error.failures.items()))
    seen: BaseException | None = cause
    while seen is not None and not isinstance(seen, OSError):  # torch's writer hides the system's error
        seen = seen.__cause__ or seen.__context__
    cause = seen or cause
    return f"rank {rank}: {first_line(cause)}"


@contextmanager
def reading(path: Path, hint: str = "") -> Iterator[None]:
    """Turn any error of a damaged checkpoint into a `RunError`, which ends with ``hint``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
            yield
    except (CheckpointException, Exception) as error:  # the former is a BaseException
        raise RunError(f"{path} cannot be loaded ({first_failure(error)}){hint}") from error


def on_each_rank(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> str | None:
    """Run an action on files on every rank. Returns the first rank's error on every rank, or None."""
    reason = None
    try:
        action()
    except Exception as error:  # a damaged file may raise anything
        reason = first_line(error)
    return first_reason(reason, group)


def agree(reason: str | None) -> None:
    """Raise a `RunError` with the first rank's reason on every rank if any rank fails. Every rank calls this."""
    if failure := first_reason(reason):
        raise RunError(failure)


def first_reason(reason: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """The first rank that gives a reason, with that reason, on every rank; None if no rank gives one.

    ``group`` has all ranks. Reasons are not gathered, which would take each rank a message from every other.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    first = torch.tensor(size if reason is None else rank, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if first == size:
        return None
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=int(first), group=group)
    return f"rank {int(first)}: {reasons[0]}"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like one checkpoint."""
    return unreadable_reason(path / step_folders.RUN_FILE) is None


def one_checkpoint(path: Path, key: str) -> Path:
    """``path`` if it is a step-N folder, or the newest checkpoint in it or in its folder "checkpoint".

    Raises a `ConfigError` about the setting ``key`` if there is no checkpoint.
    """
    newest = step_folders.newest_in(path)
    if newest != path or is_checkpoint(path):
        return newest
    hint = "name a step-N folder, a folder of them, or the dump folder of a run with checkpoint.enable"
    raise ConfigError(key, str(path), reason_without_checkpoints(path, hint))


def reason_without_checkpoints(path: Path, hint: str) -> str:
    """Why a path is not a folder of checkpoints, as the predicate of a sentence that ends with ``hint``."""
    if names_best(path):
        return "no checkpoint in that folder has a validation loss; train with checkpoint.keep_best, or leave out /best"
    if is_checkpoint(path):
        return f"is a checkpoint itself; leave out checkpoint.load_step, or name the folder {path.parent}"
    if (path / "config.json").is_file():
        return "is a Hugging Face folder, not a checkpoint; set model.from to it"
    if not path.is_dir():
        return f"{'is a file' if path.exists() else 'no such folder'}; {hint}"
    names = sorted(file.name for file in path.iterdir())
    content = f"only {', '.join(names[:3])}{' and so on' if len(names) > 3 else ''}" if names else "it is empty"
    return f"contains no checkpoint ({content}); {hint}"


class CheckpointWeights:
    """The model description and the weights of a checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read the metadata. Raises a `RunError` if it is damaged or inconsistent."""
        self.path = path
        with reading(path):
            self.run = step_folders.read_run_state(path)
            self.family: str = self.run.config["model"]["family"]
            data = {name: value for name, value in self.run.config["data"].items() if name in _TOKEN_KEYS}
            self.data = Data.model_validate(data)  # only the keys that determine the tokens of a text
            self.model = config_class(self.family).model_validate(self.run.model)
            self._reader = TensorReader(path)
            self._stored = self._reader.read_metadata().state_dict_metadata
            self._check()

    def read(self, name: str) -> torch.Tensor:
        """One full weight by its name in the model; a `RunError` if its file is damaged."""
        key = f"model.{name}" if f"model.{name}" in self._stored else f"{_BUFFERS}{name}"
        stored = self._stored[key]
        assert isinstance(stored, TensorStorageMetadata)  # checked before
        with reading(self.path):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor

    def _check(self) -> None:
        if self.run.base:  # it has only adapters
            return
        described = set()
        for parameter in family_module(self.family).stored_parameters(self.model):
            name = parameter.key
            stored = self._stored.get(name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != parameter.shape:
                raise ValueError(f"run.json describes a {name} of shape {list(parameter.shape)}, which is not there")
            described.add(name)
        for name in self._stored:
            if name.startswith("model.") and name not in described:
                reason = f"stored_parameters of {self.family!r} does not describe {name!r} for the shape in run.json"
                raise ValueError(reason)
