"""Whether an ended run can be resumed: python scripts/resumable.py --job.config_file FILE.toml

Exits with 0 if the run stopped before its last step and has a checkpoint to resume from, with 1 if it is finished or
cannot resume, with 2 after bad input. It has the arguments of train.py.
"""

from functools import partial

from titan_like.checkpoint.step_folders import is_resumable
from titan_like.config import load_config
from titan_like.config.load import run_command


def main(argv: list[str]) -> int:
    """Print whether the run can resume, and return the exit code."""
    resumable, sentence = is_resumable(load_config(argv))
    print(sentence, flush=True)
    return 0 if resumable else 1


run = partial(run_command, main)

if __name__ == "__main__":
    run()
