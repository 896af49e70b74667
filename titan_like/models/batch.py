"""The inputs of a model, a batch of samples, and of its layers, a context; both have named fields."""

from typing import NamedTuple

import torch

from titan_like.models.layers.key_ranges import KeyRanges

Rope = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each [seq, rotated / 2] or [batch, seq, rotated / 2]."""


class Batch(NamedTuple):
    """Samples with their fields. Tensors are [batch, seq] unless stated otherwise, and have no batch dimension in a
    single sample. A field that nothing needs is None.
    """

    tokens: torch.Tensor  # int64
    labels: torch.Tensor | None = None  # int64, `IGNORED_LABEL` where a position carries no loss
    positions: torch.Tensor | None = None  # int64; None: 0 to seq - 1
    document_mask: KeyRanges | None = None  # None: causal attention, or all keys in a bidirectional model
    token_types: torch.Tensor | None = None  # int64; None: the first type, or the model has no types
    padding_mask: torch.Tensor | None = None  # bool, True where tokens only fill a sample up; None: nowhere
    sample_labels: torch.Tensor | None = None  # int64 [batch]: class of a pair; answer, at a question's first option
    num_tokens: torch.Tensor | None = None  # int64 [batch], without the padding at a sample's end; None: all of seq
    loss_factors: torch.Tensor | None = None  # [heads], at least float32; None: the model returns logits
    document_starts: torch.Tensor | None = None  # int64, where each token's document begins; read by the run's masks
    next_tokens: torch.Tensor | None = None  # int64, the token after each; None: the model predicts one token ahead
    next_labels: torch.Tensor | None = None  # int64, the label of each next position
    encoder_len: int | None = None  # in a model with an encoder: how many tokens, the first ones, are the encoder's


class Context(NamedTuple):
    """Inputs of layers besides the hidden states.

    A family whose layers read other fields defines its own NamedTuple.
    """

    positions: torch.Tensor | None = None  # int64 [seq] or [batch, seq]
    document_mask: KeyRanges | None = None  # keys that queries see; None: causal attention, or all keys
    bias: torch.Tensor | None = None  # [1, heads, seq, keys], added to the scores of attention
    rope: Rope | None = None  # None: no rotation
    query_scale: torch.Tensor | None = None  # [seq] or [batch, seq], multiplies queries
    padding_mask: torch.Tensor | None = None  # bool [batch, seq], True where a position does not count
    next_embedding: torch.Tensor | None = None  # [batch, seq, hidden], of the token after each
