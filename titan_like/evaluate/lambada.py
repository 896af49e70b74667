"""LAMBADA: predicting the last word of a passage (arXiv 1606.06031)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.files import read_records, read_text
from titan_like.evaluate.task import Task, TaskError, TextSettings
from titan_like.evaluate.text import exponential
from titan_like.evaluate.windows import Score, ending_window


def lambada_task(name: str, passages: Sequence[tuple[int, str]], tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """Accuracy and perplexity of the last words of passages, each with its line in the file.

    A word is right if each of its tokens is the most probable one after all tokens before it. The perplexity is by
    word: the exponential of the mean over passages of the word's loss.

    Raises:
        TaskError: there is no passage, one has no context, or a word has more than ``seq_len`` tokens.
    """
    pairs = [split_passage(number, passage) for number, passage in passages]
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


def read_passages(path: Path) -> list[tuple[int, str]]:
    """Numbers and passages of a file of records, or the lines of one of ordinary text.

    Raises:
        TaskError: the file or a record cannot be used.
        OSError: the file cannot be read.
    """
    records = read_records(path)
    passages = enumerate(read_text(path).split("\n"), start=1) if records is None else records
    return [(number, passage) for number, passage in passages if passage.strip()]


def split_passage(number: int, passage: str) -> tuple[str, str]:
    """The context and the last word with a space before it, which is how it is tokenized.

    Raises:
        TaskError: the passage, in line ``number`` of the file, has only one word.
    """
    words = passage.split()
    if len(words) < 2:
        raise TaskError(f"has fewer than two words in line {number}; a passage needs a context and a last word")
    return passage.rstrip().removesuffix(words[-1]).strip(), f" {words[-1]}"
