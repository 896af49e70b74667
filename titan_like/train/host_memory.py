"""Settings of the C library's memory allocator for training on a CPU.

By default the memory of a training process grows from step to step, although every step allocates and frees the same
buffers. `torch` asks glibc for memory aligned to 64 bytes. glibc takes a block that is up to 96 bytes too large and
frees the two ends that are left over. Its cache of small blocks, the tcache, keeps such ends and hands them to the next
small allocation. If that one lives on, the large block cannot be joined with its end again when it is freed: the hole
is some bytes too small for the same request of the next step, which then extends the heap.

Small blocks that live on do the same when they are cut off a hole that a large block needs. glibc takes the smallest
hole that is large enough, so a spare hole of medium size keeps them out of the large ones.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_SPARE_BYTES = 16 << 20

_NO_TCACHE = "glibc.malloc.tcache_count=0"


def restart_without_tcache() -> None:
    """Start this program again with glibc's tcache off, so that freed ends join their blocks at once.

    glibc reads that setting only when a process starts, so call this first in a script. It does nothing under another
    C library, on a machine with a GPU, where steps allocate little on the host, or if `GLIBC_TUNABLES` already sets the
    size of the tcache. The process keeps its number, its open files and the options of its interpreter.
    """
    module = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
    called = sys.argv if module is None else [module.name, *sys.argv[1:]]
    is_program = sys.orig_argv[-len(called) :] == called  # not if another program runs the script
    has_gpu = os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not is_program or has_gpu or "CS_GNU_LIBC_VERSION" not in os.confstr_names or "tcache_count" in tunables:
        return
    environment = os.environ | {"GLIBC_TUNABLES": f"{tunables}:{_NO_TCACHE}".removeprefix(":")}
    with suppress(OSError):  # training works without it, in more memory
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


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
