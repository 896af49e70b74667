"""Whether a checkpoint is of the run that the configuration describes."""

from __future__ import annotations

from pathlib import Path

from titan_like.checkpoint.manager import read_run_state
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig

_MAY_CHANGE = {"dropout"}


def check_compatible(path: Path, config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a checkpoint of another model or another kind of optimizer. A damaged one passes: loading will tell.

    Raises:
        ConfigError: the first difference.
    """
    try:
        state = read_run_state(path)
        saved_shape = dict(state.model)
        differences = [
            ("model.family", config.model.family, state.config["model"]["family"]),
            ("optimizer.name", config.optimizer.name, state.config["optimizer"]["name"]),
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return
    shape = model.model_dump(mode="json")
    differences[1:1] = [
        (f"model.overrides.{field}", value, saved_shape.get(field))
        for field, value in shape.items()
        if field not in _MAY_CHANGE
    ]
    for key, value, saved in differences:
        if value != saved:
            raise ConfigError(key, value, f"{path} was saved with {saved}; keep that, or name another folder")
