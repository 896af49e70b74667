"""How long a training run takes."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.config.schema import ActivationCheckpoint
from titan_like.metrics.flops import hardware_flops_per_token
from titan_like.models.config import TransformerConfig

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Duration:
    """Days of a run, by the paper's formula and by counting every operation."""

    days_by_formula: float
    days_exact: float
    gpu_hours: float  # from days_exact
    cost: float | None  # in the currency of the price


def days_by_formula(parameters: float, tokens: float, gpus: int, tflops: float) -> float:
    """arXiv 2104.04473, equation 4: 8TP / (nX), with X in FLOP/s per GPU including recomputation."""
    return 8 * tokens * parameters / (gpus * tflops * 1e12) / SECONDS_PER_DAY


def duration(
    model: TransformerConfig,
    seq_len: int,
    tokens: float,
    gpus: int,
    tflops: float,
    recompute: ActivationCheckpoint,
    price_per_gpu_hour: float | None = None,
    decoder_seq_len: int = 0,
) -> Duration:
    """Days at ``tflops`` TFLOP/s per GPU, a rate that includes recomputation (hardware FLOPs of `metrics.flops`)."""
    seconds = tokens * hardware_flops_per_token(model, seq_len, recompute, decoder_seq_len) / (gpus * tflops * 1e12)
    hours = seconds / 3600 * gpus
    return Duration(
        days_by_formula(model.num_parameters(), tokens, gpus, tflops),
        seconds / SECONDS_PER_DAY,
        hours,
        None if price_per_gpu_hour is None else hours * price_per_gpu_hour,
    )
