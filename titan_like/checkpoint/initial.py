"""The weights that a new run begins with, from elsewhere."""

from __future__ import annotations

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.parallel.model import ParallelModel


def check_initial_weights(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a `checkpoint.initial_load_path` that cannot be of this model, without reading its tensors.

    Raises:
        ConfigError: it is no folder of either kind, or holds another model.
    """
    if config.checkpoint.initial_load_path is not None:
        raise ConfigError("checkpoint.initial_load_path", config.checkpoint.initial_load_path, "not available yet")


def load_initial_weights(path: str, model: ParallelModel) -> None:
    """Read weights into a model in any layout. Every rank calls it.

    Raises:
        RunError: the files are damaged.
    """
    raise NotImplementedError
