"""Writes checkpoints, synchronously or while training continues."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titan_like.checkpoint import step_folders
from titan_like.checkpoint.loader import first_failure, from_first_rank, in_parts, on_each_rank
from titan_like.config.errors import first_line
from titan_like.config.monitoring import Checkpoint as CheckpointSection
from titan_like.config.urls import RemotePath
from titan_like.data.readers.unfinished import remove
from titan_like.optim.shards import local
from titan_like.torch_private import save_planner, with_local_tensor

Tensors = dict[str, torch.Tensor]
# Writes this rank's share of a checkpoint's Hugging Face folder: (checkpoint, folder, (rank, ranks)).
Export = Callable[[Path, Path, tuple[int, int]], object]

# While a thread writes, the training thread waits up to this long each time it reacquires the GIL. Python's default of
# 5 ms would slow down every operator.
_SWITCH_SECONDS = 0.0005


class SaveError(Exception):
    """A checkpoint could not be written; the message is one sentence, the same on every rank."""

    def __init__(self, sentence: str, saved: list[Path]) -> None:
        """``saved``: folders that are complete nevertheless."""
        super().__init__(sentence)
        self.saved = saved


def background_group() -> dist.ProcessGroup:
    """A process group of all ranks for the saving thread, whose collectives must not mix with training's.

    A rank connects only to those that it exchanges messages with, at the first. gloo's default is a connection between
    any two ranks, for which each rank reads n addresses of O(n) bytes from the job's store.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    return dist.new_group(backend="gloo")


class DurableFiles(FileSystem):
    """The files of a checkpoint that is being written; each is on disk once it is closed.

    Tensor files begin with a mark of their checkpoint, so that a file from another checkpoint is detected. torch's own
    readers work too, because the metadata has the offset of each tensor.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file. A tensor file gets the mark first."""
        with super().create_stream(path, mode) as stream:
            if mode == "wb" and str(path).endswith(DEFAULT_SUFFIX):
                stream.write(self.mark)
            yield stream
        if mode == "wb":  # not by torch's writer, which does not empty its own buffer before
            step_folders.flush(path)


class TensorWriter(FileSystemWriter):
    """torch's writer of tensors, to files of one checkpoint with the ``mark``; see `DurableFiles`."""

    def __init__(self, folder: Path, mark: str, single_file_per_rank: bool = True) -> None:
        super().__init__(folder, single_file_per_rank, sync_files=False)
        self.save_id, self.fs = mark, DurableFiles(mark)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata. torch then sends it to all ranks, where nothing reads it, so it is emptied."""
        super().finish(metadata, results)
        metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {}, None, None

    def storage_meta(self) -> StorageMeta:
        """The metadata's description of the checkpoint, as plain text, which is unpickled without a class."""
        return StorageMeta(str(self.path), self.save_id)


