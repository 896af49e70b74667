"""When each pass of a step ran."""

from __future__ import annotations

from titan_like.parallel.schedules.communication import Step


class Timeline:
    """Receives the start and the end of every pass."""

    def start(self, step: Step) -> None:
        """A pass begins: its input is there."""

    def stop(self, step: Step) -> None:
        """A pass has been issued."""
