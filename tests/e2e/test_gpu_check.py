"""scripts/gpu_check.sh on a CPU: every part works on a small model, so that it is ready where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.readme_table import checks_of
from tests.e2e.scripts import REPO, Script


def test_every_part_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts run in forked processes."""
    monkeypatch.setattr(gpu_check, "python", lambda arguments: Script(arguments[0], arguments[1:]).wait())
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--json", str(tmp_path / "check.json")])
    code = gpu_check.main()
    found = json.loads((tmp_path / "check.json").read_text())
    assert code == 0, found
    assert found["tiny"]
    (parity,), (memory,), (speed,) = found["parity"], found["memory"], found["speed"]
    assert parity["outcome"] == "same"
    # A million parameters, with gradients and two moments in float32, and activations.
    assert 16e6 < memory["predicted_bytes"] < 200e6
    check_speed(speed)
    assert found["waits"][0]["waits"] == 0
    assert found["checkpoint"][0]["bit_identical"]
    assert found["seconds"] > 0 and found["date"]
    for name in gpu_check.PARTS:
        assert found[f"{name}_not_reached"] == []
    assert checks_of(found).endswith(
        "parity 1 of 1, memory 1 of 1, waits 1 of 1, checkpoint 1 of 1, speed 1 of 1 right"
    )


def check_speed(speed: dict[str, Any]) -> None:
    assert speed["tokens_per_second"] > 0 and speed["tflops_per_device"] > 0


@pytest.mark.exhaustive
def test_the_script_runs_from_any_folder(tmp_path: Path) -> None:
    """One part stands for all."""
    command = [str(REPO / "scripts" / "gpu_check.sh"), "--tiny", "--only", "speed", "--json", str(tmp_path / "a.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (speed,) = json.loads((tmp_path / "a.json").read_text())["speed"]
    check_speed(speed)
