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


class TaskError(ValueError):
    """A file that a task cannot use, as the predicate of a sentence about the file."""
