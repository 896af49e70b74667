"""Show a run's loss: python scripts/plot_loss.py --job.config_file train_configs/debug_gpt.toml

Prints the curve and writes it to loss.png in the run's folder, or to --out, if matplotlib is installed.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from titan_like.config import load_config
from titan_like.config.errors import require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, check_output_file
from titan_like.metrics.loss_curve import draw_losses, read_losses, text_curve
from titan_like.metrics.run_files import METRICS_FILE
from titan_like.metrics.timeline_plot import can_draw, check_picture


def main(argv: list[str]) -> int:
    """Print the curve, and draw it if that is possible."""
    parser = OptionParser(description=__doc__)
    parser.add_path("--out", "where to draw it", "FILE.png")
    options, settings = parser.parse_known_args(argv)
    config = load_config(settings)
    folder = Path(config.job.dump_folder)
    path = folder / METRICS_FILE
    losses = read_losses(path) if path.is_file() else []
    require(losses, "job.dump_folder", str(folder), f"has no {METRICS_FILE} with a loss; train the run first")
    print(text_curve(losses, min(100, shutil.get_terminal_size().columns - 10)))
    picture = Path(options.out or folder / "loss.png")
    if not can_draw():
        print("(a picture needs matplotlib: pip install 'titan_like[plot]')")
        return 0
    check_picture("--out", str(picture))
    check_output_file("--out", str(picture))
    draw_losses(losses, f"{config.model.family} {config.model.flavor}", picture)
    print(f"drawn in {picture}")
    return 0


run = partial(run_command, main)
