"""Perplexity of a text, by token and by byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.task import Task, TaskError, TextSettings
from titan_like.evaluate.windows import Score, sliding_windows


def text_task(name: str, text: str, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """The perplexity of a text under a sliding window.

    Raises:
        TaskError: the text has fewer than two tokens.
    """
    tokens = tokenizer.encode(text)
    check_long_enough(len(tokens))
    num_bytes = len(text.encode("utf-8"))

    def results(scores: Sequence[Score]) -> dict[str, float]:
        loss = -math.fsum(score.log_probability for score in scores)  # nats
        return text_results(loss, len(tokens) - 1) | {"bits_per_byte": loss / math.log(2) / num_bytes}

    return Task(name, sliding_windows(tokens, settings.seq_len, settings.stride), results)


def check_long_enough(num_tokens: int) -> None:
    """Check that a text has a token to score.

    Raises:
        TaskError: it has fewer than two tokens.
    """
    if num_tokens < 2:
        raise TaskError("has fewer than two tokens, so that none can be scored; name a longer text")


def text_results(loss: float, num_tokens: int) -> dict[str, float]:
    """Figures by token of a summed loss in nats over ``num_tokens`` scored tokens."""
    return {"tokens": num_tokens, "loss": loss / num_tokens, "perplexity": exponential(loss / num_tokens)}


def exponential(loss: float) -> float:
    """exp(loss); infinite where Python's would overflow."""
    return math.exp(loss) if loss < 700 else math.inf
