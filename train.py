"""Train a model: torchrun --nproc_per_node=N train.py --job.config_file train_configs/debug_gpt.toml

With --job.dry_run true only say what one process would do, and with --json PATH write it to a file too.
"""

from __future__ import annotations

import argparse
import os

from titan_like.config import ConfigError, load_config
from titan_like.config.load import run_command


def main(argv: list[str]) -> int:
    """Load and check the configuration, then train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", nargs="?", const="")
    options, settings = parser.parse_known_args(argv)
    config = load_config(settings)
    if config.job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

    # torch loads only for a readable configuration, and only then do settings meet the machine and the data.
    if config.job.dry_run:
        from titan_like.train.dry_run_text import print_dry_run

        print_dry_run(config, options.json)
        return 0
    if options.json is not None:
        raise ConfigError("--json", options.json, "only a dry run writes it; add --job.dry_run true or leave it out")

    from titan_like.train.host_memory import keep_freed_memory
    from titan_like.train.job import run_job
    from titan_like.train.setup import prepare_run, select_device

    if select_device(config.training.dtype).type == "cpu":
        keep_freed_memory()
    run_job(prepare_run(config))
    return 0


if __name__ == "__main__":
    run_command(main)
