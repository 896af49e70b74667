"""The random stream of each process."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.schema import Parallelism


def dropout_stream(mesh: DeviceMesh, parallelism: Parallelism) -> int:
    """Number of the random stream from which this process draws dropout.

    Processes with different activations need different streams. Tensor-parallel processes have the same activations
    between layers, except under sequence parallelism.
    """
    sharded = ["pp", "dp_replicate", "dp_shard", *(["tp"] if parallelism.sequence_parallel else [])]
    stream = 0
    for name in sharded:
        stream = stream * mesh[name].size() + mesh[name].get_local_rank()
    return stream


def seed_everything(seed: int, stream: int, deterministic: bool) -> None:
    """Seed Python's, NumPy's and torch's generators; ``deterministic`` also selects deterministic kernels."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
