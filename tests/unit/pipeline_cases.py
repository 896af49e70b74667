"""Sizes of pipelines to try, and each one's tables and times."""

from functools import cache
from itertools import product

from titan_like.parallel.schedules.simulate import simulate, unit_time
from titan_like.parallel.schedules.tables import SCHEDULES, check_schedule, schedule_table, stage_ranks

SINGLE = [name for name, schedule in SCHEDULES.items() if schedule.stages == 1]


def cases(schedule, degrees=range(1, 9)):
    """All sizes to try that the schedule accepts, as (degree, stages per rank, microbatches)."""
    stages = SCHEDULES[schedule].stages
    for degree, virtual in product(degrees, [stages] if stages else [1, 2, 4]):
        sizes = {1, 2, 3, degree - 1, degree + 1, 2 * degree - 2, 2 * degree - 1, 2 * degree + 1, 3 * degree + 2}
        sizes |= {degree * rounds for rounds in (1, 2, 3, 4, 7)}
        for microbatches in sorted(sizes - {0}):
            if check_schedule(schedule, degree, virtual, microbatches) is None:
                yield degree, virtual, microbatches


@cache
def unit_run(schedule, degree, virtual, microbatches):
    """The table, the rank of each stage and the events in the papers' units."""
    table = schedule_table(schedule, degree, virtual, microbatches)
    ranks = stage_ranks(schedule, degree, virtual)
    return table, ranks, simulate(table, ranks, unit_time)
