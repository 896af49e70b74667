"""The command titan-search from a checkout: python scripts/search.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the code next to this file, not an installed one

from titan_like.commands.search import run

if __name__ == "__main__":
    run()
