"""A sweep trains each combination once, goes on where it stopped, and ranks by validation loss."""

import json
import sys
from pathlib import Path

import pytest

from titan_like.commands import sweep as command
from titan_like.config.errors import ConfigError
from titan_like.search.sweep import Sweep, is_done, members, ranking

GIVEN = ["--training.steps=3", "--model.flavor=debug"]
# A trainer in the place of the product's: its losses follow from the settings, and rates above 0.5 fail the first time.
TRAINER = """
import json, os, sys
settings = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder, lr = settings["job.dump_folder"], float(settings["optimizer.lr"])
with open(os.path.join(folder, "..", "started.txt"), "a") as file:
    file.write(f"{os.path.basename(folder)} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\\n")
if lr == 0.25 and not os.path.exists(os.path.join(folder, "once")):
    open(os.path.join(folder, "once"), "w").close()
    print(" stopped by SIGTERM after step 1")
    raise SystemExit(0)
with open(os.path.join(folder, "metrics.jsonl"), "w") as file:
    for step in (1, 2, 3):
        line = {"step": step, "loss": 9 - lr, "validation_loss": (lr - 0.2) ** 2 + int(settings["job.seed"]) + 3 / step}
        file.write(json.dumps(line) + "\\n")
if lr > 0.5:
    print("error: the loss of step 3 is nan")
    raise SystemExit(1)
"""


@pytest.fixture
def grid(tmp_path: Path) -> str:
    path = tmp_path / "grid.toml"
    path.write_text("[optimizer]\nlr = [0.1, 0.25, 1.0]\n[job]\nseed = [1, 2]\n[model.overrides]\nnum_layers = 2\n")
    return str(path)


@pytest.mark.parametrize("gpus", [[], ["0", "1"]])
def test_each_combination_trains_once_and_the_best_comes_first(tmp_path: Path, grid: str, gpus: list[str]) -> None:
    out, script = tmp_path / "out", tmp_path / "trainer.py"
    script.write_text(TRAINER)
    runs = members(grid, GIVEN, out, 1)
    assert [run.name for run in runs] == [f"lr={lr}_seed={seed}" for lr in (0.1, 0.25, 1.0) for seed in (1, 2)]
    assert runs[0].config.model.overrides == {"num_layers": 2} and runs[5].config.optimizer.lr == 1.0
    for _ in range(3):
        Sweep([sys.executable, str(script)], gpus).run(runs)
    started = [line.split() for line in (out / "started.txt").read_text().splitlines()]
    counts = {run.name: [name for name, *_ in started].count(run.name) for run in runs}
    assert counts == {run.name: 2 if "0.25" in run.name else 1 for run in runs}, "a stopped run goes on, once"
    assert {gpu for _, *of_run in started for gpu in of_run} <= {*gpus}
    ranked, table = ranking(runs)
    expected = sorted(
        runs,
        key=lambda run: (run.config.optimizer.lr == 1.0, (run.config.optimizer.lr - 0.2) ** 2 + run.config.job.seed),
    )
    assert [run.name for run in ranked] == [run.name for run in expected], "failed runs come last"
    assert table["step of best validation_loss"]["lr=0.25_seed=1"] == 3
    assert json.loads((runs[5].folder / "outcome.json").read_text()) == {
        "outcome": "failed", "reason": "the loss of step 3 is nan",
    }  # fmt: skip


def test_the_command_writes_the_bests_file(
    tmp_path: Path, grid: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(command, "program", lambda name: (str(tmp_path / "trainer.py"),))
    out = tmp_path / "out"
    arguments = ["--grid", grid, "--dump_folder", str(out), "--json", str(tmp_path / "t.json"), *GIVEN]
    assert command.main(arguments) == 0
    assert "best: lr=0.1_seed=1" in capsys.readouterr().out, "0.25 was stopped"
    assert command.main(arguments) == 0
    assert "best: lr=0.25_seed=1" in capsys.readouterr().out
    text = (out / "best.toml").read_text()
    assert "lr = 0.25" in text and "num_layers = 2" in text and "dump_folder" not in text
    assert json.loads((tmp_path / "t.json").read_text())["best"] == "lr=0.25_seed=1"


def test_a_run_that_a_signal_ended_is_not_done(tmp_path: Path) -> None:
    """Whether it had saved or not, and whatever its process returns; a run of which nothing is done is no best."""
    (tmp_path / "grid.toml").write_text("[optimizer]\nlr = [0.1, 0.2, 0.3]\n")
    for lines in (
        "ended by SIGTERM before the first step was done",
        "torch...SignalException: Process 7 got signal: 15",
    ):
        script, out = tmp_path / "trainer.py", tmp_path / lines[:5]
        wait = "import os, signal\nif '=0.3' in sys.argv[-2]: os.kill(os.getpid(), signal.SIGTERM)\n"
        script.write_text(f"import sys\n{wait}print({lines!r})\nraise SystemExit(1)\n")
        runs = members(str(tmp_path / "grid.toml"), GIVEN, out, 1)
        Sweep([sys.executable, str(script)]).run(runs)
        assert not [run for run in runs if (run.folder / "outcome.json").exists()]
        for run in runs:
            (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        (runs[1].folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        (runs[1].folder / "outcome.json").write_text('{"outcome": "ok"}')
        ranked = ranking(runs)[0]
        assert [is_done(run) for run in ranked] == [True, False, False] and ranked[0] == runs[1]


def test_a_folder_is_of_one_sweep(tmp_path: Path, grid: str) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    sweep, out = Sweep([sys.executable, str(tmp_path / "trainer.py")]), tmp_path / "out"
    sweep.run(members(grid, GIVEN, out, 1))
    sweep.run(members(grid, ["--model.flavor=debug", "--training.steps", "3"], out, 1))
    with pytest.raises(ConfigError, match=r"has a run lr=0\.1_seed=1 with another training\.steps; name"):
        sweep.run(members(grid, [*GIVEN, "--training.steps=4"], out, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlearning = [1.0]\n", "learning"),
        ("[optimizer]\nlr = []\n", "lists no value"),
        ("[optimizer]\nlr = [0.5, 0.5]\n", "lists a value twice"),
        ("[training]\nmicro_batch_size = [3, 5]\n", "not divisible"),
        ("[checkpoint]\nfolder = ['x']\n", "each run has its own"),
    ],
)
def test_bad_grids(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        members(str(tmp_path / "grid.toml"), GIVEN, tmp_path / "out", 1)
