"""The command titan-plot-loss from a checkout: python scripts/plot_loss.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the code next to this file, not an installed one

from titan_like.commands.plot_loss import run

if __name__ == "__main__":
    run()
