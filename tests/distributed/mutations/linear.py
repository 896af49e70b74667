"""Bugs in linear attention."""

from typing import Any

import torch

from tests.distributed.mutations import bug
from titan_like.models.layers.delta_net import DeltaCore


@bug(DeltaCore, "weights")
def steps_of_the_first_tensor_rank(original: Any, self: Any) -> tuple[torch.Tensor, ...]:
    """The bias of the decays' steps learns from the first tensor rank's heads alone."""
    conv, a_log, dt_bias = original(self)
    if hasattr(self, "tensor_group") and self.tensor_group.rank:
        dt_bias = dt_bias.detach() + 0 * dt_bias
    return conv, a_log, dt_bias
