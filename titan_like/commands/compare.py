"""Compare runs, or show one run's loss: python scripts/compare.py outputs/a outputs/b

Prints the curves in one plot and a table: losses, tokens, tokens per second, MFU, skipped steps and the settings that
differ. If matplotlib is installed, it draws them with validation curves in loss.png in the first folder, or in --out.
Instead of folders, a run's settings (--job.config_file FILE.toml) name its job.dump_folder.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from titan_like.config import load_config
from titan_like.config.errors import printable, require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, check_output_file, path_option, write_json
from titan_like.metrics import loss_curve
from titan_like.metrics.run_files import METRICS_FILE
from titan_like.metrics.timeline_plot import can_draw, check_picture


def main(argv: list[str]) -> int:
    """Print the curves, and draw them if that is possible."""
    parser = OptionParser(description=__doc__)
    parser.add_path("--out", "where to draw it (default: loss.png in the first run's folder)", "FILE.png")
    parser.add_path("--json", "file to write the table to")
    options, words = parser.parse_known_args(argv)
    are_folders = len(words) > 0 and not any(word.startswith("-") for word in words)
    paths = [Path(path_option(word)) for word in words] if are_folders else [Path(load_config(words).job.dump_folder)]
    key = "run" if are_folders else "job.dump_folder"
    folders = {_name(folder, paths): folder for folder in paths}
    runs = {name: _curves(folder, key) for name, folder in folders.items()}
    width = min(100, shutil.get_terminal_size().columns - 10)
    losses = {name: curves["loss"] for name, curves in runs.items()}
    if len(runs) == 1 and (sys.stdout.encoding or "").lower().startswith("utf"):
        print(loss_curve.text_curve(next(iter(losses.values())), width))
    else:
        print(loss_curve.text_curves(losses, width, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    for sentence in loss_curve.above_picture(losses):
        print(sentence)
    rows = loss_curve.compare_runs(folders) if len(runs) > 1 or options.json else {}
    if len(runs) > 1:
        print(loss_curve.text_table(rows, list(runs)))
        if differing := loss_curve.differing_validation(rows):
            print(differing)
    write_json(options.json, {"runs": rows})
    picture = Path(options.out or paths[0] / "loss.png")
    if not can_draw():
        print("(a picture needs matplotlib: pip install 'titan_like[plot]')")
        return 0
    check_picture("--out", str(picture))
    check_output_file("--out", str(picture))
    loss_curve.draw_losses(runs, picture)
    print(f"drawn in {printable(str(picture))}")
    return 0


def _curves(folder: Path, key: str) -> dict[str, loss_curve.Curve]:
    path = folder / METRICS_FILE
    curves = loss_curve.read_losses(path) if path.is_file() else {}
    require("loss" in curves, key, str(folder), f"has no {METRICS_FILE} with a loss; train the run first")
    return curves


def _name(folder: Path, folders: list[Path]) -> str:
    """The folder's name, or its path if another run's folder has the same name."""
    names = [path.name for path in {folder.resolve() for folder in folders}]
    return printable(folder.resolve().name if names.count(folder.resolve().name) == 1 else str(folder))


run = partial(run_command, main)
