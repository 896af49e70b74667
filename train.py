"""Train a model: torchrun --nproc_per_node=N train.py --job.config_file train_configs/debug_gpt.toml"""

from __future__ import annotations

import os

from titan_like.config import load_config
from titan_like.config.load import run_command


def main(argv: list[str]) -> int:
    """Load and check the configuration, then train."""
    config = load_config(argv)
    if config.job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

    # torch loads only for a readable configuration, and only then do settings meet the machine and the data.
    from titan_like.train.setup import describe, prepare_run

    run = prepare_run(config)
    if config.job.dry_run:
        print(describe(run))
        return 0

    from titan_like.train.host_memory import keep_freed_memory
    from titan_like.train.trainer import Trainer, process_group

    if run.device.type == "cpu":
        keep_freed_memory()
    with process_group(run.device):
        Trainer(run).train()
    return 0


if __name__ == "__main__":
    run_command(main)
