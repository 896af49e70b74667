"""The validations of a run, and its checkpoint with the lowest validation loss.

A step is saved before it is validated, so its loss goes to ``validation.json`` in the checkpoint that is complete by
then. Which checkpoint is the best follows from these files alone: nothing points to a checkpoint that may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter

BEST = "best"  # the last part of a path that means a run's best checkpoint
VALIDATION_FILE = "validation.json"


@dataclass(frozen=True)
class Validations:
    """The validations of a run up to a step. Losses are in nats per token."""

    step: int = 0  # of the last one
    loss: float | None = None  # None if it is not finite
    best_step: int = 0
    best_loss: float | None = None  # None before the first finite one
    since: int = 0  # validations after the best one

    def add(self, step: int, loss: float) -> Validations:
        """With one more validation, whose ``loss`` is the best if it is below all others."""
        if not math.isfinite(loss):
            return replace(self, step=step, loss=None, since=self.since + 1)
        if self.best_loss is not None and loss >= self.best_loss:
            return replace(self, step=step, loss=loss, since=self.since + 1)
        return Validations(step, loss, best_step=step, best_loss=loss)

    def used_up(self, patience: int) -> bool:
        """Whether the run ends because of `evaluation.patience`; 0 is endless."""
        return 0 < patience <= self.since


def validation_loss(losses: Mapping[str, Mapping[str, float]]) -> float:
    """The loss by which checkpoints are compared: the validation split's or, without one, the mean of the sets'.

    ``losses`` has the losses of each split as `titan_like.train.validation.Validator.run_all` returns them.
    """
    main = losses.get("validation")
    return main["loss"] if main is not None else fmean(terms["loss"] for terms in losses.values())


def read_validations(checkpoint: Path) -> Validations | None:
    """The validations up to a checkpoint's step; None if that step has not been validated since it was saved."""
    with suppress(OSError, ValueError):
        return TypeAdapter(Validations).validate_json((checkpoint / VALIDATION_FILE).read_bytes())
    return None


def best_of(checkpoints: Iterable[Path]) -> Path | None:
    """The checkpoint whose own validation loss is the lowest, of equal ones the earliest; None if none has one."""
    validated = ((read_validations(path), path) for path in checkpoints)
    losses = [(found.loss, found.step, path) for found, path in validated if found and found.loss is not None]
    return min(losses)[-1] if losses else None


def names_best(path: Path) -> bool:
    """Whether a path means the best checkpoint of the folder that it is in."""
    return path.name == BEST and not path.exists()
