"""What every task has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_like.evaluate.windows import Score, Window


@dataclass(frozen=True)
class Task:
    """Windows to score, and what their scores say."""

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


class TaskError(ValueError):
    """A file that a task cannot use, as the predicate of a sentence about the file."""
