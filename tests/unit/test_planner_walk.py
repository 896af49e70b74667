"""The walk over a schedule's table, against a simulation of every pass."""

import random

import pytest

from benchmarks.stack_profiles import profiles
from tests.unit.planner_cases import flavor, random_workloads
from titan_like.metrics.step_timeline import simulated
from titan_like.parallel.schedules.tables import SCHEDULES, check_schedule, schedule_table, stages_per_rank
from titan_like.planner.bounds import least_step_seconds
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.stack import of_own_trainer
from titan_like.planner.step_time import step_time, steps_of, timeline, waiting_share
from titan_like.planner.walk import span_of
from titan_like.planner.workload import PipelineSchedule, Workload

SELENE = profiles()["selene_2021"]
GPT = flavor("gpt", "7.5b")


RUN = Workload(GPT, 2048, 1, 32, tensor=8, sequence_parallel=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_of_every_schedule_is_followed(schedule):
    generator = random.Random(schedule)
    compared = 0
    for pipeline, virtual, m in ((2, 1, 4), (2, 2, 4), (4, 1, 8), (4, 2, 8), (4, 2, 40), (3, 1, 36)):
        virtual = stages_per_rank(schedule, virtual)
        if check_schedule(schedule, pipeline, virtual, m):
            continue
        stages = pipeline * virtual
        durations = []
        for _ in range(stages):
            forward, inputs, weights = (generator.uniform(1, 1.5) for _ in range(3))
            durations += [forward, inputs + weights, inputs, weights]
        shape, transfer = (schedule, pipeline, virtual, m), generator.choice([0.0, 0.2])
        whole = simulated(*shape, lambda a: durations[4 * a.stage + "FBIW".index(a.kind)], transfer).seconds  # noqa: B023
        found = span_of(PipelineSchedule(*shape), durations, transfer)
        assert found == pytest.approx(whole, rel=1e-9 if m < 4 * pipeline else 0.03)
        compared += 1
    assert compared >= 3


def test_the_bound_is_below_the_walk_and_near_it():
    profile = of_own_trainer(builtin_profiles()["fsdp_a100"], "bfloat16")
    over = []
    for work in random_workloads(30, seed=1):
        total, least = step_time(work, profile).total, least_step_seconds(work, profile)
        assert least <= total * (1 + 1e-9)
        over.append(total / least - 1)
    assert sorted(over)[len(over) // 2] < 0.01
    assert max(over) < 0.3


def test_the_timeline_ends_where_the_step_does():
    profile = of_own_trainer(builtin_profiles()["fsdp_a100"], "bfloat16")
    for work in random_workloads(12, seed=1):
        end = max(phase.end for phase in timeline(work, profile).phases)
        assert step_time(work, profile).total == pytest.approx(end, rel=0.01)


def test_what_zero_3_gathers_is_part_of_every_pass():
    profile = builtin_profiles()["fsdp_a100"].changed(overlap=0.01)
    work = Workload(GPT, 2048, 1, 64, pipeline=4, shard=16)
    zero_2, zero_3 = (steps_of(work._replace(zero_stage=stage), profile).stages[1] for stage in (2, 3))
    assert zero_2.gathered == 0
    assert pytest.approx(zero_2.F + zero_2.B + zero_3.gathered) == zero_3.F + zero_3.B
    assert pytest.approx(zero_3.B) == zero_3.I + zero_3.W


def test_compiled_layers_do_not_split_their_backward_passes():
    work = RUN._replace(pipeline=4, schedule="interleaved_zero_bubble", virtual_stages=2)
    plain = work._replace(schedule="interleaved_1f1b", compiled=True)
    assert step_time(work._replace(compiled=True), SELENE).bubble >= 0.9 * step_time(plain, SELENE).bubble
    assert step_time(work, SELENE).bubble < step_time(plain._replace(compiled=False), SELENE).bubble


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
    profile = SELENE.changed(gpus_per_node=p * replicas)
    work = Workload(GPT, 2048, 1, replicas * microbatches, pipeline=p, replicate=replicas)
    share = waiting_share(work, profile.changed(cores=cores))
    assert microbatches * 3 + share * (p - 1) * 3 == pytest.approx(on_shared_cores(p, replicas, cores, microbatches))
    apart, shared = (step_time(work, profile.changed(cores=number)) for number in (0, cores))
    assert shared.bubble < apart.bubble and shared.messages < apart.messages and shared.total < apart.total
