"""FLOPs of training in three conventions, each with a name.

- ``hardware``: with recomputation and the full attention matrix (arXiv 2104.04473, appendix). HFU is this rate over the
  peak. It counts the whole forward pass of a recomputed layer; torch skips that layer's last matrix product if nothing
  after it needs the result.
- ``model``: without recomputation, with the full attention matrix. It gives MFU as defined in arXiv 2204.02311.
- ``causal``: without recomputation, with the half of the attention matrix that the causal mask leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.config.schema import ActivationCheckpoint
from titan_like.models.config import TransformerConfig


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one token's forward pass; a multiply-add is 2."""

    layer_matrices: int  # one layer's products with weights
    attention_core: int  # one layer's QKᵀ and PV over the full matrix
    logits: int  # the head's products and the output matrix's
    num_layers: int

    @property
    def layers(self) -> int:
        """All layers, full attention matrix."""
        return self.num_layers * (self.layer_matrices + self.attention_core)


def forward_flops(model: TransformerConfig, seq_len: int) -> ForwardFlops:
    """FLOPs of one token. For GPT: 24h² + 4sh per layer and 2hV for the logits (arXiv 2104.04473, appendix)."""
    parts = model.parts
    return ForwardFlops(
        layer_matrices=2 * parts.matrices,
        attention_core=parts.attention_cores * 4 * seq_len * model.hidden_size,
        logits=2 * parts.head_matrices,
        num_layers=model.num_layers,
    )


def model_flops_per_token(model: TransformerConfig, seq_len: int, causal: bool = False) -> float:
    """Forward plus backward (2 × forward), without recomputation.

    ``causal`` counts half the attention matrix, unless the model's attention is bidirectional.
    """
    forward = forward_flops(model, seq_len)
    saved = forward.num_layers * forward.attention_core / 2 if causal and model.is_causal else 0
    return 3 * (forward.layers + forward.logits - saved)


def hardware_flops_per_token(model: TransformerConfig, seq_len: int, recompute: ActivationCheckpoint) -> float:
    """``model`` plus what activation checkpointing recomputes."""
    forward = forward_flops(model, seq_len)
    again = {
        "none": 0,
        "full": forward.layer_matrices + forward.attention_core,
        "selective": forward.attention_core,
    }[recompute.mode]
    return model_flops_per_token(model, seq_len) + again * recomputed_layers(model, recompute)


def recomputed_layers(model: TransformerConfig, recompute: ActivationCheckpoint) -> int:
    """Number of layers that activation checkpointing applies to."""
    return 0 if recompute.mode == "none" else -(-model.num_layers // recompute.every_n_layers)


def megatron_flops_per_token(model: TransformerConfig, seq_len: int, recompute: ActivationCheckpoint) -> float:
    """FLOPs as in Megatron-LM's log line: 24·k·l·h²·(1 + s/6h + V/16lh), k = 4 with full recomputation and 3 without.

    With k = 4 this is exact (arXiv 2104.04473, appendix). With k = 3 it counts the logits at 3/4, as Megatron-LM does,
    so utilisations do not use it. It is computed from the weights, so it also covers GQA and SwiGLU.
    """
    forward = forward_flops(model, seq_len)
    passes = 3 + (recomputed_layers(model, recompute) / model.num_layers if recompute.mode == "full" else 0)
    return passes * (forward.layers + 0.75 * forward.logits)
