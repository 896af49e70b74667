"""Whom the watchdog names, from what the ranks say of themselves, and that nothing ends its thread."""

import json
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import titan_like.train.watchdog as watchdog_module
from titan_like.train.watchdog import Heartbeat, Watchdog, find_fault, position

SIGN = Heartbeat(number=10, step=41, seconds=20.0, where="titan_like/x.py:1 in f", waits=True, host="node7", pid=99)


def signs(*changes: dict[str, object]) -> tuple[dict[int, Heartbeat], dict[int, Heartbeat]]:
    """Two looks: in between every rank gave two signs unless its number is changed."""
    after = {rank: replace(SIGN, **({"number": 12} | change)) for rank, change in enumerate(changes)}  # type: ignore[arg-type]
    return dict.fromkeys(after, SIGN), after


AT = "at titan_like/x.py:1 in f (host node7, process 99)"


LATE = {"seconds": 25.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # A rank that gives no more signs is named before one that waits longer.
        (({"seconds": 90.0}, {}, {"number": 10, "waits": False}, {}), "rank 2 died or was stopped after step 41, {AT}"),
        # The step of a rank whose last sign is old is that of the others.
        (({"step": 60}, {"number": 10}, {"step": 59}), "rank 1 died or was stopped after step 60, {AT}"),
        # The rank that does not wait is named.
        ((LATE, {"waits": False}, {}), "rank 1 has hung for 20 s after step 41, {AT}; the other 2 wait for it"),
        # A rank that is a step behind is named though it waits.
        (({"waits": False}, {}, {"step": 40}), "rank 2 has hung for 20 s after step 40, {AT}; the other 2 wait for it"),
        # Where all wait, the one that has waited longest is named.
        (({}, LATE, {}), "rank 1 has hung for 25 s after step 41, {AT}; 3 ranks wait for one another"),
        (({"waits": False, "seconds": 7.4},), "rank 0 has hung for 7 s after step 41, {AT}"),  # one process alone
    ],
)
def test_the_rank_at_fault_is_named(changes: tuple[dict[str, object], ...], told: str) -> None:
    assert find_fault(len(changes), *signs(*changes)) == told.replace("{AT}", AT)


def test_nobody_is_named_while_a_rank_for_which_the_others_wait_gets_on() -> None:
    before, after = signs({}, {"waits": False, "seconds": 19.0}, {})
    assert find_fault(3, before, after, patience=19.5) is None
    assert str(find_fault(3, before, after, patience=18.5)).startswith("rank 1 has hung for 19 s")
    before, after = signs({"seconds": 0.1, "step": 42}, {"step": 41})  # a step ahead: nobody waits for it
    assert str(find_fault(2, before, after, patience=18.5)).startswith("rank 1 has hung")


def test_ranks_that_never_gave_a_sign_are_named() -> None:
    before, after = signs({}, {}, {}, {})
    del before[1], after[1], before[3], after[3]
    assert find_fault(4, before, after) == "ranks 1, 3 never sent a first heartbeat"


@pytest.mark.parametrize(("missing", "most_checks"), [((), 1), ((4095,), 25), ((0, 7, 4000), 75)])
def test_a_look_at_many_ranks_takes_few_requests(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, missing: tuple[int, ...], most_checks: int
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4096)
    watchdog, checks, check = Watchdog(timeout=600.0), [], dist.PrefixStore.check
    assert watchdog.size / watchdog.seconds_between_heartbeats <= 2000
    for rank in {*range(4096)} - {*missing}:
        store.set(str(rank), json.dumps(asdict(SIGN)))
    monkeypatch.setattr(dist.PrefixStore, "check", lambda self, keys: checks.append(keys) or check(self, keys))
    assert {*range(4096)} - {*watchdog._heartbeats()} == {*missing}
    assert len(checks) <= most_checks  # one, or two for each halving: 2 log2(4096) + 1 for each that is missing


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


