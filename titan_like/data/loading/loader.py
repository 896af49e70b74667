"""Batches of the global sample stream, loaded in the background.

One number is the whole cursor: how many samples the run has consumed. Microbatch k of the stream starts at sample
k·(micro_batch_size·ranks), and each rank reads a consecutive part of it.

torchdata's `StatefulDataLoader` reads the samples, and returns the state of datasets from its worker processes. Its own
state, which needs the same number of workers, is not used, because the cursor alone determines the order.
"""

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
from torch.utils.data import Dataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

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


class _Batches(Dataset[Batch]):
    """A dataset read in whole batches. It returns a one-sentence error in place of the batch, because the loader would
    wrap a worker's exception in a traceback.
    """

    def __init__(self, dataset: Dataset[Batch]) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[Batch] | ConfigError | RunError:
        try:
            return [self.dataset[index] for index in indices]
        except (ConfigError, RunError) as error:
            return error

    def state_dict(self) -> State | None:
        return self.dataset.state_dict() if isinstance(self.dataset, Masks | Source) else None

    def load_state_dict(self, state: State) -> None:
        """Torchdata saves the state only of classes with this method."""
        raise NotImplementedError("a dataset is given its state before it is copied to worker processes")


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


def _collate(samples: list[Batch] | ConfigError | RunError) -> Batch | _Sent | ConfigError | RunError:
    if not isinstance(samples, list):
        return samples
    try:
        return collate(samples) if get_worker_info() is None else _Sent(collate(samples))
    except RunError as error:
        return error


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
        batches = _Batches(dataset)
        with warnings.catch_warnings():
            # From torchdata on newer torch, and about more workers than processors: torch ignores a container's limit.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated|This DataLoader will create")
            self._loader: StatefulDataLoader | None = StatefulDataLoader(
                batches,
                batch_sampler=sampler,
                collate_fn=_collate,
                num_workers=num_workers,
                pin_memory=device.type == "cuda",
                persistent_workers=repeats and num_workers > 0,
                snapshot_every_n_steps=0 if batches.state_dict() is None else 1,
                generator=torch.Generator(),  # for the loader's seed, so that it does not advance dropout's generator
            )
        self.start()

    def start(self) -> None:
        """Begin a pass over the sampler's batches."""
        self._queue: queue.Queue[tuple[Batch, State] | BaseException | None] = queue.Queue(maxsize=self._depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(self._loader,), name="data-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = self._queue.get()
        if isinstance(item, tuple):
            batch, self.state = item
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

    def _fill(self, loader: StatefulDataLoader) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # threads start on GPU 0, where pinning would create a context
            batches = iter(loader)  # waits for the processes to be ready
            self._workers = getattr(batches, "_workers", [])
            for batch in batches:
                is_read = isinstance(batch, tuple)
                if not self._put((batch, _state_of(loader)) if is_read else batch) or not is_read:
                    return
            self._put(None)
        except BaseException as error:  # raised again in the thread that waits for the batch
            self._put(_death_among(self._workers) or error)

    def _put(self, item: tuple[Batch, State] | BaseException | None) -> bool:
        """Wait for a free slot, but not beyond `close`. Returns whether the item was queued."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _state_of(loader: StatefulDataLoader) -> State:
    """The state of the dataset in all worker processes, after the last batch."""
    if not loader.snapshot_every_n_steps:
        return {}
    state: dict[str, Any] = loader.state_dict()
    copies = state["_snapshot"]["_worker_snapshots"].values() if loader.num_workers else [state]
    return merge_states(copy["dataset_state"] for copy in copies)


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
