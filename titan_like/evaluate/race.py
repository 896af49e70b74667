"""RACE: which of four options answers a question about a passage (arXiv 1704.04683)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan_like.data.race import RaceError, read_questions
from titan_like.data.sentence_pairs import PairTokens
from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.task import Task, TaskError, TextSettings
from titan_like.evaluate.windows import Score, Window
from titan_like.models.config import NUM_OPTIONS


def race_task(name: str, folder: Path, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """Accuracy over all questions of a folder, and over those of each of its subfolders, middle and high.

    Raises:
        TaskError: the folder is not of RACE, or the tokenizer has no tokens for pairs of sentences.
    """
    if tokenizer.pair_ids is None:
        raise TaskError("needs a tokenizer with [CLS] and [SEP]; set data.tokenizer to the model's")
    try:
        questions = read_questions(folder, tokenizer)
    except RaceError as error:
        raise TaskError(str(error)) from None
    around = PairTokens(*tokenizer.pair_ids)
    windows = [
        option_window(question.inputs(option, around, settings.seq_len), around)
        for question in questions
        for option in range(NUM_OPTIONS)
    ]

    def results(scores: Sequence[Score]) -> dict[str, float]:
        values = np.array([score.log_probability for score in scores]).reshape(-1, NUM_OPTIONS)
        right = values.argmax(1) == [question.answer for question in questions]
        groups = np.array([question.group for question in questions])
        figures = {"questions": len(questions), "accuracy": float(right.mean())}
        names = sorted(set(groups)) if len(set(groups)) > 1 else []
        return figures | {f"accuracy_{group}": float(right[groups == group].mean()) for group in names}

    return Task(name, windows, results)


def option_window(inputs: np.ndarray, around: PairTokens) -> Window:
    """The window of one option without its padding: the model sees all its tokens and predicts none of them."""
    end = int(np.flatnonzero(inputs == around.separator)[-1]) + 1
    return Window(np.append(inputs[:end], around.separator), 1)
