import json
import math
import re
from pathlib import Path

import pytest

from titan_like.commands.compare import main
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.metrics.loss_curve import (
    above_picture,
    differing_validation,
    plotted_range,
    read_losses,
    text_curve,
    text_curves,
)
from titan_like.metrics.run_files import write_settings


def test_only_whole_lines_with_a_finite_loss_are_read(tmp_path: Path):
    lines = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": None}, {"step": 4, "loss": 2}]
    lines[3] |= {"validation_loss/books": 3.0, "validation_lm_loss": 1.0}
    foreign = ['{"step": Infinity, "loss": 1}', '{"step": 1, "loss": 1e999}', '{"step": -1, "loss": 1}', "[" * 100_000]
    foreign += ['{"step": 2, "loss": ' + digit * 400 + "}" for digit in ("9", "9" * 13)]
    text = "\n".join([*map(json.dumps, lines), *foreign, '{"step": 5, "lo'])
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + text.encode())
    assert read_losses(tmp_path / "metrics.jsonl") == {
        "loss": [(1, 2.5), (4, 2.0)],
        "validation_loss/books": [(4, 3.0)],
    }


def test_a_column_is_as_high_as_its_loss():
    """8 eighths for the highest of 2 rows, 1 for the lowest; the first column is the median of its steps."""
    curve = text_curve([(1, 3.0), (2, 9.0), (3, 3.0), (4, 2.0), (5, 1.0), (6, 1.0)], width=2, height=2)
    top, bottom, steps = curve.split("\n")
    assert top == "   3.000 ┤█ " and bottom == "   1.000 ┤█▁"
    assert steps.split() == ["step", "1", "6"]
    assert text_curve([(1, 3.0)], width=-3, height=1).startswith("   3.000 ┤")


