"""The C library's memory allocator, told how training on a CPU uses it."""

from __future__ import annotations

import ctypes
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Keep freed buffers of up to 32 MiB in the process for the next step, where glibc is the allocator.

    By default glibc returns large buffers to the kernel when they are freed, and the kernel zeroes and maps their pages
    one by one when the next step asks again. Kept memory counts as resident, so this is for runs whose model is on the
    CPU.

    Larger buffers (with a large vocabulary, logits) go back to the kernel as soon as they are freed: in the heap they
    would fragment it. torch asks for aligned addresses, for which glibc up to 2.38 cuts some bytes off a free block and
    keeps them for small requests (glibc bug 30723). The block is then too short for the next buffer of its own size,
    which takes new memory. `titan_like.train.loss` makes few buffers of that size.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes; set, it no longer moves by itself
        mallopt(_TRIM_THRESHOLD, -1)
        # Not M_TOP_PAD: what is free at the heap's end is handed out before the threshold is looked at.
