"""The environment variables that describe a job's processes. No torch here, so that mistakes are reported at once."""

import os
from dataclasses import replace

from titan_like.config.errors import ConfigError, all_of, require
from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import Layout

_LARGEST = 2**31 - 1
_MOST_DESCRIBED = 2**18  # processes; torch lists the ranks of every process group
_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_number(name: str, default: int, least: int = 0, most: int = _LARGEST) -> int:
    """Read a whole number that torchrun sets; a `ConfigError` if it is none, or not from ``least`` to ``most``."""
    text = os.environ.get(name, str(default))
    above = f" and at most {most}" if most < _LARGEST - 1 else ""
    reason = f"must be a whole number of at least {least}{above}; torchrun sets it"
    require(text.isdecimal() and least <= int(text) <= most, f"environment variable {name}", text, reason)
    return int(text)


def number_of_processes() -> int:
    """World size of this process's job, from torchrun's variables; 1 without them."""
    if "WORLD_SIZE" not in os.environ:
        _check_launcher()
    world_size = environment_number("WORLD_SIZE", 1, least=1)
    environment_number("MASTER_PORT", 29500, most=65535)
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        environment_number(name, 0, most=environment_number(of, _LARGEST, least=1) - 1)
    return world_size


def _check_launcher() -> None:
    """Refuse to be one of several processes of srun or mpirun, each of which would be a job of its own.

    An `sbatch` script runs once, whatever SLURM_NTASKS says, and `srun --pty` gives the terminal to one task.
    """
    variables = os.environ
    counts = dict.fromkeys(
        ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "PALS_SIZE", "MV2_COMM_WORLD_SIZE"), "mpirun"
    )
    is_task = variables.get("SLURM_PROCID", "0") != "0" or {"SLURM_STEP_ID", "SLURM_LAUNCH_NODE_IPADDR"} & {*variables}
    if is_task and "SLURM_PTY_PORT" not in variables:
        counts["SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"] = "srun"
    for name, launcher in counts.items():
        if variables.get(name, "1") not in ("", "1"):
            hint = "start one torchrun a machine, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            slurm = " (the first three from SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS)" if launcher == "srun" else ""
            reason = f"{launcher} has started as many processes, which only meet through torchrun's variables; {hint}"
            raise ConfigError(f"environment variable {name}", variables[name], reason + slurm)


def check_meeting() -> None:
    """Refuse a process of a larger job without all variables that it needs to join the others, a line for each."""
    world_size, rank = environment_number("WORLD_SIZE", 1, least=1), environment_number("RANK", 0)
    missing = [name for name in _MEETING if not os.environ.get(name, "").strip()]
    if missing and (world_size > 1 or rank > 0):
        job = f"a job of {world_size} processes" if world_size > 1 else f"a process of RANK {rank}"
        reason = f"{job} needs it; start with torchrun, which sets it"
        raise all_of([ConfigError(f"environment variable {name}", None, reason) for name in missing])


def is_one_of_several() -> bool:
    """Whether the environment has all variables for a rendezvous at MASTER_ADDR. Otherwise the process runs alone."""
    return all(os.environ.get(name) for name in _MEETING)


def cluster_size(config: JobConfig) -> int:
    """GPUs of the job: the cluster's, else the product of the degrees. Nodes of unknown size are a `ConfigError`."""
    cluster, layout = config.cluster, Layout.of(config.parallelism)
    if cluster.nodes is not None:
        reason = f"cluster.nodes is {cluster.nodes}; say how many GPUs each of them has"
        require(cluster.gpus_per_node is not None, "cluster.gpus_per_node", None, reason)
        return cluster.nodes * (cluster.gpus_per_node or 0)
    return replace(layout, shard=max(layout.shard, 1)).num_processes  # a shard degree of -1 is 1 here


def dry_run_world(config: JobConfig) -> int:
    """World size of the job that a dry run describes. It must have `job.dry_run_rank`."""
    nodes, rank, world_size = config.cluster.nodes, config.job.dry_run_rank, cluster_size(config)
    key, value = "parallelism.tensor_parallel_degree", config.parallelism.tensor_parallel_degree
    if nodes is not None:
        key, value = "cluster.nodes", nodes
    elif "WORLD_SIZE" in os.environ:
        key, value = "environment variable WORLD_SIZE", environment_number("WORLD_SIZE", 1, least=1)
        world_size = value
    reason = f"makes a job of {world_size:,} processes; a dry run can describe at most {_MOST_DESCRIBED:,}"
    require(world_size <= _MOST_DESCRIBED, key, value, reason)
    reason = f"the job has {world_size} {'processes' if world_size > 1 else 'process'}"
    require(rank < world_size, "job.dry_run_rank", rank, f"{reason}; use 0 to {world_size - 1}")
    return world_size
