"""The loss that a model computes, for tests that are not about the loss."""

from typing import Any

import torch

from titan_like.models.batch import Batch
from titan_like.models.transformer import Transformer


def summed_loss(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor, **fields: Any) -> torch.Tensor:
    """Summed loss in nats of tokens [batch, seq] and labels [batch, seq], over all of the model's predictions."""
    factors = torch.ones(len(model.config.predictions), dtype=torch.float64)
    factors = factors.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))
    found = model(Batch(tokens, labels, loss_factors=factors, **fields))
    assert isinstance(found, torch.Tensor)
    return found.sum()
