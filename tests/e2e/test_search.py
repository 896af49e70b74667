"""scripts/search.py as a user runs it: killed and started again, interrupted, and with trials that do not end well."""

import csv
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import processes_with, wait_until
from tests.e2e.scripts import REPO, Script
from titan_like.checkpoint.step_folders import release
from titan_like.commands import search as command
from titan_like.config import ConfigError, load_config
from titan_like.planner.rows import read_rows
from titan_like.search import results
from titan_like.train.rules import resolve_settings

SMALL = [
    "--job.config_file", str(REPO / "train_configs" / "debug_gpt.toml"),
    "--training.seq_len=16", "--training.global_batch_size=4", "--warmup", "1", "--steps", "2",
]  # fmt: skip
GRID = """
processes = [1, 2]
[parallelism]
tensor_parallel_degree = [1, 4]
[training]
micro_batch_size = [2]
"""

# In place of train.py: layouts that train, run out of memory, hang, and fail.
TRAINER = """
import json, os, sys, time
settings = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
if "parallelism.tensor_parallel_degree" in settings:
    open("PIDS", "a").write(f"{os.getpid()}\\n")
    time.sleep(600)
size = int(settings.get("training.micro_batch_size", 8))  # which is the default
is_pipeline = "parallelism.pipeline_parallel_degree" in settings
if is_pipeline or size > 2:  # one rank says so: two that speak at once would write into each other's lines
    time.sleep(600 * int(os.environ["RANK"]))
if is_pipeline:
    sys.exit("error: this does not work")
if size > 2:
    raise MemoryError("too many samples")
if os.environ["RANK"] == "0":
    with open(settings["job.dump_folder"] + "/metrics.jsonl", "w") as file:
        for step in range(3):
            rates = {"step_time_s": 1 / size, "tokens_per_second": 10 * size, "tflops_per_device": 0.1}
            more = {"mfu_model": None, "global_batch_size": 6, "peak_memory_bytes": 1000}
            file.write(json.dumps(rates | more) + "\\n")
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A search in this process whose trials run `TRAINER`; the file in which hanging processes note their ids."""
    script, pids = tmp_path / "trainer.py", tmp_path / "pids"
    script.write_text(TRAINER.replace("PIDS", str(pids)))
    monkeypatch.setattr(command, "program", lambda *_: (str(script),))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield pids
    release()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def outcomes(out: Path) -> dict[str, str]:
    with open(out / "results.csv", encoding="utf-8", newline="") as file:
        return {row["layout"]: row["outcome"] for row in csv.DictReader(file)}


@pytest.mark.exhaustive
def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "out"
    grid.write_text(GRID)
    words = [*SMALL, "--grid", str(grid), "--dump_folder", str(out)]
    first, second = out / "trials" / "n1-mbs2-gbs4", out / "trials" / "n2-dp2-mbs2-gbs4"
    process = Script("scripts/search.py", words, cwd=tmp_path)
    wait_until((second / "log.txt").exists, 120)
    process.kill()
    process.wait()
    measured_at = (first / "result.json").stat().st_mtime_ns
    assert not (second / "result.json").exists()
    left = processes_with(f"TITAN_SEARCH={out}")

    done = Script("scripts/search.py", words, cwd=tmp_path).wait()
    assert done.returncode == 0, done.stderr
    assert not set(left) & set(processes_with(f"TITAN_SEARCH={out}"))  # nothing of the killed search disturbs the next
    assert done.stdout.startswith("1 layouts are known already\n")
    assert (first / "result.json").stat().st_mtime_ns == measured_at
    assert outcomes(out) == {
        "n1-mbs2-gbs4": "ok",
        "n2-dp2-mbs2-gbs4": "ok",
        "n1-tp4-mbs2-gbs4": "skipped",
        "n2-tp4-mbs2-gbs4": "skipped",
    }
    rows = json.loads((out / "results.json").read_text())["layouts"]
    measured = [json.loads(line) for line in (first / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step_time_s"] == min(record["step_time_s"] for record in measured[1:])  # the lower one of two
    assert rows[0]["tokens_per_second"] == pytest.approx(4 * 16 / rows[0]["step_time_s"])
    assert all(f"does not divide the {row['processes']} processes" in row["reason"] for row in rows[2:])
    read, left_out = read_rows(out / "rows.json")
    assert [row.seconds for row in read] == [row["step_time_s"] for row in rows[:2]] and not left_out
    best = max(rows[:2], key=lambda row: row["tokens_per_second"])
    run = resolve_settings(load_config(["--job.config_file", str(out / "best.toml")]), best["processes"])
    assert (run.layout.shard, run.config.training.steps) == (best["processes"], 800)
    assert results.can_draw() == (out / "throughput.png").exists()


def test_trials_that_do_not_end_well(stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "out"
    grid.write_text(
        "processes = 2\n[training]\nmicro_batch_size = 'largest'\n"
        "[parallelism]\npipeline_parallel_degree = [1, 2]\ntensor_parallel_degree = [1, 2]\n"
    )
    words = [*SMALL, "--training.global_batch_size=6", "--grid", str(grid), "--dump_folder", str(out)]
    words += ["--timeout", "40"]  # long enough for trials that end, also where much else runs

    def interrupt() -> None:
        wait_until(lambda: stub.exists() and len(stub.read_text().splitlines()) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        command.main(words)
    release()  # as when the process ends
    assert not processes_with(f"TITAN_SEARCH={out}")
    known = {"n2-dp2-mbs1-gbs6": "ok", "n2-dp2-mbs3-gbs6": "out_of_memory", "n2-tp2-pp2-mbs1-gbs6": "skipped"}
    assert outcomes(out) == known

    assert command.main(words) == 0
    assert outcomes(out) == known | {"n2-tp2-mbs1-gbs6": "hung", "n2-pp2-mbs1-gbs6": "failed"}
    assert not processes_with(f"TITAN_SEARCH={out}")
    reasons = {row["layout"]: row["reason"] for row in json.loads((out / "results.json").read_text())["layouts"]}
    assert reasons["n2-dp2-mbs3-gbs6"].startswith("MemoryError: too many samples")
    assert reasons["n2-tp2-mbs1-gbs6"] == "ended because it was not over after 40 s"
    assert reasons["n2-pp2-mbs1-gbs6"] == "this does not work"
    printed = capsys.readouterr().out
    assert "\n2 layouts are known already\n" in printed and "  time left " in printed
    release()

    with pytest.raises(ConfigError, match="holds a search with other layouts, settings, steps"):
        command.main([*words, "--steps", "3"])
