"""The largest model that trains on one node and on the cluster, and the fewest nodes for the run's own.

Memory decides, and a tenth of it stays free, as in a search. Larger models are the run's flavor, scaled as `search
--params` does; the largest is found by bisection. Whatever the command line does not set is chosen. What decides
whether a model fits is the layout that takes the least memory: ZeRO 3, microbatches of one sample, full recomputation,
1F1B, and sequence parallelism wherever there is tensor parallelism. The layout named is the fastest in which it fits.
"""

import argparse
from collections.abc import Callable
from math import ceil, inf, sqrt
from typing import Any

from titan_like.config import ConfigError, JobConfig
from titan_like.config.errors import require
from titan_like.config.load import edit, parse_overrides
from titan_like.config.options import OptionParser
from titan_like.metrics.console import ProgressLines
from titan_like.models.registry import model_config
from titan_like.models.shape import shape_of
from titan_like.planner.auto import described
from titan_like.planner.commands.outcome import Outcome, add_options_of_searches, length, read_run, sized
from titan_like.planner.memory import largest_memory, usable_bytes
from titan_like.planner.predict import Forecast, forecast
from titan_like.planner.profile import Profile
from titan_like.planner.search import search
from titan_like.planner.search_space import SEARCHED, STAGE_SIZES, Space
from titan_like.planner.stack import checked_profile, profile_of

_LEAST_MEMORY: dict[str, Any] = {
    "parallelism.zero_stage": 3,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.pipeline_schedule": "1f1b",
    "parallelism.virtual_stages_per_rank": 1,
    "training.micro_batch_size": 1,
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.every_n_layers": 1,
    "activation_checkpoint.budget": None,
}
_CHOSEN = ("parallelism.zero_stage", "training.micro_batch_size", "activation_checkpoint.mode")  # of the fastest layout
_MOST_NODES = 4096
_SMALLEST = 1e8  # parameters
_PRECISION = 1.03  # between a size that fits and one that does not
_LEAST_STATE = 8  # bytes per parameter: master weights and gradients in float32

Show = Callable[[str], None]  # called with a line of progress


def add_options(parser: OptionParser) -> None:
    """Add the options that are not settings of the run."""
    add_options_of_searches(parser, __doc__)


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Find the largest models and the fewest nodes. The exit status is 1 if the run's model fits on none."""
    config, profile, tokens = read_run(options, settings)
    fixed = frozenset(parse_overrides(settings)) & {*SEARCHED, STAGE_SIZES}
    show, per_node = ProgressLines(), config.cluster.gpus_per_node
    if per_node is None:
        is_known = profile is not None or config.cluster.profile is not None
        require(is_known, "cluster.gpus_per_node", None, "say how many GPUs a node has")
        per_node = profile_of(config, profile).gpus_per_node
        config = edit(config, {"cluster.gpus_per_node": per_node})
    node, training = f"{per_node} × {profile_of(config, profile).device.name}", config.training
    batch = f"sequences of {training.seq_len}, batches of {training.global_batch_size}"
    lines, largest = [f"largest {config.model.family} model, {batch}"], []

    def report(largest: Forecast | None, otherwise: str) -> dict[str, Any] | None:
        if largest is None:
            lines.append(f"  {otherwise}")
            return None
        text, days = length(largest, tokens, options.price)
        nodes, work = largest.work.num_gpus // per_node, largest.work
        lines.append(f"  {nodes} × {node}: {sized(work.model)}")
        lines.extend((f"    {described(work)}", f"    predicted: {largest}{text}"))
        return {"nodes": nodes} | as_dict(largest) | days

    for nodes in dict.fromkeys((1, config.cluster.nodes or 1)):
        text = report(largest_model(config, profile, nodes, fixed, show), f"{nodes} × {node}: none fits")
        largest += [text] if text else []
    lines.append(f"fewest nodes for {config.model.flavor}")
    fewest = report(fewest_nodes(config, profile, fixed, show), "fits on no number of nodes")
    result = {"tokens": tokens, "largest": largest} | ({"fewest": fewest} if fewest else {})
    return Outcome("\n".join(lines), {"capacity": result}, int(fewest is None))


