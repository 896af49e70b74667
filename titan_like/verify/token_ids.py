"""Ids of special tokens, and where words begin: chosen for small samples, and those of a run's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from titan_like.config.schema import Data
from titan_like.data.tokenizer import ByteTokenizer, tokenizer_of
from titan_like.verify.samples import END_OF_DOCUMENT, FIRST, MASK, PAD, PADDING, SEPARATOR, words_of_samples


class TokenIds(NamedTuple):
    """The ids that objectives and masks need; -1 for a token that does not exist."""

    end_of_document: int = -1
    mask: int = -1  # hides another token
    pad: int = -1  # begins and fills up the decoder's input
    first: int = -1  # this and the next two stand around two sentences
    separator: int = -1
    padding: int = -1
    sentinels: Sequence[int] = ()
    ordinary: Sequence[int] = ()  # can be masked, and replace others
    words: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = words_of_samples  # where they and characters begin


def ids_of_samples(vocab_size: int) -> TokenIds:
    """Those of the small samples. The last tokens of the vocabulary are sentinels; a third are in no word."""
    named = (END_OF_DOCUMENT, MASK, PAD, FIRST, SEPARATOR, PADDING)
    ordinary = [token for token in range(vocab_size) if token not in named]
    return TokenIds(*named, range(vocab_size - 1, PADDING, -1), ordinary, words_of_samples)


def ids_of_tokenizer(section: Data) -> TokenIds:
    """Those of the tokenizer that [data] names."""
    tokenizer = tokenizer_of(section)
    if isinstance(tokenizer, ByteTokenizer):
        byte_ids = (256, 257, 258, 258, 259, 260, range(259, 359), range(256))
        return TokenIds(*byte_ids, lambda tokens: tokenizer.words(tokens))
    named = (tokenizer.eod_id, tokenizer.mask_id, tokenizer.pad_id, *(tokenizer.pair_ids or (None, None, None)))
    end, mask, pad, first, separator, padding = (-1 if number is None else number for number in named)
    ordinary = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.special_ids]
    ids = (end, mask, pad, first, separator, padding, tokenizer.sentinel_ids, ordinary)
    return TokenIds(*ids, lambda tokens: tokenizer.words(tokens))
