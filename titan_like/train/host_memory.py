"""Settings of the C library's memory allocator for training on a CPU.

Every step allocates and frees the same buffers. A small block that lives on may be cut off the hole that a large buffer
left, which is then too small for the same buffer of the next step. glibc takes the smallest hole that is large enough,
so a spare hole of medium size keeps small blocks out of the large ones.
"""

import ctypes
import sys

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_SPARE_BYTES = 16 << 20


def keep_freed_memory() -> None:
    """Make glibc keep freed buffers in the process for the next step, and leave a spare hole for small blocks.

    Other allocators are left alone. By default glibc returns large freed buffers to the kernel. When the next step asks
    for them again, the kernel has to zero and map their pages one by one, which takes a fifth of the step if the
    vocabulary is large. Kept memory counts as resident, so call this only in runs whose model is on the CPU.

    The heap's top padding is not raised: glibc would use up spare room at the top before it coalesces what was freed
    inside the heap.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:  # musl does not have it
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    # The second block is never touched, so it takes no memory. It keeps the first from joining the top of the heap.
    spare, _ = libc.malloc(_SPARE_BYTES), libc.malloc(_SPARE_BYTES)
    libc.free(spare)
