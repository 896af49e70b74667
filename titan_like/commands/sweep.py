"""Train every combination of some settings: python scripts/sweep.py --job.config_file FILE.toml --grid GRID.toml …

The grid is a TOML that lists the values of any keys, such as [optimizer] lr = [1e-3, 3e-3]. Runs train to their end in
folders of --dump_folder, one after the other or, with one process each, one a GPU. An interrupted sweep continues where
it stopped, and so do its runs with checkpoint.enable. Prints a table, the lowest validation loss first, and writes
loss.png and best.toml.
"""

import signal
import sys
from functools import partial
from pathlib import Path

from titan_like.commands.search import program
from titan_like.config.errors import require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, write_json, write_output_file
from titan_like.metrics import loss_curve
from titan_like.metrics.run_files import METRICS_FILE
from titan_like.metrics.timeline_plot import can_draw


def main(argv: list[str]) -> int:
    """Train what is not done, and rank all."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    parser.add_path("--grid", "the values to combine", "GRID.toml", required=True)
    parser.add_path("--dump_folder", "folder of the runs", "OUT", required=True)
    parser.add_number("--processes", int, least=1, most=2**20, default=1, help="of each run (default: 1)")
    options, settings = parser.parse_known_args(argv)
    out = Path(options.dump_folder)

    from titan_like.checkpoint.step_folders import hold
    from titan_like.planner.commands.search import run_as_toml
    from titan_like.search.sweep import Sweep, is_done, members, ranking

    runs = members(options.grid, settings, out, options.processes)
    out.mkdir(parents=True, exist_ok=True)
    refusal = hold(out / "sweep", "another sweep writes to this folder; stop it, or name another folder", 0.0)
    require(refusal is None, "--dump_folder", str(out), refusal or "")

    import torch

    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.processes}"]
    command = [sys.executable, *(torchrun if options.processes > 1 else []), *program("train")]
    count = torch.cuda.device_count() if options.processes == 1 else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Sweep(command, [str(gpu) for gpu in range(count)]).run(runs)
    ranked, table = ranking(runs)
    if not ranked:
        return 1
    names = [run.name for run in ranked]
    print(loss_curve.text_table(table, names))
    if sentence := loss_curve.differing_validation(table):
        print(sentence)
    write_json(options.json, {"best": names[0] if is_done(ranked[0]) else None, "runs": table})
    if not is_done(ranked[0]):
        return 1
    best = run_as_toml(ranked[0].config, options.processes, out / "best.toml", [f"{names[0]}, the best of a sweep"])
    write_output_file(out / "best.toml", best)
    if can_draw():
        curves = {run.name: loss_curve.read_losses(run.folder / METRICS_FILE) for run in ranked}
        loss_curve.draw_losses({name: curve for name, curve in curves.items() if "loss" in curve}, out / "loss.png")
    print(f"best: {names[0]}; wrote {out / 'best.toml'}")
    return 0


run = partial(run_command, main)
