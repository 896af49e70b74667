"""Measure which layout trains fastest: python scripts/search.py --job.config_file FILE.toml --processes 1,2,4 ...

Its options and exit codes are those of `titan_like.commands.search`; --help prints them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file, not an installed one

from titan_like.commands.search import main
from titan_like.config.load import run_command

if __name__ == "__main__":
    run_command(main)
