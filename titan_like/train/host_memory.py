"""The C library's memory allocator, told how training on a CPU uses it."""

from __future__ import annotations

import ctypes
import os
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Keep freed buffers in the process for the next step, where glibc is the allocator.

    By default glibc returns every large buffer to the kernel when it is freed, and the kernel zeroes and maps its pages
    one by one when the next step asks again: on a small model with a large vocabulary a tenth of the step. Kept memory
    counts as resident, so this is for runs whose model is on the CPU. Call it before the first tensor is made.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl has none
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_TOP_PAD, 256 << 20)
    # torch asks for addresses that are multiples of 64. Up to 2.38, glibc finds one by cutting some bytes off both ends
    # of a free block, and keeps these cuttings for small requests: they never join the block again (glibc bug 30723).
    # The freed block is then too short for the next request of its own size, which takes new memory, and the heap grows
    # to twice of what a step needs. With this variable torch aligns buffers of 2 MiB and more to pages; cuttings are
    # then mostly too large to be kept apart. It asks for huge pages too, which a heap that keeps its pages takes once.
    # torch reads the variable at its first allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
