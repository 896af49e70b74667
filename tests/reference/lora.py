"""Adapters by definition: each of Hugging Face's matrices W is W + alpha / rank · B A, a dense matrix."""

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.config.schema import LoRA
from titan_like.models.transformer import Transformer
from titan_like.parallel.lora import AdaptedLinear, add_adapters


def define_adapters(model: Transformer, section: LoRA) -> None:
    """Add adapters to all linear layers of a Llama, which compute as defined."""
    add_adapters(model, section)
    group, width = model.config.num_attention_heads // model.config.num_kv_heads, model.config.head_dim
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            heads = [0] * group + [1, 2] if name.endswith("attention.qkv") else [0]
            module.forward = _dense(module, heads, width if len(heads) > 1 else 1, section)


def _dense(module: nn.Module, heads: list[int], width: int, section: LoRA):
    """``heads``: to which matrix each head of a group belongs, with ``width`` rows."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = []
        for number, row in enumerate(module.lora_b):
            first = section.rank * heads[number // width % len(heads)]
            rows.append(row @ module.lora_a[first : first + section.rank])
        return F.linear(x, module.weight + section.alpha / section.rank * torch.stack(rows), module.bias)

    return forward
