"""The tasks by name: how their files become windows, and how they are opened from the settings that name them."""

import math
import os
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_like.config.errors import ConfigError, blamed_on, require
from titan_like.config.paths import expanded, unreadable_reason
from titan_like.config.schema import JobConfig
from titan_like.data.objectives.race import read_questions
from titan_like.data.objectives.sentence_pairs import PairTokens
from titan_like.data.readers.raw_text import UnreadableError
from titan_like.data.text.tokenizer import Tokenizer, tokenizer_of
from titan_like.evaluate.scoring import Progress, Scorer
from titan_like.evaluate.task import Score, Task, TextSettings, Window, ending_window, read_file, sliding_windows
from titan_like.models.config import NUM_OPTIONS, TransformerConfig


def text_task(name: str, path: Path, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """The perplexity of a text, or of the texts in a file of records, each under a sliding window."""
    content = read_file(path)
    texts = [content] if isinstance(content, str) else [text for _, text in content]
    bits = math.log(2) * sum(len(text.encode("utf-8")) for text in texts)
    return _text_task(name, texts, tokenizer, settings, lambda loss: {"bits_per_byte": loss / bits})


def _text_task(
    name: str,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    settings: TextSettings,
    figures: Callable[[float], dict[str, float]],
) -> Task:
    """The figures of texts by token, and more ``figures`` of their summed loss in nats.

    A text begins as documents do in training. The tokens that begin it, or else the first one, are not scored.
    """
    first, windows = tokenizer.first_ids, list[Window]()
    for text in texts:
        tokens = np.concatenate((first, tokenizer.encode(text))).astype(np.int64)
        windows += sliding_windows(tokens, settings.seq_len, settings.stride, max(1, len(first)))
    num_scored = sum(window.num_targets for window in windows)
    if num_scored == 0:
        raise UnreadableError("has fewer than two tokens, so that none can be scored; name a longer text")

    def results(scores: Sequence[Score]) -> dict[str, float]:
        loss = _loss(scores)
        by_token = {"tokens": num_scored, "loss": loss / num_scored, "perplexity": exponential(loss / num_scored)}
        return by_token | figures(loss)

    return Task(name, windows, results)


def _loss(scores: Sequence[Score]) -> float:
    """The summed loss in nats."""
    return -math.fsum(score.log_probability for score in scores)


def exponential(loss: float) -> float:
    """exp(loss); infinite where Python's would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


# Replacements, in this order. Megatron-LM has one more rule, which is meant to join an apostrophe and
# a digit. As written it applies only to an apostrophe and a digit between slashes, which WikiText does not contain.
_JOINED = {"s '": "s'"}  # the players ' goals
_JOINED |= {f" @{mark}@ ": mark for mark in "-,."} | {f" {mark} ": f"{mark} " for mark in ":;.!?,"}
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))  # no spaces right inside these
_REMAINING = {
    "= = = =": "====",  # headings
    "= = =": "===",
    "= =": "==",
    " ° ": "°",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def detokenize(text: str) -> str:
    """Turn WikiText's words between spaces into ordinary text."""
    for written, meant in _JOINED.items():
        text = text.replace(written, meant)
    for opening, closing in _PAIRS:
        end = re.escape(closing)
        text = re.sub(rf"{re.escape(opening)}\s*([^{end}]*?)\s*{end}", rf"{opening}\1{closing}", text)
    for written, meant in _REMAINING.items():
        text = text.replace(written, meant)
    return text


def count_words(text: str) -> int:
    """The number of words of a text as published. Words are between single spaces, so a line end counts as a word.

    That is how Megatron-LM counts; the test split of WikiText-103 has 245,566.
    """
    return len(text.strip().split(" "))


def wikitext_task(name: str, path: Path, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """The perplexity per word of a split of WikiText-103 (arXiv 1609.07843) or WikiText-2, as it is published.

    It is published as words between spaces, and models that read words are compared by their perplexity per word.
    Megatron-LM (arXiv 1909.08053, appendix E) gives a model with tokens of its own ordinary text, and divides the loss
    of that text by the number of words in the published one. A file of records has its lines, as on Hugging Face's
    hub, which has empty lines in place of single spaces.
    """
    text = read_file(path)
    if not isinstance(text, str):
        for number, line in text:
            if line and not line.endswith("\n"):
                raise UnreadableError(f"has a text without a line end in record {number}; WikiText's records are lines")
        text = "".join(line or " \n" for _, line in text)
    num_words = count_words(text)
    if num_words < 2:
        raise UnreadableError("has fewer than two words, so that none can be scored; name a longer text")

    def by_word(loss: float) -> dict[str, float]:
        return {"words": num_words, "word_perplexity": exponential(loss / (num_words - 1))}

    return _text_task(name, [detokenize(text)], tokenizer, settings, by_word)


def lambada_task(name: str, path: Path, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """LAMBADA (arXiv 1606.06031): accuracy and perplexity of the last words of passages, which are records or lines.

    A word is right if each of its tokens is the most probable one after all tokens before it. The perplexity is by
    word: the exponential of the mean over passages of the word's loss.
    """
    content = read_file(path)
    passages = enumerate(content.split("\n"), start=1) if isinstance(content, str) else content
    pairs = [split_passage(number, passage) for number, passage in passages if passage.strip()]
    if not pairs:
        raise UnreadableError("has no passages; write one a line")
    try:
        windows = [ending_window(*split_tokens(*pair, tokenizer), settings.seq_len) for pair in pairs]
    except ValueError as error:
        raise UnreadableError(f"has a last word that does not fit: {error}; raise training.seq_len") from None

    def results(scores: Sequence[Score]) -> dict[str, float]:
        right = sum(score.num_right == window.num_targets for score, window in zip(scores, windows, strict=True))
        accuracy, perplexity = right / len(windows), exponential(_loss(scores) / len(windows))
        return {"passages": len(windows), "accuracy": accuracy, "perplexity": perplexity}

    return Task(name, windows, results)


def split_passage(number: int, passage: str) -> tuple[str, str]:
    """The context and the last word with a space before it, which is how it is tokenized."""
    words = passage.split()
    if len(words) < 2:
        raise UnreadableError(f"has fewer than two words in line {number}; a passage needs a context and a last word")
    return passage.rstrip().removesuffix(words[-1]).strip(), f" {words[-1]}"


def split_tokens(context: str, target: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens of a context, which begins as documents do, and of a target that follows it.

    Both are tokenized as one text, because a tokenizer may write a word inside a text in another way than at its
    beginning. A token across the border is the target's.
    """
    tokens, _, ends = tokenizer.encode_with_places(context + target)
    border = int(np.append(ends > len(context), True).argmax())
    return [*tokenizer.first_ids, *tokens[:border].tolist()] or [tokenizer.eod_id], tokens[border:].tolist()


def race_task(name: str, folder: Path, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """RACE (arXiv 1704.04683): accuracy over a folder's questions, and over each of its subfolders."""
    if tokenizer.pair_ids is None:
        raise UnreadableError("needs a tokenizer with [CLS] and [SEP]; set data.tokenizer to the model's")
    questions = read_questions(folder, tokenizer)
    pair_tokens = PairTokens(*tokenizer.pair_ids)
    windows = []
    for question, option in product(questions, range(NUM_OPTIONS)):
        inputs = question.inputs(option, pair_tokens, settings.seq_len)
        end = int(np.flatnonzero(inputs == pair_tokens.separator)[-1]) + 1
        # Without the padding: the model sees all tokens of the option and predicts none of them.
        windows.append(Window(np.append(inputs[:end], pair_tokens.separator), 1))

    def results(scores: Sequence[Score]) -> dict[str, float]:
        values = np.array([score.log_probability for score in scores]).reshape(-1, NUM_OPTIONS)
        right = values.argmax(1) == [question.answer for question in questions]
        groups = np.array([question.group for question in questions])
        figures = {"questions": len(questions), "accuracy": float(right.mean())}
        names = sorted(set(groups)) if len(set(groups)) > 1 else []
        return figures | {f"accuracy_{group}": float(right[groups == group].mean()) for group in names}

    return Task(name, windows, results)


class _Kind(NamedTuple):
    """A task that can be named."""

    # From its label and its file or folder. An `UnreadableError` if that cannot be used.
    build: Callable[[str, Path, Tokenizer, TextSettings], Task]
    slides: bool = False  # cuts a text into windows that overlap
    chooses: bool = False  # is a folder of questions, for a model that chooses answers


_KINDS = {
    "text": _Kind(text_task, slides=True),
    "wikitext103": _Kind(wikitext_task, slides=True),
    "lambada": _Kind(lambada_task),
    "race": _Kind(race_task, chooses=True),
}


class NamedTask(NamedTuple):
    """A task that the setting ``key`` names as ``spec``, NAME=PATH. Its file is not opened before `open_tasks`."""

    key: str
    spec: str
    label: str  # NAME, or NAME/FILE, with the file's name without its ending, if several have that name
    kind: _Kind
    path: Path


def named_tasks(key: str, specs: Sequence[str], model: TransformerConfig) -> list[NamedTask]:
    """The tasks that are written NAME=PATH in the setting ``key``.

    Raises a `ConfigError` if there is no such task or file, one is named twice, or one scores what the model does not
    predict.
    """
    tasks: list[NamedTask] = []
    names, chooses = [spec.partition("=")[0] for spec in specs], "choice" in model.predictions
    for name, spec in zip(names, specs, strict=True):
        written = spec.partition("=")[2]
        expected = f"must be NAME=PATH, where NAME is {', '.join(_KINDS)}; for example lambada=lambada_test.jsonl"
        require(name in _KINDS and written, key, spec, expected)
        with blamed_on(key, spec, before="the path "):
            kind, path = _KINDS[name], Path(expanded(written))
        if kind.chooses:
            require(os.path.isdir(path), key, spec, f"{path} is not a folder; name one of the data set's")
        elif (reason := unreadable_reason(path)) is not None:
            raise ConfigError(key, spec, f"{path} {reason}; name a readable text file")
        only = "needs a model that chooses answers: bert, fine-tuned with model.overrides.sentence_head choice"
        only = "this model chooses answers; only race is for it" if chooses else only
        require(kind.chooses == chooses, key, spec, only)
        label = name if names.count(name) == 1 else f"{name}/{path.stem}"
        twice = f"two files would both be called {label}; name one of them, or rename it"
        require(label not in [task.label for task in tasks], key, spec, twice)
        tasks.append(NamedTask(key, spec, label, kind, path))
    return tasks


def open_tasks(named: Sequence[NamedTask], tokenizer: Tokenizer, settings: TextSettings) -> list[Task]:
    """Read and tokenize the files of tasks; a `ConfigError` if one cannot be used."""
    tasks = []
    for key, spec, label, kind, path in named:
        with blamed_on(key, spec, UnreadableError, before=f"{path} "):
            tasks.append(kind.build(label, path, tokenizer, settings))
    return tasks


def validation_tasks(config: JobConfig, model: TransformerConfig) -> list[Task]:
    """The tasks of `evaluation.datasets`, which a run scores at each validation, read and tokenized."""
    named = named_tasks("evaluation.datasets", config.evaluation.datasets, model)
    if not named:
        return []
    tokenizer = tokenizer_of(config.data, model.vocab_size)
    return open_tasks(named, tokenizer, TextSettings.of(config.training.seq_len))


def run_tasks(
    tasks: Sequence[Task], scorer: Scorer, progress: Callable[[str], Progress] | None = None
) -> dict[str, dict[str, float]]:
    """Score every task: task → figure → value, the same on every process, which all call it with the same tasks.

    ``progress`` returns the callback for a task of this name.
    """
    return {
        task.name: task.results(scorer(task.windows, None if progress is None else progress(task.name)))
        for task in tasks
    }
