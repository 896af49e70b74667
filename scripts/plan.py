"""What a run will take, before it starts: python scripts/plan.py predict --job.config_file FILE.toml

predict    step time and memory of the configuration on its cluster, with breakdowns and an error band
duration   days that --tokens take: at the predicted rate, or at --tflops per GPU
calibrate  fit the profile's constants to measured rows (--points FILE.csv), say how far rows are off that were left
           out of the fit, and write the new profile to --out FILE.toml

Nothing is computed on a GPU and no process is started. Ends with 0; predict with 1 if the run does
not fit into memory; 2 after bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # plan with the code beside this file

from titan_like.config import ConfigError, load_config
from titan_like.config.load import run_command

if TYPE_CHECKING:
    from titan_like.config.schema import JobConfig
    from titan_like.planner.predict import Forecast

COMMANDS = ("predict", "duration", "calibrate")


def build_parser() -> argparse.ArgumentParser:
    """The options that planning adds to the run's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Any --section.key of the run may follow; python train.py --help lists them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("--profile", help="stack profile: a shipped one or a TOML file (default: the GPU's)")
    parser.add_argument("--tokens", type=float, help="duration: tokens to train on (default: the run's)")
    parser.add_argument("--tflops", type=float, help="duration: TFLOP/s per GPU, instead of the predicted rate")
    parser.add_argument("--price", type=float, help="duration: price of one GPU for one hour")
    parser.add_argument("--points", metavar="FILE.csv", help="calibrate: rows measured on one stack")
    parser.add_argument("--out", metavar="FILE.toml", help="calibrate: where to write the fitted profile")
    parser.add_argument("--json", metavar="PATH", help="also write the result to this file")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that make no sense.

    Raises:
        ConfigError: the first of them.
    """
    if options.command not in COMMANDS:
        raise ConfigError("command", options.command, f"unknown; use {', '.join(COMMANDS)}")
    for name in ("tokens", "tflops"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name}", value, "must be above 0")
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise ConfigError("--price", options.price, "must be at least 0")
    for name in ("json", "out"):
        path = getattr(options, name)
        if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
            raise ConfigError(f"--{name}", path, "not a file in a folder that you may write to; name one")
    if options.command == "calibrate":
        for name in ("points", "profile"):
            if getattr(options, name) is None:
                problem = "calibrate needs the rows" if name == "points" else "say which profile to start from"
                raise ConfigError(f"--{name}", None, problem)


def main(argv: list[str]) -> int:
    """Run one of the commands."""
    options, settings = build_parser().parse_known_args(argv)
    check_options(options)
    if options.command == "calibrate":
        if settings:
            raise ConfigError("command line", settings[0], "calibrate takes no settings of a run")
        return calibrate(options)
    config = load_config(settings)

    from titan_like.planner.predict import predict
    from titan_like.planner.profile import load_profile

    forecast = predict(config, load_profile(options.profile) if options.profile else None)
    result: dict[str, Any] = {"predict": forecast.as_dict()}
    if options.command == "predict":
        print(describe(forecast))
    if options.command == "duration":
        result["duration"] = print_duration(options, config, forecast)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 1 if options.command == "predict" and not forecast.memory.fits else 0


def calibrate(options: argparse.Namespace) -> int:
    """Fit, print, write."""
    from titan_like.planner.calibrate import calibrated
    from titan_like.planner.measured import read_rows
    from titan_like.planner.profile import load_profile, profile_to_toml

    rows, left_out = read_rows(options.points)
    if not rows:
        reason = f"; {left_out[0]}" if left_out else ""
        raise ConfigError("--points", options.points, f"has no row that says enough{reason}")
    start = load_profile(options.profile)
    found = calibrated(rows, start, name=Path(options.out).stem if options.out else start.name)
    print(f"{len(rows)} rows of {options.points}, {len(left_out)} more say too little")
    print(f"step time of the rows fitted on: {found.inside}")
    for group, errors in found.left_out.items():
        print(f"  without {group:20s} {errors}")
    for name, (before, after) in found.constants.items():
        print(f"  {name:22s} {before:10.4g} → {after:10.4g}")
    if options.out:
        Path(options.out).write_text(profile_to_toml(found.profile), encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps(found.as_dict(), indent=2), encoding="utf-8")
    return 0


def describe(forecast: Forecast) -> str:
    """Step time and memory as a table."""
    time, rates, profile = forecast.time, forecast.rates, forecast.profile
    lines = [
        f"step time  {time.total:.3f} s  (between {forecast.seconds_low:.3f} and {forecast.seconds_high:.3f} in nine "
        f"of ten cases; profile {profile.name} on {profile.device.name})"
    ]
    for name, seconds in time._asdict().items():
        if name != "total" and seconds:
            lines.append(f"  {name:12s} {seconds:10.4f} s  {100 * seconds / time.total:5.1f} %")
    lines.append(
        f"rates      {rates.tokens_per_second:,.0f} tokens/s on {forecast.num_gpus} GPUs, "
        f"{rates.tflops_per_device:.1f} TFLOP/s each"
    )
    if rates.hfu is not None and rates.mfu_model is not None and rates.mfu_causal is not None:
        lines.append(
            f"           HFU {rates.hfu:.1%}, MFU {rates.mfu_model:.1%} (causal attention {rates.mfu_causal:.1%})"
        )
    memory = forecast.memory
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    lines.append(f"memory     {memory.largest / 2**30:.1f} of {memory.capacity / 2**30:.0f} GiB on a GPU: {verdict}")
    names = list(memory.ranks[0]._fields)
    lines.append("  GiB by pipeline rank: " + " ".join(f"{name:>12s}" for name in names))
    shown = range(len(memory.ranks)) if len(memory.ranks) <= 8 else (0, 1, len(memory.ranks) - 2, len(memory.ranks) - 1)
    for rank in shown:
        lines.append(f"  {rank:21d} " + " ".join(f"{value / 2**30:12.2f}" for value in memory.ranks[rank]))
    return "\n".join(lines)


def print_duration(options: argparse.Namespace, config: JobConfig, forecast: Forecast) -> dict[str, Any]:
    """Days of the run, both ways, and its price."""
    from dataclasses import asdict

    from titan_like.metrics.flops import hardware_flops_per_token
    from titan_like.planner.duration import duration
    from titan_like.train.batch_size import total_samples

    training, recompute, model = config.training, config.activation_checkpoint, forecast.work.model
    tokens = options.tokens
    if tokens is None:
        if training.steps is training.samples is training.tokens is None:
            raise ConfigError("--tokens", None, "say how many tokens to train on")
        tokens = total_samples(training) * training.seq_len
    per_token = hardware_flops_per_token(model, training.seq_len, recompute)
    rate = options.tflops or forecast.rates.tokens_per_second * per_token / forecast.num_gpus / 1e12
    took = duration(model, training.seq_len, tokens, forecast.num_gpus, rate, recompute, options.price)
    origin = "given" if options.tflops else f"predicted, profile {forecast.profile.name}"
    print(
        f"{model.num_parameters() / 1e9:.4g} billion parameters, {tokens / 1e9:.4g} billion tokens, "
        f"{forecast.num_gpus} GPUs at {rate:.1f} TFLOP/s each ({origin})"
    )
    print(f"  every operation counted    {took.days_exact:8.1f} days, {took.gpu_hours:,.0f} GPU hours")
    print(f"  8TP/(nX), arXiv 2104.04473 {took.days_by_formula:8.1f} days")
    if took.cost is not None:
        print(f"  cost                       {took.cost:,.0f}")
    return {**asdict(took), "tokens": tokens, "tflops_per_gpu": rate}


if __name__ == "__main__":
    run_command(main)
