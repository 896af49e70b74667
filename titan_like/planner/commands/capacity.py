"""The largest GPT-3-style model that trains on one node and on the cluster, and the fewest nodes for the model."""

from __future__ import annotations

import argparse
from typing import Any

from titan_like.config import ConfigError, load_config
from titan_like.config.load import parse_overrides
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import total_samples
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout
from titan_like.planner.capacity import CHOSEN, Capacity, fewest_nodes, largest_model
from titan_like.planner.commands.outcome import Outcome, Progress, above_zero, add_profile, chosen_profile, per_gpu
from titan_like.planner.duration import SECONDS_PER_DAY
from titan_like.planner.predict import checked_profile, profile_and_device
from titan_like.planner.profile import Profile
from titan_like.planner.search_space import SEARCHED, STAGE_SIZES
from titan_like.train.rules import check_sequence


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not settings of the run."""
    parser.description = (
        f"{__doc__} The layout in the run's file is chosen anew; these options of the command line stay as they are: "
        f"{', '.join(f'--{key}' for key in CHOSEN)}."
    )
    add_profile(parser)
    parser.add_argument("--tokens", type=float, help="tokens to train on (default: the run's)")


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Find both. The exit status is 1 if the model fits on no number of nodes.

    Raises:
        ConfigError: the run does not say which GPUs its nodes have, or no layout is valid.
    """
    above_zero(options, "tokens")
    fixed = frozenset(parse_overrides(settings)) & {*SEARCHED, STAGE_SIZES}
    for key in sorted(fixed - {*CHOSEN}):
        problem = f"cannot be fixed here; these can: {', '.join(CHOSEN)}"
        raise ConfigError(key, parse_overrides(settings)[key], problem)
    # Everything but the layout must be a valid run.
    config = load_config(settings)
    context = config.parallelism.context_parallel_degree
    if context != 1:
        raise ConfigError("parallelism.context_parallel_degree", context, "must be 1 here")
    model = model_config(config.model)
    check_sequence(config, model, Layout(1, 1, 1, 1, 1))
    profile = profile_of(config, chosen_profile(options))
    show = Progress()
    training, gpus = config.training, f"{profile.gpus_per_node} × {profile.device.name}"
    choices = dict.fromkeys((1, config.cluster.nodes or 1))
    largest = {nodes: largest_model(config, profile, model, nodes, fixed, show) for nodes in choices}
    tokens = options.tokens or total_samples(training) * training.seq_len
    lines = [f"largest GPT-3-style model, sequences of {training.seq_len}, batches of {training.global_batch_size}"]
    result: dict[str, Any] = {"tokens": tokens, "largest": []}
    for nodes, found in largest.items():
        lines.append(f"  {nodes} × {gpus}: {sized(found) if found else 'none fits'}")
        if found is not None:
            lines += [f"    {line}" for line in layout_of(found, tokens)]
            result["largest"].append(as_dict(found, tokens))
    fewest = fewest_nodes(config, profile, model, fixed=fixed, show=show)
    lines.append(f"fewest nodes for {config.model.flavor} ({model.num_parameters() / 1e9:.4g} billion parameters)")
    if fewest is None:
        lines.append("  fits on no number of nodes")
    else:
        lines.append(f"  {fewest.nodes} × {gpus}")
        lines += [f"    {line}" for line in layout_of(fewest, tokens)]
        result["fewest"] = as_dict(fewest, tokens)
    return Outcome("\n".join(lines), {"capacity": result}, int(fewest is None))


def profile_of(config: JobConfig, profile: Profile | None) -> Profile:
    """The stack's constants for the run's nodes.

    Raises:
        ConfigError: the GPU or the nodes are not stated, the GPU lacks the data type, or nothing is known of links.
    """
    if config.cluster.gpus_per_node is None and profile is None and config.cluster.profile is None:
        raise ConfigError("cluster.gpus_per_node", None, "say how many GPUs a node has")
    profile, device = profile_and_device(config, profile)
    return checked_profile(config, config.cluster.gpus_per_node or profile.gpus_per_node, profile, device)


def sized(found: Capacity) -> str:
    """A model's parameters and shape in words."""
    model = found.model
    shape = f"{model.num_layers} layers, width {model.hidden_size}, {model.num_attention_heads} heads"
    return f"{model.num_parameters() / 1e9:.4g} billion parameters ({shape})"


def layout_of(found: Capacity, tokens: float) -> list[str]:
    """A model's layout and speed in words."""
    forecast, work = found.forecast, found.forecast.work
    memory, rates = forecast.memory, forecast.rates
    degrees = f"tensor {work.tensor} × pipeline {work.pipeline} × data {work.shard}"
    days = tokens / rates.tokens_per_second / SECONDS_PER_DAY
    told = f"{days:,.0f}" if days >= 10 else f"{days:.2g}"
    return [
        f"{degrees}, ZeRO {work.zero_stage}, recompute {work.recompute}, microbatches of {work.micro_batch_size}: "
        f"{memory.largest / 2**30:.1f} of {memory.capacity / 2**30:.0f} GiB",
        f"{rates.tokens_per_second:,.0f} tokens/s, {per_gpu(rates.tflops_per_device)} per GPU, "
        f"{tokens / 1e9:.4g} billion tokens in {told} days (profile {forecast.profile.name})",
    ]


def as_dict(found: Capacity, tokens: float) -> dict[str, Any]:
    """A result for JSON."""
    work, model = found.forecast.work, found.model
    return {
        "nodes": found.nodes,
        "parameters": model.num_parameters(),
        "layers": model.num_layers,
        "width": model.hidden_size,
        "heads": model.num_attention_heads,
        "tensor": work.tensor,
        "pipeline": work.pipeline,
        "shard": work.shard,
        "zero_stage": work.zero_stage,
        "recompute": work.recompute,
        "micro_batch_size": work.micro_batch_size,
        "days": tokens / found.forecast.rates.tokens_per_second / SECONDS_PER_DAY,
        "predict": found.forecast.as_dict(),
    }