def largest_model(
    config: JobConfig, profile: Profile | None, nodes: int, fixed: frozenset[str], show: Show
) -> Forecast | None:
    """The largest scaled model that fits on the nodes, to within 3 %; None if not even 100 million parameters do."""
    gpus = nodes * (config.cluster.gpus_per_node or 1)

    def of_size(parameters: float) -> JobConfig:
        return edit(config, {"model.overrides": shape_of(config.model, parameters, config.training.seq_len).overrides})

    def fit(parameters: float) -> bool:
        show(f"do {parameters / 1e9:.3g} billion parameters fit on {nodes} node{'s' * (nodes > 1)}?")
        return fits(of_size(parameters), profile, gpus, fixed)

    too_large = gpus * usable_bytes(profile_of(config, profile).device) / _LEAST_STATE
    size = too_large / 2
    while size >= _SMALLEST and not fit(size):
        too_large, size = size, size / 2
    if size < _SMALLEST:
        return None
    while too_large / size > _PRECISION:
        middle = sqrt(size * too_large)
        size, too_large = (middle, too_large) if fit(middle) else (size, middle)
    return fastest(of_size(size), profile, gpus, fixed)


def fewest_nodes(config: JobConfig, profile: Profile | None, fixed: frozenset[str], show: Show) -> Forecast | None:
    """The fewest nodes on which the run's model fits; None if it needs more than 4,096."""
    model, per_node = model_config(config.model), config.cluster.gpus_per_node or 1
    stack = profile_of(config, profile)
    room = usable_bytes(stack.device) - stack.overhead_bytes
    lowest = model.num_parameters() * _LEAST_STATE / room / per_node if room > 0 else inf
    refusal, is_valid = None, False
    for nodes in range(ceil(min(lowest, _MOST_NODES + 1)), _MOST_NODES + 1):
        show(f"does it fit on {nodes} node{'s' * (nodes > 1)}?")
        try:
            if fits(config, profile, nodes * per_node, fixed):
                return fastest(config, profile, nodes * per_node, fixed)
            is_valid = True
        except ConfigError as error:  # no layout divides the batch on this many; another number may
            refusal = refusal or error
    if refusal is not None and not is_valid:
        raise refusal
    return None


def fits(config: JobConfig, profile: Profile | None, gpus: int, fixed: frozenset[str]) -> bool:
    """Whether there is a layout with enough memory; a `ConfigError` if no layout is valid."""
    stack = checked_profile(config, gpus, profile)
    overrides = {key: value for key, value in _LEAST_MEMORY.items() if key not in fixed}
    usable = usable_bytes(stack.device)
    space = Space(edit(config, overrides), model_config(config.model), gpus, fixed | overrides.keys())
    for group in space.groups():
        splits = group.tensor == 1 or group.sequence_parallel or group.seq_len % group.tensor
        works = (
            space.member(group, *choice, *split) for choice in space.pipelines(group) for split in space.splits(group)
        )
        if splits and any(largest_memory(work, stack, usable) <= usable for work in works):
            return True
    return False


def fastest(config: JobConfig, profile: Profile | None, gpus: int, fixed: frozenset[str]) -> Forecast:
    """The fastest layout in which a model fits, of the schedules and splits that decide whether it does."""
    plain = {key: value for key, value in _LEAST_MEMORY.items() if key not in fixed and key not in _CHOSEN}
    result = search(edit(config, plain), gpus, profile, fixed | plain.keys(), kinds=1)
    return forecast(result.best.work, result.profile)


def as_dict(largest: Forecast) -> dict[str, Any]:
    """A result for JSON."""
    work, model = largest.work, largest.work.model
    shape = {"layers": model.num_layers, "width": model.hidden_size, "heads": model.num_attention_heads}
    layout = {name: getattr(work, name) for name in SEARCHED.values()}
    return {"parameters": model.num_parameters()} | shape | layout | {"predict": largest.as_dict()}
