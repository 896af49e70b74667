"""Reports of failed memory allocations that name the setting to change."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from titan_like.config.errors import ConfigError, first_line

# Messages of torch's allocators and the C++ library. Only the GPU's allocator has an exception class of its own.
_WORDS = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "out of memory")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # a container's limit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


@contextmanager
def out_of_memory_names(key: str, value: object, cure: str) -> Iterator[None]:
    """Turn a failed allocation inside this context into a sentence about a setting.

    Raises:
        ConfigError: memory could not be allocated. All other exceptions pass through.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = f"this machine does not have enough memory for it ({first_line(error)[:200]}); {cure}"
        raise ConfigError(key, value, problem) from None


def host_memory_bytes() -> int:
    """Memory that this machine's processes may use together: the installed memory, or a lower limit if one is set."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    of_process = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits if of_process == resource.RLIM_INFINITY else [*limits, of_process])
