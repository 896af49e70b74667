"""`benchmarks/data.py` on sizes that take seconds: it runs, and counts what the product does."""

import json
from pathlib import Path

import pytest

from tests.e2e.scripts import Script


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_small_measurements(tmp_path: Path) -> None:
    text, result = tmp_path / "text.jsonl", tmp_path / "found.json"
    lines = [json.dumps({"text": f"{number} " + "some words and others\n" * 40}) for number in range(200)]
    text.write_text("\n".join(lines))
    sections = ["access", "tokenize", "loader", "sources"]
    options = ["--only", *sections, "--scale=0.001", f"--input={text}", "--tokens_per_second=100", f"--json={result}"]
    done = Script("benchmarks/data.py", options).wait()
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert set(found) == {"command", "machine", *sections}
    assert 0 < found["access"]["state_bytes"] < 2**20
    assert found["tokenize"]["tokens"] > 200  # the ends of the documents
    assert found["loader"]["ratio"] == pytest.approx(found["loader"]["tokens_per_second"] / 100)
    assert {"indexed", "text", "streamed by 2 workers"} < set(found["sources"])
    assert all(rates["median"] > 0 for rates in found["sources"].values())
