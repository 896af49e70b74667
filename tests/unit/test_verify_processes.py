"""What `verify` takes for a deadlock: processes of which none does anything, and not ones that are slow.

And what it shows of the traceback of one that failed.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.scripts import install
from titan_like.config.entry_points import is_added
from titan_like.data.batch import map_tensors
from titan_like.data.loading.lengths import sample_length
from titan_like.verify import processes
from titan_like.verify.processes import DONE, STOPPED, WAITING, Group, Member, error_in


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


@pytest.mark.slow
def test_starting_slowly_is_no_deadlock() -> None:
    (outcome,) = Group(returned, 1, SlowImport()).wait(60, patience=1.0)
    assert (outcome.ending, outcome.result) == (DONE, "computed"), outcome


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_pause_of_the_waiting_process_is_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock has gone on, but it has not looked at the others meanwhile."""
    begun, monotonic = tmp_path / "begun", time.monotonic
    clock = lambda: monotonic() + 1000 * begun.exists()  # noqa: E731
    monkeypatch.setattr(processes.time, "monotonic", clock)
    outcomes = Group(sleeps, 1, begun).wait(1005, patience=20.0)
    assert [outcome.reason for outcome in outcomes] == [processes.TOO_LONG], outcomes


def printed(error: Exception) -> str:
    return "loading\n" + "".join(traceback.format_exception(error)) + "a later warning\n"


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("too small: 8\nSet VERBOSE=1 for more"), "ValueError: too small: 8"),
        (ValueError("\n\n  too small\nSet VERBOSE=1 for more"), "ValueError: too small"),
        (
            RuntimeError("backend raised:\nValueError: too small\n\nSet"),
            "RuntimeError: backend raised: ValueError: too small",
        ),
        (AssertionError(), "AssertionError"),
    ],
)
def test_the_type_and_the_first_line_of_the_last_error(error: Exception, told: str) -> None:
    text = printed(raised(error, cause=raised(KeyError("cause\nof it"))))
    assert re.fullmatch(rf"{told} \(tests/unit/test_verify_processes\.py:\d+\)", error_in(text)), error_in(text)


def test_the_place_is_the_innermost_line_of_the_package() -> None:
    try:
        sample_length(None, None)  # type: ignore[arg-type]
    except AttributeError as error:
        text = printed(error)
    told = error_in(text)
    assert told.startswith("AttributeError: 'NoneType' object has no attribute")
    file, _, line = told.rpartition(" (")[2].removesuffix(")").rpartition(":")
    assert file == "titan_like/data/loading/lengths.py"
    source = Path(processes.__file__).parents[2] / file
    assert source.read_text().splitlines()[int(line) - 1].strip() in text


def test_the_place_is_in_a_package_that_adds_to_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.py").write_text("import json\n\n\ndef read(x):\n    return json.loads('{')\n")
    install(tmp_path, "lines", "titan_like.datasets", 'lines = "lines:Lines"\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as error:
        map_tensors(importlib.import_module("lines").read, torch.zeros(1))
    assert error_in(printed(error.value)).endswith(f" ({tmp_path}/lines.py:5)")


def test_a_module_that_has_the_name_of_such_a_package_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("utils", "lines"):
        install(tmp_path, name, "titan_like.datasets", f'{name} = "{name}:Lines"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "lines" / "lib")
    assert is_added(f"{tmp_path}/utils.py") and is_added(f"{tmp_path}/lines/data.py")
    assert not is_added(torch.utils.data.__file__) and not is_added(f"{tmp_path}/lines/lib/json/decoder.py")


def test_without_a_traceback_there_is_no_error() -> None:
    assert error_in("") == error_in("error: training.steps = 0\n") == ""
