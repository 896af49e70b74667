"""A decoder: rotary positions, grouped-query attention, and MLPs that are dense or of experts."""

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Batch, Context, Rope
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.mixers import build_mixer
from titan_like.models.layers.cross_entropy import IGNORED_LABEL, TokenLoss
from titan_like.models.layers.experts import SparseMLP
from titan_like.models.layers.mlp import GatedMLP, PlainMLP
from titan_like.models.layers.norms import make_norm
from titan_like.models.layers.positions import query_temperature, rope_cos_sin, rope_frequencies, rope_magnitude
from titan_like.models.transformer import Labels, Transformer, VocabularyBias


class DecoderLayer(nn.Module):
    """A block of attention and one of an MLP. What a block computes is added to the hidden states.

    A layer without one of them has `nn.Identity` in its place, and no norm for it.
    """

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.block, self.residual_scale = config.block, config.residual_scale
        self.has_experts = isinstance(mlp, SparseMLP)
        self.has_attention, self.has_mlp = (not isinstance(part, nn.Identity) for part in (attention, mlp))
        has_two, has_one = config.block == "sandwich", config.block == "parallel_one_norm"
        self.attention_norm = norm_of(config) if self.has_attention else nn.Identity()
        self.attention = attention
        self.attention_post_norm = norm_of(config) if has_two and self.has_attention else None
        self.mlp_norm = norm_of(config) if self.has_mlp and not has_one else nn.Identity()
        self.mlp = mlp
        self.mlp_post_norm = norm_of(config) if has_two and self.has_mlp else None

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        if self.block == "post":
            if self.has_attention:
                x = self.add(x, self.attention(x, context), self.attention_norm)
            return self.add(x, self.feed_forward(x, context), self.mlp_norm) if self.has_mlp else x
        normed, after = self.attention_norm(x), x
        if self.has_attention:
            after = self.add(x, self.attention(normed, context), self.attention_post_norm)
        if not self.has_mlp:
            return after
        entered = {"parallel": x, "parallel_one_norm": normed}.get(self.block, after)
        return self.add(after, self.feed_forward(self.mlp_norm(entered), context), self.mlp_post_norm)

    def feed_forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """The MLP, [batch, seq, hidden] → [batch, seq, hidden]. Experts do not count padding."""
        return self.mlp(x, context.padding_mask) if self.has_experts else self.mlp(x)

    def add(self, x: torch.Tensor, result: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """The hidden states x plus what a block computed, normalised and scaled; all [batch, seq, hidden]."""
        result = result if norm is None else norm(result)
        return x + (result if self.residual_scale == 1 else self.residual_scale * result)


def norm_of(config: DecoderConfig) -> nn.Module:
    """A norm over the hidden states."""
    return make_norm(config.hidden_size, config.norm_eps, config.norm, config.norm_offset)


class MTPLayer(DecoderLayer):
    """A decoder layer that sees each next token too, to predict the one after it (arXiv 2412.19437, section 2.2).

    Its modules outside attention and MLP have DeepSeek's names; ``norm`` is before the output matrix. The hidden states
    that it gets for a loss have gone through the model's own last norm.
    """

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, attention, mlp)
        self.enorm = norm_of(config)
        self.hnorm = norm_of(config)
        self.norm = norm_of(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → the same and, after it, what predicts tokens after the next: [2 · batch, seq, hidden].

        Without ``next_embedding`` in the context → the same.
        """
        if context.next_embedding is None:
            return x
        both = torch.cat((self.enorm(context.next_embedding), self.hnorm(x)), 2)
        return torch.cat((x, self.norm(super().forward(self.eh_proj(both), context))))


class NextEmbedding(nn.Module):
    """Looks up the next tokens in the embedding table. It has no parameters."""

    def __init__(self, num_embeddings: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings

    def forward(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[batch, seq] and [num_embeddings, hidden] → [batch, seq, hidden]."""
        return F.embedding(tokens, table)


class Decoder(Transformer):
    """A decoder over token sequences [batch, seq]; see `Transformer.forward`."""

    residual_outputs: tuple[str, ...] = ("attention.proj", "down")
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.layers.update({str(i): self.new_layer(i) for i in range(len(config.layer_kinds))})
        if config.kv_lora_rank:  # a package's mixer has the other name
            names = [name for name, _ in self.layers.named_modules()]
            outputs = [end for end in ("heads.proj", "attention.proj") if any(name.endswith(end) for name in names)]
            self.residual_outputs = (*outputs, "down")
        self.kinds_of_layers = {name: config.kind_of(int(name)) for name in self.layers}
        self.kinds = {name: config.kind(name) for name in config.kind_names}
        self.norm = norm_of(config)
        if config.output_bias:
            self.output_bias = VocabularyBias(config.padded_vocab_size)
        self.token_loss = TokenLoss(config.vocab_size, config.padded_vocab_size, config.final_softcap)
        predicts_next = "mtp" in config.predictions
        self.next_embedding: nn.Module = NextEmbedding(config.padded_vocab_size) if predicts_next else nn.Identity()

    def new_layer(self, number: int) -> DecoderLayer:
        """Build the layer with this number."""
        config, mlp = self.config, GatedMLP if self.config.gated else PlainMLP
        layer = DecoderLayer if number < config.num_layers else MTPLayer
        parts = config.kind(config.kind_of(number)).parts
        attention = nn.Identity() if parts == "mlp" else self.new_attention(number)
        if parts == "mixer":
            return layer(config, attention, nn.Identity())
        if config.num_experts and number not in config.dense_layers:
            return layer(config, attention, SparseMLP(config))
        dense = mlp(config.hidden_size, config.ffn_hidden_size, config.activation, bias=config.mlp_bias)
        return layer(config, attention, dense)

    def new_attention(self, number: int) -> nn.Module:
        """Build what mixes positions in the layer with this number."""
        return build_mixer(self.config, self.config.kind_of(number))

    def embed(self, batch: Batch) -> torch.Tensor:
        """As in the base class. Positions enter in the attention."""
        return self._scale_embedding(self.embedding(batch.tokens))

    def _scale_embedding(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.config.embedding_scale
        if self.config.round_embedding_scale:  # to the type of x
            return x * torch.full((), factor, dtype=x.dtype, device=x.device)
        return _scaled(x, factor)

    def contexts(self, batch: Batch) -> Mapping[str, Context]:
        """As in the base class, with the rotary tables of each layer's kind."""
        tables, contexts = self.rotary_tables(batch), super().contexts(batch)
        tables_of = {name: tables[self.kinds_of_layers[name]] for name in self.layers}
        scale, of_all = self.query_scale(batch), self.config.query_temperature_of == "all"
        scales = {name: scale if of_all or tables_of[name] is None else None for name in self.layers}
        return {name: contexts[name]._replace(rope=tables_of[name], query_scale=scales[name]) for name in self.layers}

    def query_scale(self, batch: Batch) -> torch.Tensor | None:
        """What the queries of each position are multiplied by, [*positions.shape]; None: nothing."""
        factor, period = self.config.query_temperature, self.config.query_temperature_period
        positions, offset = cast(torch.Tensor, batch.positions), self.config.query_temperature_offset
        return query_temperature(positions, factor, period, offset) if factor else None

    def rotary_tables(self, batch: Batch) -> dict[str, Rope | None]:
        """(cos, sin) of each kind of layer, each [*positions.shape, rotated / 2]; None for a kind without rotation.

        longrope chooses by the length of the sequences, or for each by ``num_tokens``.
        """
        positions = cast(torch.Tensor, batch.positions)
        tables: dict[str, Rope | None] = {}
        length: int | torch.Tensor = positions.shape[-1] * self.context_shards
        if batch.num_tokens is not None:
            length = batch.num_tokens[:, None, None]
        for name, kind in self.kinds.items():
            tables[name] = None
            if kind.rope_theta:
                rope = self.config.rotary_size, kind.rope_theta, kind.rope_scaling
                frequencies = rope_frequencies(*rope, positions.device, length)
                tables[name] = rope_cos_sin(positions, frequencies, rope_magnitude(kind.rope_scaling, length))
        return tables

    def run_layer(self, layer: nn.Module, x: torch.Tensor, context: Context, batch: Batch) -> torch.Tensor:
        """As in the base class. A layer of multi-token prediction runs for losses alone."""
        if batch.loss_factors is None or batch.next_tokens is None or not isinstance(layer, MTPLayer):
            return layer(x, context)
        if self.is_last:  # what predicts the next token goes into the layer, as in Megatron-LM and vLLM
            x = self.before_output(x)
        embedding = self._scale_embedding(self.next_embedding(batch.next_tokens, self.embedding.weight))
        is_padding = cast(torch.Tensor, batch.next_labels) == IGNORED_LABEL  # no other of its positions counts
        return layer(x, context._replace(next_embedding=embedding, padding_mask=is_padding))

    def loss(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """As in the base class, and with multi-token prediction the loss of tokens after the next."""
        if batch.next_labels is None:
            return super().loss(x, batch)
        x, ahead = x.chunk(2)
        if not any(isinstance(layer, MTPLayer) for layer in self.layers.values()):  # before which x is normalised
            x = self.before_output(x)
        of_next, of_ahead = cast(torch.Tensor, batch.loss_factors)
        losses = self.loss_of_tokens(x, batch.labels, of_next), self.loss_of_tokens(ahead, batch.next_labels, of_ahead)
        return torch.stack(losses)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        return super().logits(_scaled(x, self.config.logit_scale))

    def loss_of_tokens(self, x: torch.Tensor, labels: Labels, factor: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        return super().loss_of_tokens(_scaled(x, self.config.logit_scale), labels, factor)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else factor * x


build = Decoder
