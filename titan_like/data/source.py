"""The interface of every dataset: samples by index, and a fingerprint."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch.utils.data import Dataset

from titan_like.config.schema import Data
from titan_like.data.batch import Batch, without_labels
from titan_like.data.loading.permutation import Permutation
from titan_like.models.layers.cross_entropy import IGNORED_LABEL

__all__ = ["IGNORED_LABEL", "SPLITS", "UNKNOWN_LENGTH", "DataRequest", "Source", "epoch_order"]

UNKNOWN_LENGTH = sys.maxsize  # a stream's, in samples; the most that len() may return
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class DataRequest:
    """What a run asks of a dataset: one split, as samples of a given length."""

    section: Data  # the run's [data] section
    split: str  # one of SPLITS
    seq_len: int  # tokens per sample; the objective may change it, see `titan_like.data.loading.lengths`
    seed: int
    vocab_size: int  # the model's; tokens must be below it
    cache_folder: Path  # for files that are made once and read by all processes of a node; may not exist yet
    part: int = 0  # number of the source in a blend; each source has an order of its own


class Source(Dataset[Batch], ABC):
    """One split of a dataset. Every process opens it from the same request and finds the same samples.

    A subclass implements `__len__`, `sample` and `fingerprint`, and raises a `ConfigError` for what the user has to
    change. Batches are read through ``source[index]``, where ``index`` is the number of the sample in the whole run or
    evaluation. The implementation here maps it to a position for `sample`. A subclass with an order of its own, such as
    a stream, overrides `__getitem__`. That must be a function of ``index`` alone, so that every layout reads the same
    samples and a run can resume. Without an order of positions it needs no `sample`.
    """

    together = 1  # samples that stay together in every order, such as the options of a question

    def __init__(self, request: DataRequest) -> None:
        self.request = request

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the split's content. A checkpoint resumes only on data with the same fingerprint."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples in the split, that is, in one epoch; `UNKNOWN_LENGTH` for a stream that has any.

        Outside training, a stream also gives samples past its end, without labels.
        """

    def sample(self, position: int) -> Batch:
        """The sample at ``position``, from 0 to ``len(self) - 1``: its tokens and labels, int64 [seq] each.

        All samples have the same fields. Without `document_starts`, a document begins after each end-of-document token.
        """
        return self[position]

    def drawn(self, num_samples: int) -> dict[str, float]:
        """What the first samples of a run took from each part of a blend, by name, for logs. Nothing by default."""
        return {}

    def described(self, micro_batch_size: int, num_ranks: int) -> str | None:
        """A line for the log of a run that begins, on ``num_ranks`` data-parallel processes. Nothing by default."""
        return None

    def state_dict(self) -> dict[str, list[int]] | None:
        """State in a checkpoint that spares a resumed run reading its data again: by name, numbers that grow as reading
        goes on. It never decides which samples come. None: there is nothing to keep.
        """
        return None

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Take over what `state_dict` gave in all processes of a run, before the first sample is read."""

    def __getitem__(self, index: int) -> Batch:
        """Sample ``index`` of the run.

        In the training split this is sample i mod n of epoch i div n. The order within an epoch is a function of the
        seed and the epoch. Other splits are read in order, and an index past the end gives a sample without labels.
        """
        if self.request.split == "train":
            number, within = divmod(index, self.together)
            epoch, place = divmod(number, len(self) // self.together)
            order = epoch_order(len(self) // self.together, self.request.seed, self.request.part, epoch)
            return self.sample(order(place) * self.together + within)
        return self.sample(index) if index < len(self) else without_labels(self.sample(0))


def digest_of(*parts: object) -> str:
    """A digest of the ``repr`` of the parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=256)  # enough for two epochs of each source of a blend
def epoch_order(num_samples: int, *key: object) -> Permutation:
    """The order of an epoch, given the seed, the number of the source in a blend and the epoch; or a block's order."""
    return Permutation(num_samples, *key)
