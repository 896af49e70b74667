import statistics

import pytest

from tests.unit.planner_cases import flavor, random_workloads
from titan_like.parallel.schedules.tables import SCHEDULES, check_schedule, schedule_table, stages_per_rank
from titan_like.planner.predict import of_own_trainer
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.simulator import simulated_step_time, stage_passes, timeline
from titan_like.planner.step_time import message_time, step_time, waiting_share
from titan_like.planner.workload import Workload

QUIET = builtin_profiles()["selene_2021"].changed(
    nvlink_latency=0.0, network_latency=0.0, message_efficiency=1e12, nvlink_efficiency=1e12, microbatch_time=0.0
)


def own_pipelines(count, seed):
    """Random pipelines of our own trainer, and its stack."""
    profile = of_own_trainer(builtin_profiles()["fsdp_a100"], "float16")
    return [work for work in random_workloads(count, seed) if work.pipeline > 1], profile


def test_closed_forms_are_near_the_simulation():
    works, profile = own_pipelines(300, seed=5)
    apart = [step_time(work, profile).total / simulated_step_time(work, profile).total - 1 for work in works]
    assert len(apart) > 150
    assert abs(statistics.median(apart)) < 0.01
    assert statistics.quantiles([abs(one) for one in apart], n=10)[-1] < 0.05
    assert max(abs(one) for one in apart) < 0.25


def test_a_few_rounds_stand_for_all_of_them():
    """The step that predictions simulate in part, against every pass of it."""
    works, profile = own_pipelines(150, seed=6)
    whole = [max(phase.end for phase in timeline(work, profile).phases) for work in works]
    apart = [simulated_step_time(work, profile).total / end - 1 for work, end in zip(works, whole, strict=True)]
    assert max(abs(one) for one in apart) < 0.01
    assert sum(abs(one) < 1e-9 for one in apart) > 0.9 * len(apart)
    assert any(work.microbatches > 4 * work.pipeline for work in works)


def test_messages_that_a_rank_waits_for_itself_take_its_time():
    profile = builtin_profiles()["selene_2021"]
    work = Workload(flavor("gpt", "7.5b"), 2048, 1, 32, tensor=8, pipeline=4, dtype="float16")
    waits, hides = (simulated_step_time(work, profile.changed(message_exposed=part)) for part in (1.0, 0.0))
    message = message_time(work, profile)
    assert waits.messages == pytest.approx(32 * message)  # of an end of the pipeline: one each way
    assert hides.messages == 0
    assert hides.compute == waits.compute
    # Hidden, or waited for where the next pass needs it.
    assert waits.total - 32 * 2 * message < hides.total < waits.total


def test_what_zero_3_gathers_is_part_of_every_pass():
    profile = builtin_profiles()["fsdp_a100"].changed(overlap=0.01)
    work = Workload(flavor("gpt", "7.5b"), 2048, 1, 64, pipeline=4, shard=16, dtype="float16")
    zero_2, zero_3 = (stage_passes(work._replace(zero_stage=stage), profile)[1] for stage in (2, 3))
    assert zero_2.gathered == 0
    assert pytest.approx(zero_2.F + zero_2.B + zero_3.gathered) == zero_3.F + zero_3.B
    assert pytest.approx(zero_3.B) == zero_3.I + zero_3.W


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


def on_shared_cores(p, replicas, cores, microbatches):
    """The length of a 1F1B pipeline, event by event, whose working processes have equal parts of the cores.

    Passes take 1 and 2 while all processes work. None takes more than one core.
    """
    left = [list(one) for one in schedule_table("1f1b", p, 1, microbatches)]
    done, todo, now, lengths = set(), [0.0] * p, 0.0, {"F": 1.0, "B": 2.0}
    while any(left):
        able = []
        for rank, passes in enumerate(left):
            if passes:
                kind, stage, microbatch = passes[0]
                needed = (kind, stage - 1 if kind == "F" else stage + 1, microbatch)
                if needed in done or not 0 <= needed[1] < p:
                    todo[rank] = todo[rank] or lengths[kind]
                    able.append(rank)
        rate = p * replicas / cores * min(1.0, cores / (len(able) * replicas))
        seconds = min(todo[rank] for rank in able) / rate
        now += seconds
        for rank in able:
            todo[rank] -= seconds * rate
            if todo[rank] < 1e-9:
                todo[rank] = 0.0
                done.add(tuple(left[rank].pop(0)))
    return now


@pytest.mark.parametrize(
    ("p", "replicas", "cores", "microbatches"),
    [(2, 4, 2, 4), (4, 2, 2, 8), (4, 1, 2, 4), (4, 1, 3, 8), (4, 2, 6, 8), (8, 1, 4, 16), (3, 1, 2, 6)],
)
def test_processes_that_wait_give_their_cores_to_the_others(p, replicas, cores, microbatches):
    profile = builtin_profiles()["fsdp_a100"].changed(gpus_per_node=p * replicas)
    batch = replicas * microbatches
    work = Workload(flavor("gpt", "7.5b"), 2048, 1, batch, pipeline=p, replicate=replicas, dtype="float16")
    share = waiting_share(work, profile.changed(cores=cores))
    bubble = (p - 1) * 3
    assert microbatches * 3 + share * bubble == pytest.approx(on_shared_cores(p, replicas, cores, microbatches))
    for of in (simulated_step_time, step_time):
        apart, shared = (of(work, profile.changed(cores=number)) for number in (0, cores))
        assert shared.bubble < apart.bubble and shared.messages < apart.messages and shared.total < apart.total