class Ended(BaseException):
    """Instead of the end of the process."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """What two ranks meet at; this process is rank 0."""
    meeting = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watchdog_module, "default_store", lambda: meeting)

    def end(_: Watchdog, report: str) -> None:
        raise Ended(report)

    monkeypatch.setattr(Watchdog, "_end_process", end)
    return dist.PrefixStore("watchdog", meeting)


def test_signs_go_on_if_looking_at_others_fails(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("'>=' not supported")

    watchdog = Watchdog(timeout=0.6)  # a sign every 0.05 s
    monkeypatch.setattr(watchdog, "_look_at_others", fail)
    with watchdog:
        deadline = time.monotonic() + 60
        while int(json.loads(store.get("0"))["number"]) < 30:
            assert watchdog._thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
    assert capfd.readouterr().err == "the watchdog of rank 0 failed (TypeError): '>=' not supported\n"


@pytest.mark.parametrize(
    ("error", "ends"), [(RuntimeError, False), (dist.DistStoreError, False), (dist.DistNetworkError, True)]
)
def test_only_a_lost_connection_means_that_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, error: type[Exception], ends: bool
) -> None:
    watchdog, calls = Watchdog(timeout=0.12), []

    def fail() -> None:
        calls.append(1)
        if len(calls) == 3:
            watchdog._ended.set()
        raise error("something")

    monkeypatch.setattr(watchdog, "_send_heartbeat", fail)
    if ends:
        with pytest.raises(Ended, match="the process that hosts the job's store is gone"):
            watchdog._watch()
    else:
        watchdog._watch()
    assert len(calls) == (1 if ends else 3)


class Job:
    """Rank 0's watchdog at 60 s of patience, whose clock is turned by hand; of rank 1 only the signs exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
        self.now, self.store, self.sign = 0.0, store, replace(SIGN, number=0, step=0, seconds=0.0, waits=False)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watchdog_module, "position", lambda _: ("titan_like/x.py:2 in g", True))
        self.watchdog = Watchdog(timeout=60.0)
        self.watchdog.is_starting = lambda: False
        self.steps = 0
        self.watchdog.progress = lambda: (self.steps, 0)

    def pass_time(self, seconds: float, steps: bool = False, other: bool = True, other_steps: bool = False) -> None:
        """Second after second in which either rank gets on or not; ``other``: whether rank 1 gives signs."""
        for _ in range(round(seconds)):
            self.now += 1
            self.steps += steps
            if other:
                since = 0.0 if other_steps else self.sign.seconds + 1
                self.sign = replace(self.sign, number=self.sign.number + 1, seconds=since)
                self.store.set("1", json.dumps(asdict(self.sign)))
            self.watchdog._send_heartbeat()
            self.watchdog._look_at_others()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> Job:
    return Job(monkeypatch, store)


def test_a_job_that_gets_on_is_never_ended(job: Job) -> None:
    job.pass_time(200, steps=True, other=False)  # rank 1 gives no sign, but no step is done without it


def test_a_rank_that_waits_for_one_that_gets_on_ends_nothing(job: Job) -> None:
    job.pass_time(300, other_steps=True)
    with pytest.raises(Ended, match=r"rank 1 has hung for 5\d s"):
        job.pass_time(60)  # until it does not


def test_a_silent_rank_is_named_within_the_timeout(job: Job) -> None:
    job.pass_time(100, steps=True)
    with pytest.raises(Ended, match="rank 1 died or was stopped after step 100"):
        job.pass_time(59, other=False)


def test_time_in_which_the_process_is_suspended_does_not_count(job: Job) -> None:
    job.pass_time(10)
    for _ in range(5):
        job.now += 3600
        job.pass_time(1, other_steps=True)
    job.pass_time(5, steps=True)
    job.now += 3600
    job.pass_time(20)


def test_few_and_spread_ranks_look(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1000)
    looking = []
    for rank in range(1000):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        looking += [rank] if Watchdog(timeout=60.0)._looks else []
    assert looking == list(range(0, 1000, 16))


def test_the_word_of_the_rank_that_looked_is_taken(job: Job) -> None:
    job.watchdog._looks = False
    job.store.set("report", "rank 1 …")
    with pytest.raises(Ended, match=r"^$"):  # which has printed it
        job.pass_time(60)


def test_before_the_first_step_a_main_thread_that_moves_gets_on(job: Job) -> None:
    job.watchdog.is_starting = lambda: True
    frames = [sys._getframe(), (lambda: sys._getframe())()]
    for _ in range(200):
        frames.reverse()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "_current_frames", lambda: {job.watchdog._main: frames[0]})
            job.pass_time(1)
