"""The days and the price of training on a number of tokens, at the predicted rate or at --tflops per GPU."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from titan_like.config import ConfigError
from titan_like.config.schema import ActivationCheckpoint
from titan_like.data.lengths import sample_length
from titan_like.metrics.flops import hardware_flops_per_token
from titan_like.models.config import TransformerConfig
from titan_like.planner.commands.outcome import (
    SECONDS_PER_DAY,
    Outcome,
    add_price,
    add_profile,
    chosen_profile,
    does_not_fit,
    gpus,
    loaded,
    per_gpu,
    tokens_of,
)
from titan_like.planner.predict import predict

_SLOWEST = 1e-6  # TFLOP/s of a GPU; a day's work would take longer than the universe is old


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not settings of the run."""
    add_profile(parser)
    add_price(parser)
    parser.add_argument("--tflops", type=float, help="TFLOP/s per GPU, instead of the predicted rate")


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Compute the days by the exact count and by the paper's formula.

    Raises:
        ConfigError: neither the command nor the run says how many tokens, or an option is out of range.
    """
    if options.tflops is not None and not options.tflops >= _SLOWEST:
        raise ConfigError("--tflops", options.tflops, f"must be at least {_SLOWEST:.0e}")
    profile, config = chosen_profile(options), loaded(settings)
    tokens = tokens_of(options, config)
    if tokens is None:
        raise ConfigError("--tokens", None, "say how many tokens to train on")
    forecast = predict(config, profile)
    device, dtype = forecast.profile.device, forecast.work.dtype
    if options.tflops is not None and options.tflops * 1e12 > device.peak_flops(dtype):
        peak = f"the peak of {device.name} in {dtype} is {device.peak_flops(dtype) / 1e12:g}"
        raise ConfigError("--tflops", options.tflops, f"{peak}; give the rate that a GPU achieves")
    recompute, model = forecast.work.activation_checkpoint, forecast.work.model
    encoder, decoder = sample_length(config, model)[1:]
    per_token = hardware_flops_per_token(model, encoder, recompute, decoder)
    rate = options.tflops or forecast.rates.tokens_per_second * per_token / forecast.work.num_gpus / 1e12
    took = duration(model, encoder, tokens, forecast.work.num_gpus, rate, recompute, options.price, decoder)
    origin = "given" if options.tflops else f"predicted, profile {forecast.profile.name}"
    lines = [
        f"{model.num_parameters() / 1e9:.4g} billion parameters, {tokens / 1e9:.4g} billion tokens, "
        f"{gpus(forecast.work.num_gpus)} at {per_gpu(rate)} each, including recomputation ({origin})",
        f"  every operation counted    {took.days_exact:8.1f} days, {took.gpu_hours:,.0f} GPU hours",
        f"  8TP/(nX), arXiv 2104.04473 {took.days_by_formula:8.1f} days",
    ]
    if took.cost is not None:
        lines.append(f"  cost                       {took.cost:,.0f}")
    lines += does_not_fit(forecast.memory)
    result = {**asdict(took), "tokens": tokens, "tflops_per_gpu": rate}
    return Outcome("\n".join(lines), {"predict": forecast.as_dict(), "duration": result})


@dataclass(frozen=True)
class Duration:
    """Days of a run, by the paper's formula and by counting every operation."""

    # arXiv 2104.04473, equation 4: 8TP / (nX), P of what a token uses, X in FLOP/s per GPU with recomputation.
    days_by_formula: float
    days_exact: float
    gpu_hours: float  # from days_exact
    cost: float | None  # in the currency of the price


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
        8 * tokens * model.active_parameters / (gpus * tflops * 1e12) / SECONDS_PER_DAY,
        seconds / SECONDS_PER_DAY,
        hours,
        None if price_per_gpu_hour is None else hours * price_per_gpu_hour,
    )
