"""Predict the time and memory of a run before it starts: python scripts/plan.py COMMAND --job.config_file FILE.toml

ask        can I train it? --model and --gpu give layout, batch, days, cost and a TOML; needs no file
predict    step time and memory of the configuration on its cluster, with breakdowns and an error band
search     the fastest valid layout for --gpus, the reasons why others are slower, days, and a TOML for training
capacity   the largest model that trains on one node and on the cluster, and the fewest nodes for the run's own
duration   days for --tokens, at the predicted rate or at --tflops per GPU
simulate   the pipeline of one step, pass by pass, as text and picture, next to a measured step if one is given
calibrate  fit a profile's constants to measured rows, and report the errors on rows that were left out of the fit
microbenchmark
           measure this machine and write a profile of it; the only command that runs kernels

Each command has a --help. Exit codes: 0 done; 1 if the run does not fit into memory (predict, ask) or the model fits on
no number of nodes (capacity); 2 bad input.
"""

import importlib
import os
import sys
from functools import partial

from titan_like.config.errors import require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, as_installed, write_json, write_output_file

COMMANDS = ("ask", "predict", "search", "capacity", "duration", "simulate", "calibrate", "microbenchmark")


def main(argv: list[str]) -> int:
    """Run one of the commands, each a module of `titan_like.planner.commands`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(as_installed((__doc__ or "").rstrip()))
        return 0
    require(argv[0] in COMMANDS, "command", argv[0], f"unknown; use {', '.join(COMMANDS)}")
    command = importlib.import_module(f"titan_like.planner.commands.{argv[0]}")
    prog = f"{os.path.basename(sys.argv[0])} {argv[0]}"
    parser = OptionParser(prog=prog, description=command.__doc__, takes_settings=True)
    command.add_options(parser)
    options, settings = parser.parse_known_args(argv[1:])
    outcome = command.run(options, settings)
    if outcome.text:  # only one of several processes prints
        print(outcome.text)
    for path, text in outcome.files.items():
        write_output_file(path, text)
    write_json(options.json, outcome.json)
    return int(outcome.status)


run = partial(run_command, main)

if __name__ == "__main__":
    run()
