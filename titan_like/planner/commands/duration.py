"""The days and the price of training on a number of tokens, at the predicted rate or at --tflops per GPU."""

import argparse

from titan_like.config.errors import require
from titan_like.config.options import OptionParser
from titan_like.data.loading.lengths import sample_length
from titan_like.metrics.flops import hardware_flops_per_token
from titan_like.planner.commands import outcome
from titan_like.planner.predict import per_gpu, predict

_SLOWEST = 1e-6  # TFLOP/s of a GPU; a day's work would take longer than the universe is old


def add_options(parser: OptionParser) -> None:
    """Add the options that are not settings of the run."""
    outcome.add_profile(parser)
    outcome.add_price(parser)
    parser.add_number("--tflops", float, least=_SLOWEST, help="TFLOP/s per GPU, instead of the predicted rate")


def run(options: argparse.Namespace, settings: list[str]) -> outcome.Outcome:
    """Compute the days by the exact count and by the paper's formula."""
    config, profile, tokens = outcome.read_run(options, settings)
    require(tokens, "--tokens", None, "say how many tokens to train on")
    assert tokens is not None
    forecast = predict(config, profile)
    work, device = forecast.work, forecast.profile.device
    peak = device.peak_flops(work.dtype) / 1e12
    reason = f"the peak of {device.name} in {work.dtype} is {peak:g}; give the rate that a GPU achieves"
    require(options.tflops is None or options.tflops <= peak, "--tflops", options.tflops, reason)
    # Rates include recomputation: they are hardware FLOPs of `metrics.flops`.
    encoder, decoder = sample_length(config, work.model)[1:]
    per_token = hardware_flops_per_token(work.model, encoder, work.activation_checkpoint, decoder)
    rate = options.tflops or forecast.rates.tokens_per_second * per_token / work.num_gpus / 1e12
    speed = work.num_gpus * rate * 1e12
    predicted = None if options.tflops else forecast
    took = outcome.days_of(tokens, speed / per_token, work.num_gpus, options.price, predicted)
    # arXiv 2104.04473, equation 4: P counts the parameters that a token uses.
    by_formula = outcome.days_of(tokens, speed / (8 * work.model.active_parameters), work.num_gpus)["days"]
    origin = "given" if options.tflops else f"predicted, profile {forecast.profile.name}"
    lines = [
        f"{outcome.billions(work.model.num_parameters())} parameters, {outcome.billions(tokens)} tokens, "
        f"{outcome.gpus(work.num_gpus)} at {per_gpu(rate)} each, including recomputation ({origin})",
        f"  every operation counted    {outcome.in_days(took)}, {took['gpu_hours']:,.0f} GPU hours",
        f"  8TP/(nX), arXiv 2104.04473 {outcome.in_days({'days': by_formula})}",
    ]
    if options.price is not None:
        lines.append(f"  cost                       {took['cost']:,.0f}")
    lines += outcome.does_not_fit(forecast)
    result = {"days_by_formula": by_formula, "days_exact": took.pop("days"), "cost": None} | took
    result |= {"tokens": tokens, "tflops_per_gpu": rate}
    return outcome.Outcome("\n".join(lines), {"predict": forecast.as_dict(), "duration": result})
