"""Measure which layout trains fastest: python scripts/search.py --job.config_file FILE.toml --processes 1,2,4 ...

Trains a run for some steps in one layout after the other, each in its own torchrun. Writes to --dump_folder results.csv
and .json, throughput.png, best.toml (the run in its fastest layout) and rows.json, to which scripts/plan.py calibrate
fits a profile. --grid names a TOML with the values of each key to combine; --top K measures the planner's K best
layouts for each number of processes; without --profile, it first measures a CPU for the planner, once. Out of memory is
a result. An interrupted search continues where it stopped. In a Slurm job, trials run on its nodes.
Exit codes: 0 done, 1 no layout trained, 2 bad input.
"""

import argparse
import os
import signal
from functools import partial
from pathlib import Path

import titan_like
from titan_like.config import load_config
from titan_like.config.errors import require
from titan_like.config.load import edit, parse_overrides, run_command
from titan_like.config.options import OptionParser, write_json


def build_parser() -> argparse.ArgumentParser:
    """The options that a search adds to the run's settings."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    parser.add_argument("--processes", metavar="N[,N...]", help="numbers of processes (default: the grid's)")
    parser.add_path("--dump_folder", "folder of the results", "OUT", required=True)
    parser.add_path("--grid", "the values to combine (docs/search.md)", "GRID.toml")
    meaning = "the planner's layouts to measure (default: 8)"
    parser.add_number("--top", int, least=1, most=1e5, metavar="K", help=meaning)
    parser.add_path("--profile", "a shipped one or a TOML file; {processes} in its name is replaced", "PROFILE")
    parser.add_number("--warmup", int, least=0, default=3, help="steps before the measured ones (default: 3)")
    parser.add_number("--steps", int, least=1, default=5, help="measured steps; their median counts (default: 5)")
    parser.add_number("--timeout", float, least=1, most=1e6, default=600.0, help="seconds of a trial (default: 600)")
    parser.add_number("--memory_gib", float, least=0.1, help="memory of a CPU process (default: its share)")
    return parser


def check_options(options: argparse.Namespace) -> list[int]:
    """Refuse the first option that is out of range; returns the numbers of processes."""
    reason = "the grid lists the layouts to measure; give --grid or --top"
    require(options.grid is None or options.top is None, "--top", options.top, reason)
    words = [] if options.processes is None else [word.strip() for word in options.processes.split(",")]
    are_counts = all(word.isdecimal() and 0 < int(word) <= 2**20 for word in words)
    require(are_counts, "--processes", options.processes, "must be whole numbers of at least 1, such as 1,2,4")
    return list(dict.fromkeys(map(int, words)))


def main(argv: list[str]) -> int:
    """Measure the layouts and print them, the fastest first."""
    options, settings = build_parser().parse_known_args(argv)
    counts, config = check_options(options), load_config(settings)

    from titan_like.checkpoint.step_folders import hold
    from titan_like.data.loading.batch_size import check_length
    from titan_like.metrics.devices import known_device
    from titan_like.planner.predict import FLOAT8_NOTE
    from titan_like.planner.profile import load_profile
    from titan_like.planner.search_space import SEARCHED, STAGE_SIZES, set_keys
    from titan_like.planner.stack import profile_of
    from titan_like.search.cases import grid_cases, own_profile, planned_cases, read_grid
    from titan_like.search.trial import OK, Place, Plan, end_processes

    check_length(config.training)  # the best run's file trains as it is
    values = read_grid(options.grid, settings) if options.grid else {}
    listed = values.pop("processes", [])
    counts = counts or list(dict.fromkeys(listed))
    require(counts, "--processes", None, "name the numbers of processes to measure, such as 1,2,4")
    named = {count: (options.profile or "").replace("{processes}", str(count)) for count in counts}
    profiles = {count: load_profile(name) if name else None for count, name in named.items()}

    import torch

    from titan_like.search.results import described
    from titan_like.search.search import Search
    from titan_like.train.setup import host_memory_bytes

    gpus = torch.cuda.device_count()
    place = Place(program("train"), gpus or None, None if gpus else 0.9 * host_memory_bytes() / 2**30)
    if os.environ.get("SLURM_JOB_ID"):
        place = Place.of_slurm(program("train"))
    for count in counts:
        place.check(count)
    gpu_name = torch.cuda.get_device_name(0) if gpus else ""
    gpu = config.cluster.gpu or (gpu_name if known_device(gpu_name) else None)
    config = edit(config, {"cluster.gpu": gpu, "cluster.gpus_per_node": config.cluster.gpus_per_node or place.per_node})
    if not (gpus or place.hosts or options.grid or options.profile or config.cluster.profile or gpu):
        profiles = {count: own_profile(count, Place(program("plan", "scripts"))) for count in counts}
    stacks = {}
    if any(profiles.values()) or config.cluster.profile or gpu:
        stacks = {count: profile_of(config, profile) for count, profile in profiles.items()}
        for count, profile in stacks.items():
            if profile.device.is_cpu and profile.gpus_per_node != count:
                warning = f"{profile.name} was measured with {profile.gpus_per_node} processes, which share the cores"
                print(f"{warning}; predictions for {count} are rough")
        if config.float8.enable:
            print(FLOAT8_NOTE)
    reason = "the planner needs a profile to choose layouts; measure one with scripts/plan.py microbenchmark, or give"
    require(stacks or options.grid, "--profile", None, f"{reason} --grid")
    if options.grid:
        cases = grid_cases(config, counts, values)
    else:
        fixed = frozenset(parse_overrides(settings)) & {*SEARCHED, STAGE_SIZES}
        fixed |= set_keys(config) if config.parallelism.auto else frozenset()
        cases = planned_cases(config, profiles, fixed, options.top or 8)
    reason = f"no layout is valid; {cases[0].reason}"
    require(any(case.sizes for case in cases), "--processes", ",".join(map(str, counts)), reason)

    out = Path(options.dump_folder)
    refusal = hold(out / "search", "another search writes to this folder; stop it, or name another folder", 0.0)
    require(refusal is None, "--dump_folder", str(out), refusal or "")
    plan = Plan(options.warmup, options.steps, options.timeout, options.memory_gib)
    search = Search(out, cases, place, plan, gpu or gpu_name or "CPU", stacks)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the trial ends too, and the files are written
        signal.signal(number, signal.default_int_handler)
    end_processes(out)
    rows = search.run()
    print(f"\n{described(rows)}\nwrote {out}")
    write_json(options.json, {"layouts": rows})
    return 0 if any(row["outcome"] == OK for row in rows) else 1


def program(name: str, folder: str = "") -> tuple[str, ...]:
    """The arguments with which torchrun starts a script of this checkout, or its module in an installed package."""
    script = Path(titan_like.__file__).parents[1] / folder / f"{name}.py"
    return (str(script),) if script.is_file() else ("-m", f"titan_like.commands.{name}")


run = partial(run_command, main)
