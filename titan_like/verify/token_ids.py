"""Special tokens, and where words begin, in small samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np

from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, collate
from titan_like.data.masks import Masks, masks_of
from titan_like.data.sentence_pairs import Samples
from titan_like.data.tokenizer import Tokenizer
from titan_like.models.registry import model_config
from titan_like.verify.samples import END_OF_DOCUMENT, FIRST, MASK, PAD, PADDING, SEPARATOR, words_of_samples


class TokenIds(NamedTuple):
    """What objectives and masks need of a tokenizer, under its names for it."""

    eod_id: int = -1
    mask_id: int = -1
    pad_id: int = -1
    pair_ids: tuple[int, int, int] = (-1, -1, -1)
    sentinel_ids: Sequence[int] = ()
    special_ids: Collection[int] = ()
    vocab_size: int = 0
    words: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = words_of_samples  # where they and characters begin


def ids_of_samples(vocab_size: int) -> TokenIds:
    """Those of the small samples. The last tokens of the vocabulary are the sentinels, from the end."""
    special, sentinels = (END_OF_DOCUMENT, MASK, FIRST, SEPARATOR, PADDING), range(vocab_size - 1, PADDING, -1)
    return TokenIds(END_OF_DOCUMENT, MASK, PAD, (FIRST, SEPARATOR, PADDING), sentinels, special, vocab_size)


def masks_of_run(config: JobConfig) -> Masks:
    """What the trainer makes of the small samples."""
    model = model_config(config.model)
    return masks_of(config, model, cast(Tokenizer, ids_of_samples(model.vocab_size)))


def batch_of(samples: Samples, indices: Iterable[int], config: JobConfig) -> Batch:
    """Small samples as the trainer reads them, in one batch."""
    masked = masks_of_run(config).over(samples)
    return collate([masked[index] for index in indices])
