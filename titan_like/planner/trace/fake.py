"""Process groups without processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from titan_like.torch_private import fake_store


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Act as one of many processes that do not exist. Collectives return without doing anything."""
    hook = sys.excepthook  # which torch wraps with each group, so that every line of a traceback names all ranks
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
