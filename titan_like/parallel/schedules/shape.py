"""What a run's pipeline is: its schedule, and where its stages lie."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.parallel.schedules.communication import Step, add_communication
from titan_like.parallel.schedules.tables import forward_table, schedule_table, stage_ranks

MAX_PENDING_SENDS = 2  # messages a rank leaves unfinished; gloo cannot tell whether one has arrived without waiting


@dataclass(frozen=True)
class PipelineShape:
    """How stages lie on processes, and the order in which they work."""

    schedule: str
    degree: int
    virtual_stages: int

    @property
    def ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.degree, self.virtual_stages)

    def steps(self, rank: int, num_microbatches: int, backward: bool) -> list[Step]:
        """List the passes and messages of one rank for one batch, in order."""
        table = schedule_table if backward else forward_table
        actions = table(self.schedule, self.degree, self.virtual_stages, num_microbatches)
        return add_communication(actions, self.ranks)[rank]
