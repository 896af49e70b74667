"""Requests to stop: what is noted, what ends the process, and what forked children do with them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.e2e.jobs import wait_until
from titan_like.train import signals as signals_module
from titan_like.train.signals import STOP_SIGNALS, StopSignals

REPO = Path(__file__).parents[2]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines with which the process would have ended."""
    lines: list[str] = []
    monkeypatch.setattr(StopSignals, "_end", lambda _self, number, line: lines.append(line))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return lines


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_while_the_main_thread_is_in_c_code(number: signal.Signals, ended: list[str]) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        stop.can_save = True
        noted = threading.Event()

        def send() -> None:
            os.kill(os.getpid(), number)
            wait_until(lambda: stop.received)
            noted.set()

        threading.Thread(target=send).start()
        assert sum(range(10**7)) and noted.wait(60)  # one bytecode of the main thread
        assert stop.received == number and not ended
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_sigusr2_asks_for_a_snapshot_and_not_to_stop(ended: list[str]) -> None:
    with StopSignals() as stop:  # before the first step
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: stop.asks_for_snapshot)
    assert not stop.received and not ended
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("first", "second", "under_torchrun", "seconds", "ends"),
    [
        ("SIGINT", "SIGINT", False, 0.3, True),  # Ctrl-C twice
        ("SIGINT", "SIGTERM", True, 0.3, True),  # which is what torchrun makes of it
        ("SIGINT", "SIGINT", True, 0.3, False),  # a cluster signals a rank and torchrun, which passes it on
        ("SIGTERM", "SIGTERM", True, 0.3, False),
        ("SIGHUP", "SIGTERM", True, 0.3, False),  # a terminal signals the shell too, whose signal is torchrun's second
        ("SIGTERM", "SIGTERM", False, 6.0, True),
    ],
)
def test_a_second_request_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch,
    ended: list[str],
    first: str,
    second: str,
    under_torchrun: bool,
    seconds: float,
    ends: bool,
) -> None:
    now = 100.0
    monkeypatch.setattr(signals_module.time, "monotonic", lambda: now)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    stop = StopSignals()
    stop.can_save = True
    stop._receive(getattr(signal, first))
    now += seconds
    stop._receive(getattr(signal, second))
    assert stop.received == getattr(signal, first)
    assert ended == ([f"ended at once by a second signal ({second})"] if ends else [])


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO, env=dict(os.environ) | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


BEFORE_THE_LOOP = """
import os, signal, threading, time
from tests.e2e.jobs import wait_until
from titan_like.train.signals import StopSignals
with StopSignals():
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGHUP)).start()
    HOW
    print("the main thread has gone on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", "time.sleep(100)", "while True: len('')"],
    ids=["C code", "waiting", "Python code"],
)
def test_a_signal_before_the_first_step_ends_the_process(how: str) -> None:
    done = run(BEFORE_THE_LOOP.replace("HOW", how), LOCAL_RANK="0")
    assert (done.returncode, done.stdout, done.stderr) == (129, "", "ended by SIGHUP before the first step was done\n")


@pytest.mark.slow
def test_only_one_rank_of_a_machine_says_so_and_nohup_holds() -> None:
    code = BEFORE_THE_LOOP
    done = run(code.replace("HOW", "time.sleep(100)"), LOCAL_RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (129, "", "")
    done = run("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + code.replace("HOW", "time.sleep(0.5)"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "the main thread has gone on\n", "")


def test_a_script_that_has_a_signal_ignored_means_save() -> None:
    """As scripts/slurm and scripts/k8s do, and as a shell does with SIGINT to what it runs in the background."""
    code = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
from titan_like.train.signals import StopSignals
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGUSR1)
    while not stop.received:
        time.sleep(0.01)
    print("noted", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (130, "noted\n")
    assert done.stderr == "ended by SIGINT before the first step was done\n"


def test_a_forked_child_leaves_signals_to_its_parent(ended: list[str]) -> None:
    with StopSignals() as stop:
        stop.can_save = True
        child = os.fork()
        if child == 0:
            for number in STOP_SIGNALS:
                os.kill(os.getpid(), number)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: stop.received)
        assert stop.received == signal.SIGUSR1 and not ended
