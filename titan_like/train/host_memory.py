"""Settings of the C library's memory allocator for training on a CPU."""

from __future__ import annotations

import ctypes
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc keep freed buffers in the process for the next step. Other allocators are left alone.

    By default glibc returns large freed buffers to the kernel. When the next step asks for them again, the kernel has
    to zero and map their pages one by one, which takes a fifth of the step if the vocabulary is large. Kept memory
    counts as resident, so call this only in runs whose model is on the CPU.

    Buffers as large as the logits fragment the heap, so `titan_like.train.loss` allocates none besides the logits. For
    the same reason the heap's top padding is not raised: glibc would use up spare room at the top before it coalesces
    what was freed inside the heap.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl does not have it
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
