"""RACE: multiple-choice questions about passages (arXiv 1704.04683), on which arXiv 1909.08053, section 5.3, fine-tunes
BERT.

The dataset is a folder with ``train``, ``dev`` and ``test``, each with ``middle`` and ``high``. Each line of the .txt
files is a JSON object with an article, questions, four options for each, and answers A to D.

A question is four consecutive samples, as in Megatron-LM (tasks/race): [CLS] question and option [SEP] passage [SEP].
The sample label of the first is the number of the answer. An option replaces the blank (_) of a question, or follows a
question without one. Both together are truncated to `MOST_OF_QUESTION` tokens, or half of a shorter sample, and the
passage to the remaining length. Runs of white space become one space.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator

from titan_like.config.errors import blamed_on, require
from titan_like.config.paths import user_file
from titan_like.data.batch import Batch
from titan_like.data.objectives.sentence_pairs import ADDED, PairTokens, pair_tokens_of
from titan_like.data.readers.raw_text import UnreadableError
from titan_like.data.source import IGNORED_LABEL, DataRequest, Source
from titan_like.data.text.tokenizer import Tokenizer, tokenizer_of
from titan_like.models.config import NUM_OPTIONS

MOST_OF_QUESTION = 128  # tokens of a question with an option
FOLDERS = {"train": "train", "validation": "dev", "test": "test"}


@dataclass(frozen=True)
class Question:
    """A question with its passage, tokenized: int64 [tokens] each."""

    passage: np.ndarray
    options: list[np.ndarray]  # each with the question
    answer: int
    group: str  # the folder of its file: middle or high

    def inputs(self, option: int, pair_tokens: PairTokens, seq_len: int) -> np.ndarray:
        """[CLS] question and option [SEP] passage [SEP], padded: int64 [seq_len]."""
        question = self.options[option][: min(MOST_OF_QUESTION, (seq_len - ADDED) // 2)]
        return pair_tokens.join(question, self.passage[: seq_len - ADDED - len(question)], seq_len)


class Record(BaseModel):
    """A line of a file: a passage with its questions."""

    article: str
    questions: list[str]
    options: list[Annotated[list[str], Field(min_length=NUM_OPTIONS, max_length=NUM_OPTIONS)]]
    answers: list[Literal["A", "B", "C", "D"]]

    @model_validator(mode="after")
    def _check_lengths(self) -> Record:
        if not len(self.questions) == len(self.options) == len(self.answers):
            raise ValueError("each question needs options and an answer")
        return self


def read_questions(folder: Path, tokenizer: Tokenizer) -> list[Question]:
    """All questions in a folder and its subfolders, sorted by file. Raises an `UnreadableError` if there is none."""
    records = [(file.parent.name, record) for file in sorted(folder.rglob("*.txt")) for record in _records(file)]
    if not any(record.questions for _, record in records):
        raise UnreadableError("has no .txt files with questions; name a folder of RACE, such as RACE/test")
    passages = tokenizer.encode_all([_clean(record.article) for _, record in records])
    texts = [
        _clean(question.replace("_", option) if "_" in question else f"{question} {option}")
        for _, record in records
        for question, options in zip(record.questions, record.options, strict=True)
        for option in options
    ]
    options = iter(tokenizer.encode_all(texts))
    return [
        Question(passage, [next(options) for _ in range(NUM_OPTIONS)], ord(answer) - ord("A"), group)
        for (group, record), passage in zip(records, passages, strict=True)
        for answer in record.answers
    ]


def _clean(text: str) -> str:
    return " ".join(text.split())


def _records(file: Path) -> Iterator[Record]:
    """The JSON objects of a file, one a line."""
    with user_file(file, lambda reason: UnreadableError(f"contains {file.name}, which {reason}")):
        content = file.read_bytes()
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            if line.strip():
                yield Record.model_validate_json(line)
        except ValidationError:
            reason = f"has no article with questions, {NUM_OPTIONS} options each and answers in line {number} of"
            raise UnreadableError(f"{reason} {file.name}; download the dataset again") from None


class RaceSource(Source):
    """One split of RACE."""

    together = NUM_OPTIONS

    def __init__(self, request: DataRequest) -> None:
        super().__init__(request)
        section = request.section
        reason = 'dataset "race" needs one folder, in which train, dev and test are'
        require(len(section.paths) == 1, "data.paths", section.paths, reason)
        tokenizer = tokenizer_of(section, request.vocab_size)
        self._pair_tokens = pair_tokens_of(section.tokenizer, tokenizer, request.vocab_size)
        folder = Path(section.paths[0]) / FOLDERS[request.split]
        with blamed_on("data.paths", str(folder), UnreadableError):
            self._questions = read_questions(folder, tokenizer)

    def __len__(self) -> int:
        return NUM_OPTIONS * len(self._questions)

    def sample(self, position: int) -> Batch:
        """One option of a question."""
        number, option = divmod(position, NUM_OPTIONS)
        question = self._questions[number]
        tokens = torch.from_numpy(question.inputs(option, self._pair_tokens, self.request.seq_len))
        return self._pair_tokens.batch(tokens, sample_labels=torch.tensor(IGNORED_LABEL if option else question.answer))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all questions' tokens and answers."""
        digest = hashlib.blake2b(digest_size=16)
        for question in self._questions:
            for tokens in (question.passage, *question.options):
                digest.update(np.int64(len(tokens)).tobytes() + tokens.tobytes())
            digest.update(bytes([question.answer]))
        return digest.hexdigest()