class Saver:
    """Writes the checkpoints of a run. All ranks call each method at the same point.

    With `checkpoint.async` a thread copies the tensors while the next step computes its gradients, then writes the
    copies while training continues, so only `before_update` may have to wait. Later saves reuse the buffers.

    A Hugging Face folder in ``exports_to`` is made from the step's checkpoint, or from one of weights alone that is
    removed again. Each rank writes a share of its files.
    """

    def __init__(self, folder: Path, section: CheckpointSection, exports_to: Path, export: Export) -> None:
        self.folder, self.keep_latest, self.in_background = folder, section.keep_latest, section.async_
        self.exports_to, self.export = exports_to, export
        # Created before training, where a failure costs least, and only for runs that save, because gloo polls.
        self._group = background_group() if section.enable or section.hugging_face_interval else None
        if section.hugging_face_interval and dist.get_rank() == 0:
            step_folders.sweep(exports_to)
        self._save: _Save | None = None
        self._copies: Tensors = {}
        self._plans = uuid4().hex  # key of the plans of earlier saves, which rank 0 keeps: many ranks' take minutes
        self.files: dict[str, bytes] = {}  # files that rank 0 adds to each checkpoint, by name
        # Called in the thread before it copies, with the event `_Save.is_awaited`.
        self.before_copy: Callable[[threading.Event], object] = lambda _: None

    def save(self, tensors: Tensors, run: step_folders.RunState, saves: bool = True, exports: bool = False) -> None:
        """Write a checkpoint, a Hugging Face folder or both, perhaps in the background; `finish` has the outcome."""
        assert self._save is None and self._group is not None
        self._due = [folder for folder, is_due in ((self.folder, saves), (self.exports_to, exports)) if is_due]
        self._save = _Save([step_folders.checkpoint_path(folder, run.step) for folder in self._due])
        self._saved: list[Path] = []
        if not self.in_background:
            self._save.reason = self._write(tensors, run)
            return
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        target = partial(self._copy_and_write, self._save, tensors, run, ready)
        self._save.thread = threading.Thread(target=target, name="checkpoint", daemon=True)
        self._save.thread.start()

    def before_update(self) -> None:
        """Wait until a running save has copied the tensors, so that they may change."""
        if self._save is not None and self._save.thread is not None:
            self._save.is_awaited.set()
            self._save.is_copied.wait()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing a checkpoint."""
        return self._save is not None and self._save.thread is not None and self._save.thread.is_alive()

    def finish(self) -> list[Path]:
        """Wait until the current save is done. Returns the folders that it wrote; empty if there was no save.

        Raises a `SaveError` if a folder could not be written. Earlier ones are untouched.
        """
        save, self._save = self._save, None
        if save is None:
            return []
        if save.thread is not None:
            save.is_awaited.set()
            save.thread.join()
        if save.crash is not None:
            raise save.crash
        if save.reason is not None:
            path = next(path for path in save.paths if path not in self._saved)
            raise SaveError(f"{path} is not saved ({save.reason}); earlier checkpoints are intact", self._saved)
        return self._saved

    def _copy_and_write(
        self, save: _Save, tensors: Tensors, run: step_folders.RunState, ready: torch.cuda.Event | None
    ) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            if ready is not None:
                torch.cuda.set_device(ready.device)  # a new thread is on GPU 0, and would create a context there
            self.before_copy(save.is_awaited)
            copies = self._copy(tensors, ready)
            save.is_copied.set()
            save.reason = self._write(copies, run)
        except BaseException as error:  # `finish` raises it
            save.crash = error
        finally:
            sys.setswitchinterval(interval)
            save.is_copied.set()

    def _copy(self, tensors: Tensors, ready: torch.cuda.Event | None) -> Tensors:
        """Copies of the tensors in host memory, with their values at the event ``ready``."""
        stream = None if ready is None else torch.cuda.Stream(ready.device)
        with torch.cuda.stream(stream):  # nothing without a stream
            if ready is not None:
                ready.wait()
            copies = {name: self._copy_one(name, tensor) for name, tensor in tensors.items()}
        if stream is not None:
            stream.synchronize()
        return copies

    @torch.no_grad()
    def _copy_one(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        part, copy = local(tensor), self._copies.get(name)
        if copy is None or copy.shape != part.shape or copy.dtype != part.dtype:
            copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
            self._copies[name] = copy
        copy.copy_(part, non_blocking=True)
        return with_local_tensor(tensor, copy) if isinstance(tensor, DTensor) else copy

    def _write(self, tensors: Tensors, run: step_folders.RunState) -> str | None:
        """Why a folder could not be written, the same on every rank; None if all are written."""
        exports, step = self.exports_to in self._due, run.step
        weights = step_folders.unfinished_path(self.exports_to, step) / "weights"  # removed again
        folder = self.folder if self.folder in self._due else weights
        reason = self._not_finite(tensors)
        if reason is None and exports:
            reason = self._on_first_rank(partial(step_folders.begin_checkpoint, self.exports_to, step))
        reason = reason or self._write_checkpoint(tensors, run, folder)
        if reason is None and exports:
            reason = self._write_export(step_folders.checkpoint_path(folder, step), weights, step)
        if reason is not None:
            for folder in self._due:
                self._on_first_rank(partial(step_folders.sweep, folder))
        return reason

    def _write_checkpoint(self, tensors: Tensors, run: step_folders.RunState, folder: Path) -> str | None:
        reason = self._on_first_rank(partial(step_folders.begin_checkpoint, folder, run.step))
        if reason is None:
            try:
                mark = from_first_rank(uuid4().hex, self._group)
                writer = TensorWriter(step_folders.unfinished_path(folder, run.step), mark)
                # One key on all ranks: rank 0 has no plan of theirs under a new one, and they would send it none.
                planner = save_planner(f"{self._plans} of {'weights' if folder != self.folder else 'everything'}")
                dcp.save(in_parts(tensors), storage_writer=writer, planner=planner, process_group=self._group)
            except CheckpointException as error:  # raised on every rank
                self._plans = uuid4().hex
                reason = self._explained(first_failure(error), tensors, folder)
        if reason is None:
            # After skipped steps the weights may be bad, so keep all older checkpoints.
            keep = self.keep_latest if run.consecutive_skips == 0 else 0
            reason = self._on_first_rank(partial(step_folders.complete_checkpoint, folder, run, keep, self.files))
        if reason is None and folder == self.folder:
            self._saved.append(step_folders.checkpoint_path(folder, run.step))
        return reason

    def _write_export(self, checkpoint: Path, weights: Path, step: int) -> str | None:
        """Write the Hugging Face folder of a checkpoint, perhaps one of weights alone, and remove ``weights``."""
        rank, unfinished = dist.get_rank(), weights.parent
        with TemporaryDirectory() if isinstance(unfinished, RemotePath) else nullcontext(unfinished) as name:
            folder = Path(name)
            write = partial(self.export, checkpoint, folder, (rank, dist.get_world_size()))
            reason = on_each_rank(write, self._group)
            reason = reason or self._on_first_rank(partial(remove, weights))
            if isinstance(unfinished, RemotePath):
                put = partial(step_folders.upload, folder, unfinished)
                for is_turn in (rank > 0, rank == 0):  # the file that makes it complete is rank 0's
                    reason = reason or on_each_rank(put if is_turn else lambda: None, self._group)
        reason = reason or self._on_first_rank(partial(step_folders.complete, self.exports_to, step, self.keep_latest))
        if reason is None:
            self._saved.append(step_folders.checkpoint_path(self.exports_to, step))
        return reason

    def _explained(self, reason: str, tensors: Tensors, folder: Path) -> str:
        """The reason of a failed save, with a full disk named, which torch's writer does not report."""
        needed = sum(local(tensor).nbytes for tensor in tensors.values())
        is_here = dist.get_rank() == 0 and not isinstance(folder, RemotePath)
        if is_here and shutil.disk_usage(folder).free < needed:
            reason = f"the disk is full; {reason}"
        return from_first_rank(reason, self._group)

    def _not_finite(self, tensors: Tensors) -> str | None:
        """The reason not to save tensors that are not finite and would replace good ones, or None."""
        parts = [local(tensor) for tensor in tensors.values()]
        extremes = [torch.stack(torch.aminmax(part)) for part in parts if part.is_floating_point() and part.numel()]
        is_bad = torch.tensor(int(not all(pair.isfinite().all() for pair in extremes)))
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX, group=self._group)
        return "weights or optimizer are not finite" if is_bad else None

    def _on_first_rank(self, action: Callable[[], object]) -> str | None:
        """Run an action on files on rank 0. Returns its error on every rank, or None."""
        reason = None
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                reason = first_line(error)
        return from_first_rank(reason, self._group)


@dataclass
class _Save:
    """The state of one save."""

    paths: list[Path]
    reason: str | None = None
    crash: BaseException | None = None
    thread: threading.Thread | None = None
    is_copied: threading.Event = field(default_factory=threading.Event)
    is_awaited: threading.Event = field(default_factory=threading.Event)
