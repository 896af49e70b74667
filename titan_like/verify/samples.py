"""The data of a verification: samples that all differ, with unequal numbers of labels, some with none at all.

A mean of means over such samples is another number than the mean over all tokens.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

IGNORED = -100  # label of a position that carries no loss


class Samples(Dataset[torch.Tensor]):
    """Sample i of the run, int64 [2, seq]: inputs and labels, a function of the seed and i alone.

    With a ``size`` an index past the end is a sample without labels, as in validation.
    """

    def __init__(self, seed: int, seq_len: int, vocab_size: int, size: int | None = None) -> None:
        self.seed, self.seq_len, self.vocab_size, self.size = seed, seq_len, vocab_size, size

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
        if self.size is not None and index >= self.size:
            labels.fill_(IGNORED)
        return torch.stack((inputs, labels))

    def first(self, count: int, start: int = 0) -> torch.Tensor:
        """Samples ``start`` to ``start + count``, int64 [count, 2, seq]."""
        return torch.stack([self[index] for index in range(start, start + count)])


def training_samples(seed: int, seq_len: int, vocab_size: int) -> Samples:
    """The endless training stream."""
    return Samples(2 * seed, seq_len, vocab_size)


def validation_samples(seed: int, seq_len: int, vocab_size: int, size: int) -> Samples:
    """Held-out samples."""
    return Samples(2 * seed + 1, seq_len, vocab_size, size)


def fingerprint(sample: torch.Tensor) -> bytes:
    """What tells a sample from all others."""
    return sample.cpu().numpy().tobytes()
