"""What a command of the planner returns, and the options that several commands share."""

import argparse
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_like.config import JobConfig, load_config
from titan_like.config.errors import require
from titan_like.config.options import OptionParser, path_option
from titan_like.data.loading.batch_size import check_rampup, total_samples
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import model_config
from titan_like.planner.links import read_measurements, with_links
from titan_like.planner.predict import FLOAT8_NOTE, Forecast
from titan_like.planner.profile import Profile, load_profile
from titan_like.train.memory import memory_hints


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    text: str
    json: dict[str, Any]  # what --json writes
    status: int = 0  # exit status
    files: dict[Path, str] = field(default_factory=dict)  # texts to write to files


def add_profile(parser: OptionParser) -> None:
    """Add the option for the stack profile."""
    parser.add_path("--profile", "stack profile: a shipped one or a TOML file (default: the GPU's)", "PROFILE")
    links = "what scripts/bench_comm.py --json has measured, in the place of the profile's links"
    parser.add_path("--links", links, "FILE.json")


def add_price(parser: OptionParser) -> None:
    """Add the options for the days and the cost of the whole run."""
    parser.add_number("--tokens", float, least=1, most=1e18, help="tokens to train on (default: the run's)")
    parser.add_number("--price", float, least=0, most=1e9, help="price of one GPU for one hour")


def add_options_of_searches(parser: OptionParser, purpose: str | None) -> None:
    """Add the options that `search` and `capacity` share, and what both do with a layout to their help."""
    hint = "The layout in the run's file is chosen anew; any --section.key on this command line stays as it is."
    parser.description = f"{purpose} {hint}"
    add_profile(parser)
    add_price(parser)


def read_run(options: argparse.Namespace, settings: list[str]) -> tuple[JobConfig, Profile | None, float | None]:
    """What a command is asked about: the run, the profile (None for the GPU's own), and the tokens to train on.

    The tokens are None if neither the command line nor the run says how many, or the command has no such option. A line
    on stderr says if predictions leave out one of the settings.
    """
    config = load_config(settings)
    if config.float8.enable:
        print(FLOAT8_NOTE, file=sys.stderr)
    reason = "changes a profile; name that with --profile too"
    require(options.profile or not options.links, "--links", options.links, reason)
    profile = load_profile(options.profile) if options.profile else None
    if profile is not None and options.links:
        linked = with_links(profile, read_measurements(options.links, profile.device.is_cpu))
        profile = replace(linked, name=f"{profile.name} with the links of {Path(options.links).name}")
    return config, profile, _tokens(options, config) if hasattr(options, "tokens") else None


def _tokens(options: argparse.Namespace, config: JobConfig) -> float | None:
    training = config.training
    if options.tokens is None and training.epochs is not None:
        from titan_like.data.loading.describe import describe_data

        training = describe_data(config, model_config(config.model))[0].training
    if options.tokens is not None or training.steps is training.samples is training.tokens is None:
        return options.tokens
    check_rampup(training)
    return total_samples(training) * training.seq_len


def days_of(
    tokens: float, tokens_per_second: float, num_gpus: int, price: float | None = None, forecast: Forecast | None = None
) -> dict[str, float]:
    """Days, GPU hours and, at a price for one GPU's hour, cost of training on a number of tokens.

    With a ``forecast`` of the rate, also the days between which nine of ten runs take.
    """
    seconds = tokens / tokens_per_second
    days, hours = seconds / 86400, seconds / 3600 * num_gpus
    figures = {"days": days, "gpu_hours": hours} | ({} if price is None else {"cost": hours * price})
    if forecast is not None:
        low, high = (days * limit / forecast.time.total for limit in (forecast.seconds_low, forecast.seconds_high))
        figures |= {"days_low": low, "days_high": high}
    return figures


def length(forecast: Forecast, tokens: float | None, price: float | None) -> tuple[str, dict[str, float]]:
    """`days_of` in words, after a comma, and for JSON; both are empty without a number of tokens."""
    if tokens is None:
        return "", {}
    figures = days_of(tokens, forecast.rates.tokens_per_second, forecast.work.num_gpus, price, forecast)
    cost = f", cost {figures['cost']:,.0f}" if price is not None else ""
    return f", {billions(tokens)} tokens in {in_days(figures)}, {figures['gpu_hours']:,.0f} GPU hours{cost}", figures


def in_days(figures: dict[str, float]) -> str:
    """The days of `days_of` in words, with their band if there is one."""
    limits = [figures[name] for name in ("days", "days_low", "days_high") if name in figures]
    days, *band = (f"{limit:,.0f}" if limit >= 10 else f"{limit:.3g}" for limit in limits)
    return f"{days} days" + (f" (between {band[0]} and {band[1]} in nine of ten cases)" if band else "")


def billions(count: float) -> str:
    """A number of tokens or parameters in words."""
    unit, name = (1e9, "billion") if count >= 1e8 else (1e6, "million")
    return f"{float(f'{count / unit:.4g}'):g} {name}"


def toml_option(text: str) -> str:
    """The path of a TOML file to write. Its ending tells profiles in files from shipped ones."""
    path = path_option(text)
    if Path(path).suffix != ".toml":
        raise argparse.ArgumentTypeError("must be a TOML file; give it a name that ends with .toml")
    return path


def does_not_fit(forecast: Forecast) -> list[str]:
    """A warning for commands that report something else: the run is predicted not to fit into memory."""
    return [] if forecast.memory.fits else [f"the run DOES NOT FIT: {forecast.taken} on a GPU; {hints(forecast)}"]


def hints(forecast: Forecast) -> str:
    """What to change in a run that does not fit, as the trainer says when memory runs out."""
    work, size = forecast.work, forecast.work.micro_batch_size
    text = memory_hints(size, work.recompute, work.zero_stage, work.dtype, work.shard * work.context)
    return f"training.micro_batch_size = {size}: {text}"


def sized(model: TransformerConfig) -> str:
    """A model's parameters and shape in words."""
    shape = f"{model.num_layers} layers, width {model.hidden_size}, {model.num_attention_heads} heads"
    return f"{billions(model.num_parameters())} parameters ({shape})"


def gpus(count: int) -> str:
    """A number of GPUs in words."""
    return f"{count} GPU" + ("s" if count != 1 else "")
