"""scripts/gpu_check.sh on a CPU: every part works on a small model, so that it is ready where there is a GPU."""

import json
import os
import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_every_part_is_ready(tmp_path: Path) -> None:
    command = [str(REPO / "scripts" / "gpu_check.sh"), "--tiny", "--json", str(tmp_path / "check.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["tiny"]
    (parity,), (memory,), (speed,) = found["parity"], found["memory"], found["speed"]
    assert parity["outcome"] == "same"
    # A million parameters, with gradients and two moments in float32, and activations.
    assert 16e6 < memory["predicted_bytes"] < 200e6
    assert speed["tokens_per_second"] > 0 and speed["tflops_per_device"] > 0
    assert found["waits"][0]["waits"] == 0
    assert found["checkpoint"][0]["bit_identical"]
