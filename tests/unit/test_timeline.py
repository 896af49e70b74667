import json

import pytest
import torch.distributed as dist
from torch import device

from titan_like.metrics.step_timeline import (
    GAPS,
    Phase,
    RankTimes,
    StepTimeline,
    as_simulated,
    chrome_trace,
    measured,
    simulated,
)
from titan_like.metrics.timeline_report import figures, headline, legend_of, rank_shares
from titan_like.parallel.schedules.simulate import Event, ideal_bubble, unit_time
from titan_like.parallel.schedules.tables import SCHEDULES, Action
from titan_like.parallel.timeline import Timeline


def unit_step(schedule="1f1b", degree=4, microbatches=8, transfer=0.0):
    return simulated(schedule, degree, SCHEDULES[schedule].stages or 2, microbatches, unit_time, transfer)


def seen_by_ranks(step, offsets):
    """What each rank would have seen of a step, on a clock of its own."""
    return [
        RankTimes(
            [
                event._replace(rank=0, start=event.start + o, end=event.end + o)
                for event in step.passes
                if event.rank == r
            ],
            [wait._replace(rank=0, start=wait.start + o, end=wait.end + o) for wait in step.waits if wait.rank == r],
            [Phase(0, "optimizer", step.seconds + o, step.seconds + 3 + o)],
            [(-2.0 + o, -1.99 + o), (-1.0 + o, -0.999 + o)],
        )
        for r, o in enumerate(offsets)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [4, 8])
def test_bubble_fraction_is_that_of_the_simulated_schedule(schedule, microbatches):
    found = figures(unit_step(schedule, microbatches=microbatches))
    expected = ideal_bubble(schedule, 4, SCHEDULES[schedule].stages or 2, microbatches)
    assert found.bubble_fraction == pytest.approx(expected)
    assert found.bubble_fraction_simulated == found.bubble_fraction_ideal == pytest.approx(expected)
    assert found.exposed_communication == pytest.approx(0)


def test_messages_are_exposed_communication_and_not_in_the_simulated_bubble():
    quick, slow = figures(unit_step()), figures(unit_step(transfer=0.5))
    assert slow.bubble_fraction > quick.bubble_fraction
    assert slow.bubble_fraction_simulated == pytest.approx(quick.bubble_fraction)
    assert slow.exposed_communication > 0.01
    step = unit_step(transfer=1.0)
    assert as_simulated(step).seconds == pytest.approx(unit_step().seconds)
    assert as_simulated(step).mean_seconds() == pytest.approx(step.mean_seconds())


def test_slowest_stage():
    step = simulated("1f1b", 4, 1, 8, lambda action: unit_time(action) * (1.5 if action.stage == 2 else 1))
    found = figures(step)
    assert found.slowest_stage == 2
    assert found.stage_seconds == pytest.approx([3, 3, 4.5, 3])
    assert found.slowest_stage_excess == pytest.approx(4.5 / 3.375 - 1)


