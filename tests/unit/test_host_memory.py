"""The C library's allocator under the settings for a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
BLOCK, SMALL = 32 << 20, 1 << 20
SCRIPT = f"""
import ctypes, json, os, sys
from titan_like.train.host_memory import keep_freed_memory, restart_without_tcache

print(os.getpid())
sys.stdout.flush()
restart_without_tcache()
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
tunables = os.environ.get("GLIBC_TUNABLES", "")
print(json.dumps([os.getpid(), sys.argv[1:], sys.flags.dont_write_bytecode, tunables, blocks, grown]))
"""

pytestmark = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="settings of glibc")


def run(folder: Path, tunables: str, *called: str) -> tuple[list[int], list[Any]]:
    """The number of the process at each start, and what it prints at the end. ``called`` replaces the script's path."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-B", *(called or [str(script)]), "a b", "--c=d"]
    *numbers, last = subprocess.check_output(command, env=environment, text=True, cwd=folder).splitlines()
    return [int(number) for number in numbers], json.loads(last)


def test_freed_block_serves_the_same_request_again(tmp_path: Path) -> None:
    numbers, (number, arguments, is_option_kept, tunables, blocks, _) = run(tmp_path, "glibc.malloc.perturb=0")
    assert numbers == [number, number]  # started again once, as the same process
    again, (_, given, *_) = run(tmp_path, "", "-m", "script")
    assert len(again) == 2 and given == arguments
    assert arguments == ["a b", "--c=d"] and is_option_kept
    assert tunables == "glibc.malloc.perturb=0:glibc.malloc.tcache_count=0"
    assert blocks < 1.5


def test_small_blocks_that_live_on_leave_large_holes_whole(tmp_path: Path) -> None:
    _, (*_, grown) = run(tmp_path, "")
    assert grown == 0


def test_users_size_of_the_tcache_is_kept(tmp_path: Path) -> None:
    numbers, (number, _, _, tunables, *_) = run(tmp_path, "glibc.malloc.tcache_count=7")
    assert numbers == [number] and tunables == "glibc.malloc.tcache_count=7"


def test_program_that_runs_a_script_is_not_started_again(tmp_path: Path) -> None:
    """`exec` would replace the test runner, a debugger or a notebook."""
    (tmp_path / "script.py").write_text(SCRIPT)
    runner = f"import runpy; runpy.run_path({str(tmp_path / 'script.py')!r}, run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": ""}
    printed = subprocess.check_output([sys.executable, "-c", runner], env=environment, text=True).splitlines()
    assert len(printed) == 2
