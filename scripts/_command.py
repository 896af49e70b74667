"""A command from a checkout: python scripts/plan.py is titan-plan. Each command's file is a link to this one."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the code next to this file, not an installed one

if __name__ == "__main__":
    import_module(f"titan_like.commands.{Path(__file__).stem}").run()
