"""A step that the host has issued. On a GPU it may still have to run; its numbers are read later."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

Stamp = float | torch.cuda.Event  # a moment: seconds of the host's clock, or a place among a GPU's kernels


class StepValues(NamedTuple):
    """What the host learns of a step from the device. All ranks learn the same."""

    loss: float  # nats per token
    grad_norm: float  # before clipping, without the loss scale
    spike: float  # 1 where the update was skipped because the loss is a spike
    loss_scale: float
    num_zeros: float  # gradient elements that are exactly 0; NaN where they were not counted
    stop_signal: float  # the largest number of a signal that a rank has received, or 0
    is_saving: float  # 1 where a rank is still writing a checkpoint


@dataclass(frozen=True)
class IssuedStep:
    """What the host knows of a step without waiting for it."""

    step: int
    lr: float
    global_batch_size: int
    consumed_samples: int
    consumed_tokens: int
    data_time_s: float
    began: Stamp
    ended: Stamp
    values: torch.Tensor  # `StepValues` in float64, in the host's memory once `ended` has come

    def read(self) -> tuple[StepValues, float]:
        """Wait for the device; the step's numbers, and how many seconds it took."""
        if isinstance(self.began, float) or isinstance(self.ended, float):
            assert isinstance(self.began, float) and isinstance(self.ended, float)
            seconds = self.ended - self.began
        else:
            self.ended.synchronize()
            seconds = self.began.elapsed_time(self.ended) / 1000
        return StepValues(*self.values.tolist()), seconds


def stamp(device: torch.device) -> Stamp:
    """This moment: of the host, or after what the GPU has been given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def copy_to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory that is complete when the GPU has come this far."""
    if values.device.type != "cuda":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
