"""What a model learns to predict: the next token, masked tokens, or missing spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from titan_like.config.schema import JobConfig
from titan_like.data.masked_tokens import masked_tokens_of
from titan_like.data.span_corruption import span_corruption_of
from titan_like.data.tokenizer import Tokenizer
from titan_like.models.config import TransformerConfig


class Objective(Protocol):
    """Turns a window of tokens into a sample. `titan_like.data.lengths` gives the lengths of both."""

    @property
    def encoder_len(self) -> int | None:
        """Positions of the encoder's input, which come before the decoder's; None for a model with one stack."""
        ...

    def apply(self, sample: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        """A window's tokens and next tokens, int64 [2, raw] → inputs and labels, int64 [2, seq].

        ``index`` is the sample's number in the run. The result is a function of the arguments alone.
        """
        ...


@dataclass(frozen=True)
class NextTokens:
    """Causal language modelling: the labels are the next tokens, which a dataset gives."""

    encoder_len: None = None

    def apply(self, sample: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        """The sample as it is, int64 [2, seq]."""
        return sample


NEXT_TOKENS = NextTokens()


def objective_of(config: JobConfig, model: TransformerConfig, tokenizer: Tokenizer) -> Objective:
    """The objective of a run's model.

    Raises:
        ConfigError: the tokenizer or the model lacks a token that is needed.
    """
    if model.objective == "span_corruption":
        return span_corruption_of(config, model, tokenizer)
    if model.objective == "mlm" and "tokens" in model.predictions:
        return masked_tokens_of(config.data, tokenizer, model.vocab_size)
    return NEXT_TOKENS
