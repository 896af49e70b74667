"""What FSDP2 gathers and reduces in each pass of a stage, against rules written out by hand."""

import pytest

from tests.unit.planner_cases import flavor
from titan_like.planner.data_parallel import communication, sharding_of
from titan_like.planner.stages import pipeline_program
from titan_like.planner.workload import Workload

MODEL = flavor("gpt", "debug", num_layers=3)


@pytest.mark.parametrize(
    ("zero", "replicas", "passes", "gathered", "reduced"),
    [
        # Without ZeRO there is nothing to gather, and gradients are summed at the end.
        (0, 2, "FFBB", [0, 0, 0, 0], ["", "", "", "all"]),
        # ZeRO 1 and 2 gather once, and keep what is gathered.
        (1, 1, "FFBB", ["all", 0, 0, 0], ["", "", "", "all"]),
        (2, 1, "FFBB", ["all", 0, 0, 0], ["", "", "all", "all"]),
        # ZeRO 3 gathers for every pass, but keeps the root between a forward pass and the next backward pass.
        (3, 1, "FBFB", ["all", "layers", "all", "layers"], ["", "all", "", "all"]),
        (3, 1, "FFBB", ["all", "layers", "layers", "all"], ["", "", "all", "all"]),
        # In a split backward pass the second part reduces. The first one also has what earlier first parts have left.
        (2, 1, "FFIIWW", ["all", 0, 0, 0, 0, 0], ["", "", "", "", "all", "matrices"]),
        (2, 2, "FFIIWW", ["all", 0, 0, 0, 0, 0], ["", "", "", "", "all", "all"]),
    ],
)
def test_gathers_and_reductions_of_a_step(
    zero: int, replicas: int, passes: str, gathered: list[str | int], reduced: list[str]
) -> None:
    work = Workload(MODEL, 64, 1, 8, shard=1 if zero == 0 else 2, replicate=replicas, zero_stage=zero)
    (stage,) = pipeline_program(work).stages
    expected = {"all": [*stage.units], "layers": [unit for unit in stage.units if unit.name], 0: [], "": []}
    expected["matrices"] = [unit.matrices for unit in stage.units]
    found = [*communication(stage, passes, sharding_of(work))]
    assert [units for units, _, _ in found] == [expected[name] for name in gathered]
    assert [units for _, units, _ in found] == [expected[name] for name in reduced]
    assert [sums_replicas for *_, sums_replicas in found] == [False] * (len(passes) - 1) + [True]
