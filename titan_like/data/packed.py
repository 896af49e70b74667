"""Packed samples for causal language models: windows of seq_len tokens over the concatenated documents."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import Dataset

from titan_like.config.errors import ConfigError
from titan_like.data.text import TokenFile

IGNORED_LABEL = -100  # positions that carry no loss
_PIECES, _PIECE = 64, 4096  # that a token_fingerprint is made of, and their tokens
SPLITS = ("train", "validation", "test")


def split_weights(text: str) -> tuple[float, float, float]:
    """ "969,30,1" → shares of train, validation and test that sum to 1.

    Raises:
        ConfigError: not three numbers that are at least 0, with some for training.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or not all(0 <= weight < float("inf") for weight in weights) or weights[0] == 0:
        raise ConfigError("data.split", text, 'must be three weights for train, validation and test, like "969,30,1"')
    train, validation, test = (weight / sum(weights) for weight in weights)
    return train, validation, test


def split_bounds(document_ends: np.ndarray, weights: tuple[float, float, float]) -> list[int]:
    """Token positions [0, a, b, total] between which the splits lie.

    Cuts fall on the nearest end of a document, so that no document is in two splits; only where that would leave a
    split without a token (a corpus of one long document, say) does the cut fall inside one.
    """
    total = int(document_ends[-1])
    edges = np.concatenate(([0], document_ends))
    bounds = [0]
    for split, share in enumerate(np.cumsum(weights)[:2]):
        exact = round(float(share) * total)
        nearest = int(edges[np.abs(edges - exact).argmin()])
        later_needed = any(weight > 0 for weight in weights[split + 1 :])
        empty = (weights[split] > 0 and nearest <= bounds[-1]) or (later_needed and nearest >= total)
        bounds.append(max(exact if empty else nearest, bounds[-1]))
    return [*bounds, total]


class PackedDataset(Dataset[torch.Tensor]):
    """Samples of seq_len + 1 tokens, so that inputs and labels are the same window shifted by one.

    ``shuffled`` is the training stream: index i of the whole run is sample i mod n of epoch i div n, in an order
    that is a function of the seed and the epoch. Otherwise the samples stand in order, and an index past the end is
    a sample without labels, which carries no loss.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, *, shuffled: bool, seed: int = 0) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.shuffled = shuffled
        self.seed = seed
        self.num_samples = max(0, (len(tokens) - 1) // seq_len)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        """int64 [2, seq]: inputs and labels."""
        position, past_the_end = index, False
        if self.shuffled:
            epoch, within = divmod(index, self.num_samples)
            position = int(_epoch_order(self.seed, epoch, self.num_samples)[within])
        elif index >= self.num_samples:
            position, past_the_end = 0, True
        start = position * self.seq_len
        window = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        sample = torch.stack((window[:-1], window[1:]))
        if past_the_end:
            sample[1].fill_(IGNORED_LABEL)
        return sample


def token_fingerprint(tokens: np.ndarray) -> str:
    """Tells a token stream from others: its length, and pieces from all over it, since it may be of any size."""
    starts = np.linspace(0, max(0, len(tokens) - _PIECE), _PIECES).astype(np.int64)
    digest = hashlib.blake2b(str(len(tokens)).encode(), digest_size=16)
    for start in starts:
        digest.update(tokens[start : start + _PIECE].astype(np.int64).tobytes())
    return digest.hexdigest()


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def build_datasets(corpus: TokenFile, split: str, seq_len: int, seed: int) -> dict[str, PackedDataset]:
    """The train, validation and test splits of a corpus.

    Raises:
        ConfigError: the training split holds no whole sample.
    """
    bounds = split_bounds(corpus.document_ends, split_weights(split))
    datasets = {}
    for number, name in enumerate(SPLITS):
        tokens = corpus.tokens[bounds[number] : bounds[number + 1]]
        datasets[name] = PackedDataset(tokens, seq_len, shuffled=name == "train", seed=seed)
    train = datasets["train"]
    if len(train) == 0:
        problem = f"the training split has {len(train.tokens)} tokens, fewer than seq_len + 1; add text or lower it"
        raise ConfigError("training.seq_len", seq_len, problem)
    return datasets
