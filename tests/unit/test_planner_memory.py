import itertools
import math
import random

import pytest
from benchmarks.stack_memory import layer_activations, rank_parameters
from titan_like.planner.shapes import ParameterSplit, ShardOf, stage_units
from titan_like.planner.training_state import Storage, peak_state, rounds_of, trainer_states

from benchmarks import stack_memory
from tests.unit.planner_cases import MODELS, flavor, random_workloads, state_bytes
from titan_like.config.schema import Optimizer
from titan_like.optim.state_size import ADAMW_STATE, StateValues, optimizer_state
from titan_like.parallel import split as parallel_split
from titan_like.parallel.schedules.simulate import max_in_flight
from titan_like.parallel.schedules.tables import (
    SCHEDULES,
    SPLIT_BACKWARD,
    check_schedule,
    schedule_table,
    stage_ranks,
    stages_per_rank,
)
from titan_like.parallel.split import StageLayers, balanced_layers, split_layers
from titan_like.planner import training_state
from titan_like.planner.memory import in_flight, largest_memory, memory
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.workload import BYTES, RankStages, Workload

MEGATRON = builtin_profiles()["selene_2021"]
TRAINER = builtin_profiles()["fsdp_a100"].changed(trainer_state=True)
WORKLOADS = random_workloads(80, seed=3)


@pytest.mark.parametrize("profile", [MEGATRON, TRAINER], ids=["megatron", "trainer"])
def test_memory_is_finite_positive_and_the_sum_of_its_parts(profile):
    for work in WORKLOADS:
        found = stack_memory.memory(work, profile)
        for rank in found.ranks:
            assert all(math.isfinite(part) and part >= 0 for part in rank)
            assert rank.total == pytest.approx(sum(rank[:-1]))
        assert profile is MEGATRON or largest_memory(work, profile) == found.largest


def test_fullest_rank_may_be_the_first_that_has_gradients_when_it_holds_most():
    model, shape = flavor("llama", "llama2_7b"), (2048, 2, 20)
    work = Workload(model, *shape, pipeline=7, shard=2, recompute="full")  # 5 microbatches
    found = memory(work, TRAINER)
    totals = [rank.total for rank in found.ranks]
    assert totals.index(max(totals)) == 3
    assert largest_memory(work, TRAINER) == found.largest
    for microbatches, virtual, stages in itertools.product(range(1, 9), (1, 2, 4), (None, "uneven")):
        if virtual > 1 and microbatches % 4:
            continue
        layers = [1 + (i % 3 == 0) for i in range(4 * virtual)]
        layers[-1] += 32 - sum(layers)
        work = Workload(model, 2048, 1, microbatches, pipeline=4, virtual_stages=virtual)
        work = work._replace(schedule="interleaved_1f1b" if virtual > 1 else "1f1b", recompute="full")
        work = work._replace(stage_layers=tuple(layers) if stages else None)
        assert largest_memory(work, TRAINER) == memory(work, TRAINER).largest


def test_memory_never_rises_with_recomputation():
    for work in WORKLOADS:
        used = [
            stack_memory.memory(work._replace(recompute=mode, recompute_every=1), MEGATRON).largest
            for mode in ("none", "selective", "full")
        ]
        several = work.pipeline > 1 or work.model.num_layers > 8
        assert not several or used == sorted(used, reverse=True)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS[:2], ids=["124m", "7.5b"])
def test_state_of_our_trainer_is_its_own_formula(zero_stage, dtype, model):
    work = Workload(model, 1024, 1, 32, shard=8, zero_stage=zero_stage, dtype=dtype)
    (rank,) = memory(work, TRAINER).ranks
    between_steps, peak = state_bytes(model, zero_stage, 8, compute_bytes=BYTES[dtype])
    assert rank.parameters + rank.optimizer == between_steps
    assert rank.parameters + rank.gradients + rank.optimizer + rank.gathered == peak


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_one_process_in_a_half_type_keeps_a_copy_and_its_fresh_gradients(zero_stage):
    model = MODELS[0]
    parameters = model.num_parameters()
    # Fresh gradients are below `UNIT_BYTES`.
    assert state_bytes(model, zero_stage, 1, compute_bytes=2) == (14 * parameters, 20 * parameters)
    work = Workload(model, 1024, 1, 32, zero_stage=zero_stage, dtype="bfloat16")
    (rank,) = memory(work, TRAINER).ranks
    assert (rank.parameters, rank.gradients, rank.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert rank.gathered == 4 * parameters


def test_parameters_of_all_ranks_are_those_of_the_model():
    for model in MODELS:
        once = sum(
            rank_parameters(model, (n,), first, last, 1) for n, first, last in [(1, True, False), (1, False, True)]
        )
        layers = rank_parameters(model, (model.num_layers - 2,), False, False, 1) if model.num_layers > 2 else 0
        twice = model.padded_vocab_size * model.hidden_size if model.tied_embeddings else 0
        assert once + layers == model.num_parameters() + twice


def test_logits_and_buffers_take_what_the_profile_says():
    work = Workload(MODELS[0], 1024, 2, 32, dtype="bfloat16", zero_stage=1, shard=4)
    plain, more = (
        stack_memory.memory(work, MEGATRON.changed(logit_state=n, buffer_state=b)).ranks[0]
        for n, b in ((2, 0), (10, 4))
    )
    logits = 2 * 1024 * work.model.padded_vocab_size
    assert plain.logits == 4 * logits
    assert more.logits == 12 * logits
    assert more.gathered - plain.gathered == 4 * rank_parameters(work.model, work.model.layer_counts, True, True, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (4, 4), (4, 16)])
