"""Bugs in linear attention."""

from typing import Any

import torch

from tests.distributed.mutations import bug
from titan_like.models.layers.delta_net import DeltaCore
from titan_like.parallel.tensor_styles import SharedLinear


@bug(DeltaCore, "weights")
def steps_of_the_first_tensor_rank(original: Any, self: Any) -> tuple[torch.Tensor, ...]:
    """The bias of the decays' steps learns from the first tensor rank's heads alone."""
    conv, a_log, dt_bias = original(self)
    if hasattr(self, "tensor_group") and self.tensor_group.rank:
        dt_bias = dt_bias.detach() + 0 * dt_bias
    return conv, a_log, dt_bias


@bug(SharedLinear, "forward")
def shared_rows_of_the_first_tensor_rank(original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    """b and c of the only group learn from the first tensor rank's heads alone."""
    y = original(self, x)
    return y.detach() + 0 * y if self.tensor_group.rank else y
