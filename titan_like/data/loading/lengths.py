"""Tokens and positions of a sample, before and after the objective. Does not import torch."""

from bisect import bisect_right
from typing import NamedTuple

from titan_like.config.errors import require
from titan_like.config.schema import Data, JobConfig
from titan_like.models.config import TransformerConfig


class SampleLength(NamedTuple):
    """Lengths of one sample."""

    raw: int  # tokens of the dataset's window
    encoder: int  # positions of the encoder's input; in a model without a decoder of its own, all positions
    decoder: int = 0  # positions of the decoder's input, which follow the encoder's

    @property
    def positions(self) -> int:
        """All positions that the model computes."""
        return self.encoder + self.decoder


def sample_length(config: JobConfig, model: TransformerConfig) -> SampleLength:
    """Lengths of the run's samples: `training.seq_len`, changed by the model's objective."""
    training, section = config.training, config.data
    if model.objective != "span_corruption":
        return SampleLength(training.seq_len, training.seq_len)
    raw = raw_length(training.seq_len, section)
    noise, spans = span_counts(raw, section)
    reason = f"of {raw} tokens {noise} would be in {spans} spans, with {raw - noise} tokens between them"
    hint = "lower it or raise data.mean_noise_span_length"
    require(0 < spans <= raw - noise, "data.noise_density", section.noise_density, f"{reason}; {hint}")
    needed, decoder = targets_length(raw, section), training.decoder_seq_len
    reason = f"the targets of {training.seq_len} encoder positions need {needed}; use at least that, or leave it out"
    require(decoder == 0 or decoder >= needed, "training.decoder_seq_len", decoder, reason)
    return SampleLength(raw, training.seq_len, decoder or needed)


def span_counts(raw: int, section: Data) -> tuple[int, int]:
    """(tokens that span corruption removes from ``raw``, all but one at most; number of spans), as in T5's code."""
    noise = min(max(round(raw * section.noise_density), 1), raw - 1)
    return noise, max(round(noise / section.mean_noise_span_length), 1)


def inputs_length(raw: int, section: Data) -> int:
    """Encoder positions for ``raw`` tokens: the remaining tokens, a sentinel for each span, and the end."""
    noise, spans = span_counts(raw, section)
    return raw - noise + spans + 1


def targets_length(raw: int, section: Data) -> int:
    """Decoder positions for ``raw`` tokens: the removed tokens, a sentinel before each span, and the end."""
    noise, spans = span_counts(raw, section)
    return noise + spans + 1


def raw_length(encoder: int, section: Data) -> int:
    """The largest number of tokens whose corrupted form fits, and then fills, ``encoder`` positions.

    One token more makes `inputs_length` 0 or 1 larger, so every length from 3 on occurs. Raises a `ConfigError` if
    ``encoder``, which is `training.seq_len`, is below 3: a token, a sentinel and the end.
    """
    reason = "span corruption needs a token, a sentinel and the end; use at least 3"
    require(encoder >= 3, "training.seq_len", encoder, reason)
    limit = 2 + int(encoder / (1 - section.noise_density))
    return bisect_right(range(2, limit + 1), encoder, key=lambda raw: inputs_length(raw, section)) + 1
