"""What `verify` takes for a deadlock: processes of which none does anything, and not ones that are slow."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from titan_like.verify import processes
from titan_like.verify.processes import DONE, STOPPED, WAITING, Group, Member


def compute(seconds: float) -> str:
    """Use the processor."""
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass
    return "computed"


class SlowImport:
    """Takes long to arrive in a process, as a function of a program that imports much does."""

    def __reduce__(self) -> tuple[Any, ...]:
        return compute, (3.0,)


def returned(_: Member, value: str) -> str:
    return value


def polls(_: Member, file: Path) -> str:
    """Wait for another program, as the compiler does for its lock."""
    while not file.exists():
        time.sleep(0.05)
    return "found"


def sleeps(member: Member, file: Path) -> None:
    file.touch()
    time.sleep(3600)


def test_starting_slowly_is_no_deadlock() -> None:
    (outcome,) = Group(returned, 1, SlowImport()).wait(60, patience=1.0)
    assert (outcome.ending, outcome.result) == (DONE, "computed"), outcome


def test_waiting_for_a_lock_of_another_program_is_no_deadlock(tmp_path: Path) -> None:
    timer = threading.Timer(4.0, (tmp_path / "lock").touch)
    timer.start()
    outcomes = Group(polls, 2, tmp_path / "lock").wait(60, patience=1.5)
    timer.join()
    assert [outcome.ending for outcome in outcomes] == [DONE, DONE], outcomes


def test_doing_nothing_is_a_deadlock(tmp_path: Path) -> None:
    outcomes = Group(sleeps, 2, tmp_path / "begun").wait(60, patience=1.0)
    assert [(outcome.ending, outcome.reason) for outcome in outcomes] == [(STOPPED, WAITING)] * 2, outcomes
    assert not any(outcome.is_undecided for outcome in outcomes)


def test_a_pause_of_the_waiting_process_is_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock has gone on, but it has not looked at the others meanwhile."""
    begun, monotonic = tmp_path / "begun", time.monotonic
    clock = lambda: monotonic() + 1000 * begun.exists()  # noqa: E731
    monkeypatch.setattr(processes.time, "monotonic", clock)
    outcomes = Group(sleeps, 1, begun).wait(1005, patience=20.0)
    assert [outcome.reason for outcome in outcomes] == [processes.TOO_LONG], outcomes
