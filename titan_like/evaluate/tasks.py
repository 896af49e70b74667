"""The tasks by name, and how they are opened from the settings that name them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.paths import expanded, file_problem
from titan_like.config.schema import JobConfig
from titan_like.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from titan_like.evaluate.files import read_text
from titan_like.evaluate.lambada import lambada_task, read_passages
from titan_like.evaluate.race import race_task
from titan_like.evaluate.scoring import Progress, Scorer
from titan_like.evaluate.task import Task, TaskError, TextSettings
from titan_like.evaluate.text import text_task
from titan_like.evaluate.wikitext import read_published, wikitext_task
from titan_like.models.config import TransformerConfig

# The function that reads a task's file, and the one that makes a task of its name and what was read.
_OF_TEXT: dict[str, tuple[Callable[[Path], Any], Callable[[str, Any, Tokenizer, TextSettings], Task]]] = {
    "text": (read_text, text_task),
    "wikitext103": (read_published, wikitext_task),
    "lambada": (read_passages, lambada_task),
}
_OF_FOLDERS: dict[str, Callable[[str, Path, Tokenizer, TextSettings], Task]] = {"race": race_task}
_SLIDING = ("text", "wikitext103")
_TASKS = (*_OF_TEXT, *_OF_FOLDERS)


def check_tasks(key: str, specs: Sequence[str]) -> list[tuple[str, Path]]:
    """Check tasks written NAME=PATH, without opening their files; returns the names and paths.

    Args:
        key: the setting that names the tasks, for the error.
        specs: the tasks.

    Raises:
        ConfigError: there is no such task or file, or one is named twice.
    """
    found = []
    for spec in specs:
        name, _, written = spec.partition("=")
        if name not in _TASKS or not written:
            expected = f"must be NAME=PATH, where NAME is {', '.join(_TASKS)}; for example lambada=lambada_test.jsonl"
            raise ConfigError(key, spec, expected)
        try:
            path = Path(expanded(written))
        except ValueError as error:
            raise ConfigError(key, spec, f"the path {error}") from None
        if name in _OF_FOLDERS:
            if not os.path.isdir(path):
                raise ConfigError(key, spec, f"{path} is not a folder; name one of the data set's")
        elif (problem := file_problem(path)) is not None:
            raise ConfigError(key, spec, f"{path} {problem}; name a readable text file")
        found.append((name, path))
    labels = _labels(found)
    for label, spec in zip(labels, specs, strict=True):
        if labels.count(label) > 1:
            raise ConfigError(key, spec, f"two files would both be called {label}; name one of them, or rename it")
    return found


def slides_windows(specs: Sequence[str]) -> bool:
    """Whether any of the tasks, written NAME=PATH, cuts a text into windows that overlap."""
    return any(spec.partition("=")[0] in _SLIDING for spec in specs)


def check_predictions(key: str, specs: Sequence[str], family: str, predictions: Sequence[str]) -> None:
    """Check that a model predicts what tasks written NAME=PATH score: next tokens, or answers for RACE.

    Raises:
        ConfigError: the first task that it cannot do.
    """
    for spec in specs:
        if (spec.partition("=")[0] in _OF_FOLDERS) != ("choice" in predictions):
            chooses = f"{family} with this head chooses answers; only {', '.join(_OF_FOLDERS)} is for it"
            predicts = "needs a model that chooses answers: bert, fine-tuned with model.overrides.sentence_head choice"
            raise ConfigError(key, spec, chooses if "choice" in predictions else predicts)


def open_tasks(key: str, specs: Sequence[str], tokenizer: Tokenizer, settings: TextSettings) -> list[Task]:
    """Read and tokenize the files of tasks written NAME=PATH. ``key`` is the setting that errors blame.

    A task has its name, or NAME/FILE, with the file's name without its ending, if there are several of that name.

    Raises:
        ConfigError: a task or file cannot be used.
    """
    found = check_tasks(key, specs)
    tasks = []
    for (name, path), label, spec in zip(found, _labels(found), specs, strict=True):
        try:
            if name in _OF_FOLDERS:
                tasks.append(_OF_FOLDERS[name](label, path, tokenizer, settings))
                continue
            read, make = _OF_TEXT[name]
            tasks.append(make(label, read(path), tokenizer, settings))
        except OSError as error:
            raise ConfigError(key, spec, f"{path} cannot be read ({error.strerror})") from None
        except TaskError as error:
            raise ConfigError(key, spec, f"{path} {error}") from None
    return tasks


def validation_tasks(config: JobConfig, model: TransformerConfig) -> list[Task]:
    """The tasks of `evaluation.datasets`, which a run scores at each validation, read and tokenized.

    Raises:
        ConfigError: a task or file cannot be used.
    """
    if not config.evaluation.datasets:
        return []
    check_predictions("evaluation.datasets", config.evaluation.datasets, config.model.family, model.predictions)
    tokenizer = build_tokenizer(config.data.tokenizer)
    check_vocabulary(config.data.tokenizer, tokenizer, model.vocab_size)
    settings = TextSettings.of(config.training.seq_len)
    return open_tasks("evaluation.datasets", config.evaluation.datasets, tokenizer, settings)


def run_tasks(
    tasks: Sequence[Task], scorer: Scorer, progress: Callable[[str], Progress] | None = None
) -> dict[str, dict[str, float]]:
    """Score every task: task → figure → value, the same on every process.

    Args:
        tasks: the tasks, the same on every process.
        scorer: the model.
        progress: makes a task's name into what is told about its progress.
    """
    return {
        task.name: task.results(scorer(task.windows, None if progress is None else progress(task.name)))
        for task in tasks
    }


def _labels(found: Sequence[tuple[str, Path]]) -> list[str]:
    times = Counter(name for name, _ in found)
    return [name if times[name] == 1 else f"{name}/{path.stem}" for name, path in found]
