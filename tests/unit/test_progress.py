"""Whether a run that has ended can go on."""

from pathlib import Path

import pytest

from titan_like.checkpoint.step_folders import is_resumable
from titan_like.config import load_config


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        ([4], [], (True, "resumable: step 4 of 9 is in ")),
        ([4, 9], [], (False, "finished: a checkpoint of step 9 of 9 ")),
        ([12], [], (False, "finished: a checkpoint of step 12 of 9 ")),
        ([], [], (False, "not resumable: no checkpoint in ")),
        ([4], ["--checkpoint.load_step=4"], (False, "not resumable: every start goes back to ")),
        ([4], ["--checkpoint.enable=false"], (False, "not resumable: checkpoint.enable is false")),
    ],
)
def test_is_resumable(tmp_path: Path, steps: list[int], options: list[str], expected: tuple[bool, str]) -> None:
    for step in steps:
        (tmp_path / "checkpoint" / f"step-{step}").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-8.unfinished").mkdir(parents=True)  # not one
    settings = [f"--job.dump_folder={tmp_path}", "--training.steps=9", "--checkpoint.enable=true"]
    resumable, sentence = is_resumable(load_config([*settings, *options]))
    assert resumable == expected[0]
    assert sentence.startswith(expected[1])
