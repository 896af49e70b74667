"""Measure which layout trains fastest: python scripts/search.py --job.config_file FILE.toml --processes 1,2,4 ...

Trains a run for a few steps in one layout after the other, each under a torchrun of its own, and writes to --dump_folder
results.csv and results.json, throughput.png, best.toml (the run in its fastest layout) and rows.json, to which
plan.py calibrate fits a profile. --grid names a TOML with the values of each key to combine; --top K takes the planner's
K best layouts for each number of processes (the default, with K = 8). Out of memory is a result. A search that was ended
goes on where it left off. Within a Slurm job, trials run on its nodes. Exit codes: 0 done, 1 no layout trained, 2 bad
input.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import titan_like
from titan_like.config import ConfigError, JobConfig, load_config
from titan_like.config.load import edit, parse_overrides
from titan_like.config.options import OptionParser, check_output_file, json_text, path_option, write_output_file

if TYPE_CHECKING:
    from titan_like.search.cases import Case, Refused

_TOP = 8
_GIB = 2**30


def build_parser() -> argparse.ArgumentParser:
    """The options that a search adds to the run's settings."""
    parser = OptionParser(
        prog="search.py",
        description=__doc__,
        epilog="Any --section.key of the run can be given too; python train.py --help lists them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--processes", metavar="N[,N...]", help="numbers of processes (default: those of the grid)")
    parser.add_argument("--dump_folder", type=path_option, required=True, metavar="OUT", help="folder of the results")
    parser.add_argument("--grid", type=path_option, metavar="GRID.toml", help="the values to combine (docs/search.md)")
    parser.add_argument("--top", type=int, metavar="K", help=f"layouts that the planner chooses (default: {_TOP})")
    parser.add_argument("--profile", type=path_option, help="the planner's: a shipped one or a TOML file")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps; the median counts (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a trial (default: %(default)s)")
    parser.add_argument(
        "--memory_gib", type=float, help="memory of a process (default, without GPUs: its share of the machine's)"
    )
    parser.add_argument("--json", type=path_option, metavar="PATH", help="also write results.json to this file")
    return parser


def check_options(options: argparse.Namespace) -> list[int]:
    """Check the options; the process counts of the command line.

    Raises:
        ConfigError: the first option that is out of range.
    """
    if options.grid is not None and options.top is not None:
        raise ConfigError("--top", options.top, "the grid says what to measure; give --grid or --top")
    for name, least in (("top", 1), ("warmup", 1), ("steps", 1)):
        value = getattr(options, name)
        if value is not None and not least <= value <= 10_000:
            raise ConfigError(f"--{name}", value, f"must be from {least} to 10,000")
    for name in ("timeout", "memory_gib"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 1e6:
            raise ConfigError(f"--{name}", value, "must be above 0 and at most a million")
    check_output_file("--json", options.json, options)
    out = Path(options.dump_folder)
    if out.exists() and not out.is_dir():
        raise ConfigError("--dump_folder", str(out), "is a file; name a folder")
    counts = [word.strip() for word in (options.processes or "").split(",")] if options.processes is not None else []
    for word in counts:
        if not word.isdecimal() or not 0 < int(word) <= 2**20:
            raise ConfigError("--processes", options.processes, "must be whole numbers of at least 1, such as 1,2,4")
    return list(dict.fromkeys(map(int, counts)))


def main(argv: list[str]) -> int:
    """Measure the layouts and print them, the fastest first.

    Raises:
        ConfigError: an option, a setting or the grid is wrong, or the folder holds another search.
    """
    options, given = build_parser().parse_known_args(argv)
    counts = check_options(options)
    config = load_config(given)

    from titan_like.data.batch_size import check_length
    from titan_like.planner.predict import FLOAT8_NOTE, profile_and_device
    from titan_like.planner.profile import load_profile
    from titan_like.search.cases import Case, grid_cases, read_grid

    check_length(config.training)  # best.toml is to train as it is
    profile = load_profile(options.profile) if options.profile else None
    listed, values = read_grid(options.grid, given) if options.grid else ([], {})
    counts = counts or listed
    if not counts:
        raise ConfigError("--processes", None, "say on how many to measure, such as 1,2,4")

    import torch

    from titan_like.search.trial import Place, Plan, end_processes

    gpus = torch.cuda.device_count()
    place = Place.found(trainer(), gpus)
    for count in counts:
        problem = place.problem(count)
        if problem is not None:
            raise ConfigError("--processes", count, problem)
    gpu = torch.cuda.get_device_name(0) if gpus else "CPU"
    here = config.cluster.gpu or (gpu if gpus else None)
    predicted = edit(
        config, {"cluster.gpu": here, "cluster.gpus_per_node": config.cluster.gpus_per_node or place.per_node}
    )
    stack = None
    if profile is not None or here is not None or config.cluster.profile is not None:
        stack = profile_and_device(predicted, profile)
    elif not options.grid:
        problem = "the planner needs one to choose layouts on a CPU; plan.py microbenchmark measures it. Or give --grid"
        raise ConfigError("--profile", None, problem)
    if stack is not None and config.float8.enable:
        print(FLOAT8_NOTE)
    cases = grid_cases(predicted, counts, values) if options.grid else _planned(predicted, counts, options, given)
    if not any(isinstance(case, Case) for case in cases):
        problem = f"no layout is valid; the first is refused because of {cases[0].reason}"
        raise ConfigError("--grid" if options.grid else "--processes", options.grid or counts[0], problem)

    from titan_like.checkpoint.step_folders import hold
    from titan_like.search.results import described, judgement
    from titan_like.search.search import Search

    out = Path(options.dump_folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--dump_folder", str(out), f"cannot be made ({error.strerror}); name another one") from None
    refusal = hold(out / "search", "another search writes to this folder; stop it, or name another folder", 0.0)
    if refusal is not None:
        raise ConfigError("--dump_folder", str(out), refusal)
    limit = options.memory_gib * _GIB if options.memory_gib else None
    search = Search(
        predicted, cases, place, Plan(out, options.warmup, options.steps, options.timeout, limit), gpu, stack
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the trial ends too, and the files are written
        signal.signal(number, signal.default_int_handler)
    end_processes(out)
    rows = search.run()
    print(f"\n{described(rows)}\nwrote {out}")
    if options.json:
        write_output_file("--json", options.json, json_text({"layouts": rows, "planner": judgement(rows)}))
    return 0 if any(row["outcome"] == "ok" for row in rows) else 1


def trainer() -> tuple[str, ...]:
    """What torchrun starts: train.py of this checkout, or the same code where the package is installed alone."""
    script = Path(titan_like.__file__).parents[1] / "train.py"
    return (str(script),) if script.is_file() else ("-m", "titan_like.commands.train")


def _planned(
    config: JobConfig, counts: list[int], options: argparse.Namespace, given: list[str]
) -> list[Case | Refused]:
    from titan_like.planner.profile import load_profile
    from titan_like.planner.search_space import SEARCHED, STAGE_SIZES, set_keys
    from titan_like.search.cases import planned_cases

    fixed = frozenset(parse_overrides(given)) & {*SEARCHED, STAGE_SIZES}
    if config.parallelism.auto:
        fixed |= set_keys(config)
    profile = load_profile(options.profile) if options.profile else None
    return list(planned_cases(config, counts, profile, fixed, options.top or _TOP))
