"""What changes when a run goes on from a checkpoint with other settings than those that it was saved with."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from titan_like.checkpoint.step_folders import RunState
from titan_like.config.errors import ConfigError, first_line
from titan_like.config.schema import Float8, JobConfig, LRScheduler, Optimizer, Training
from titan_like.data.batch_size import global_batch_size_at
from titan_like.data.masks import MASK_SETTINGS
from titan_like.models.config import TransformerConfig
from titan_like.optim.schedule import Schedule

# Section → keys that decide what is learnt. `check_same_run` and the data's fingerprint refuse a change of the others.
_LEARNT: dict[str, tuple[str, ...]] = {
    "training": tuple(Training.model_fields),
    "optimizer": tuple(key for key in Optimizer.model_fields if key != "implementation"),
    "lr_scheduler": tuple(LRScheduler.model_fields),
    "float8": tuple(Float8.model_fields),
    "health": ("skip_nonfinite", "loss_spike_factor", "loss_spike_window", "loss_spike_action"),
    "data": MASK_SETTINGS,
}
_OF_SCHEDULE = {
    *("training.steps", "training.samples", "training.tokens", "training.global_batch_size"),
    *("training.batch_size_rampup", "optimizer.lr", "optimizer.matrix_lr"),
    *(f"lr_scheduler.{key}" for key in LRScheduler.model_fields),
}


def schedule_of(config: JobConfig, state: RunState | None) -> Schedule:
    """The schedule of a run that goes on from a checkpoint, or of a new one (None).

    Raises:
        ConfigError: it is to be the checkpoint's, which is not valid.
    """
    if state is None or state.step == 0 or config.lr_scheduler.resume == "recompute":
        return Schedule.of(config, *(state.come_to(config.training) if state else ()))
    try:
        return _saved_schedule(state)
    except ValidationError as error:
        problem = (
            f'the schedule in the checkpoint of step {state.step} is not valid ({first_line(error)}); use "recompute"'
        )
        raise ConfigError("lr_scheduler.resume", "continue", problem) from None


def changes(state: RunState, config: JobConfig, model: TransformerConfig, schedule: Schedule) -> list[str]:
    """A line for each change of a setting that decides what is learnt, if a run goes on from a checkpoint.

    Changes that concern the learning rate share a line, which says what it is in the next step. ``schedule`` is the
    run's from here on.
    """
    if state.step == 0:  # it may be a converted one, which no run has saved
        return []
    step, consumed = state.step + 1, state.consumed_samples
    try:
        then, saved = _saved_settings(state), _saved_schedule(state)
    except ValidationError as error:
        return [f"what changes from step {step} on is not known: run.json of step {state.step}: {first_line(error)}"]
    was, now = then.model_dump(mode="json"), config.model_dump(mode="json")
    pairs = [(f"{name}.{key}", was[name][key], now[name][key]) for name, keys in _LEARNT.items() for key in keys]
    dropout = model.model_dump().get("dropout")
    pairs.append(("model.overrides.dropout", state.model.get("dropout", dropout), dropout))
    changed = {key: f"{key} {_shown(old)} -> {_shown(new)}" for key, old, new in pairs if old != new}
    lines = [text for key, text in changed.items() if key not in _OF_SCHEDULE]
    if of_schedule := [text for key, text in changed.items() if key in _OF_SCHEDULE]:
        of_both = (saved, then.training), (schedule, config.training)
        old_lr, lr = (f"{s.lr_at(step, consumed + global_batch_size_at(t, consumed)):.3g}" for s, t in of_both)
        outcome = f"and lr at step {step} stays {lr}"
        if lr != old_lr:
            outcome = f"so lr at step {step} is {lr} instead of {old_lr}"
        if config.lr_scheduler.resume == "continue" and "lr_scheduler.resume" not in changed:
            outcome += ' (lr_scheduler.resume = "continue")'
        lines.insert(0, ", ".join([*of_schedule, outcome]))
    return [f"from step {step} on: {line}" for line in lines]


def _saved_schedule(state: RunState) -> Schedule:
    """A checkpoint's schedule; a `ValidationError` if it is not valid."""
    if state.schedule:
        return Schedule.model_validate(state.schedule)
    then = _saved_settings(state)
    return Schedule.of(then, *state.come_to(then.training))


def _saved_settings(state: RunState) -> JobConfig:
    """A checkpoint's settings that decide what is learnt. Those that are newer than it have their defaults."""
    return JobConfig.model_validate(
        {
            section: {key: value for key, value in state.config.get(section, {}).items() if key in keys}
            for section, keys in _LEARNT.items()
        }
    )


def _shown(value: Any) -> str:
    return "(not set)" if value is None else json.dumps(value)
