"""benchmarks/peers.py on a CPU: every side that is installed trains, so that the script is ready for a GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.readme_table import table_of

REPO = Path(__file__).parents[2]


def test_readme_shows_the_table() -> None:
    files = (REPO / "benchmarks" / "results" / f"peers_{card}.json" for card in ("h200", "h100"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert table_of(results) in (REPO / "README.md").read_text(encoding="utf-8")


# torch's own packages are looked up as ever.
NOT_INSTALLED = """
from importlib.metadata import Distribution, PackageNotFoundError
original = Distribution.from_name.__func__
def from_name(cls, name):
    if name.replace("-", "_") == "titan_like":
        raise PackageNotFoundError(name)
    return original(cls, name)
Distribution.from_name = classmethod(from_name)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("waves", [False, True])
def test_every_side_trains(tmp_path: Path, waves: bool) -> None:
    """In a checkout that is not installed."""
    (tmp_path / "sitecustomize.py").write_text(NOT_INSTALLED)
    command = [sys.executable, str(REPO / "benchmarks" / "peers.py"), "--tiny", "--json", str(tmp_path / "peers.json")]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
    command += ["--waves"] if waves else []
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["tiny"] and found["machine"]["torch"] and "full attention" in found["mfu_is"]
    cases = {(case["model"], case["side"]): case for case in found["cases"]}
    for (_, side), case in cases.items():
        if side == "torchtitan":
            assert case["problem"].startswith("not run: torchtitan")
            continue
        assert case.get("problem", "") == "", case
        assert case["tokens_per_second"] > 0 and case["step_ms"] > 0 and case["first_step_s"] > 0
        assert len(case["step_seconds"]) == 5 and case["peak_memory_bytes"] > 50e6 and case["mfu"] is None
        assert case["command"].startswith(f"python benchmarks/peer_sides.py {side} --model.family=")
        assert abs(case["first_loss"] - math.log(512)) < 0.4 and math.isfinite(case["last_loss"])
        assert side == "ours" or f"| {case['tokens_per_second']:,.0f}," in done.stdout.replace(": ", "| ")
    assert {side for _, side in cases} == {"ours", "bare", "trainer", "torchtitan"}
    compiled = found.get("compiled", {})
    assert len(compiled) == (8 if waves else 0) and not any("problem" in row for row in compiled.values()), compiled
