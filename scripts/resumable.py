"""Has a run that ended something left to do? python scripts/resumable.py --job.config_file FILE.toml

Ends with 0 if the run was stopped before its last step and a checkpoint is there to go on from, 1 if it is finished or
cannot go on, 2 after bad input. Takes the arguments that train.py was given.
"""

from __future__ import annotations

from titan_like.checkpoint.progress import is_resumable
from titan_like.config import load_config
from titan_like.config.load import run_command


def main(argv: list[str]) -> int:
    """Look at the run's checkpoints."""
    resumable, sentence = is_resumable(load_config(argv))
    print(sentence, flush=True)
    return 0 if resumable else 1


if __name__ == "__main__":
    run_command(main)
