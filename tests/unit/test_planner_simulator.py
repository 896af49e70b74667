import pytest

from tests.unit.planner_cases import flavor, random_workloads
from titan_like.parallel.schedules import SCHEDULES, bubble_fraction, check_schedule, ideal_bubble, stages_per_rank
from titan_like.parallel.schedules import step_time as end_of
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.simulator import pass_times, pipeline_events, simulated_step_time
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import Workload

QUIET = builtin_profiles()["selene_2021"].changed(
    nvlink_latency=0.0, network_latency=0.0, message_efficiency=1e12, nvlink_efficiency=1e12, microbatch_time=0.0
)


def without_ends(times):
    """The times of a stage in the middle, for all stages."""
    return [times[1]] * len(times)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(("degree", "microbatches"), [(4, 8), (8, 8), (8, 64)])
def test_equal_stages_have_exactly_the_papers_bubbles(schedule, degree, microbatches, monkeypatch):
    virtual = stages_per_rank(schedule, 3)
    work = Workload(
        flavor("gpt", "gpt3_175b"),
        2048,
        1,
        microbatches,
        pipeline=degree,
        schedule=schedule,
        virtual_stages=virtual,
        flash=False,
        dtype="float16",
        recompute="full",
    )
    times = without_ends(pass_times(work, QUIET))
    monkeypatch.setattr("titan_like.planner.simulator.pass_times", lambda *_: times)
    events = pipeline_events(work, QUIET)
    assert bubble_fraction(events, degree) == pytest.approx((degree - 1) / (virtual * microbatches), rel=1e-9)
    assert ideal_bubble(schedule, degree, virtual, microbatches) == (degree - 1) / (virtual * microbatches)
    total = microbatches * virtual * (times[0]["F"] + times[0]["B"])
    assert end_of(events) == pytest.approx(total * (1 + (degree - 1) / (virtual * microbatches)), rel=1e-9)


def test_closed_forms_are_near_the_simulation_of_real_stages():
    compared = 0
    for work in random_workloads(150, seed=5):
        if work.pipeline == 1 or work.zero_stage == 3 or work.model.num_layers % work.pipeline:
            continue
        if work.schedule not in ("1f1b", "interleaved_1f1b", "gpipe") or work.recompute_every > 1:
            continue
        compared += 1
        assert simulated_step_time(work, QUIET).total == pytest.approx(step_time(work, QUIET).total, rel=0.15)
    assert compared > 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_the_trainer_is_simulated(schedule):
    virtual = stages_per_rank(schedule, 2)
    assert check_schedule(schedule, 4, virtual, 16) is None
    profile = builtin_profiles()["selene_2021"]
    work = Workload(
        flavor("gpt", "7.5b"),
        2048,
        1,
        16,
        tensor=8,
        pipeline=4,
        schedule=schedule,
        virtual_stages=virtual,
        dtype="float16",
        stage_layers=tuple([36 // (4 * virtual)] * (4 * virtual - 1) + [36 - 36 // (4 * virtual) * (4 * virtual - 1)]),
    )
    found = simulated_step_time(work, profile)
    assert found.bubble > 0
    assert found.total == pytest.approx(sum(found[:-1]))
    slower = profile.changed(message_efficiency=profile.message_efficiency / 20)
    assert simulated_step_time(work, slower).total > found.total


def test_an_uneven_stage_holds_the_others_up():
    model = flavor("gpt", "7.5b")
    even = Workload(model, 2048, 1, 32, tensor=8, pipeline=4, dtype="float16", stage_layers=(9, 9, 9, 9))
    uneven = even._replace(stage_layers=(7, 15, 7, 7))
    for predicted in (simulated_step_time, step_time):
        slow, fast = predicted(uneven, QUIET), predicted(even, QUIET)
        assert slow.compute + slow.bubble > 1.4 * (fast.compute + fast.bubble)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_zero_bubble_of_unequal_halves_is_near_the_simulation(recompute, microbatches):
    """With recomputation the first half of a backward pass takes several times as long as the second."""
    work = Workload(
        flavor("gpt", "gpt3_175b"), 2048, 1, microbatches, tensor=8, pipeline=8, sequence_parallel=True,
        schedule="interleaved_zero_bubble", virtual_stages=2, recompute=recompute,
    )  # fmt: skip
    profile = builtin_profiles()["fsdp_a100"]
    found, simulated = step_time(work, profile), simulated_step_time(work, profile)
    assert found.total == pytest.approx(simulated.total, rel=0.02)
    # Compiled layers' backward passes are not split: as long as the bubble of 1F1B with as many stages.
    plain = step_time(work._replace(schedule="interleaved_1f1b", compiled=True), profile)
    assert step_time(work._replace(compiled=True), profile).bubble == pytest.approx(plain.bubble, rel=1e-9)
