"""Seeds of the random generators: what dropout draws follows from seed, step and rank alone."""

import hashlib
import random

import numpy as np
import torch

from titan_like.parallel.layout import Layout


def dropout_stream(layout: Layout, rank: int) -> int:
    """Number of the random stream from which a rank draws dropout.

    Ranks with different activations need different streams. Tensor-parallel ranks have the same activations between
    layers, except under sequence parallelism.
    """
    return rank if layout.sequence_parallel else rank // layout.tensor


def seed_everything(seed: int, stream: int, deterministic: bool) -> None:
    """Seed Python's, NumPy's and torch's generators; ``deterministic`` also selects deterministic kernels."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_step(seed: int, step: int, stream: int) -> None:
    """Seed torch's generators for the dropout of one step, from these numbers alone.

    Checkpoints therefore need no random state: a run that resumes in a layout draws what it would have drawn there.
    """
    digest = hashlib.sha256(f"dropout/{seed}/{step}/{stream}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    # What `torch.manual_seed` does for the devices in use. For others, it would format a stack trace.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
