"""Batches of the global sample stream, loaded in the background.

One number is the whole cursor: how many samples the run has consumed. Microbatch k of the stream starts at sample
k·(micro_batch_size·ranks), and each rank reads a consecutive part of it.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from titan_like.config.errors import ConfigError, RunError
from titan_like.data.batch import Batch, collate, map_tensors
from titan_like.data.objectives.masks import Masks
from titan_like.data.source import Source

State = dict[str, list[int]]  # a dataset's; see `titan_like.data.source.Source.state_dict`


@dataclass
class GlobalSampler(Sampler[list[int]]):
    """Yields lists of global sample indices, one list for each microbatch of this rank."""

    first_sample: int
    micro_batch_size: int
    rank: int
    num_ranks: int
    last_sample: int | None = None  # exclusive; None never ends

    def __iter__(self) -> Iterator[list[int]]:
        start = self.first_sample
        while self.last_sample is None or start < self.last_sample:
            rank_start = start + self.rank * self.micro_batch_size
            yield list(range(rank_start, rank_start + self.micro_batch_size))
            start += self.num_ranks * self.micro_batch_size


class _Batches(Dataset[Any]):
    """A dataset read in whole batches, each with the state of the process's dataset after it.

    It returns a one-sentence error in place of both, because the loader would wrap a worker's exception in a traceback.
    """

    def __init__(self, dataset: Dataset[Batch]) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> tuple[Batch, State | None] | ConfigError | RunError:
        try:
            batch = collate([self.dataset[index] for index in indices])
        except (ConfigError, RunError) as error:
            return error
        return batch, self.dataset.state_dict() if isinstance(self.dataset, Masks | Source) else None


def merge_states(states: Iterable[Mapping[str, list[int]] | None]) -> State:
    """The merged state of all copies of a dataset: the largest value of each name."""
    merged: State = {}
    for state in states:
        for name, numbers in (state or {}).items():
            merged[name] = max(numbers, merged.get(name, numbers))
    return merged


class _Sent:
    """A batch that is sent by value, which is faster than torch's file descriptor for each tensor."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = map_tensors(lambda x: x if x.dtype == torch.bfloat16 else x.numpy(), self.batch)  # NumPy has none
        return partial(map_tensors, torch.as_tensor), (arrays,)


def _to_send(item: Any) -> Any:
    """What `_Batches` returns, in a worker process with the batch as `_Sent`."""
    return (_Sent(item[0]), item[1]) if isinstance(item, tuple) and get_worker_info() else item


class BackgroundLoader:
    """Iterates over microbatches, which a thread prepares up to ``depth`` ahead.

    With ``num_workers``, worker processes read the samples. `__next__` raises the thread's error, or a `RunError` if a
    worker process has died.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        sampler: GlobalSampler,
        num_workers: int,
        device: torch.device,
        depth: int = 8,
        repeats: bool = False,
    ) -> None:
        """With ``repeats``, worker processes outlive the pass over the sampler's batches, for another `start`."""
        self._device = device  # batches for a GPU are pinned
        self._depth, self._repeats, self._workers = depth, repeats, list[BaseProcess]()
        self.state: State = {}  # the dataset's, after the microbatches returned so far
        with warnings.catch_warnings():
            # About more workers than processors: torch ignores a container's limit.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader: DataLoader | None = DataLoader(
                _Batches(dataset),
                batch_sampler=sampler,
                collate_fn=_to_send,
                num_workers=num_workers,
                pin_memory=device.type == "cuda",
                persistent_workers=repeats and num_workers > 0,
                generator=torch.Generator(),  # for the loader's seed, so that it does not advance dropout's generator
            )
        self.start()

    def start(self) -> None:
        """Begin a pass over the sampler's batches."""
        self._queue: queue.Queue[tuple[Batch, State | None] | BaseException | None] = queue.Queue(maxsize=self._depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(self._loader,), name="data-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = self._queue.get()
        if isinstance(item, tuple):
            batch, state = item
            self.state = merge_states([self.state, state])
            return batch
        self._queue.put(item)  # the thread has ended, so the next call must find the same answer
        raise StopIteration if item is None else item

    def close(self) -> None:
        """End the pass, its thread and, unless the loader ``repeats``, its worker processes."""
        self._stopped.set()
        with suppress(queue.Empty):  # the thread may be waiting for a free slot
            self._queue.get_nowait()
        self._thread.join(timeout=10)
        if not self._repeats:
            self._loader = None

    def _fill(self, loader: DataLoader) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # threads start on GPU 0, where pinning would create a context
            items = iter(loader)  # starts the processes
            self._workers = getattr(items, "_workers", [])
            for item in items:
                is_read = not isinstance(item, ConfigError | RunError)
                if not self._put(tuple(item) if is_read else item) or not is_read:  # pinning makes lists of tuples
                    return
            self._put(None)
        except BaseException as error:  # raised again in the thread that waits for the batch
            self._put(_death_among(self._workers) or error)

    def _put(self, item: tuple[Batch, State | None] | BaseException | None) -> bool:
        """Wait for a free slot, but not beyond `close`. Returns whether the item was queued."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _death_among(workers: list[BaseProcess]) -> RunError | None:
    """The error if one of the processes has died, else None."""
    # A dying process closes its connections, which is an error here, shortly before its death can be seen.
    dead = wait([worker.sentinel for worker in workers], timeout=1.0) if workers else []
    for worker in workers:
        if worker.sentinel in dead:
            worker.join()
            code = worker.exitcode or 0
            end = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
            hint = "the same command resumes from the last checkpoint; lower data.num_workers if it happens again"
            reason = f"a data loader process (pid {worker.pid}) {end}, perhaps for lack of memory or room in /dev/shm"
            return RunError(f"{reason}; {hint}", of_this_process=True)
    return None