def write_run(folder: Path, losses: list[dict[str, float]], **settings: float) -> Path:
    folder.mkdir()
    lines = [
        {"step": 10 * (number + 1), "consumed_tokens": 640 * (number + 1)} | line for number, line in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if settings:
        arguments = [f"--optimizer.{key}={value}" for key, value in settings.items()]
        write_settings(folder, load_config([*arguments, f"--job.dump_folder={folder}"]), {"processes": 1})
    return folder


def test_runs_are_drawn_over_one_another_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [{"loss": 4.0, "step_time_s": 0.5}, {"loss": 2.0, "step_time_s": 0.25}, {"loss": 3.0, "step_time_s": 1}]
    rates = {"tokens_per_second": 250.0, "mfu_model": 0.375}
    first = [line | rates | {"skipped": 1, "nan": 0, "spike": 0} for line in first[:2]] + first[2:]
    second = [{"loss": 5.0, "validation_loss": 6.0}, {"loss": 1.0, "validation_loss": 7.0}]
    a = write_run(tmp_path / "a", first, lr=0.5, weight_decay=0.25)
    b = write_run(tmp_path / "b", second, lr=0.125, weight_decay=0.25)
    c = write_run(tmp_path / "c", [{"loss": 2.5}])  # an older run, which did not keep its settings
    assert main([str(a), str(b), str(c), "--json", str(tmp_path / "t.json")]) == 0
    output = capsys.readouterr().out
    assert output.count("   5.000 |") == 1 and output.count("step  10") == 1  # one picture
    table = {line[0]: line[1:] for line in (re.split(r" {2,}", line) for line in output.splitlines()) if len(line) == 4}
    assert table == {
        "": ["o a", "x b", "+ c"],
        "final loss": ["3", "1", "2.5"],
        "best loss": ["2", "1", "2.5"],
        "step of best loss": ["20", "20", "10"],
        "final validation_loss": ["-", "7", "-"],
        "best validation_loss": ["-", "6", "-"],
        "step of best validation_loss": ["-", "10", "-"],
        "tokens": ["1,920", "1,280", "640"],
        "seconds": ["1.75", "0", "0"],
        "tokens per second": ["250", "-", "-"],
        "MFU": ["0.375", "-", "-"],
        "skipped steps": ["2", "0", "0"],
        "optimizer.lr": ["0.5", "0.125", "-"],
    }
    assert json.loads((tmp_path / "t.json").read_text())["runs"]["optimizer.lr"] == {"a": 0.5, "b": 0.125}


def test_validation_losses_of_different_samples_are_named(tmp_path: Path) -> None:
    both = {"a": 1.0, "b": 1.0}
    kept, sizes, lr = {"final validation_loss/x": both}, {"training.global_batch_size": both}, {"optimizer.lr": both}
    assert "differ in training.global_batch_size" in str(differing_validation(kept | sizes | lr))
    for rows in (kept | lr, sizes, sizes | {"final validation_loss": {"a": 1.0}}, kept | {"data.num_workers": both}):
        assert differing_validation(rows) is None


def test_a_diverged_run_does_not_flatten_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [(step, 1.0 + 9.0 / step) for step in range(1, 101)]
    diverged = [(step, loss if step < 60 else 1e4 + step) for step, loss in good]
    alone, both = text_curves({"good": good}), text_curves({"good": good, "diverged": diverged})
    places = [
        [(row, column) for row, line in enumerate(text.splitlines()[:-1]) for column, c in enumerate(line) if c in "o@"]
        for text in (alone, both)
    ]
    assert places[0] == places[1], "the good run is drawn as if it were alone"
    assert plotted_range({"good": good, "diverged": diverged}) == (1.0 + 9.0 / 100, 10.0)
    assert above_picture({"good": good, "diverged": diverged}) == [
        "diverged is above the picture in 41 steps from 60 on, up to 1.01e+04"
    ]
    spike = [(step, 2.5 if step == 50 else 2.0 - step / 100) for step in range(100)]
    assert plotted_range({"spike": spike})[1] == 2.5 and above_picture({"spike": spike}) == [], "it flattens nothing"
    folders = [write_run(tmp_path / name, [{"loss": loss} for _, loss in curve]) for name, curve in
               (("good", good), ("diverged", diverged))]  # fmt: skip
    assert main([str(folder) for folder in folders]) == 0
    assert "diverged is above the picture in 41 steps from 600 on" in capsys.readouterr().out


def test_the_command_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl with a loss"):
        main([f"--job.dump_folder={tmp_path}"])
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 51):
            file.write(json.dumps({"step": step, "loss": 5 / step}) + "\n")
    assert main([f"--job.dump_folder={tmp_path}"]) == 0
    assert "   5.000 ┤█" in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match=rf'run = "{tmp_path}/again": has no metrics.jsonl with a loss'):
        main([str(tmp_path), str(tmp_path / "again")])
    lines = [{"step": step, "loss": 3 / step, "validation_loss": 1.5} for step in range(1, 51)]
    (tmp_path / "again" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    assert main([str(tmp_path), str(tmp_path / "again")]) == 0
    assert "   5.000 |o" in capsys.readouterr().out
    _, labels = drawn[0].axes[0].get_legend_handles_labels()
    assert labels == [tmp_path.name, "again", "again: validation loss"]
    for name in ("loss.nonsense", "loss"):
        with pytest.raises(ConfigError, match=rf'--out = ".*/{name}"'):
            main([f"--job.dump_folder={tmp_path}", "--out", str(tmp_path / name)])
    # A run that ends in NaN, that is named twice, and whose name drives a terminal.
    (tmp_path / "again" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n')
    folder = str((tmp_path / "again").rename(tmp_path / "a\x1b[31m"))
    assert main([folder, folder, str(tmp_path), "--json", str(tmp_path / "table.json")]) == 0
    printed, rows = capsys.readouterr().out, json.loads((tmp_path / "table.json").read_text())["runs"]
    assert "\x1b" not in printed and "final loss         nan" in printed
    assert rows["final loss"] == {"a\\x1b[31m": None, tmp_path.name: 0.1}
    assert rows["best loss"] == {"a\\x1b[31m": 2.5, tmp_path.name: 0.1}
    assert main([folder, "--json", str(tmp_path / "table.json")]) == 0
    assert json.loads((tmp_path / "table.json").read_text())["runs"]["best loss"] == {"a\\x1b[31m": 2.5}
