"""stdout and stderr that fail in every way, in a process of its own."""

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


def run(tmp_path: Path, redirections: str) -> tuple[str, str]:
    """What arrives on stdout and stderr."""
    end, out, err = tmp_path / "end", tmp_path / "out", tmp_path / "err"
    script = f'"$0" -c "$1" {end} {redirections.format(out=out, err=err)}'
    done = subprocess.run(["bash", "-c", script, sys.executable, CODE], cwd=REPO)
    assert done.returncode == 0
    assert end.read_text() == "done"
    return tuple(path.read_text() if path.exists() else "" for path in (out, err))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("redirection", "problem"),
    [
        (">/dev/full 2>{err}", "No space left on device"),
        ("> >(exec true) 2>{err}", "Broken pipe"),
    ],
    ids=["full", "broken pipe"],
)
def test_a_stdout_that_fails_is_told_once(tmp_path: Path, redirection: str, problem: str) -> None:
    lines = run(tmp_path, redirection)[1].splitlines()
    told = [line for line in lines if not line.startswith("naïve")]
    assert told == [f"stdout cannot be written ({problem}); training goes on without it"]
    assert len(lines) == 3001


@pytest.mark.parametrize("redirections", [">{out} 2>&-", ">{out} 2>/dev/full", ">&- 2>{err}"])
def test_no_stream_is_needed(tmp_path: Path, redirections: str) -> None:
    out, _ = run(tmp_path, redirections)
    assert len(out.splitlines()) == (3000 if "{out}" in redirections else 0)
