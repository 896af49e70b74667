"""Peak memory as the planner predicts it: what must hold of any prediction, and states counted by hand."""

import itertools
import math
from itertools import pairwise

import pytest

from benchmarks import stacks
from benchmarks.stack_profiles import profiles
from benchmarks.stacks import STACKS
from tests.unit.planner_cases import flavor, random_workloads
from titan_like.config.schema import Optimizer
from titan_like.optim.state_size import ADAMW_STATE, StateValues, optimizer_state
from titan_like.planner.memory import largest_memory, memory
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.stack import of_own_trainer
from titan_like.planner.workload import BYTES, Workload

TRAINER = of_own_trainer(builtin_profiles()["fsdp_a100"], "bfloat16")
SMALL = flavor("gpt", "gpt2_124m")
WORKLOADS = random_workloads(30, seed=1)


def of_stack(name):
    """Memory of a published stack."""
    return lambda work: stacks.memory(work, profiles()[name], STACKS[name], flash=True)


MEMORY = {"trainer": lambda work: memory(work, TRAINER), "selene_2021": of_stack("selene_2021")}
MEMORY |= {"jean_zay_v100": of_stack("jean_zay_v100")}


@pytest.mark.parametrize("of", MEMORY.values(), ids=MEMORY)
def test_memory_is_finite_positive_and_the_sum_of_its_parts(of):
    for work in WORKLOADS:
        found = of(work)
        for rank in found.ranks:
            assert all(math.isfinite(part) and part >= 0 for part in rank)
            assert rank.total == pytest.approx(sum(rank[:-1]))
        assert of is not MEMORY["trainer"] or largest_memory(work, TRAINER) == found.largest


def test_fullest_rank_may_be_between_the_ends():
    for microbatches, virtual, is_even in itertools.product(range(1, 9), (1, 2, 4), (True, False)):
        if virtual > 1 and microbatches % 4:
            continue
        layers = [1 + (i % 3 == 0) for i in range(4 * virtual)]
        layers[-1] += 12 * virtual - sum(layers)
        work = Workload(flavor("gpt", "7.5b", num_layers=12 * virtual), 2048, 1, microbatches, pipeline=4)
        work = work._replace(schedule="interleaved_1f1b" if virtual > 1 else "1f1b", virtual_stages=virtual)
        work = work._replace(recompute="full", stage_layers=None if is_even else tuple(layers))
        assert largest_memory(work, TRAINER) == memory(work, TRAINER).largest


@pytest.mark.parametrize("of", MEMORY.values(), ids=MEMORY)
def test_memory_never_rises_with_tensor_parallelism_recomputation_or_zero(of):
    for work in WORKLOADS:
        # What the trainer's schedules that split backward passes defer is more with recomputation.
        if work.schedule in ("1f1b", "gpipe", "interleaved_1f1b"):
            used = [of(work._replace(recompute=mode, recompute_every=1)).largest for mode in ("none", "full")]
            assert used[1] <= used[0]
        if work.tensor == 1:
            assert of(work._replace(tensor=8, sequence_parallel=True)).largest <= of(work).largest
        if work.shard > 1:
            for lower, higher in pairwise([of(work._replace(zero_stage=stage)) for stage in range(4)]):
                assert higher.largest <= 1.05 * lower.largest  # units that are gathered for a moment may be more


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_one_process_in_a_half_type_keeps_a_copy_of_its_weights(zero_stage):
    parameters = SMALL.num_parameters()
    work = Workload(SMALL, 1024, 1, 32, zero_stage=zero_stage, dtype="bfloat16")
    (rank,) = memory(work, TRAINER).ranks
    assert (rank.parameters, rank.optimizer) == (4 * parameters, 8 * parameters)
    assert 2 * parameters <= rank.gathered <= 4 * parameters
    assert rank.gradients <= 6 * parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero_shards_what_its_paper_says(zero_stage, dtype):
    """arXiv 1910.02054: optimizer state from stage 1 on, gradients from 2 on, weights from 3 on; ours from 1 on."""
    (rank,) = memory(Workload(SMALL, 1024, 1, 32, shard=8, zero_stage=zero_stage, dtype=dtype), TRAINER).ranks
    parameters, shards = SMALL.num_parameters(), 8 if zero_stage else 1
    assert rank.parameters == pytest.approx(4 * parameters / shards, rel=0.01)
    assert rank.optimizer == pytest.approx(8 * parameters / shards, rel=0.01)
    if zero_stage < 2:
        assert rank.gradients >= BYTES["float32"] * parameters * (0.5 if zero_stage else 1)
    else:
        assert rank.gradients < 2.5 * parameters
    if zero_stage == 3:
        assert rank.gathered < BYTES[dtype] * parameters


def test_logits_and_buffers_of_a_stack_take_what_it_says():
    from dataclasses import replace

    work = Workload(SMALL, 1024, 2, 32, zero_stage=1, shard=4)
    stack, profile = STACKS["selene_2021"], profiles()["selene_2021"]
    plain, more = (
        stacks.memory(work, profile, replace(stack, logit_state=n, buffer_state=b), True).ranks[0]
        for n, b in ((2, 0), (10, 4))
    )
    assert more.activations - plain.activations == 8 * 2 * 1024 * SMALL.padded_vocab_size
    assert more.gathered - plain.gathered == 4 * SMALL.num_parameters()


def test_unfused_attention_keeps_its_matrices():
    """arXiv 2205.05198, equation 1: 5·a·s²·b bytes with dropout."""
    work = Workload(flavor("gpt", "7.5b"), 2048, 1, 1, tensor=8, sequence_parallel=True, dropout=True)
    stack, profile = STACKS["selene_2021"], profiles()["selene_2021"]
    fused, unfused = (stacks.memory(work, profile, stack, flash).ranks[0].activations for flash in (True, False))
    assert unfused - fused == 36 * 5 * 32 / 8 * 2048**2


ADAFACTOR_STATE, MUON_STATE = (optimizer_state(Optimizer(name=name)) for name in ("adafactor", "muon"))


def test_state_of_optimizers_is_found_by_a_step():
    assert optimizer_state(Optimizer()) == ADAMW_STATE
    assert optimizer_state(Optimizer(name="sgd")) == (StateValues(), StateValues(), 0)
    assert (StateValues(0, 1, 1, 1), StateValues(0, 1, 1, 1), 1) == ADAFACTOR_STATE
    assert optimizer_state(Optimizer(name="adafactor", beta1=0.9)).tables == StateValues(1, 1, 1, 1)
    assert (StateValues(1), StateValues(2), 2) == MUON_STATE
    assert MUON_STATE.of("layers.0.x", (3, 5)) == 15 and MUON_STATE.of("embedding.weight", (3, 5)) == 30
    assert ADAFACTOR_STATE.of("layers.0.x", (0, 5)) == 5  # an empty shard knows the columns
    assert ADAFACTOR_STATE.of("layers.0.x", (8, 5), 4) == 8 + 4 * 5  # each matrix of a stack has its own