def test_chunks_in_flight_bound_those_of_the_trainer_s_tables(schedule, degree, microbatches):
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    assert check_schedule(schedule, degree, virtual, microbatches) is None
    held = max_in_flight(schedule_table(schedule, degree, virtual, microbatches))
    stages = stages_per_rank(schedule, virtual)
    counted = [in_flight(schedule, degree, stages, microbatches, rank) for rank in range(degree)]
    assert all(mine >= table for mine, table in zip(counted, held, strict=True))
    if schedule in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"):
        assert counted == held


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_are_those_of_arxiv_2205_05198(tensor, sequence_parallel):
    model = flavor("gpt", "gpt3_175b")
    s, b, h, a = 2048, 1, 12288, 96
    work = Workload(model, s, b, 64, tensor=tensor, flash=False, dropout=True, dtype="float16")
    work = work._replace(sequence_parallel=sequence_parallel and tensor > 1)
    outside = tensor if work.sequence_parallel else 1
    whole = s * b * h * (10 / outside + 24 / tensor + 5 * a * s / (h * tensor))  # equations 2 and 4
    assert layer_activations(work)[0][0] == pytest.approx(whole)
    selective = layer_activations(work._replace(recompute="selective"))[0][0]
    assert selective == pytest.approx(s * b * h * (10 / outside + 24 / tensor))  # equation 6
    assert layer_activations(work._replace(recompute="full"))[0][0] == pytest.approx(2 * s * b * h / outside)


ADAFACTOR_STATE, MUON_STATE = (optimizer_state(Optimizer(name=name)) for name in ("adafactor", "muon"))


def test_state_of_optimizers_is_found_by_a_step():
    assert optimizer_state(Optimizer()) == ADAMW_STATE
    assert optimizer_state(Optimizer(name="sgd")) == (StateValues(), StateValues(), 0)
    assert (StateValues(0, 1, 1), StateValues(0, 1, 1), 1) == ADAFACTOR_STATE
    assert optimizer_state(Optimizer(name="adafactor", beta1=0.9)).tables == StateValues(1, 1, 1)
    assert (StateValues(1), StateValues(2), 2) == MUON_STATE
    assert MUON_STATE.of("layers.0.x", (3, 5)) == 15 and MUON_STATE.of("embedding.weight", (3, 5)) == 30
    assert ADAFACTOR_STATE.of("layers.0.x", (0, 5)) == 5  # an empty shard knows the columns


def random_ranks(count):
    """Ranks of random pipelines of our own trainer: their state by closed form, and by going through their passes."""
    generator = random.Random(11)
    pick = generator.choice
    while count:
        model, tensor, degree = pick(MODELS), pick([1, 2, 8]), pick([1, 2, 3, 4, 8])
        schedule, virtual, microbatches = pick([*SCHEDULES]), pick([1, 2, 3]), pick([1, 2, 4, 6, 8, 16, 24])
        zero, shard, compute = pick(range(4)), pick([1, 2, 24]), pick([2, 4])
        schedule = schedule if degree > 1 else "1f1b"
        stages = stages_per_rank(schedule, virtual)
        invalid = check_schedule(schedule, degree, virtual, microbatches) or degree * stages > model.num_layers
        if invalid or (schedule in LOOPS and virtual == 1) or model.num_kv_heads % tensor:
            continue
        count -= 1
        layers = tuple(balanced_layers(model.num_layers, degree * stages, pick([0, 2.4])))
        rank = generator.randrange(degree)
        optimizer = pick([ADAMW_STATE, ADAFACTOR_STATE, MUON_STATE])
        split = ParameterSplit(ShardOf(tensor), ShardOf(shard if zero else 1))
        storage = Storage(zero, split, shard, compute=compute, optimizer=optimizer)
        splits, ranks = split_layers(list(layers)), stage_ranks(schedule, degree, virtual)
        counts = tuple((count,) for count, owner in zip(layers, ranks, strict=True) if owner == rank)
        here = RankStages(counts, ranks[0] == rank, ranks[-1] == rank)
        turns = schedule in SPLIT_BACKWARD, rounds_of(schedule, degree, microbatches), microbatches > 1
        [found] = trainer_states(model, (here,), *turns, storage)
        units = {i: stage_units(model, splits[i]) for i, owner in enumerate(ranks) if owner == rank}
        actions = schedule_table(schedule, degree, virtual, microbatches)[rank]
        exact = peak_state(units, actions, storage)
        yield schedule, zero, found, max(exact, sum(found[:3]))


@pytest.mark.parametrize("most", [0, 2**23, 2**25])
@pytest.mark.parametrize("zero", [2, 3])
def test_closed_form_of_two_kinds_of_layers_knows_their_units(monkeypatch, most, zero):
    monkeypatch.setattr(parallel_split, "LAYER_UNIT_BYTES", most)
    trainer_states.cache_clear(), training_state._stages.cache_clear()
    model, shard = flavor("t5", "220m"), 16
    whole = StageLayers(range(model.num_layers), is_first=True, is_last=True)
    storage = Storage(zero, ParameterSplit(ShardOf(2), ShardOf(shard)), shard, compute=2)
    ranks = (RankStages((model.layer_counts,), True, True),)
    [found] = trainer_states(model, ranks, False, 3, True, storage)
    assert sum(found) == peak_state({0: stage_units(model, whole)}, schedule_table("1f1b", 1, 1, 4)[0], storage)
    trainer_states.cache_clear(), training_state._stages.cache_clear()


LOOPS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")


def test_state_by_closed_form_is_what_the_passes_hold():
    whole = 0
    for schedule, zero, found, exact in random_ranks(250):
        if schedule in SPLIT_BACKWARD:
            assert sum(found) >= exact * (1 - 0.005), (schedule, zero)
        else:
            whole += 1
            assert sum(found) == exact, (schedule, zero)
    assert whole > 100
