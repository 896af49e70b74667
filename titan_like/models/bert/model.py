"""BERT: bidirectional attention, learned positions and token types, GELU, biases, dropout, a head for masked tokens and
one for the first token.

Norms stand before attention and MLP, as in Megatron-LM: that removes the instabilities of the original placement, after
each residual sum, and lets larger models train to a lower loss (arXiv 1909.08053, section 5.3). The original placement
is an option.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Batch, Context
from titan_like.models.bert.config import BertConfig
from titan_like.models.config import NUM_OPTIONS
from titan_like.models.gpt.model import GPTLayer
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.transformer import Transformer, VocabularyBias


class BertLayer(GPTLayer):
    """GPT's layer with attention from both sides and exact GELU. The norms are in the branches, or after the sums."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, is_causal=False, approximate="none")
        self.norms_first = config.norm_placement == "pre"

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """As in the base class."""
        if self.norms_first:
            return super().forward(x, context)
        x = self.attention_norm(x + F.dropout(self.attention(x, context), self.dropout, self.training))
        return self.mlp_norm(x + F.dropout(self.mlp(x), self.dropout, self.training))


class Transform(nn.Module):
    """norm(gelu(dense(x))), before the output matrix."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.norm(F.gelu(self.dense(x)))


class FirstToken(nn.Module):
    """Takes the hidden state of the first token, [CLS]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, 1, hidden]."""
        return x[:, :1]


class SampleLoss(nn.Module):
    """Cross entropy of classes of samples. It has no parameters."""

    def __init__(self, is_choice: bool) -> None:
        """The classes are two, or with ``is_choice`` the options of a question, which are a sample each."""
        super().__init__()
        self.classes, self.samples = (NUM_OPTIONS, NUM_OPTIONS) if is_choice else (2, 1)

    def forward(self, scores: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """``factor`` times the summed loss in nats, a scalar: scores [batch, 1, scores of a sample], labels [batch]."""
        scores = scores.reshape(-1, self.classes).to(factor.dtype)
        labels = labels[:: self.samples]
        return F.cross_entropy(scores, labels, ignore_index=IGNORED_LABEL, reduction="sum") * factor


class Bert(Transformer):
    """BERT over token sequences [batch, seq]; see `Transformer.forward`.

    Modules that a shape does not have are `nn.Identity`.
    """

    residual_outputs: tuple[str, ...] = ("attention.proj", "mlp.fc2")
    entry = ("embedding", "position_embedding", "token_type_embedding", "embedding_norm")
    head = ("norm", "transform", "first_token", "pooler", "pair", "pooled_dropout", "choice")
    pooled = may_be_new = ("pooler", "pair", "choice")

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        hidden, is_post = config.hidden_size, config.norm_placement == "post"
        self.dropout = config.dropout
        self.position_embedding = nn.Embedding(config.max_seq_len, hidden)
        self.token_type_embedding = nn.Embedding(config.num_token_types, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, config.norm_eps) if is_post else nn.Identity()
        self.layers.update({str(i): BertLayer(config) for i in range(config.num_layers)})
        self.norm = nn.Identity() if is_post else nn.LayerNorm(hidden, config.norm_eps)
        self.transform: nn.Module = Transform(config)
        self.output_bias = VocabularyBias(config.padded_vocab_size)
        self.sample_loss = SampleLoss(config.sentence_head == "choice")
        head = config.sentence_head
        self.first_token = FirstToken() if head != "none" else nn.Identity()
        self.pooler = nn.Linear(hidden, hidden) if head != "none" else nn.Identity()
        self.pair = nn.Linear(hidden, 2) if head == "pair" else nn.Identity()
        self.pooled_dropout = nn.Dropout(config.dropout) if head == "choice" else nn.Identity()
        self.choice = nn.Linear(hidden, 1) if head == "choice" else nn.Identity()
        if head == "choice":
            for name in ("transform", "output", "output_bias", "mask_padding", "token_loss"):
                setattr(self, name, nn.Identity())
        if is_post:  # whose norms bound the residual stream
            self.residual_outputs = ()

    @property
    def last_norm(self) -> nn.Module:
        """The norm whose weights scale the logits. Only the last stage has it."""
        return self.transform.norm if isinstance(self.transform, Transform) else self.norm

    def embed(self, batch: Batch) -> torch.Tensor:
        """As in the base class. Without ``token_types`` all tokens are of the first type."""
        positions = cast(torch.Tensor, batch.positions)
        types = torch.zeros_like(positions) if batch.token_types is None else batch.token_types
        x = self.embedding(batch.tokens) + self.position_embedding(positions) + self.token_type_embedding(types)
        return F.dropout(self.embedding_norm(x), self.dropout, self.training)

    def predict(self, x: torch.Tensor, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Hidden states after the last layer → a tensor for each of the configuration's ``predictions``.

        They are the logits of tokens [batch, seq, padded vocab], of a pair [batch, 1, 2], first of sentences in order,
        or the score of a choice [batch, 1, 1].
        """
        x, predictions = self.norm(x), self.config.predictions
        outputs = [self.logits(self.transform(x))] if "tokens" in predictions else []
        outputs += [self.scores(x)] if "pair" in predictions or "choice" in predictions else []
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of the first token's head: for pairs [batch, 1, 2], for choices [batch, 1, 1]."""
        pooled = torch.tanh(self.pooler(self.first_token(x)))
        return self.pair(pooled) if "pair" in self.config.predictions else self.choice(self.pooled_dropout(pooled))

    def loss(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """As in the base class."""
        x, losses = self.norm(x), []
        for name, factor in zip(self.config.predictions, cast(torch.Tensor, batch.loss_factors), strict=True):
            if name == "tokens":
                losses.append(self.loss_of_tokens(self.transform(x), batch.labels, factor))
            else:
                losses.append(self.sample_loss(self.scores(x), batch.sample_labels, factor))
        return torch.stack(losses)


build = Bert
