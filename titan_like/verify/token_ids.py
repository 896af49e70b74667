"""Ids of special tokens, and where words begin: chosen for small samples, and those of a run's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, count, takewhile
from typing import NamedTuple

import numpy as np

from titan_like.data.tokenizer import ByteTokenizer, build_tokenizer
from titan_like.verify.samples import END_OF_DOCUMENT, FIRST, MASK, PAD, PADDING, SEPARATOR, words_of_samples

# Names of the first six of `TokenIds`. The first name that a vocabulary has counts.
_NAMES = (
    *(("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"), ("[MASK]", "<mask>"), ("<pad>", "[PAD]")),
    *(("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[PAD]", "<pad>", "[CLS]", "<s>")),
)


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


def ids_of_tokenizer(spec: str) -> TokenIds:
    """Those of the tokenizer that `data.tokenizer` names, by its vocabulary; the words are as it tells them."""
    tokenizer = build_tokenizer(spec)
    if isinstance(tokenizer, ByteTokenizer):
        return TokenIds(
            256, 257, 258, 258, 259, 260, range(259, 359), range(256), lambda tokens: tokenizer.words(tokens)
        )
    library, vocab = tokenizer.tokenizer, tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    named = (next((vocab[name] for name in names if name in vocab), -1) for names in _NAMES)
    end, mask, pad, first, separator, padding = named
    special = {vocab.get(name) for name in (*chain(*_NAMES), "[UNK]", "<unk>")}
    special |= {number for number, token in library.get_added_tokens_decoder().items() if token.special}
    sentinels = [vocab[name] for name in takewhile(vocab.__contains__, map("<extra_id_{}>".format, count()))]
    ordinary = [number for number in range(max(vocab.values()) + 1) if number not in special]
    return TokenIds(
        end, mask, pad, first, separator, padding, sentinels, ordinary, lambda tokens: tokenizer.words(tokens)
    )
