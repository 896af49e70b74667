"""The command titan-bench-comm from a checkout: torchrun scripts/bench_comm.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the code next to this file, not an installed one

from titan_like.commands.bench_comm import run

if __name__ == "__main__":
    run()
