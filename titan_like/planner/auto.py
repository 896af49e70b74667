"""`parallelism.auto`: choose a run's layout when it starts."""

from __future__ import annotations

import torch

from titan_like.config.errors import ConfigError
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.planner.explanations import described, why_slower
from titan_like.planner.search import Found, search
from titan_like.planner.search_space import set_keys
from titan_like.train.environment import environment_number


def with_chosen_layout(config: JobConfig, world_size: int) -> JobConfig:
    """Replace `parallelism.auto` by a layout. Every process chooses the same one, and rank 0 prints it.

    Raises:
        ConfigError: there is no GPU to plan for, or no layout is valid and fits.
    """
    if not config.parallelism.auto:
        return config
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    on_node = environment_number("LOCAL_WORLD_SIZE", 1, least=1)
    nodes_are_equal = world_size == on_node * environment_number("GROUP_WORLD_SIZE", 1, least=1)
    config, told = choose_layout(config, world_size, found, on_node if nodes_are_equal else None)
    if environment_number("RANK", 0) == 0:
        print(told, flush=True)
    return config


def choose_layout(
    config: JobConfig, world_size: int, gpu: str | None, gpus_per_node: int | None
) -> tuple[JobConfig, str]:
    """The configuration in the fastest layout that fits, and a line that says which it is and why.

    The parts of the layout that the file or the command line sets stay as they are. The choice depends on the arguments
    alone, so all processes of a job make the same one without communicating.

    Args:
        config: the run; its `cluster.gpu` and `cluster.gpus_per_node` have precedence over what was found.
        world_size: processes of the job.
        gpu: name of the GPU found.
        gpus_per_node: processes on each node; None if nodes differ.

    Raises:
        ConfigError: it is not known what to plan for, or no layout is valid and fits.
    """
    gpu = config.cluster.gpu or gpu
    if gpu is None and config.cluster.profile is None:
        problem = "there is no GPU here to plan for; name one in cluster.gpu, or a profile of this machine in "
        problem += "cluster.profile (scripts/plan.py microbenchmark writes it), or set the degrees"
        raise ConfigError("parallelism.auto", True, problem)
    gpus_per_node = config.cluster.gpus_per_node or gpus_per_node
    if gpus_per_node is None:
        problem = "the nodes have unequal numbers of processes; say how many GPUs to plan for on each"
        raise ConfigError("cluster.gpus_per_node", None, problem)
    planned = edit(config, {"cluster.gpu": gpu, "cluster.gpus_per_node": gpus_per_node})
    found = search(planned, world_size, fixed=set_keys(config), kinds=2)
    values = found.space.settings(found.best.work) | {"parallelism.auto": False}
    return edit(config, values), _summary(found)


def _summary(found: Found) -> str:
    best, capacity = found.best, found.profile.device.memory_bytes
    line = (
        f"layout chosen: {described(best.work)}; predicted {best.time.total:.4g} s a step and "
        f"{best.memory_bytes / 2**30:.1f} of {capacity / 2**30:.0f} GiB on {found.profile.device.name} (profile "
        f"{found.profile.name}); fastest of {found.counts.valid:,} valid layouts"
    )
    for other in found.ranked[1:2]:
        slower = 100 * (other.time.total / best.time.total - 1)
        line += f"; next: {described(other.work)}, {slower:+.1f} %: {why_slower(best, other, found.profile)}"
    return line
