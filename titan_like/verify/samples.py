"""The data of a verification: samples that all differ, with unequal numbers of labels, some with none at all.

A mean of means over such samples is another number than the mean over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from titan_like.config.schema import JobConfig
from titan_like.data.packed import token_fingerprint
from titan_like.models.registry import model_config

IGNORED = -100  # label of a position that carries no loss
_EMPTY_BATCH = 2  # the global batch, from 0, of which one data-parallel rank has no label at all


@dataclass(frozen=True)
class Samples(Dataset[torch.Tensor]):
    """Sample i of the run, int64 [2, seq]: inputs and labels, a function of the seed and i alone.

    With a ``size`` an index past the end is a sample without labels, as in validation.
    """

    seed: int
    seq_len: int
    vocab_size: int
    size: int | None = None
    empty: tuple[int, int, int, int] | None = None  # first, last + 1, samples of a microbatch, data-parallel ranks

    def __len__(self) -> int:
        return 1 << 40 if self.size is None else self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + index) % 2**63)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        if index % 2:
            tokens[self.seq_len // 2] = self.vocab_size - 1  # the last token before the padding
        inputs, labels = tokens[:-1].clone(), tokens[1:].clone()
        positions = torch.arange(self.seq_len)
        first = index * 5 % (self.seq_len + 1)  # of the positions with a label: from all to none
        labels[(positions < first) | ((positions + index) % 11 == 0)] = IGNORED
        if (self.size is not None and index >= self.size) or self._is_empty(index):
            labels.fill_(IGNORED)
        return torch.stack((inputs, labels))

    def _is_empty(self, index: int) -> bool:
        first, end, micro_batch, ranks = self.empty or (0, 0, 1, 1)
        return first <= index < end and index // micro_batch % ranks == ranks - 1

    @property
    def fingerprint(self) -> str:
        """What checkpoints tell these samples from others by."""
        return token_fingerprint(self.first(4).flatten().numpy())

    def first(self, count: int, start: int = 0) -> torch.Tensor:
        """Samples ``start`` to ``start + count``, int64 [count, 2, seq]."""
        return torch.stack([self[index] for index in range(start, start + count)])


def batches(config: JobConfig, last: int) -> dict[int, range]:
    """Step → the samples that it takes; the batch grows in equal pieces during a ramp-up."""
    full, rampup = config.training.global_batch_size, config.training.batch_size_rampup
    taken, consumed = {}, 0
    for step in range(1, last + 1):
        size = full
        if rampup is not None:
            start, increment, samples = rampup
            size = min(full, start + increment * (consumed * ((full - start) // increment) // samples))
        taken[step] = range(consumed, consumed + size)
        consumed += size
    return taken


def training_samples(config: JobConfig) -> Samples:
    """The endless training stream, in one batch without labels for the last data-parallel rank of this layout."""
    batch, section = config.training.global_batch_size, config.parallelism
    ranks = section.data_parallel_replicate_degree * section.data_parallel_shard_degree
    empty = (_EMPTY_BATCH * batch, (_EMPTY_BATCH + 1) * batch, config.training.micro_batch_size, ranks)
    vocab_size = model_config(config.model).vocab_size
    return Samples(2 * config.job.seed, config.training.seq_len, vocab_size, empty=empty if ranks > 1 else None)


def validation_samples(config: JobConfig) -> Samples:
    """Held-out samples: more than a global batch and less than two, not whole microbatches of all ranks."""
    batch, vocab_size = config.training.global_batch_size, model_config(config.model).vocab_size
    size = batch + max(1, batch // 2 - 1)
    return Samples(2 * config.job.seed + 1, config.training.seq_len, vocab_size, size)
