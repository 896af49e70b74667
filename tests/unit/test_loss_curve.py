import json
import math
from pathlib import Path

import pytest

from titan_like.commands.plot_loss import main
from titan_like.config.errors import ConfigError
from titan_like.metrics.loss_curve import read_losses, text_curve


def test_only_whole_lines_with_a_finite_loss_are_read(tmp_path: Path):
    lines = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": None}, {"step": 4, "loss": 2}]
    lines[3] |= {"validation_loss/books": 3.0, "validation_lm_loss": 1.0}
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"step": 5, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
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
    with pytest.raises(ConfigError, match=rf'--runs = "{tmp_path}/again": has no metrics.jsonl with a loss'):
        main(["--runs", str(tmp_path), str(tmp_path / "again")])
    lines = [{"step": step, "loss": 3 / step, "validation_loss": 1.5} for step in range(1, 51)]
    (tmp_path / "again" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    assert main(["--runs", str(tmp_path), str(tmp_path / "again")]) == 0
    assert "again\n   3.000 ┤█" in capsys.readouterr().out
    _, labels = drawn[0].axes[0].get_legend_handles_labels()
    assert labels == [tmp_path.name, "again", "again: validation loss"]
    for name in ("loss.nonsense", "loss"):
        with pytest.raises(ConfigError, match=rf'--out = ".*/{name}"'):
            main([f"--job.dump_folder={tmp_path}", "--out", str(tmp_path / name)])
