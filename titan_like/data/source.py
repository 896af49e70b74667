"""The interface of every dataset: samples by index, and a fingerprint."""

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
    """A run's request to a dataset: one split, as samples of a given length."""

    section: Data  # the run's [data] section
    split: str  # one of SPLITS
    seq_len: int  # tokens per sample; the objective may change it, see `titan_like.data.loading.lengths`
    seed: int
    vocab_size: int  # the model's; tokens must be below it
    cache_folder: Path  # for files that are made once and read by all processes of a node; may not exist yet
    part: int = 0  # number of the source in a blend; each source has an order of its own


class Source(Dataset[Batch], ABC):
    """One split of a dataset. Every process opens it from the same request and finds the same samples.

    A subclass implements `__len__`, `sample` and `fingerprint`, and raises a `ConfigError` for errors that the user can
    correct. The loader reads ``source[index]``, where ``index`` is the number of the sample in the whole run or
    evaluation. `__getitem__` maps it to a position for `sample`. A subclass with its own order, such as a stream,
    overrides `__getitem__` and needs no `sample`. The result must depend on ``index`` alone, so that every layout reads
    the same samples and a run can resume.
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
        """Number of samples in the split, that is, in one epoch; `UNKNOWN_LENGTH` for a stream that is not empty.

        Outside training, a stream returns samples without labels past its end.
        """

    def sample(self, position: int) -> Batch:
        """The sample at ``position``, from 0 to ``len(self) - 1``: its tokens and labels, int64 [seq] each.

        All samples have the same fields. Without `document_starts`, a document begins after each end-of-document token.
        """
        return self[position]

    def drawn(self, num_samples: int) -> dict[str, float]:
        """Samples and epochs of each source of a blend after ``num_samples`` of the run, for logs; by default none."""
        return {}

    def described(self, micro_batch_size: int, num_ranks: int) -> str | None:
        """A log line for the start of a run on ``num_ranks`` data-parallel ranks; by default none."""
        return None

    def state_dict(self) -> dict[str, list[int]] | None:
        """State for checkpoints that lets a resumed run skip data that was read: by name, numbers that never decrease.

        The samples do not depend on it. None if there is no state.
        """
        return None

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Load the merged `state_dict` of all processes of a run, before the first sample is read."""

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
