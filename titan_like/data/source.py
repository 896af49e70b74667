"""The interface of every dataset: samples by number, and a fingerprint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

from titan_like.config.schema import Data
from titan_like.data.permutation import Permutation

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
    part: int = 0  # number of the source in a blend, whose sources have orders of their own


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

    def drawn(self, num_samples: int) -> dict[str, float]:
        """What the first samples of a run took from each part of a blend, by name, for logs. Nothing by default."""
        return {}

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq].

        In training it is sample i mod n of epoch i div n, in an order that is a function of the seed and the epoch.
        Elsewhere the samples stand in order, and an index past the end is a sample without labels.
        """
        if self.request.split == "train":
            epoch, within = divmod(index, len(self))
            return self.sample(_epoch_order(len(self), self.request.seed, self.request.part, epoch)(within))
        if index < len(self):
            return self.sample(index)
        inputs = self.sample(0)[0]
        return torch.stack((inputs, torch.full_like(inputs, IGNORED_LABEL)))


@lru_cache(maxsize=256)  # of two epochs of each source of a blend
def _epoch_order(num_samples: int, *key: int) -> Permutation:
    return Permutation(num_samples, *key)
