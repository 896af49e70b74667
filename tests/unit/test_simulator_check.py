"""The simulator beside steps that real processes took: `benchmarks/results/simulator_check_cpu.json`."""

import json
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from titan_like.metrics.step_timeline import simulated

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):  # where it finds the scripts that it builds on
    CHECK = import_module("simulator_check")
RESULT = json.loads((BENCHMARKS / "results" / "simulator_check_cpu.json").read_text())


def test_measured_steps_are_simulated_within_2_percent():
    """The measured medians, and constants from other runs; the simulation is done here."""
    extra = CHECK.Overheads(**RESULT["overheads_s"])
    times = CHECK.Times(**RESULT["seconds_of_a_microbatch"])
    for case in RESULT["cases"]:
        layout = (case["schedule"], RESULT["ranks"], case["virtual_stages"], case["microbatches"])
        seconds = CHECK.predicted(*layout, times, extra)
        assert seconds == pytest.approx(case["measured_s"], rel=0.02)
    assert len(RESULT["cases"]) == len(CHECK.CASES) * 4


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_constants_are_found_again(schedule, virtual):
    """A step made with known ones: passes 2 ms and 3 ms over their sleep, messages of 5 ms, 7 ms around the passes."""
    times = CHECK.Times(0.060, 0.060, 0.060)
    part = times / virtual

    def duration(action):
        return part.of(action) + {"F": 0.002, "B": 0.003}[action.kind]

    step = simulated(schedule, 4, virtual, 8, duration, transfer=0.005)
    found = CHECK.overheads([(step.seconds + 0.007, step)], times)
    assert found.passes == pytest.approx({"F": 0.002, "B": 0.003})
    assert found.gap == pytest.approx(0)
    assert found.message == pytest.approx(0.005)
    assert found.around == pytest.approx(0.007)
    assert CHECK.predicted(schedule, 4, virtual, 8, times, found) == pytest.approx(step.seconds + 0.007)
