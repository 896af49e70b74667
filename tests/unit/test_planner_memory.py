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
from titan_like.planner.workload import Workload

TRAINER = of_own_trainer(builtin_profiles()["fsdp_a100"], "bfloat16")
WORKLOADS = random_workloads(30, seed=1)


def of_stack(name):
    """Memory of a published stack."""
    return lambda work: stacks.memory(work, profiles()[name], STACKS[name], flash=True)


MEMORY = {"trainer": lambda work: memory(work, TRAINER), "selene_2021": of_stack("selene_2021")}
MEMORY |= {"jean_zay_v100": of_stack("jean_zay_v100")}


@pytest.mark.slow
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


@pytest.mark.slow
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
