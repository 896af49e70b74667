"""Ids of special tokens, and which tokens continue a word: chosen for small samples, and those of a run's tokenizer."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from tokenizers import models

from titan_like.config.schema import Data
from titan_like.data.tokenizer import ByteTokenizer, tokenizer_of
from titan_like.verify.samples import END_OF_DOCUMENT, FIRST, MASK, PAD, PADDING, SEPARATOR


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
    continuing: Container[int] = ()  # continue the word of the token before them,
    continued: Container[int] = ()  # if that is one of these


def ids_of_samples(vocab_size: int) -> TokenIds:
    """Those of the small samples. The last tokens of the vocabulary are sentinels; a third are in no word."""
    named = (END_OF_DOCUMENT, MASK, PAD, FIRST, SEPARATOR, PADDING)
    ordinary = [token for token in range(vocab_size) if token not in named]
    in_words = {token for token in range(vocab_size) if token % 3}
    return TokenIds(*named, range(vocab_size - 1, PADDING, -1), ordinary, in_words, in_words)


def ids_of_tokenizer(section: Data) -> TokenIds:
    """Those of the tokenizer that [data] names, by the pieces of its vocabulary."""

    def is_of_word(character: str) -> bool:  # a letter, digit or underscore, and no vocabulary's mark of white space
        return (character.isalnum() or character == "_") and character not in "\u2581ĠĊĉč"

    tokenizer = tokenizer_of(section)
    if isinstance(tokenizer, ByteTokenizer):
        in_words = {byte for byte in range(256) if byte >= 128 or is_of_word(chr(byte))}
        return TokenIds(256, 257, 258, 258, 259, 260, range(259, 359), range(256), in_words, in_words)
    vocab = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    absent, special = (-1, -1, -1), tokenizer.special_ids
    end, mask, pad = (
        -1 if number is None else number for number in (tokenizer.eod_id, tokenizer.mask_id, tokenizer.pad_id)
    )
    first, separator, padding = tokenizer.pair_ids or absent
    pieces = {number: piece for piece, number in vocab.items() if piece and number not in special}
    begins, ends = ({n for n, piece in pieces.items() if is_of_word(piece[at])} for at in (0, -1))
    if isinstance(tokenizer.tokenizer.model, models.WordPiece):
        begins, ends = {n for n, piece in pieces.items() if piece.startswith("##")}, set(pieces)
    sentinels = [vocab[name] for name in takewhile(vocab.__contains__, map("<extra_id_{}>".format, count()))]
    ordinary = [number for number in range(max(vocab.values()) + 1) if number not in special]
    return TokenIds(end, mask, pad, first, separator, padding, sentinels, ordinary, begins, ends)
