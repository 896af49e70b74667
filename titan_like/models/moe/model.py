"""A Llama whose MLPs are experts, of which a router chooses a few for each token."""

from __future__ import annotations

from torch import nn

from titan_like.models.layers.attention import SelfAttention
from titan_like.models.layers.experts import SparseMLP
from titan_like.models.layers.mlp import SwiGLUMLP
from titan_like.models.llama.model import Llama, LlamaLayer
from titan_like.models.moe.config import MoEConfig


class MoE(Llama):
    """A mixture of experts over token sequences [batch, seq]; see `Transformer.forward`."""

    residual_outputs = ("attention.proj", "down")
    config: MoEConfig

    def new_layer(self, number: int) -> LlamaLayer:
        """Build the layer with this number. The first ones are dense."""
        config, hidden = self.config, self.config.hidden_size
        attention = SelfAttention(
            hidden,
            config.num_attention_heads,
            config.num_kv_heads,
            bias=False,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
        )
        is_dense = number < config.num_dense_layers
        mlp: nn.Module = SwiGLUMLP(hidden, config.ffn_hidden_size) if is_dense else SparseMLP(config)
        layer = LlamaLayer(config, attention, mlp)
        layer.takes_padding_mask = not is_dense
        return layer


build = MoE
