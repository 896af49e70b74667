"""Changes of settings and of the schedule when a run resumes from a checkpoint."""

import json
from typing import Any

from titan_like.checkpoint.step_folders import RunState
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Float8, JobConfig, LRScheduler, Optimizer, Training
from titan_like.data.loading.batch_size import global_batch_size_at
from titan_like.data.objectives.masks import MASK_SETTINGS
from titan_like.models.config import TransformerConfig
from titan_like.optim.schedule import Schedule

# Section → keys that affect training and may change. `check_same_run` and the data's fingerprint refuse other changes.
_LEARNT: dict[str, tuple[str, ...]] = {
    "training": tuple(Training.model_fields),
    "optimizer": tuple(key for key in Optimizer.model_fields if key != "implementation"),
    "lr_scheduler": tuple(LRScheduler.model_fields),
    "float8": tuple(Float8.model_fields),
    "health": ("skip_nonfinite", "loss_spike_factor", "loss_spike_window", "loss_spike_action"),
    "data": MASK_SETTINGS,
}
_LENGTH_KEYS = ("steps", "samples", "tokens", "epochs", "global_batch_size", "batch_size_rampup")
_LENGTH = tuple(f"training.{key}" for key in _LENGTH_KEYS)
_OF_SCHEDULE = (*_LENGTH, "optimizer.lr", "optimizer.matrix_lr", "lr_scheduler.")  # prefixes of keys


def schedule_of(config: JobConfig, state: RunState | None) -> Schedule:
    """The schedule of a run that resumes from a checkpoint, or of a new run (None).

    Raises a `ConfigError` if the checkpoint lacks the schedule that `lr_scheduler.resume` continues.
    """
    if state is None or state.step == 0 or config.lr_scheduler.resume == "recompute":
        return Schedule.of(config, *(state.progress(config.training) if state else ()))
    if state.schedule is None:
        reason = f'an earlier version saved step {state.step}, without its schedule; use "recompute"'
        raise ConfigError("lr_scheduler.resume", "continue", reason)
    return state.schedule


def changes(state: RunState, config: JobConfig, model: TransformerConfig, schedule: Schedule) -> list[str]:
    """A line for each change, in a resumed run, of a setting that affects training.

    Changes of the learning rate's settings share a line, which shows its next value. ``schedule`` is the resumed run's.
    """
    if state.step == 0:  # perhaps a converted checkpoint
        return []
    default, now = JobConfig().model_dump(mode="json"), config.model_dump(mode="json")
    was = {name: default[name] | state.config.get(name, {}) for name in _LEARNT}  # an older one lacks newer keys
    pairs = [(f"{name}.{key}", was[name][key], now[name][key]) for name, keys in _LEARNT.items() for key in keys]
    dropout = model.model_dump().get("dropout")
    pairs.append(("model.overrides.dropout", state.model.get("dropout", dropout), dropout))
    changed = {key: f"{key} {_shown(old)} -> {_shown(new)}" for key, old, new in pairs if old != new}
    lines = [text for key, text in changed.items() if not key.startswith(_OF_SCHEDULE)]
    if of_schedule := [text for key, text in changed.items() if key.startswith(_OF_SCHEDULE)]:
        step, samples = state.step + 1, state.consumed_samples
        samples += global_batch_size_at(config.training, samples)
        lr, old_lr = (s and f"{s.lr_at(step, samples):.3g}" for s in (schedule, state.schedule))
        outcome = f"and lr at step {step} stays {lr}" if lr == old_lr else f"so lr at step {step} is {lr}"
        outcome += f" instead of {old_lr}" if old_lr not in (None, lr) else ""
        if config.lr_scheduler.resume == "continue" and "lr_scheduler.resume" not in changed:
            outcome += ' (lr_scheduler.resume = "continue")'
        lines.insert(0, ", ".join([*of_schedule, outcome]))
    return [f"from step {state.step + 1} on: {line}" for line in lines]


def _shown(value: Any) -> str:
    return "(not set)" if value is None else json.dumps(value)
