"""The record of one step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_like.metrics.flops import Throughput


@dataclass
class StepRecord:
    """A line of metrics.jsonl before a validation. Times in seconds, memory in bytes, loss in nats per token."""

    step: int
    loss: float
    grad_norm: float  # before clipping
    lr: float
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    step_time_s: float
    data_time_s: float  # part of step_time_s spent waiting for data
    throughput: Throughput
    peak_memory_bytes: int
    skipped: int  # 1 if the update was skipped because float16 overflowed
    nan: int  # 1 if the loss or gradient norm was not finite for another reason
    spike: int | None = None  # only with spike detection: 1 if the update was skipped because of a loss spike
    num_zeros: float | None = None  # gradient elements that are exactly 0, on logged steps
    loss_scale: float | None = None  # float16 only
    host_lead_s: float | None = None  # on a GPU, on steps read at once: from being issued to being done and read
    losses: dict[str, float] = field(default_factory=dict)  # see `named_losses`
    experts: dict[str, float] = field(default_factory=dict)  # `titan_like.parallel.expert_balance.FIGURES`
    sources: dict[str, float] = field(default_factory=dict)  # for a blend: samples and epochs, on logged steps
    profile: dict[str, float] = field(default_factory=dict)  # figures by name, on steps with a timeline

    def as_dict(self) -> dict[str, Any]:
        """A flat record in the order of metrics.jsonl; optional values only if they are known."""
        flat: dict[str, Any] = {}
        for key, value in asdict(self).items():
            flat |= value if isinstance(value, dict) else {key: value}
        optional = ("spike", "num_zeros", "loss_scale", "host_lead_s")
        return {key: value for key, value in flat.items() if value is not None or key not in optional}


_LOSS_NAMES = {"tokens": "lm_loss", "mtp": "mtp_loss", "pair": "sentence_loss", "choice": "choice_loss"}


def named_losses(predictions: Sequence[str], losses: Sequence[float]) -> dict[str, float]:
    """The terms of a loss by name; empty if the tokens' is the only one."""
    if tuple(predictions) == ("tokens",):
        return {}
    return {_LOSS_NAMES[prediction]: loss for prediction, loss in zip(predictions, losses, strict=True)}
