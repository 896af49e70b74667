"""The order of samples of a blend: the same on any number of ranks, resumed anywhere, with or without processes."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_like.config.errors import RunError
from titan_like.config.schema import Data
from titan_like.data.indexed import DTYPES, IndexedWriter
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.open_source import open_source
from titan_like.data.source import DataRequest, Source

SEQ, MICRO, CPU = 4, 2, torch.device("cpu")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A blend of three datasets, of which no two samples are alike: a sample tells where it is from."""
    folder, start = tmp_path_factory.mktemp("blend"), 0
    for name, documents in (("a", 40), ("b", 9), ("c", 3)):
        with IndexedWriter(folder / name, DTYPES[4]) as writer:
            for _ in range(documents):
                writer.add(np.arange(start, start + 13))
                writer.end_document()
                start += 13
    return ["0.5", f"{folder}/a", "0.3", f"{folder}/b", "0.2", f"{folder}/c"]


def source_of(paths: list[str]) -> Source:
    """Opened anew, as each rank does."""
    section = Data(dataset="indexed", paths=paths, split="1,0,0")
    return open_source(DataRequest(section, "train", SEQ, 5, 1000, Path()))


def loaders_of(paths: list[str], first: int, ranks: int, workers: int = 0) -> list[BackgroundLoader]:
    samplers = [GlobalSampler(first, MICRO, rank, ranks) for rank in range(ranks)]
    return [BackgroundLoader(source_of(paths), sampler, workers, CPU) for sampler in samplers]


def consumed(loaders: list[BackgroundLoader], microbatches: int) -> list[list[int]]:
    """Inputs of the samples that the ranks take together, in the order of the stream."""
    found = [next(loader)[:, 0] for _ in range(microbatches) for loader in loaders]
    for loader in loaders:
        loader.close()
    return torch.cat(found).tolist()


def test_a_killed_process_ends_the_loader_and_the_next_one_goes_on_with_the_next_sample(paths: list[str]) -> None:
    wanted = consumed(loaders_of(paths, 0, 1), 60)
    others = multiprocessing.active_children()
    (loader,) = loaders_of(paths, 0, 1, workers=2)
    found = torch.cat([next(loader)[:, 0] for _ in range(3)]).tolist()
    victim = min(set(multiprocessing.active_children()) - set(others), key=lambda process: process.pid or 0)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    sentence = (
        rf"^a data loader process \(pid {victim.pid}\) was killed by signal 9, .*resumes from the last checkpoint"
    )
    with pytest.raises(RunError, match=sentence) as raised:
        while True:
            found += next(loader)[:, 0].tolist()
    assert raised.value.of_this_process
    with pytest.raises(RunError, match=sentence):  # asked again, it fails again instead of waiting for ever
        next(loader)
    loader.close()
    assert found == wanted[: len(found)]  # what came before the error is in order, without a gap
    found += consumed(loaders_of(paths, len(found), 1, workers=1), (len(wanted) - len(found)) // MICRO)
    assert found == wanted
