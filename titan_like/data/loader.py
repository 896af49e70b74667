"""Batches of the global sample stream, loaded in the background.

One number is the whole cursor: how many samples the run has consumed. Microbatch k of the stream starts at sample
k·(micro_batch_size·ranks), and each rank takes a consecutive part of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from titan_like.config.errors import ConfigError, RunError


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
            mine = start + self.rank * self.micro_batch_size
            yield list(range(mine, mine + self.micro_batch_size))
            start += self.num_ranks * self.micro_batch_size


class _Batches(Dataset[torch.Tensor]):
    """A dataset read in whole batches. A one-sentence error is returned in place of the batch, because the loader would
    wrap what its processes raise in a traceback.
    """

    def __init__(self, dataset: Dataset[torch.Tensor]) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor] | ConfigError | RunError:
        try:
            return [self.dataset[index] for index in indices]
        except (ConfigError, RunError) as error:
            return error


def _collate(samples: list[torch.Tensor] | ConfigError | RunError) -> torch.Tensor | ConfigError | RunError:
    return default_collate(samples) if isinstance(samples, list) else samples


class BackgroundLoader:
    """Iterates over microbatches, int64 [micro_batch, rows, seq], which a thread prepares up to ``depth`` ahead.

    With ``num_workers``, worker processes read the samples. An error in the thread is raised from `__next__`, and so is
    a `RunError` if one of these processes has died.
    """

    def __init__(
        self,
        dataset: Dataset[torch.Tensor],
        sampler: GlobalSampler,
        num_workers: int,
        device: torch.device,
        depth: int = 8,
    ) -> None:
        self._device = device  # the target of later copies, which are faster from pinned memory if it is a GPU
        loader = DataLoader(
            _Batches(dataset),
            batch_sampler=sampler,
            collate_fn=_collate,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # the loader draws a seed, which must not advance dropout's generator
        )
        self._queue: queue.Queue[torch.Tensor | BaseException | None] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(loader,), name="data-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        item = self._queue.get()
        if isinstance(item, torch.Tensor):
            return item
        self._queue.put(item)  # the thread has ended, so the next call must find the same answer
        raise StopIteration if item is None else item

    def close(self) -> None:
        """Stop loading and end the thread. Worker processes end with the loader, which only the thread holds."""
        self._stopped.set()
        with suppress(queue.Empty):  # free a slot, for which the thread may be waiting
            self._queue.get_nowait()
        self._thread.join(timeout=10)

    def _fill(self, loader: DataLoader) -> None:
        others = active_children()
        workers: list[BaseProcess] = []
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # threads start on GPU 0, where pinning would create a context
            batches = iter(loader)
            workers = [process for process in active_children() if process not in others]
            for batch in batches:
                if not self._put(batch) or not isinstance(batch, torch.Tensor):
                    return
            self._put(None)
        except BaseException as error:  # raised again in the thread that waits for the batch
            self._put(_death_among(workers) or error)

    def _put(self, item: torch.Tensor | BaseException | None) -> bool:
        """Wait for a free slot, but not beyond `close`. Returns whether the item was taken."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _death_among(workers: list[BaseProcess]) -> RunError | None:
    """What to raise if one of the processes has died; None if all of them live."""
    # A dying process closes its connections, which is an error here, shortly before its death can be seen.
    dead = wait([worker.sentinel for worker in workers], timeout=1.0) if workers else []
    for worker in workers:
        if worker.sentinel in dead:
            worker.join()
            code = worker.exitcode or 0
            cause = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
            return RunError(
                f"a data loader process (pid {worker.pid}) {cause}, perhaps for lack of memory or of room in /dev/shm; "
                "the same command resumes from the last checkpoint; lower data.num_workers if it happens again",
                of_this_process=True,
            )
    return None
