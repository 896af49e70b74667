"""Step time and memory of a configuration on its cluster, with breakdowns and an error band."""

import argparse

from titan_like.config.options import OptionParser
from titan_like.planner.commands.outcome import Outcome, add_profile, gpus, hints, read_run
from titan_like.planner.memory import MEMORY_MARGIN, usable_bytes
from titan_like.planner.predict import Forecast, per_gpu, predict

_LARGEST_LOAD = 2**14  # of as many experts, one gets all


def add_options(parser: OptionParser) -> None:
    """Add the options that are not settings of the run."""
    add_profile(parser)
    text = "rows of the process with the most work for its experts, relative to equal loads (default: %(default)s)"
    parser.add_number("--expert_load", float, least=1, most=_LARGEST_LOAD, default=1.0, help=text)


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Predict the run. The exit status is 1 if it does not fit into memory."""
    config, profile, _ = read_run(options, settings)
    forecast = predict(config, profile, options.expert_load)
    return Outcome(describe(forecast), {"predict": forecast.as_dict()}, 0 if forecast.memory.fits else 1)


def describe(forecast: Forecast) -> str:
    """Step time and memory as a table."""
    time, rates = forecast.time, forecast.rates
    lines = [
        f"step time  {time.total:.3f} s  (between {forecast.seconds_low:.3f} and {forecast.seconds_high:.3f} in nine "
        f"of ten cases; {forecast.stack})"
    ]
    lines += [forecast.to_measure] if forecast.to_measure else []
    for name, seconds in time._asdict().items():
        if name != "total" and seconds:
            lines.append(f"  {name:12s} {seconds:10.4f} s  {100 * seconds / time.total:5.1f} %")
    lines.append(
        f"rates      {rates.tokens_per_second:,.0f} tokens/s on {gpus(forecast.work.num_gpus)}, "
        f"{per_gpu(rates.tflops_per_device)} each ({forecast.convention})"
    )
    if rates.hfu is not None and rates.mfu_model is not None and rates.mfu_causal is not None:
        lines.append(
            f"           HFU {rates.hfu:.1%}, MFU {rates.mfu_model:.1%} (causal attention {rates.mfu_causal:.1%})"
        )
    if forecast.is_host_bound:
        lines.append(
            f"host-bound: issuing a step's work takes about {1e3 * forecast.host_seconds:,.0f} ms, the GPU needs "
            f"{1e3 * forecast.device_seconds:,.0f} ms; larger microbatches use it better, or compile.cudagraphs where "
            "it works"
        )
    memory = forecast.memory
    verdict = "fits" if memory.fits else f"DOES NOT FIT; {hints(forecast)}"
    if memory.fits and memory.largest > usable_bytes(forecast.profile.device):
        verdict += f", but leaves less than the {100 * MEMORY_MARGIN:.0f} % free that a search keeps"
    lines.append(f"memory     {forecast.taken} on a GPU: {verdict}")
    names = list(memory.ranks[0]._fields)
    lines.append("  GiB by pipeline rank: " + " ".join(f"{name:>12s}" for name in names))
    shown = range(len(memory.ranks)) if len(memory.ranks) <= 8 else (0, 1, len(memory.ranks) - 2, len(memory.ranks) - 1)
    for rank in shown:
        lines.append(f"  {rank:21d} " + " ".join(f"{value / 2**30:12.2f}" for value in memory.ranks[rank]))
    return "\n".join(lines)
