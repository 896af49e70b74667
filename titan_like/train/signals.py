"""Requests to stop from outside: SIGTERM and SIGUSR1, as clusters send them before they take a machine away."""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes the first signal that asks to stop. A second one ends the process at once.

    A context manager: outside it signals do what they did before. Only the process's main thread can handle signals.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal
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
        self.received = number
        signal.signal(number, signal.SIG_DFL)
