"""Tasks: windows of text that a model sees at once, the figures of their scores, and the files they are read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_like.data.readers.raw_text import BadRecord, UnreadableError, kind_of, read_pieces, texts_of


@dataclass(frozen=True)
class Window:
    """The model sees ``tokens`` without the last one. The last ``num_targets`` tokens are scored."""

    tokens: np.ndarray  # int64 [at most seq_len + 1]
    num_targets: int  # at least 1, and fewer than there are tokens


class Score(NamedTuple):
    """A model's score on the targets of one window."""

    log_probability: float  # sum over all targets, in nats; or an option's score, if the model chooses answers
    num_right: int  # targets that are the most probable token given all tokens before


def sliding_windows(tokens: np.ndarray, seq_len: int, stride: int, num_given: int = 1) -> list[Window]:
    """Cut a text [tokens] into windows of ``seq_len`` inputs, each ``stride`` tokens after the one before.

    Every token after the first ``num_given`` is scored once. Tokens of the first window see everything before them;
    later ones see at least the ``seq_len - stride`` inputs before the newly scored tokens. A stride of ``seq_len``
    gives disjoint windows.
    """
    windows, scored = [], num_given
    for start in range(0, len(tokens), stride):
        end = min(start + seq_len + 1, len(tokens))
        if end > scored:
            windows.append(Window(tokens[start:end], end - scored))
            scored = end
    return windows


def ending_window(context: Sequence[int], target: Sequence[int], seq_len: int) -> Window:
    """The window that scores ``target`` after as much of ``context`` as fits; the rest is cut from its left.

    Raises a `ValueError` if the context is empty, or the target is empty or has more than ``seq_len`` tokens.
    """
    if not context or not 0 < len(target) <= seq_len:
        raise ValueError(f"{len(target)} tokens after {len(context)} cannot be scored in a window of {seq_len}")
    tokens = np.asarray([*context, *target], dtype=np.int64)
    return Window(tokens[-(seq_len + 1) :], len(target))


@dataclass(frozen=True)
class Task:
    """Windows to score, and the figures that follow from the scores."""

    name: str
    windows: list[Window]
    results: Callable[[Sequence[Score]], dict[str, float]]  # the windows' scores → figures by name


@dataclass(frozen=True)
class TextSettings:
    """How texts are cut into windows."""

    seq_len: int  # tokens that the model sees at once
    stride: int  # tokens from one sliding window to the next, at most seq_len

    @classmethod
    def of(cls, seq_len: int, stride: int | None = None) -> TextSettings:
        """By default a window overlaps half of the one before, as in Hugging Face's guide to perplexity."""
        return cls(seq_len, max(1, seq_len // 2) if stride is None else stride)


_KEY = "text"  # a record's text


def read_file(path: Path) -> str | list[tuple[int, str]]:
    """The text of a file, without a byte-order mark, or the texts of a file of records, with their numbers from 1.

    Records are the rows of a parquet or arrow file, with their text in the column "text", or the lines of a file of
    JSON objects or the elements of a JSON array, with their text under "text". Raises an `UnreadableError` if the file
    is damaged or not UTF-8, or a record has no text.
    """
    texts = [record for piece, _ in read_pieces(path, _KEY) for record in texts_of(piece, _KEY)]
    has_records = kind_of(path, _KEY) != "text"
    for number, text in texts:
        if isinstance(text, BadRecord):
            of_record = f"cannot be used because of record {number} ({text}); correct it"
            raise UnreadableError(of_record if has_records else str(text))
    return texts if has_records else "".join(text for _, text in texts)
