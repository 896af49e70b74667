"""Tokenizes a long text in pieces, with the same tokens as the whole text.

A text may be cut before a token that does not depend on where tokenization begins and ends. Each piece is tokenized
with some context on both sides, whose tokens are dropped.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
from tokenizers import models

from titan_like.data.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

PIECE = 1 << 18  # characters that are tokenized at a time; a tokenizer needs some 200 bytes of memory for each
CONTEXT = 1 << 11  # characters before and after a piece that are tokenized with it
FindCut = Callable[[str], int | None]  # a place in a stretch of text, or None
_AGREEING = 8  # tokens before and after a cut on which all windows agree
# Characters that the windows leave out at both ends of the same text. The tokens of repeated digits, spaces or phrases
# depend on where a window begins.
_SHIFTS = (0, 1, 2, 3, 5, 8, 13, 21, 34)


def find_cut(tokenizer: Tokenizer, text: str) -> int | None:
    """A place for a cut in the middle half of ``text``, 2 · CONTEXT characters of a longer text.

    None if the tokens there depend on where tokenization begins. With a Unigram model, cuts are between words only:
    within a word, such as a dashed line, the rounding of earlier scores decides between equally likely tokens.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return len(text) // 2
    first, stretch = _window(tokenizer, text, 0), np.ones(2 * _AGREEING + 1)
    _, begins, ends, begins_word = first.T
    is_cut = (len(text) // 4 < begins) & (begins < ends) & (begins < len(text) * 3 // 4)
    is_cut[1:] &= np.maximum.accumulate(ends)[:-1] <= begins[1:]  # not within a character of several tokens
    if isinstance(tokenizer.tokenizer.model, models.Unigram):
        is_cut &= begins_word == 1
    if len(first) < len(stretch) or not is_cut.any():
        return None
    windows = [set(map(tuple, _window(tokenizer, text, shift).tolist())) for shift in _SHIFTS[1:]]
    agree = [all(token in window for window in windows) for token in map(tuple, first.tolist())]
    places = begins[is_cut & (np.convolve(agree, stretch, "same") == len(stretch))]
    return int(places[np.abs(places - len(text) // 2).argmin()]) if len(places) else None


def _window(tokenizer: HuggingFaceTokenizer, text: str, shift: int) -> np.ndarray:
    """The tokens of a text without its ends: int64 [tokens, 4] of id, begin, end, and whether the pre-tokenizer divides
    the text at the begin. That distinguishes digits that are the same tokens in other groups of three.
    """
    ids, begins, ends = tokenizer.encode_with_places(text[shift : len(text) - shift])
    encoded = tokenizer.tokenizer.encode(text[shift : len(text) - shift], add_special_tokens=False)
    tokens = pairwise(zip(encoded.word_ids, encoded.offsets, strict=True))
    words = [place for (before, _), (word, (place, _)) in tokens if word != before]
    return np.stack((ids, begins + shift, ends + shift, np.isin(begins, words)), axis=1)


def encode_piece(tokenizer: Tokenizer, before: str, text: str, after: str) -> np.ndarray | None:
    """The tokens of a part of a text between cuts of `find_cut`: int64 [tokens].

    ``before`` and ``after`` are CONTEXT characters around it, or empty at the ends of the whole text. None if a cut is
    within a token after all, because the text repeats itself over more than the context.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.encode(text)
    ids, begins, ends = tokenizer.encode_with_places(before + text + after)
    bounds = [0, len(ids)]
    for side, at in enumerate((len(before), len(before) + len(text))):
        if (before, after)[side]:
            bounds[side] = int(((begins <= at) & (at < ends)).argmax())
            if begins[bounds[side]] != at:
                return None
    return ids[slice(*bounds)]


def encode_documents(
    tokenizer: Tokenizer, texts: list[str], ends: bool = True, before: str = "", after: str = ""
) -> list[np.ndarray] | None:
    """The tokens of documents, int64 [tokens] each, with those that begin one and, if it ``ends``, the end-of-document.

    A part of a long text has context on one side or both; None if it cannot be cut there after all.
    """
    first, end = [] if before else tokenizer.first_ids, [tokenizer.eod_id] if ends and not after else []
    if not (before or after):
        encoded = encode_texts(tokenizer, texts)
    elif (part := encode_piece(tokenizer, before, texts[0], after)) is not None:
        encoded = [part]
    else:
        return None
    return [np.concatenate((first, tokens, end)).astype(np.int64) for tokens in encoded]


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The tokens of several texts, int64 [tokens] each. Long texts are tokenized in pieces."""
    short = iter(tokenizer.encode_all([text for text in texts if len(text) <= PIECE]))
    return [next(short) if len(text) <= PIECE else _encode_long(tokenizer, text) for text in texts]


def _encode_long(tokenizer: Tokenizer, text: str) -> np.ndarray:
    parts = list[np.ndarray]()
    for piece in cut_text([text], partial(find_cut, tokenizer)):
        if (tokens := encode_piece(tokenizer, *piece)) is None:
            return tokenizer.encode(text)
        parts.append(tokens)
    return np.concatenate(parts)


def cut_text(parts: Iterable[str], find_cut: FindCut) -> Iterator[tuple[str, str, str]]:
    """Cut a text, given in ``parts``, into (context, piece, context), with pieces of at least `PIECE` characters.

    ``find_cut`` gets consecutive stretches of 2 · CONTEXT characters until it finds a place in one.
    """
    text = ""
    begin = 0
    at = PIECE
    for part in parts:
        text += part
        while len(text) - at >= 2 * CONTEXT:
            cut = find_cut(text[at : at + 2 * CONTEXT])
            at += cut or CONTEXT
            if cut is not None:
                yield text[max(0, begin - CONTEXT) : begin], text[begin:at], text[at : at + CONTEXT]
                text, begin = text[at - CONTEXT :], CONTEXT
                at = begin + PIECE
    yield text[max(0, begin - CONTEXT) : begin], text[begin:], ""
