"""Which random numbers each process draws."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.schema import Parallelism


def dropout_stream(mesh: DeviceMesh, parallelism: Parallelism) -> int:
    """Number of the random stream that this process draws dropout from.

    Processes that hold different activations draw differently. Tensor-parallel processes hold the same ones between
    layers, except under sequence parallelism.
    """
    sharded = ["pp", "dp_replicate", "dp_shard", *(["tp"] if parallelism.sequence_parallel else [])]
    stream = 0
    for name in sharded:
        stream = stream * mesh[name].size() + mesh[name].get_local_rank()
    return stream


def seed_everything(seed: int, stream: int, deterministic: bool) -> None:
    """Seed every generator, and choose deterministic kernels if asked."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
