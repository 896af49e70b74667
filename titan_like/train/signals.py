"""Requests to stop from outside: SIGTERM and SIGUSR1, as clusters send them before they take a machine away."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_REQUEST = 5.0  # seconds


class StopSignals:
    """Notes a signal that asks to stop. One that comes some seconds later ends the process at once.

    Clusters signal every process, and torchrun passes on to its ranks what it gets: the same request comes twice.
    A context manager: outside it signals do what they did before. Only the process's main thread can handle signals.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal
        self._when = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received and time.monotonic() > self._when + _SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.received:
            self.received, self._when = number, time.monotonic()
