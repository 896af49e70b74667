import json
import re

import pytest

from tests.unit.test_planner_command import plan
from titan_like.metrics.step_timeline import Phase, chrome_trace, read_trace, simulated
from titan_like.metrics.timeline_report import differences, lanes, parts_of
from titan_like.parallel.schedules.simulate import unit_time
from titan_like.parallel.schedules.tables import SCHEDULES, stages_per_rank

RUN = ("--job.config_file", "train_configs/gpt_76b.toml", "--training.global_batch_size", "256")


def test_lanes_show_passes_their_microbatches_and_waits():
    step = simulated("1f1b", 2, 1, 2, unit_time)
    assert lanes(step, 18) == ["F0F1....B0==..B1==", "..F0B0==F1B1==...."]
    assert lanes(step, 9) == ["FF..B0.B1", ".FB0FB1.."]
    # Another step's time axis; the second stage of a rank in small letters.
    assert lanes(step, 36, 18.0) == ["F0F1....B0==..B1==", "..F0B0==F1B1=="]
    assert lanes(simulated("interleaved_1f1b", 2, 2, 2, unit_time), 30) == [
        "F0F1f0f1....b0==..b1==B0==B1==",
        "..F0F1f0b0==f1b1==B0==B1==....",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_timeline_comes_back_from_its_file(schedule, tmp_path):
    virtual = stages_per_rank(schedule, 2)
    step = simulated(schedule, 4, virtual, 8, unit_time, transfer=0.25)
    step.phases.extend(Phase(rank, "optimizer", step.seconds, step.seconds + rank) for rank in range(4))
    path = tmp_path / "step-1.json"
    path.write_text(json.dumps(chrome_trace(step)))
    back = read_trace(path)
    assert back == step


def test_parts_of_a_step_sum_up_and_differ_where_the_step_does():
    step = simulated("1f1b", 4, 1, 8, unit_time, transfer=0.5)
    parts = parts_of(step)
    before = list(parts)[: list(parts).index("first to last pass")]
    assert sum(parts[name] for name in before) == pytest.approx(parts["first to last pass"])
    assert parts["forward passes"] == 8
    assert parts["backward passes"] == 16
    slow = simulated("1f1b", 4, 1, 8, lambda action: unit_time(action) + 0.25 * (action.kind == "B"), transfer=0.5)
    slow.phases.extend(
        [Phase(0, "gradient norm", slow.seconds, slow.seconds + 2), Phase(0, "optimizer", 0.0, slow.seconds + 3)]
    )
    found = {part.name: part.measured - part.predicted for part in differences(step, slow)}
    assert found["backward passes"] == pytest.approx(8 * 0.25)
    assert found["forward passes"] == 0
    assert found["exposed communication"] == pytest.approx(0)
    assert found["optimizer"] == pytest.approx(3)
    assert found["step"] == pytest.approx(slow.seconds + 3 - step.seconds)


def test_of_many_microbatches_the_first_and_the_last_round_are_drawn(tmp_path):
    many, target = [*RUN[:2], "--training.global_batch_size", "2048"], tmp_path / "plan.json"
    done = plan("simulate", *many, "--width", "200", "--json", target)
    assert done.returncode == 0, done.stderr
    step = json.loads(target.read_text())["simulate"]["seconds"]
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("left out: ")]
    left, each = re.fullmatch(
        r"left out: (\d+) rounds of 4 after microbatch 3, which take ([0-9.,]+) ms each", told
    ).groups()
    (axis,) = [line for line in done.stdout.splitlines() if line.startswith(" " * 10 + "0")]
    drawn = float(axis.split()[-2].replace(",", ""))
    assert drawn + int(left) * float(each.replace(",", "")) == pytest.approx(1000 * step, rel=1e-4)
    first = next(line for line in done.stdout.splitlines() if line.startswith("rank   0"))
    assert f"B{4 * int(left) + 7}" in first and "B0" in first
    whole = plan("simulate", *many, "--whole").stdout
    assert "left out" not in whole


def test_simulate_draws_writes_and_compares(tmp_path):
    out, target, picture = tmp_path / "step.json", tmp_path / "plan.json", tmp_path / "step.svg"
    done = plan("simulate", *RUN, "--out", out, "--width", "60")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1] for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(rows) == 4
    assert all(len(row) == 60 for row in rows)
    pytest.importorskip("matplotlib")
    done = plan("simulate", *RUN, "--measured", out, "--json", target, "--picture", picture, "--profile", "titan_h100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank   0 |") == 2
    found = json.loads(target.read_text())["simulate"]
    compared = {part["name"]: part["predicted"] - part["measured"] for part in found["compared"]}
    assert compared["forward passes"] != 0
    assert compared["step"] == pytest.approx(
        sum(compared[name] for name in ("first to last pass", "gradient reduction", "optimizer", "rest of the step"))
    )
    assert picture.read_text().startswith("<?xml")
    same = plan("simulate", *RUN, "--measured", out, "--json", target)
    assert same.returncode == 0
    found = json.loads(target.read_text())["simulate"]
    assert all(part["predicted"] == pytest.approx(part["measured"], abs=1e-9) for part in found["compared"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schedule": "fastest"}, "not a pipeline schedule"),
        ({"pipeline_degree": 4}, "do not follow the order of the schedule"),
        ({"clock_error": "none"}, "clock_error: should be a valid number"),
    ],
)
def test_a_timeline_that_can_be_no_step_of_its_schedule_is_refused(change, problem, tmp_path):
    trace = chrome_trace(simulated("1f1b", 2, 1, 2, unit_time))
    trace["otherData"] |= change
    (tmp_path / "step.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=problem):
        read_trace(tmp_path / "step.json")