def test_wait_is_bubble_until_the_message_is_made_and_exposed_from_there():
    passes = [
        Event(0, Action("F", 0, 0), 0.0, 1.0),
        Event(1, Action("F", 1, 0), 1.4, 2.4),
        Event(1, Action("B", 1, 0), 2.5, 4.5),
        Event(0, Action("B", 0, 0), 4.6, 6.6),
    ]
    waits = [Event(1, Action("F", 1, 0), 0.0, 1.4), Event(0, Action("B", 0, 0), 1.0, 4.6)]
    step = StepTimeline("1f1b", 2, 1, passes, waits)
    first, second = rank_shares(step)
    assert (first.compute, first.bubble, first.exposed_communication, first.other) == pytest.approx((3, 3.5, 0.1, 0))
    assert (second.compute, second.bubble, second.exposed_communication) == pytest.approx((3, 1 + 2.1, 0.4))
    assert second.other == pytest.approx(0.1)  # between its passes, without a wait
    assert [gap[1:] for gap in step.gaps if gap.rank == 1] == [
        ("bubble", 0.0, 1.0),
        ("exposed communication", 1.0, 1.4),
        ("between passes", 2.4, 2.5),
        ("bubble", 4.5, 6.6),
    ]
    # The last rank waits for the first, which computes as long: t_pb is 3.5 of t_id 3 on the first rank.
    assert figures(step).bubble_fraction == pytest.approx(3.5 / 3)
    assert "bubble 1.167" in headline(step)
    assert legend_of(step) == {
        "F": "forward passes 1,000.00 ms",
        "B": "backward passes 2,000.00 ms",
        "bubble": "bubble 3,300.00 ms",
        "exposed communication": "exposed communication 250.00 ms",
        "between passes": "between passes 50.00 ms",
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gaps_and_passes_fill_each_ranks_time(schedule):
    step = unit_step(schedule, transfer=0.25)
    for rank in range(4):
        starts, ends = zip(*sorted((e.start, e.end) for e in (*step.passes, *step.gaps) if e.rank == rank), strict=True)
        assert (*starts, step.seconds) == pytest.approx((0.0, *ends))


def test_ranks_with_different_clocks_come_onto_one():
    step = unit_step()
    found = measured("1f1b", 4, 1, seen_by_ranks(step, [5.0, 1000.0, -40.0, 7.5]))
    key = lambda event: (event.rank, event.start)  # noqa: E731
    for got, expected in zip(sorted(found.passes, key=key), sorted(step.passes, key=key), strict=True):
        assert (got.rank, got.action) == (expected.rank, expected.action)
        assert (got.start, got.end) == pytest.approx((expected.start, expected.end), abs=found.clock_error + 1e-9)
    assert found.clock_error == pytest.approx(0.001)
    assert {phase.rank for phase in found.phases} == set(range(4))


def test_timeline_notes_passes_waits_and_phases(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        timeline = Timeline(device("cpu"), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    timeline.start(Action("F", 0, 0))
    timeline.stop(Action("F", 0, 0))
    timeline.waiting()
    timeline.start(Action("B", 0, 0))
    timeline.stop(Action("B", 0, 0))
    timeline.mark("gradient norm")
    timeline.mark("optimizer")
    times = timeline.finish()
    assert [event.action for event in times.passes] == [Action("F", 0, 0), Action("B", 0, 0)]
    (wait,), (forward, backward) = times.waits, times.passes
    assert wait.action == backward.action
    assert forward.start <= forward.end <= wait.start <= wait.end == backward.start <= backward.end
    assert [phase.name for phase in times.phases] == ["gradient norm", "optimizer"]
    assert times.phases[0].start == backward.end
    assert times.phases[0].end == times.phases[1].start
    assert times.error == 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_trace_keeps_to_the_trace_event_format(schedule):
    step = unit_step(schedule)
    trace = json.loads(json.dumps(chrome_trace(step)))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] == "ms"
    required = {"M": {"args"}, "X": {"cat", "tid", "ts", "dur"}, "s": {"cat", "id", "tid", "ts"}}
    required["f"] = required["s"] | {"bp"}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid"} | required[event["ph"]] <= set(event)
        assert event["pid"] in range(4)
        assert event.get("dur", 0) >= 0

    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and "name" in e["args"]]
    assert names == [n for rank in range(4) for n in (f"pipeline rank {rank}", "passes", "gaps", "rest of the step")]

    assert {e["name"] for e in trace["traceEvents"] if e.get("cat") == "gap"} <= set(GAPS)
    passes = [e for e in trace["traceEvents"] if e["ph"] == "X" and "args" in e]
    assert len(passes) == len(step.passes)
    for found, expected in zip(passes, step.passes, strict=True):
        assert found["pid"] == expected.rank
        assert (found["ts"], found["dur"]) == pytest.approx(
            (1e6 * expected.start, 1e6 * (expected.end - expected.start))
        )
        assert (found["args"]["stage"], found["args"]["microbatch"]) == expected.action[1:]
