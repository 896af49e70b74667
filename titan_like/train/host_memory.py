"""The C library's memory allocator, told how training on a CPU uses it."""

from __future__ import annotations

import ctypes
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Keep freed buffers in the process, where glibc is the allocator.

    By default glibc returns every large buffer to the kernel when it is freed, and the kernel zeroes and maps its pages
    one by one when the next step asks again: on a small model with a large vocabulary a tenth of the step. Kept memory
    counts as resident, so this is for runs whose model is on the CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_TOP_PAD, 256 << 20)
