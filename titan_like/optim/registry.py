"""Checks of the settings of an update rule, without importing it or torch."""

from titan_like.config.entry_points import RULES, find_entry
from titan_like.config.errors import require
from titan_like.config.schema import Optimizer

_ONLY_FOR = {  # settings of one built-in rule
    "adafactor": ("relative_step", "scale_parameter", "clip_threshold", "decay_rate", "beta1"),
    "muon": ("momentum", "matrix_lr", "adjust_lr", "newton_schulz_steps", "newton_schulz_dtype"),
}


def check_optimizer(section: Optimizer) -> None:
    """Raise a `ConfigError` for an unknown rule, a setting that a built-in one does not use, or a beta out of range."""
    find_entry("optimizer.name", section.name)
    reason = f"{section.name} has no options; leave them out"
    require(not section.options or section.name not in RULES, "optimizer.options", section.options, reason)
    are_rates = all(0 <= beta < 1 for beta in section.betas)
    require(are_rates, "optimizer.betas", section.betas, "each must be at least 0 and below 1")
    for rule, keys in _ONLY_FOR.items():
        for key in keys if section.name in RULES and section.name != rule else ():
            value = getattr(section, key)
            reason = f"{section.name} does not use it; leave it out, or set optimizer.name to {rule}"
            require(value == Optimizer.model_fields[key].default, f"optimizer.{key}", value, reason)
