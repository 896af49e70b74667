"""Train a model: torchrun --nproc_per_node=N train.py --job.config_file train_configs/debug_gpt.toml

--job.dry_run true only prints one rank's memory, communication and computation; --json PATH also writes them to a file.
"""

import gc
import os
from functools import partial
from typing import NoReturn

from titan_like.metrics.output import outlive_output
from titan_like.train.signals import StopSignals


def main(argv: list[str], signals: StopSignals | None = None) -> int:
    """Load and check the configuration, then train. ``signals``: the handlers that are already installed."""
    from titan_like.config import load_config
    from titan_like.config.errors import require
    from titan_like.config.options import OptionParser

    parser = OptionParser(add_help=False)
    parser.add_path("--json", "file to write a dry run's result to")
    options, arguments = parser.parse_known_args(argv)
    config = load_config(arguments)
    may_write = options.json is None or config.job.dry_run
    require(may_write, "--json", options.json, "only a dry run writes it; add --job.dry_run true or leave it out")
    if config.job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

    # The settings are checked before torch is loaded, and before anything that depends on the machine or the data.
    from titan_like.train.environment import check_meeting, dry_run_world, number_of_processes
    from titan_like.train.rules import resolve_settings

    world_size = dry_run_world(config) if config.job.dry_run else number_of_processes()
    settings = None if config.parallelism.auto else resolve_settings(config, world_size)
    if config.job.dry_run:
        from titan_like.planner.dry_run_page import print_dry_run

        print_dry_run(config, options.json)
        return 0

    check_meeting()
    outlive_output()
    gc.disable()  # importing torch makes 300,000 objects, hardly any of them garbage
    from titan_like.planner.forecast import step_forecast
    from titan_like.planner.stack import named_profile
    from titan_like.train.host_memory import keep_freed_memory
    from titan_like.train.job import run_job
    from titan_like.train.setup import prepare_run, select_device

    gc.freeze()  # later collections skip them
    gc.enable()
    if settings is None:
        from titan_like.planner.auto import with_chosen_layout

        settings = resolve_settings(with_chosen_layout(config, world_size), world_size)
    named_profile(config)  # refuses one that cannot be read
    if select_device(config.training.dtype).type == "cpu":
        keep_freed_memory()
    run = prepare_run(settings)
    run_job(run, signals, step_forecast(run))
    return 0


def run() -> NoReturn:
    """Handle signals as early as possible: most imports of `main` follow."""
    with StopSignals() as signals:
        from titan_like.config.load import run_command

        run_command(partial(main, signals=signals))


if __name__ == "__main__":
    run()
