"""The largest GPT-3-style model that trains on one node and on the cluster, and the fewest nodes for the model.

Memory decides, and a tenth of it stays free, as in a search. Models have GPT-3's shape: heads of 64 to 128, an MLP four
times as wide as the model, and a depth that follows from the width as in arXiv 2005.14165 (table 2.1) and, above its
175 billion parameters, arXiv 2104.04473 (table 1). The layouts are all that the trainer's own rules accept, with
tensor, pipeline and data parallelism, ZeRO 0 to 3, recomputation and any microbatch size, each of which may be fixed.
Pipelines run 1f1b, which holds the fewest activations. Tensor parallelism always comes with sequence parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import Any

from titan_like.config import ConfigError, load_config
from titan_like.config.load import edit, parse_overrides
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import total_samples
from titan_like.models.config import TransformerConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout
from titan_like.planner.commands.duration import SECONDS_PER_DAY
from titan_like.planner.commands.outcome import Outcome, Progress, above_zero, add_profile, chosen_profile, per_gpu
from titan_like.planner.memory import largest_memory, usable_bytes
from titan_like.planner.predict import Forecast, checked_profile, forecast, profile_and_device
from titan_like.planner.profile import Profile
from titan_like.planner.search_space import SEARCHED, STAGE_SIZES, Space, divisors
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import Workload
from titan_like.train.layout_rules import check_sequence

# (width, layers): GPT-3's models, then PTD-P's.
_FAMILY = (
    *((768, 12), (1024, 24), (2048, 24), (2560, 32), (4096, 32), (5120, 40), (12288, 96)),
    *((16384, 96), (20480, 105), (25600, 128)),
)
_WIDTH_STEP = 128
_HEAD_SIZES = range(128, 63, -8)  # the widest possible is taken; multiples of 8 reach the fast kernels

# The keys that are chosen here, unless they are fixed.
CHOSEN = (
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.zero_stage",
    "training.micro_batch_size",
    "activation_checkpoint.mode",
)

_LEAST_MEMORY = {"parallelism.zero_stage": 3, "training.micro_batch_size": 1}
_PLAIN = {
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_schedule": "1f1b",
    "parallelism.virtual_stages_per_rank": 1,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "activation_checkpoint.every_n_layers": 1,
}

_SHOWN = (
    "tensor",
    "pipeline",
    "shard",
    "expert",
    "zero_stage",
    "recompute",
    "micro_batch_size",
)  # of a layout, in JSON

Show = Callable[[str], None]  # called with a line of progress
ModelFor = Callable[[int], TransformerConfig | None]  # the model for a tensor-parallel degree, None if there is none


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not settings of the run."""
    parser.description = (
        "Find the largest GPT-3-style model that trains on one node and on the cluster, and the fewest nodes for the "
        "run's model. The layout in the run's file is chosen anew; these options of the command line stay as they are: "
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


@dataclass(frozen=True)
class Capacity:
    """A model that fits, in the fastest layout in which it does."""

    nodes: int
    forecast: Forecast

    @property
    def model(self) -> TransformerConfig:
        """The model's shape."""
        return self.forecast.work.model


def depth(width: int) -> int:
    """Layers of a GPT-3-style model: interpolated within the family, beyond it in proportion to the width."""
    for (narrow, shallow), (wide, deep) in pairwise(_FAMILY):
        if width <= wide:
            return max(1, round(shallow + (deep - shallow) * (width - narrow) / (wide - narrow)))
    return round(width * _FAMILY[-1][1] / _FAMILY[-1][0])


def gpt3_style(width: int, tensor: int, vocab_size: int, vocab_multiple: int, seq_len: int) -> GPTConfig | None:
    """The model of a width, with heads that ``tensor`` processes can share; None if there is none."""
    for size in _HEAD_SIZES:
        if width % (size * tensor) == 0:
            return GPTConfig(
                num_layers=depth(width),
                hidden_size=width,
                num_attention_heads=width // size,
                vocab_size=vocab_size,
                vocab_multiple=vocab_multiple,
                max_seq_len=seq_len,
            )
    return None


def largest_model(
    config: JobConfig,
    profile: Profile,
    table: TransformerConfig,
    nodes: int,
    fixed: frozenset[str] = frozenset(),
    show: Show = lambda _: None,
) -> Capacity | None:
    """The GPT-3-style model with the most parameters that fits on the nodes; None if not even the smallest fits.

    The run gives sequence length, batch and precision, and ``table`` the vocabulary. Keys of `CHOSEN` in ``fixed`` stay
    as the run has them. ``show`` is called with lines of progress.

    Raises:
        ConfigError: no layout is valid for the run, whatever the memory.
    """
    gpus = nodes * profile.gpus_per_node

    def of_width(width: int) -> ModelFor:
        return lambda tensor: gpt3_style(width, tensor, table.vocab_size, table.vocab_multiple, config.training.seq_len)

    # Go up while the evenly sharded state alone would fit, then down to the first width that really does.
    width, narrowest = _FAMILY[0][0], _FAMILY[0][0]
    while (model := of_width(width)(1)) is not None and _least_gpus(model, profile) <= gpus:
        width += _WIDTH_STEP
    for candidate in range(width - _WIDTH_STEP, narrowest - 1, -_WIDTH_STEP):
        show(f"does a width of {candidate} fit on {nodes} node{'s' * (nodes > 1)}?")
        if fits(config, profile, of_width(candidate), gpus, fixed):
            return _fastest(config, profile, of_width(candidate), gpus, nodes, fixed)
    return None


def fewest_nodes(
    config: JobConfig,
    profile: Profile,
    model: TransformerConfig,
    most: int = 4096,
    fixed: frozenset[str] = frozenset(),
    show: Show = lambda _: None,
) -> Capacity | None:
    """The fewest nodes on which the model fits, up to ``most``; None if it needs more. ``fixed`` keys of `CHOSEN` stay.

    Raises:
        ConfigError: no layout on any number of nodes is valid for the run.
    """
    least = _least_gpus(model, profile) / profile.gpus_per_node
    refusal, accepted = None, False
    for nodes in range(ceil(least) if least <= most else most + 1, most + 1):
        gpus = nodes * profile.gpus_per_node
        show(f"does it fit on {nodes} node{'s' * (nodes > 1)}?")
        try:
            found = fits(config, profile, lambda _: model, gpus, fixed)
        except ConfigError as error:  # no layout divides the batch on this many; another number may
            refusal = refusal or error
            continue
        accepted = True
        if found:
            return _fastest(config, profile, lambda _: model, gpus, nodes, fixed)
    if refusal is not None and not accepted:
        raise refusal
    return None


def _least_gpus(model: TransformerConfig, profile: Profile) -> float:
    """A lower bound on the number of GPUs: what the state needs if it is sharded evenly."""
    room = usable_bytes(profile.device) - profile.overhead_bytes
    return model.num_parameters() * 16 / room if room > 0 else inf


def fits(
    config: JobConfig, profile: Profile, model_for: ModelFor, gpus: int, fixed: frozenset[str] = frozenset()
) -> bool:
    """Whether there is a layout with enough memory.

    Where they are not fixed, it is enough to try ZeRO 3 and microbatches of one sample, which never take more than
    others.

    Raises:
        ConfigError: no layout is valid.
    """
    least = {key: value for key, value in _LEAST_MEMORY.items() if key not in fixed}
    works = valid_layouts(edit(config, least), model_for, gpus, fixed | least.keys())
    return any(largest_memory(work, profile) <= usable_bytes(profile.device) for work in works)


def valid_layouts(
    config: JobConfig, model_for: ModelFor, gpus: int, fixed: frozenset[str] = frozenset()
) -> Iterator[Workload]:
    """Every layout on ``gpus`` GPUs that the trainer's rules accept. Smaller microbatches come first.

    Raises:
        ConfigError: the first refusal, if the rules accept no layout.
    """
    pipeline = config.parallelism.pipeline_parallel_degree if CHOSEN[1] in fixed else 1
    refusal, accepted = None, False
    for tensor in [config.parallelism.tensor_parallel_degree] if CHOSEN[0] in fixed else divisors(gpus):
        model = model_for(tensor)
        if model is None or gpus % (tensor * pipeline):
            continue
        sequence = tensor > 1 and config.training.seq_len % tensor == 0
        settings = _PLAIN | {CHOSEN[0]: tensor, "parallelism.sequence_parallel": sequence}
        space = Space(edit(config, settings), model, gpus, fixed | settings.keys())
        try:
            for group in space.groups():
                accepted = True
                yield from (space.member(group, "1f1b", 1, *split) for split in space.splits(group))
        except ConfigError as error:
            refusal = refusal or error
    if refusal is not None and not accepted:
        raise refusal


def _fastest(
    config: JobConfig, profile: Profile, model_for: ModelFor, gpus: int, nodes: int, fixed: frozenset[str]
) -> Capacity:
    """The layout with the shortest step among those in which the model fits."""
    profile = profile.changed(one_node=nodes == 1)
    found: list[tuple[float, Workload]] = []
    too_large: set[tuple[object, ...]] = set()  # layouts whose larger microbatches need not be tried
    for work in valid_layouts(config, model_for, gpus, fixed):
        place = (work.tensor, work.pipeline, work.zero_stage, work.recompute)
        if place not in too_large and largest_memory(work, profile) <= usable_bytes(profile.device):
            found.append((step_time(work, profile).total, work))
        else:
            too_large.add(place)
    best = min(found, key=lambda one: (one[0], one[1].zero_stage))[1]  # `fits` found one
    return Capacity(nodes, forecast(best, profile))


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
    degrees += f" (experts {work.expert})" if work.expert > 1 else ""
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
        **{name: getattr(work, name) for name in _SHOWN},
        "days": tokens / found.forecast.rates.tokens_per_second / SECONDS_PER_DAY,
        "predict": found.forecast.as_dict(),
    }
