"""benchmarks/peers.py on a CPU: every side that is installed trains, so that the script is ready for a GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_every_side_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "peers.py"), "--tiny", "--json", str(tmp_path / "peers.json")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["tiny"] and found["machine"]["torch"] and "full attention" in found["mfu_is"]
    cases = {(case["model"], case["side"]): case for case in found["cases"]}
    for (model, side), case in cases.items():
        if side == "torchtitan":
            assert case["problem"].startswith("not run: torchtitan")
            continue
        assert case.get("problem", "") == "", case
        assert case["tokens_per_second"] > 0 and case["step_ms"] > 0 and case["first_step_s"] > 0
        assert len(case["step_seconds"]) == 5 and case["peak_memory_bytes"] > 50e6 and case["mfu"] is None
        assert case["command"].startswith(f"python benchmarks/peer_sides.py {side} --model.family=")
        assert abs(case["first_loss"] - math.log(512)) < 0.4 and math.isfinite(case["last_loss"])
        if side != "ours":
            ratio = cases[model, "ours"]["tokens_per_second"] / case["tokens_per_second"]
            assert found["ratios"][model][side] == pytest.approx(ratio, rel=1e-2, abs=1e-4)
    assert {side for _, side in cases} == {"ours", "bare", "trainer", "torchtitan"}
    assert "ours ÷" in done.stdout
