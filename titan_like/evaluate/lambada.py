"""LAMBADA: predicting the last word of a passage (arXiv 1606.06031)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.task import Task, TaskError, TextSettings
from titan_like.evaluate.text import exponential
from titan_like.evaluate.windows import Score, ending_window


def lambada_task(name: str, text: str, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """Accuracy and perplexity of the last words of passages, one a line.

    A word is right if each of its tokens is the most probable one after all tokens before it. The perplexity is by
    word: the exponential of the mean over passages of the word's loss.

    Raises:
        TaskError: a line cannot be read or has no context, or a word has more than ``seq_len`` tokens.
    """
    pairs = [split_passage(number, passage) for number, passage in read_passages(text)]
    if not pairs:
        raise TaskError("has no passages; write one a line")
    contexts = tokenizer.encode_all([context for context, _ in pairs])
    words = tokenizer.encode_all([word for _, word in pairs])
    try:
        windows = [
            ending_window(context.tolist(), word.tolist(), settings.seq_len)
            for context, word in zip(contexts, words, strict=True)
        ]
    except ValueError as error:
        raise TaskError(f"has a last word that does not fit: {error}; raise training.seq_len") from None

    def results(scores: Sequence[Score]) -> dict[str, float]:
        right = sum(score.num_right == window.num_targets for score, window in zip(scores, windows, strict=True))
        loss = -math.fsum(score.log_probability for score in scores)
        accuracy, perplexity = right / len(windows), exponential(loss / len(windows))
        return {"passages": len(windows), "accuracy": accuracy, "perplexity": perplexity}

    return Task(name, windows, results)


def read_passages(text: str) -> list[tuple[int, str]]:
    """Line numbers and passages of a file that has one a line, as text or as JSON with the key "text".

    Raises:
        TaskError: the first line is JSON and another one is not, or has no text.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith("{"):
        return lines
    return [(number, _text_of_json(number, line)) for number, line in lines]


def _text_of_json(number: int, line: str) -> str:
    try:
        passage = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        passage = None
    if not isinstance(passage, str):
        raise TaskError(f'has no JSON object with a text under "text" in line {number}; correct the line')
    return passage


def split_passage(number: int, passage: str) -> tuple[str, str]:
    """The context and the last word with a space before it, which is how it is tokenized.

    Raises:
        TaskError: the passage, in line ``number`` of the file, has only one word.
    """
    words = passage.split()
    if len(words) < 2:
        raise TaskError(f"has fewer than two words in line {number}; a passage needs a context and a last word")
    return passage.rstrip().removesuffix(words[-1]).strip(), f" {words[-1]}"
