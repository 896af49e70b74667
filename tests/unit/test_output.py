"""A stdout that fails, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
CODE = """
import sys
from titan_like.metrics.output import outlive_output
outlive_output()
file = open(sys.argv[1], "w")  # its descriptor is not that of a stream
for number in range(3000):
    print("na\\xefve \\xd7", number, flush=True)
    print("na\\xefve \\xd7", number, file=sys.stderr)
sys.stdout.flush()
file.write("done")
"""


@pytest.mark.parametrize(
    ("stdout", "problem"), [("/dev/full", "No space left on device"), (">(exec true)", "Broken pipe")]
)
def test_a_stdout_that_fails_is_told_once(tmp_path: Path, stdout: str, problem: str) -> None:
    end, err = tmp_path / "end", tmp_path / "err"
    script = f'"$0" -c "$1" {end} > {stdout} 2>{err}'
    assert subprocess.run(["bash", "-c", script, sys.executable, CODE], cwd=REPO).returncode == 0
    assert end.read_text() == "done"
    lines = err.read_text().splitlines()
    told = [line for line in lines if not line.startswith("naïve")]
    assert told == [f"stdout cannot be written ({problem}); training goes on without it"]
    assert len(lines) == 3001
