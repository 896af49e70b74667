"""The interface of every dataset: samples by index, and a fingerprint."""

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
    """What a run asks of a dataset: one split, as samples of a given length."""

    section: Data  # the run's [data] section
    split: str  # one of SPLITS
    seq_len: int
    seed: int
    vocab_size: int  # the model's; tokens must be below it
    cache_folder: Path  # for files that are made once and read by all processes of a node; may not exist yet


class Source(Dataset[torch.Tensor], ABC):
    """One split of a dataset. Every process opens it from the same request and finds the same samples.

    A subclass implements `__len__`, `sample` and `fingerprint`, and raises a `ConfigError` for what the user has to
    change. Batches are read through ``source[index]``, where ``index`` is the number of the sample in the whole run or
    evaluation. The implementation here maps it to a position for `sample`. A subclass with an order of its own, such as
    a blend or a stream, overrides `__getitem__`. That must be a function of ``index`` alone, so that every layout reads
    the same samples and a run can resume.
    """

    def __init__(self, request: DataRequest) -> None:
        self.request = request

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the split's content. A checkpoint resumes only on data with the same fingerprint."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples in the split, that is, in one epoch."""

    @abstractmethod
    def sample(self, position: int) -> torch.Tensor:
        """The sample at ``position``, from 0 to ``len(self) - 1``.

        Returns:
            int64 [2, seq]: inputs and labels. A position without a label has `IGNORED_LABEL`.
        """

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq].

        In the training split this is sample i mod n of epoch i div n. The order within an epoch is a function of the
        seed and the epoch. Other splits are read in order, and an index past the end gives a sample without labels.
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
    """Open one split of the dataset that [data] names.

    Raises:
        ConfigError: there is no such dataset, its class is not a `Source`, its samples do not fit the run, or the class
            raises one.
    """
    entry = find_dataset(request.section)
    dataset = load_entry("data.dataset", entry)
    if not (isinstance(dataset, type) and issubclass(dataset, Source)):
        refusal = f"{entry.value} is not a subclass of titan_like.data.source.Source"
        raise ConfigError("data.dataset", entry.name, refusal)
    source: Source = dataset(request)
    problem = _sample_problem(source.sample(0), request) if len(source) > 0 else None
    if problem is not None:
        raise ConfigError("data.dataset", entry.name, problem)
    return source


def _sample_problem(sample: object, request: DataRequest) -> str | None:
    """The reason why a sample cannot belong to the run; None if it can."""
    if not isinstance(sample, torch.Tensor):
        return f"its samples are {type(sample).__name__}, not torch.Tensor"
    if sample.dtype != torch.int64 or sample.shape != (2, request.seq_len):
        return f"its samples are {sample.dtype} {list(sample.shape)}, not torch.int64 [2, {request.seq_len}]"
    inputs, labels = sample
    tokens = torch.cat((inputs, labels[labels != IGNORED_LABEL]))
    if tokens.min() < 0 or tokens.max() >= request.vocab_size:
        most = request.vocab_size - 1
        return f"its first sample has tokens from {tokens.min()} to {tokens.max()}, but the model's go from 0 to {most}"
    return None
