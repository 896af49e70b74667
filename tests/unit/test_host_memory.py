"""The C library's allocator under the settings for a CPU."""

import json
import os
import subprocess
import sys

import pytest

BLOCK, SMALL = 32 << 20, 1 << 20
SCRIPT = f"""
import ctypes, json
from titan_like.train.host_memory import keep_freed_memory

keep_freed_memory()
libc, block = ctypes.CDLL(None), ctypes.c_void_p()

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("heap", *(f"other{{i}}" for i in range(9)))]

libc.mallinfo2.restype = Info
before = libc.mallinfo2().heap
for _ in range(8):  # as torch allocates and frees
    libc.posix_memalign(ctypes.byref(block), 64, {BLOCK})
    libc.free(block)
blocks = (libc.mallinfo2().heap - before) / {BLOCK}
held = [ctypes.c_void_p() for _ in range(10)]
libc.posix_memalign(ctypes.byref(block), 64, {BLOCK + 4096})  # room to align the next one
libc.posix_memalign(ctypes.byref(held[0]), 64, {BLOCK})  # what is freed before it does not join the top of the heap
libc.free(block)
before = libc.mallinfo2().heap
for small in held[1:]:
    libc.posix_memalign(ctypes.byref(small), 64, {SMALL})
libc.posix_memalign(ctypes.byref(block), 64, {BLOCK})
grown = libc.mallinfo2().heap - before
print(json.dumps([blocks, grown]))
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="settings of glibc")
def test_freed_blocks_serve_the_same_requests_again() -> None:
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    blocks, grown = json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT], env=os.environ | tunables))
    assert blocks < 1.5
    assert grown == 0  # although small blocks live on
