"""A step that the host has issued. On a GPU it may not have run yet, so its numbers are read later."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class StepValues(NamedTuple):
    """The numbers of a step that the host reads from the device, equal on all ranks."""

    loss: float  # nats per token
    grad_norm: float  # before clipping, without the loss scale
    spike: float  # 1 if the update was skipped because the loss is a spike
    loss_scale: float
    num_zeros: float  # gradient elements that are exactly 0; NaN if they were not counted
    stop_signal: float  # the largest signal number that any rank has received, or 0
    is_saving: float  # 1 if any rank is still writing a checkpoint
    num_labels: float  # labels of the global batch for the prediction that has the fewest
    # Loss of each prediction; keys that all queries see together (0 if samples have no masks); `FIGURES` of experts
    terms: list[float]


_SINGLE_VALUES = len(StepValues._fields) - 1


@dataclass(frozen=True)
class PendingStep:
    """A step that the host has issued, with all that the host can tell without waiting for the device."""

    step: int
    lr: float
    global_batch_size: int
    consumed_samples: int
    consumed_tokens: int
    data_time_s: float
    began: Any  # stamps of `titan_like.parallel.timeline`
    ended: Any
    issued: float  # `time.perf_counter` when the host had issued the step
    values: torch.Tensor  # `StepValues` as float64 [8 + terms], in the host's memory once `ended` has passed

    def read(self) -> tuple[StepValues, float]:
        """Wait for the device, and return the step's numbers and its duration in seconds."""
        if isinstance(self.began, float):
            seconds = self.ended - self.began
        else:
            self.ended.synchronize()
            seconds = self.began.elapsed_time(self.ended) / 1000
        values = self.values.tolist()
        return StepValues._make([*values[:_SINGLE_VALUES], values[_SINGLE_VALUES:]]), seconds


def copy_to_host(values: torch.Tensor) -> torch.Tensor:
    """Start a copy to the host's memory, same shape, that is complete once the GPU has reached this point."""
    if values.device.type != "cuda":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
