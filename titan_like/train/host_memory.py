"""The C library's memory allocator, told how training on a CPU uses it."""

from __future__ import annotations

import ctypes
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Keep freed buffers in the process for the next step, where glibc is the allocator.

    By default glibc returns large buffers to the kernel when they are freed, and the kernel zeroes and maps their pages
    one by one when the next step asks again: a fifth of the step where the vocabulary is large. Kept memory counts as
    resident, so this is for runs whose model is on the CPU. Buffers of the logits' size fragment the heap, so
    `titan_like.train.loss` makes none beside them, and the heap grows by no more than is asked for: room to spare
    at its top is used up before what was freed within it is joined again.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
