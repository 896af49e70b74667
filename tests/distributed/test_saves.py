"""Saves in the background hold exactly the step that they are of; a save that fails leaves everything else whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker, save_worker
from tests.distributed.launch import base_config, collect, launch
from titan_like.checkpoint.step_folders import complete_steps

STEPS = {"training.steps": 5}
BACKGROUND = STEPS | {"checkpoint.async": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saves")
    base_config(root, {})  # writes the text
    return root


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, str]:
    """Digest of every step of a run that saves nothing, on two ranks."""
    return collect(crash_worker.reference, 2, folder, folder / "straight", STEPS)[0]


@pytest.mark.parametrize(("copy", "write"), [(0.3, 0.0), (0.0, 0.5)], ids=["slow to copy", "slow to write"])
def test_a_checkpoint_written_in_the_background_is_that_of_its_step(
    folder: Path, wanted: dict[str, str], copy: float, write: float
) -> None:
    dump = folder / f"background {copy} {write}"
    events, digests = collect(save_worker.train_slowly, 2, folder, dump, BACKGROUND, copy, write)[0]
    assert digests == wanted
    of_each = ["save {0} returns", "copied", "update {1}", "written {0}"]  # written at last, while training goes on
    if copy:
        assert [event for event in events if "written" not in event][:7] == [
            "update 1", *(event.format(step, step + 1) for step in (1, 2) for event in of_each[:3])
        ]  # fmt: skip
    else:
        before = {step: events[: events.index(f"written {step}")] for step in (1, 2, 3)}
        for step in (1, 2, 3):
            assert f"update {step + 1}" in before[step] and f"save {step + 1} returns" not in before[step]


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_save_that_fails(folder: Path, wanted: dict[str, str], background: bool, on_failure: str) -> None:
    dump = folder / f"fails {background} {on_failure}"
    settings: dict[str, Any] = STEPS | {"checkpoint.async": background, "checkpoint.on_failure": on_failure}
    outcomes = collect(save_worker.train_where_a_save_fails, 2, folder, dump, settings, 3)
    problem = f"{dump}/checkpoint/step-3 is not saved (rank 1: "
    saved = complete_steps(dump / "checkpoint")
    assert not [path.name for path in (dump / "checkpoint").iterdir() if not path.name.startswith("step-")]
    assert not list((dump / "checkpoint").glob("*.unfinished"))
    if on_failure == "continue":
        assert [outcome["step"] for outcome in outcomes] == [5, 5]
        assert saved == [1, 2, 4, 5]
        (line,) = [line for line in outcomes[0]["printed"].splitlines() if "is not saved" in line]
        assert line.strip().startswith(problem) and line.endswith("earlier checkpoints are intact; training goes on")
    else:
        errors = [outcome["error"] for outcome in outcomes]
        assert errors[0] == errors[1] and errors[0].startswith(problem)
        assert errors[0].endswith("earlier checkpoints are intact") and "\n" not in errors[0]
        assert saved == [1, 2]
        assert outcomes[0]["step"] == outcomes[1]["step"] <= 4
    # What is there is whole.
    (outcome,) = collect(crash_worker.resume_each, 2, folder, [dump], STEPS)[0]
    assert outcome["step"] == saved[-1] and outcome["digest"] == wanted[str(saved[-1])]
    assert outcome["final"] == wanted["5"]


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_the_last_save_that_fails_ends_the_run_with_an_error(folder: Path, on_failure: str) -> None:
    dump = folder / f"last fails {on_failure}"
    settings: dict[str, Any] = STEPS | {"checkpoint.async": True, "checkpoint.on_failure": on_failure}
    (outcome,) = collect(save_worker.train_where_a_save_fails, 1, folder, dump, settings, 5)
    assert outcome["error"].startswith(f"{dump}/checkpoint/step-5 is not saved (rank 0: ")
    assert complete_steps(dump / "checkpoint") == [1, 2, 3, 4]


def test_other_text_under_the_same_name_is_refused(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    text, dump = tmp_path / "text.txt", tmp_path / "run"
    launch(crash_worker.train, 1, tmp_path, dump, {})
    before = text.read_text()
    for changed, is_refused in ((before[::-1], True), (before, False)):
        text.write_text(changed)
        ((outcome,),) = collect(crash_worker.resume_each, 1, tmp_path, [dump], {"training.steps": 4})
        refusal = f"the checkpoint of step 3 in {dump}/checkpoint was trained on other data than [data] now gives;"
        assert outcome.get("error", "").startswith(refusal) == is_refused, outcome
