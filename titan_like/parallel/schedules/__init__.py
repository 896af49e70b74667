"""Pipeline schedules as pure functions: the order of computations and messages on each rank, and how long they take."""

from titan_like.parallel.schedules.actions import Action, Table
from titan_like.parallel.schedules.communication import Step, add_communication
from titan_like.parallel.schedules.simulate import (
    Event,
    bubble_fraction,
    ideal_bubble,
    max_in_flight,
    simulate,
    step_time,
    unit_time,
)
from titan_like.parallel.schedules.tables import (
    SCHEDULES,
    check_schedule,
    forward_table,
    schedule_table,
    stage_ranks,
    stages_per_rank,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Event",
    "Step",
    "Table",
    "add_communication",
    "bubble_fraction",
    "check_schedule",
    "forward_table",
    "ideal_bubble",
    "max_in_flight",
    "schedule_table",
    "simulate",
    "stage_ranks",
    "stages_per_rank",
    "step_time",
    "unit_time",
]
