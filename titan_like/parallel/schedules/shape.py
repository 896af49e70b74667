"""The shape of a run's pipeline: its schedule and the placement of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.parallel.schedules.communication import Step, add_communication
from titan_like.parallel.schedules.tables import forward_table, schedule_table, stage_ranks

MAX_PENDING_SENDS = 2  # unfinished sends per rank; without waiting, gloo cannot tell whether one has finished


@dataclass(frozen=True)
class PipelineShape:
    """A schedule with its pipeline degree and stages per rank."""

    schedule: str
    degree: int
    virtual_stages: int

    @property
    def ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.degree, self.virtual_stages)

    def steps(self, rank: int, num_microbatches: int, backward: bool) -> list[Step]:
        """List one rank's passes and messages for one batch, in order.

        Raises:
            ValueError: the schedule cannot run this number of microbatches.
        """
        table = schedule_table if backward else forward_table
        actions = table(self.schedule, self.degree, self.virtual_stages, num_microbatches)
        return add_communication(actions, self.ranks)[rank]
