"""One rank of a job that counts what its start, its saves and its loads do: `starts.py ranks` forks them.

Only this process is changed: the store that the ranks meet at, the functions of torch.distributed that make process
groups and send objects, and the methods of the trainer whose time is taken. A rank writes its counts to a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

import titan_like.train.trainer as trainer_module
import titan_like.train.training_state as state_module
import titan_like.verify.preloaded  # noqa: F401  everything that ranks would import
from titan_like.checkpoint.saver import Saver
from titan_like.commands.train import run
from titan_like.train.trainer import Trainer

After = Callable[[Any, float, list[Any]], object]
OBJECTS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")
COUNTS: Counter[str] = Counter()
TIMES: dict[str, float] = {}  # phase → time of its end, or the seconds of a save and a load
_STORES: list[dist.Store] = []  # C++ does not keep Python's part of them alive


class CountingStore(dist.Store):
    """Another store, with every operation counted."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store
        _STORES.append(self)

    def clone(self) -> dist.Store:
        """A store with a connection of its own."""
        return CountingStore(self.store.clone())

    def has_extended_api(self) -> bool:
        """Whether there is `multi_get`."""
        return True


def _counted(name: str) -> Callable[..., Any]:
    """The method of a `CountingStore` that counts its calls, and the bytes of its arguments and results."""

    def method(self: CountingStore, *arguments: Any) -> Any:
        result = getattr(self.store, name)(*arguments)
        of = "watchdog" if "watchdog" in str(arguments[0]) else "store"
        late = " after the first step" if of == "store" and "first step" in TIMES else ""
        COUNTS[f"{of} operations{late}"] += 1
        COUNTS[f"{of} bytes{late}"] += _size(arguments) + _size(result)
        return result

    return method


def _size(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


for _name in ("set", "get", "add", "check", "wait", "multi_get", "compare_set", "delete_key"):
    setattr(CountingStore, _name, _counted(_name))


def wrap(place: Any, name: str, after: After) -> None:
    """Let ``after(result, began, arguments)`` follow each call of a function."""
    function = getattr(place, name)

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        began = time.time()
        result = function(*arguments, **options)
        after(result, began, [*arguments, *options.values()])
        return result

    setattr(place, name, wrapped)


def sockets() -> int:
    """Open sockets of this process."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(path) and os.readlink(path).startswith("socket:") for path in paths)


def note(phase: str) -> After:
    """Note when a phase ended for the first time, how long it took and how many sockets were open."""

    def noted(_: Any, began: float, arguments: list[Any]) -> None:
        if phase not in TIMES:
            TIMES[phase] = time.time()
            TIMES[f"seconds of {phase}"] = TIMES[phase] - began
            COUNTS[f"sockets after {phase}"] = sockets()

    return noted


def count_objects(kind: str) -> After:
    """Count a collective of pickled objects, and the bytes that this rank sends or receives in it."""

    def counted(_: Any, began: float, arguments: list[Any]) -> None:
        now = "after" if "first step" in TIMES else "before"
        COUNTS[f"{kind} {now} the first step"] += 1
        objects = [value for value in arguments if not isinstance(value, dist.ProcessGroup)]
        COUNTS[f"object bytes {now} the first step"] += len(pickle.dumps(objects))

    return counted


def install() -> None:
    """Count and take times from here on."""
    meet = dist.rendezvous

    def rendezvous(*arguments: Any, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        TIMES["settings and data"] = time.time()
        for store, rank, size in meet(*arguments, **options):
            TIMES["rendezvous"] = time.time()
            yield CountingStore(store), rank, size

    def made(result: Any, began: float, arguments: list[Any]) -> None:
        COUNTS["calls that make groups"] += 1
        COUNTS["groups of this rank"] += result[0] is not dist.GroupMember.NON_GROUP_MEMBER

    dist.rendezvous = rendezvous
    wrap(dist.distributed_c10d, "_new_process_group_helper", made)
    wrap(dist, "init_process_group", note("default group"))
    wrap(trainer_module, "build_mesh", note("mesh"))
    wrap(Trainer, "__init__", note("model"))
    wrap(Trainer, "read_step", note("first step"))
    wrap(Saver, "save", note("save"))
    wrap(state_module, "resume", note("load"))
    for kind in OBJECTS:
        wrap(dist, kind, count_objects(kind))


def work(rank: int, ranks: int, port: int, arguments: list[str], output: Path, began: float) -> None:
    """Be one rank of a job that ``began`` at this time, in a process of its own that ends with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(output / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train.py", *arguments]
    install()
    try:
        run()
    finally:
        TIMES["end"] = time.time()
        times = {name: value if name.startswith("seconds") else value - began for name, value in TIMES.items()}
        (output / f"rank-{rank}.json").write_text(json.dumps({"times": times, "counts": COUNTS}))
