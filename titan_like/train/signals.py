"""Signals that ask a run to stop (Ctrl-C, a closed terminal, a cluster's warning) or, SIGUSR2, for a memory snapshot.

This module imports nothing slow, so that train.py can handle signals before it loads torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SAME_REQUEST = 5.0  # seconds


class StopSignals:
    """Context manager that handles the signals that ask a run to stop. On exit it restores the previous handlers.

    Until `can_save` is set, a signal ends the process at once, with one line. From then on a signal is only
    stored in `received`, so that all ranks save and stop after the same step. A second request ends the process.

    Python runs signal handlers in the main thread, between two bytecodes, so a collective or a compilation may delay
    them for minutes. A separate thread therefore acts on signals. Python's C-level handler wakes it by writing the
    signal's number to a pipe. Only the main thread can install handlers; in any other thread this does nothing.

    The process may have been started with some of these signals ignored. SIGHUP then stays ignored (nohup). SIGTERM and
    SIGUSR1 are only stored, even before the first step, because scripts/slurm and scripts/k8s use them to tell a job to
    save. SIGINT is handled anyway, because a shell makes its background jobs ignore it unasked.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the first signal that was stored
        self.agreed = 0  # the signal on which all ranks stop after this step; they exchange it once a step
        self.asks_for_snapshot = False  # the trainer's observer resets it
        self.can_save = False  # the trainer sets this after the first step
        self._when = 0.0
        self._before: dict[signal.Signals, object] = {}
        self._only_noted: set[int] = set()
        self._pipe = (-1, -1)
        self._wakeup_before = -1

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._act, args=(self._pipe[0],), name="signals", daemon=True).start()
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        ignored = {number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
        self._only_noted = {int(number) for number in ignored - {signal.SIGINT}}
        self._before = {
            number: signal.signal(number, lambda *_: None)  # the thread acts
            for number in (*STOP_SIGNALS, signal.SIGUSR2)
            if number not in ignored or number != signal.SIGHUP
        }
        os.register_at_fork(after_in_child=self._leave_to_parent)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])  # ends the thread

    def ignore(self) -> None:
        """Ignore signals until the process ends. The run is over, and Python takes a while to shut down."""
        if self._before:
            self._leave_to_parent()
            os.close(self._pipe[1])

    def _act(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for number in numbers:
                self.asks_for_snapshot |= number == signal.SIGUSR2
                if number in STOP_SIGNALS:
                    self._receive(number)
        os.close(pipe)

    def _receive(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.can_save and number not in self._only_noted:
            self._end(number, f"ended by {name} before the first step was done")
        elif not self.received:
            self.received, self._when = number, time.monotonic()
        elif self._is_second_request(number):
            self._end(number, f"ended at once by a second signal ({name})")

    def _is_second_request(self, number: int) -> bool:
        """Whether a signal is a new request, and not the first one delivered again.

        Clusters signal every process, and torchrun forwards what it gets to its ranks, so one request may arrive twice
        within moments. SIGINT to a lone process always comes from its user. torchrun sends SIGTERM on a second SIGINT.
        """
        if self.received == signal.SIGINT and number == (
            signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGINT
        ):
            return True
        return time.monotonic() > self._when + _SAME_REQUEST

    def _end(self, number: int, line: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                os.write(2, f"{line}\n".encode())  # not sys.stderr, whose lock the main thread may hold
        os._exit(128 + number)

    def _leave_to_parent(self) -> None:
        """Ignore signals in a forked child such as a data worker. It receives them too, but its parent will end it."""
        if self._before:
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
            self._before.clear()
