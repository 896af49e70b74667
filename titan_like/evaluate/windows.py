"""Windows: pieces of text that a model sees at once, and the tokens in them that are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Window:
    """The model sees ``tokens`` without the last one. The last ``num_targets`` tokens are scored."""

    tokens: np.ndarray  # int64 [at most seq_len + 1]
    num_targets: int  # at least 1, and fewer than there are tokens


class Score(NamedTuple):
    """A model's score on the targets of one window."""

    log_probability: float  # of all targets together, in nats; or the score of an option, of a model that chooses
    num_right: int  # targets that are the most probable token given all tokens before


def sliding_windows(tokens: np.ndarray, seq_len: int, stride: int) -> list[Window]:
    """Cut a text [tokens] into windows of ``seq_len`` inputs, each ``stride`` tokens after the one before.

    Every token except the first is scored once. Tokens of the first window see everything before them; later ones see
    at least the ``seq_len - stride`` inputs before the newly scored tokens. A stride of ``seq_len`` gives disjoint
    windows.
    """
    windows, scored = [], 1  # nothing predicts the first token
    for start in range(0, len(tokens), stride):
        end = min(start + seq_len + 1, len(tokens))
        if end > scored:
            windows.append(Window(tokens[start:end], end - scored))
            scored = end
    return windows


def ending_window(context: Sequence[int], target: Sequence[int], seq_len: int) -> Window:
    """The window that scores ``target`` after as much of ``context`` as fits; the rest is cut from its left.

    Raises:
        ValueError: the context is empty, or the target is empty or has more than ``seq_len`` tokens.
    """
    if not context or not 0 < len(target) <= seq_len:
        raise ValueError(f"{len(target)} tokens after {len(context)} cannot be scored in a window of {seq_len}")
    tokens = np.asarray([*context, *target], dtype=np.int64)
    return Window(tokens[-(seq_len + 1) :], len(target))
