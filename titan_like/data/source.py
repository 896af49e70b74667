"""The interface of every dataset: samples by number, and a fingerprint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from titan_like.config.entry_points import load_entry
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data
from titan_like.data.registry import find_dataset

IGNORED_LABEL = -100  # positions that carry no loss
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class DataRequest:
    """What a run asks of a dataset: one split of it, as samples of one length."""

    section: Data  # [data] of the run
    split: str  # one of SPLITS
    seq_len: int
    seed: int
    vocab_size: int  # of the model: tokens are 0 to vocab_size - 1
    cache_folder: Path  # may not exist yet; for what is made once and read by all processes of a node


class Source(Dataset[torch.Tensor], ABC):
    """One split of a dataset. Every process opens it from the same request and finds the same samples.

    A subclass has `__len__`, `sample` and `fingerprint`, and raises a `ConfigError` where the user has to change
    something. Batches are taken by ``source[index]``, ``index`` being the number of the sample in the whole run, or in
    the whole evaluation; here, that is an order of `sample`'s positions. A subclass with an order of its own, such as
    a blend or a stream, overrides `__getitem__`. It must be a function of ``index`` alone: that is how every layout
    reads the same samples, and how a run resumes.
    """

    def __init__(self, request: DataRequest) -> None:
        self.request = request

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Tells this split from others: a checkpoint resumes only on the data that it was trained on."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples in the split, each counted once."""

    @abstractmethod
    def sample(self, position: int) -> torch.Tensor:
        """The sample at ``position``, from 0 to ``len(self) - 1``.

        Returns:
            int64 [2, seq]: the inputs, and the label of each, `IGNORED_LABEL` where there is none.
        """

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq].

        In training it is sample i mod n of epoch i div n, in an order that is a function of the seed and the epoch.
        Elsewhere the samples stand in order, and an index past the end is a sample without labels.
        """
        if self.request.split == "train":
            epoch, within = divmod(index, len(self))
            return self.sample(int(_epoch_order(self.request.seed, epoch, len(self))[within]))
        if index < len(self):
            return self.sample(index)
        inputs = self.sample(0)[0]
        return torch.stack((inputs, torch.full_like(inputs, IGNORED_LABEL)))


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def open_source(request: DataRequest) -> Source:
    """One split of the dataset that [data] names.

    Raises:
        ConfigError: there is no such dataset, its class is none, its samples do not fit the run, or it refuses itself.
    """
    entry = find_dataset(request.section)
    dataset = load_entry("data.dataset", entry)
    if not (isinstance(dataset, type) and issubclass(dataset, Source)):
        raise ConfigError("data.dataset", entry.name, f"{entry.value} is no subclass of titan_like.data.source.Source")
    source: Source = dataset(request)
    problem = _sample_problem(source.sample(0), request) if len(source) > 0 else None
    if problem is not None:
        raise ConfigError("data.dataset", entry.name, problem)
    return source


def _sample_problem(sample: object, request: DataRequest) -> str | None:
    """Why a sample can be none of the run."""
    if not isinstance(sample, torch.Tensor):
        return f"its samples are {type(sample).__name__}, not torch.Tensor"
    if sample.dtype != torch.int64 or sample.shape != (2, request.seq_len):
        return f"its samples are {sample.dtype} {list(sample.shape)}, not torch.int64 [2, {request.seq_len}]"
    inputs, labels = sample
    tokens = torch.cat((inputs, labels[labels != IGNORED_LABEL]))
    if tokens.min() < 0 or tokens.max() >= request.vocab_size:
        most = request.vocab_size - 1
        return f"its first sample has tokens from {tokens.min()} to {tokens.max()}, and the model's go from 0 to {most}"
    return None
