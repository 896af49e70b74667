"""Finds the beginnings of words among token ids, for whole-word masking. The tokenizer's pre-tokenizer defines words.

Datasets store ids without their text, so the pre-tokenizer divides the text of the tokens again. If it does not divide
text, as with Llama 2, or if the vocabulary marks words itself, as WordPiece by ##, white space divides the text.
"""

import re
from collections.abc import Collection
from functools import lru_cache
from itertools import accumulate

import numpy as np
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from titan_like.config.errors import ConfigError


class Words:
    """Finds words by the text of their tokens. A token that joins two words makes them one."""

    def __init__(self, pieces: list[bytes], pre_tokenizer: pre_tokenizers.PreTokenizer, opens: np.ndarray) -> None:
        """``pieces``: UTF-8 of each token, empty for tokens that are words of their own; the last is for any other id.

        Text can be cut before the tokens that ``opens`` marks, bool [pieces], so that few of its parts are new.
        """
        self._pieces, self._pre_tokenizer = pieces, pre_tokenizer
        self._is_apart = np.array([not piece for piece in pieces])
        self._opens = opens | self._is_apart

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether a word, and whether a character, begins at each token: ids [n] → bool [n] each."""
        clipped = np.minimum(ids, len(self._pieces) - 1)
        cuts = np.flatnonzero(self._opens[clipped] | np.append(True, self._is_apart[clipped[:-1]])).tolist()
        data = clipped.astype(np.int32).tobytes()
        levels = [self._levels(data[4 * a : 4 * b]) for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)]
        level = np.frombuffer(b"".join(levels), dtype=np.uint8)
        return level > 1, level > 0

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def _levels(self, ids: bytes) -> bytes:
        """For each token, an int32, a byte: 2 where a word begins, 1 where another character does, and else 0."""
        pieces = [self._pieces[token] for token in np.frombuffer(ids, dtype=np.int32)]
        # A letter replaces each byte of an incomplete character, as at the ends of a sample.
        text = re.sub("[\udc80-\udcff]", "x", b"".join(pieces).decode("utf-8", "surrogateescape"))
        places = {byte: place for place, byte in enumerate(accumulate((len(c.encode()) for c in text), initial=0))}
        ends = (end for _, (_, end) in self._pre_tokenizer.pre_tokenize_str(text))
        begins = {0, *ends}  # white space outside words belongs to the next word
        token_places = (places.get(byte) for byte in accumulate(map(len, pieces[:-1]), initial=0))
        return bytes(2 if place in begins else place is not None for place in token_places)


def words_of(tokenizer: HFTokenizer, special_ids: Collection[int], spec: str) -> Words:
    """The words of the tokenizer ``spec``. Raises a `ConfigError` if its tokens do not mark the beginnings of words.

    Special and added tokens are words of their own.
    """
    vocab, model = tokenizer.get_vocab(with_added_tokens=True), tokenizer.model
    example = "a 的"
    prefix, suffix = (getattr(model, name, "") or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    normal = tokenizer.normalizer.normalize_str(example) if tokenizer.normalizer else example
    divided = tokenizer.pre_tokenizer.pre_tokenize_str(normal) if tokenizer.pre_tokenizer else [(normal, (0, 0))]
    marked = "".join(piece for piece, _ in divided)
    pre_tokenizer = tokenizer.pre_tokenizer if len(divided) > 1 else pre_tokenizers.Metaspace()
    if is_marked := bool(prefix or suffix) or isinstance(model, models.WordLevel):
        pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous" if suffix else "merged_with_next")
    elif marked == "a的":
        reason = f"but the tokens of {spec} have no white space and do not mark where words begin; set it to false"
        raise ConfigError("data.mlm_whole_words", True, reason)
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}

    def text_of(piece: str) -> bytes:
        """The text that the pre-tokenizer saw, without the marks that it writes for a space and for bytes."""
        if suffix:
            return piece.replace(suffix, " ").encode()
        if is_marked:
            return (piece[len(prefix) :] if prefix and piece.startswith(prefix) else f" {piece}").encode()
        if "的" in normal and "的" not in marked and bytes_of.keys() >= set(piece):
            return bytes(map(bytes_of.__getitem__, piece))
        if getattr(model, "byte_fallback", False) and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        return (piece.replace("▁", " ") if "▁" in marked and "▁" not in normal else piece).encode()

    apart, pieces = {*special_ids, *tokenizer.get_added_tokens_decoder()}, [b""] * (max(vocab.values()) + 2)
    for piece, number in vocab.items():
        pieces[number] = b"" if number in apart else text_of(piece)
    # Whatever divides text at white space divides it before a space with a letter or digit.
    texts = [piece.decode(errors="replace") for piece in pieces]
    return Words(pieces, pre_tokenizer, np.array([text[:1] in (" ", "▁") and text[1:2].isalnum() for text in texts]))


def byte_characters() -> list[str]:
    """The character for each byte in GPT-2's vocabulary: the byte itself if printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]
