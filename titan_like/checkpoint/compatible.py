"""Checks that a checkpoint belongs to the run that the configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from titan_like.checkpoint.step_folders import RUN_FILE, RunState, UnreadableError, checkpoint_path, read_run_state
from titan_like.config.errors import ConfigError, first_line
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig


class OtherRunError(ConfigError):
    """A checkpoint in the run's folder belongs to another model, optimizer or data."""


_MAY_CHANGE = {"dropout"}
# Optimizer state fits only its own optimizer, and the data cursor counts samples of the same data in the same order.
_MUST_STAY = [
    ("optimizer", "name"),
    ("optimizer", "beta1"),
    ("job", "seed"),
    ("training", "seq_len"),
    ("training", "decoder_seq_len"),
    ("data", "dataset"),
    ("data", "options"),
    ("data", "split"),
    ("data", "tokenizer"),
    ("data", "mlm_probability"),
    ("data", "mlm_whole_words"),
    ("data", "mlm_max_ngram"),
    ("data", "noise_density"),
    ("data", "mean_noise_span_length"),
    ("data", "sentence_objective"),
]


def check_same_model(path: Path, config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a checkpoint of another model. A damaged one passes here and fails when it is loaded.

    Raises:
        OtherRunError: the first difference.
    """
    state = _readable_state(path)
    if state is not None:
        _compare(path, _of_model(state, config, model))


def check_same_run(path: Path, config: JobConfig, model: TransformerConfig) -> None:
    """Refuse to resume from a checkpoint of another model, optimizer or data. A damaged one fails when it is loaded.

    Raises:
        OtherRunError: the first difference.
    """
    state = _readable_state(path)
    if state is None:
        return
    compared, now, then = _of_model(state, config, model), config.model_dump(mode="json"), state.config
    if state.step > 0:  # at step 0 there is no cursor and no optimizer state
        compared += [(f"{s}.{key}", now[s][key], then[s].get(key, now[s][key])) for s, key in _MUST_STAY]
    _compare(path, compared)


def _of_model(state: RunState, config: JobConfig, model: TransformerConfig) -> list[tuple[str, Any, Any]]:
    """(setting, value, value in the checkpoint) of all that describes the model."""
    shape, fields = model.model_dump(mode="json"), type(model).model_fields
    family = ("model.family", config.model.family, state.config["model"]["family"])
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in shape}
    saved = defaults | state.model  # an older one may lack a newer field
    return [family, *((f"model.overrides.{k}", v, saved[k]) for k, v in shape.items() if k not in _MAY_CHANGE)]


def check_readable(folder: Path, steps: list[int], cure: str) -> None:
    """Refuse a folder in which no checkpoint's `run.json` can be read. One readable file is enough.

    ``cure`` is what the user can do about it.

    Raises:
        ConfigError: what is wrong with the newest of ``steps``.
    """
    problem = None
    for step in reversed(steps):
        try:
            read_run_state(checkpoint_path(folder, step))
            return
        except UnreadableError as error:
            problem = problem or f"{checkpoint_path(folder, step)} cannot be loaded ({first_line(error)})"
        except Exception:  # whatever a damaged file raises
            return
    if problem is not None:
        others = ", nor any other there" if len(steps) > 1 else ""
        raise ConfigError("checkpoint.folder", str(folder), f"{problem}{others}; {cure}")


def _readable_state(path: Path) -> RunState | None:
    try:
        return read_run_state(path)
    except (OSError, ValueError):
        return None


def _compare(path: Path, compared: list[tuple[str, Any, Any]]) -> None:
    for key, value, saved in compared:
        if saved is PydanticUndefined:
            problem = f"{path / RUN_FILE} does not say what it was saved with; restore the file, or name another folder"
            raise OtherRunError(key, value, problem)
        if value != saved:
            then = "none" if saved is None else saved
            raise OtherRunError(key, value, f"{path} was saved with {then}; keep that, or name another folder")
