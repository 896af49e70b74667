"""What the rest of the project knows of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.config import TransformerConfig
from titan_like.models.layers.init import fill_normal


class Transformer(nn.Module):
    """Base of the families: embedding → layers → norm → logits over the padded vocabulary.

    Layers live in a ModuleDict, so that a layer keeps its name whichever process holds it.
    """

    residual_outputs: tuple[str, ...]  # matrices that write to the residual stream, by the end of their names

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict()
        self.norm: nn.Module = nn.Identity()
        untied = not config.tied_embeddings
        self.output = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False) if untied else None

    def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """tokens [batch, seq] → (hidden states [batch, seq, hidden], what every layer takes besides them)."""
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] → logits [batch, seq, padded vocab]; padding entries are -inf."""
        x, extra = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, *extra)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        # Written outside autograd: the gradient of a padding logit is its probability, which is then exactly zero.
        logits.detach()[..., self.config.vocab_size :] = float("-inf")
        return logits

    def init_weights(self, seed: int) -> None:
        """N(0, init_std); matrices that write to the residual stream are scaled by 1/√(2·layers) (GPT-2);
        biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                residual = name.removesuffix(".weight").endswith(self.residual_outputs)
                scale = (2 * self.config.num_layers) ** -0.5 if residual else 1.0
                fill_normal(parameter, seed, name, self.config.init_std * scale)
