"""Reading the weights of a checkpoint one at a time, in one process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_like.checkpoint.loader import first_failure
from titan_like.checkpoint.reader import TensorReader
from titan_like.checkpoint.step_folders import RUN_FILE, checkpoint_path, complete_steps, read_run_state
from titan_like.config.errors import ConfigError, RunError, first_line
from titan_like.models.hugging_face import family_module
from titan_like.models.registry import config_class


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like one checkpoint."""
    return os.path.isfile(path / RUN_FILE)


def one_checkpoint(path: Path, key: str) -> Path:
    """``path`` if it is a step-N folder, or the newest checkpoint in it.

    Raises:
        ConfigError: it is neither, or its run.json is damaged; ``key`` is the setting to blame.
    """
    if not is_checkpoint(path):
        steps = complete_steps(path)
        if not steps:
            problem = "neither a checkpoint (a step-N folder) nor a folder of them; name one that a run has saved"
            raise ConfigError(key, str(path), problem)
        path = checkpoint_path(path, steps[-1])
    try:
        read_run_state(path)
    except Exception as error:  # whatever a damaged file raises
        raise ConfigError(key, str(path), f"cannot be loaded ({first_line(error)}); name another checkpoint") from None
    return path


class CheckpointWeights:
    """The model description and the weights of a checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            RunError: it is damaged or inconsistent.
        """
        self.path = path
        try:
            self.run = read_run_state(path)
            self.family: str = self.run.config["model"]["family"]
            self.tokenizer: str = self.run.config["data"]["tokenizer"]
            if not isinstance(self.tokenizer, str):
                raise TypeError("run.json names no tokenizer")
            self.model = config_class(self.family).model_validate(self.run.model)
            self._reader = TensorReader(path)
            self._stored = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # whatever a damaged file raises
            raise RunError(f"{path} cannot be loaded ({first_line(error)})") from error
        self._check()

    def read(self, name: str) -> torch.Tensor:
        """One full weight by its name in the model.

        Raises:
            RunError: its file is damaged.
        """
        stored = self._stored[f"model.{name}"]
        assert isinstance(stored, TensorStorageMetadata)  # checked before
        try:
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({f"model.{name}": tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise RunError(f"{self.path} cannot be loaded ({first_failure(error)})") from error
        except Exception as error:  # whatever a damaged file raises
            raise RunError(f"{self.path} cannot be loaded ({first_line(error)})") from error
        return tensor

    def _check(self) -> None:
        known = set()
        for parameter in family_module(self.family).stored_parameters(self.model):
            name = f"model.{parameter.name}"
            stored = self._stored.get(name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != parameter.shape:
                problem = f"run.json describes a {name} of shape {list(parameter.shape)}, which is not there"
                raise RunError(f"{self.path} cannot be loaded ({problem})")
            if not stored.properties.dtype.is_floating_point:
                raise RunError(f"{self.path} cannot be loaded ({name} is of type {stored.properties.dtype})")
            known.add(name)
        for name in self._stored:
            if name.startswith("model.") and name not in known:
                problem = f"stored_parameters of {self.family!r} does not describe {name!r} for the shape in run.json"
                raise RunError(f"{self.path} cannot be loaded ({problem})")
