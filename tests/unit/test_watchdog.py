"""Whom the watchdog names, from what the ranks say of themselves."""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import titan_like.train.watchdog as watchdog_module
from titan_like.train.watchdog import Sign, find_fault, position

SIGN = Sign(number=10, step=41, seconds=20.0, where="titan_like/x.py:1 in f", waits=True, host="node7", pid=99)


def signs(*changes: dict[str, object]) -> tuple[dict[int, Sign], dict[int, Sign]]:
    """Two looks: in between every rank gave two signs unless its number is changed."""
    after = {rank: replace(SIGN, **({"number": 12} | change)) for rank, change in enumerate(changes)}  # type: ignore[arg-type]
    return dict.fromkeys(after, SIGN), after


def test_a_rank_that_gives_no_more_signs_is_named_before_one_that_waits_longer() -> None:
    before, after = signs({"seconds": 90.0}, {}, {"number": 10, "waits": False}, {})
    assert find_fault(4, before, after) == (
        "rank 2 died or was stopped after step 41, at titan_like/x.py:1 in f (host node7, process 99)"
    )


def test_the_rank_that_does_not_wait_is_named() -> None:
    before, after = signs({"seconds": 22.0}, {"waits": False, "where": "titan_like/data/loader.py:70 in __next__"}, {})
    assert find_fault(3, before, after) == (
        "rank 1 has hung for 20 s after step 41, at titan_like/data/loader.py:70 in __next__ (host node7, process 99); "
        "the other 2 wait for it"
    )


def test_a_rank_that_is_a_step_behind_is_named_though_it_waits() -> None:
    before, after = signs({"waits": False}, {}, {"step": 40})
    assert find_fault(3, before, after).startswith("rank 2 has hung for 20 s after step 40")


def test_where_all_wait_the_one_that_has_waited_longest_is_named_and_that_all_do() -> None:
    before, after = signs({}, {"seconds": 25.0}, {})
    assert find_fault(3, before, after).startswith("rank 1 has hung for 25 s")
    assert find_fault(3, before, after).endswith("; 3 ranks wait for one another")


def test_ranks_that_never_gave_a_sign_are_named() -> None:
    before, after = signs({}, {}, {}, {})
    del before[1], after[1], before[3], after[3]
    assert find_fault(4, before, after) == "ranks 1, 3 never came as far as the first sign of life"


def test_one_process_alone() -> None:
    before, after = signs({"waits": False, "seconds": 7.4})
    assert find_fault(1, before, after) == (
        "rank 0 has hung for 7 s after step 41, at titan_like/x.py:1 in f (host node7, process 99)"
    )


def waits_for_others(events: threading.Event, _: queue.Queue[int]) -> None:
    events.wait()


def waits_for_data(_: threading.Event, items: queue.Queue[int]) -> None:
    items.get()  # the standard library waits within it, and not for other ranks


@pytest.mark.parametrize("function", [waits_for_others, waits_for_data])
def test_the_place_is_the_product_s_line_and_what_it_called(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[threading.Event, queue.Queue[int]], None]
) -> None:
    monkeypatch.setattr(watchdog_module, "_PACKAGE", str(Path(__file__).parent))
    event, items = threading.Event(), queue.Queue[int]()
    thread = threading.Thread(target=function, args=(event, items))
    thread.start()
    while (frame := sys._current_frames().get(thread.ident or 0)) is None or frame.f_code.co_name != "wait":
        pass
    where, is_waiting = position(frame)
    event.set()
    items.put(1)
    thread.join()
    line = function.__code__.co_firstlineno + 1
    assert re.fullmatch(rf"unit/test_watchdog.py:{line} in {function.__name__} \(threading.py:\d+ in wait\)", where)
    assert is_waiting == (function is waits_for_others)
