"""Is this layout the same training? python scripts/verify.py --job.config_file FILE.toml --parallelism.KEY VALUE

Trains a small model of the configuration's kind a few steps twice: plainly on one process, and in the configuration's
layout on CPU processes of this machine, or on its GPUs. Compares samples, losses, gradients, norms, weights and
dropout, and says which axis of the layout is at fault if they differ. Ends with 0 if they are the same, 1 if they
differ, 2 after bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # verify the code beside this file, wherever another lies

from titan_like.config import ConfigError, load_config
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser

if TYPE_CHECKING:
    from titan_like.verify.verify import Verdict


def build_parser() -> argparse.ArgumentParser:
    """The options that verification adds to the run's settings."""
    parser = OptionParser(
        description=__doc__,
        epilog="Any --section.key of the run may follow; python train.py --help lists them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare (default: 3)")
    parser.add_argument(
        "--processes",
        type=int,
        help="processes of the job, where a shard degree of -1 leaves them open (default: the degrees' product, "
        "with 2 data-parallel ones if that is valid)",
    )
    parser.add_argument("--full_size", action="store_true", help="keep the sizes of model, sequences and microbatches")
    parser.add_argument("--keep_layout", action="store_true", help="keep degrees above 4, however many processes")
    parser.add_argument("--gpus", action="store_true", help="compute on this machine's GPUs, one for each process")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one run may take (default: 120)")
    parser.add_argument("--json", metavar="PATH", help="also write the result to this file")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that make no sense.

    Raises:
        ConfigError: the first that is out of range.
    """
    if options.steps < 1:
        raise ConfigError("--steps", options.steps, "must be at least 1")
    if options.processes is not None and options.processes < 1:
        raise ConfigError("--processes", options.processes, "must be at least 1")
    if not options.timeout > 0:
        raise ConfigError("--timeout", options.timeout, "must be above 0")
    if options.json and (Path(options.json).is_dir() or not os.access(Path(options.json).parent, os.W_OK)):
        raise ConfigError("--json", options.json, "not a file in a folder that you may write to; name one")


def check_gpus(processes: int) -> None:
    """Refuse to verify on GPUs that are not there.

    Raises:
        ConfigError: fewer GPUs than processes.
    """
    import torch

    found = torch.cuda.device_count()
    if found < processes:
        problem = f"this machine has {found} GPUs and the verification needs {processes}; leave --gpus out to use CPUs"
        raise ConfigError("--gpus", processes, problem)


def main(argv: list[str]) -> int:
    """Verify the configuration's layout and print a table."""
    options, settings = build_parser().parse_known_args(argv)
    if sys.platform != "linux":
        raise ConfigError(
            "verify.py", sys.platform, "its processes are watched by means that only Linux has; use Linux"
        )
    check_options(options)
    config = load_config(settings)
    if config.parallelism.auto:
        problem = "there is no layout to verify yet; scripts/plan.py search --out writes the one that is chosen"
        raise ConfigError("parallelism.auto", True, problem)

    from titan_like.verify.processes import Processes
    from titan_like.verify.shrink import resolve, shrink
    from titan_like.verify.verify import Verifier

    started = time.perf_counter()
    layout = resolve(config, options.processes)
    small = shrink(config, layout, options.steps, full_size=options.full_size, keep_layout=options.keep_layout)
    if options.gpus:
        check_gpus(max(layout.num_processes for layout in small.layouts))
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(Path(folder), options.timeout, on_gpus=options.gpus) as processes,
    ):
        verdict = Verifier(small, options.steps, processes).verify(
            lambda line: print(line, file=sys.stderr, flush=True)
        )
    seconds = time.perf_counter() - started
    print(format_table(verdict))
    print(format_verdict(verdict, seconds))
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(verdict, seconds), indent=2), encoding="utf-8")
    return 0 if verdict.same else 1


def format_table(verdict: Verdict) -> str:
    """One line a row: what was compared, the largest difference, how large it may be, where."""
    width = max(len(check.name) for check in verdict.checks)
    lines = [f"{'':{width}}  {'':9}  {'worst':>9}  {'allowed':>9}"]
    for check in verdict.checks:
        worst, allowed = f"{check.worst:.2e}", f"{check.tolerance:.2e}"
        if not check.tolerance:  # something that must hold exactly: how many things are wrong
            worst, allowed = f"{check.worst:.0f}", "0"
        outcome = "same" if check.ok else "DIFFERENT"
        lines.append(f"{check.name:{width}}  {outcome:9}  {worst:>9}  {allowed:>9}  {check.parameter or ''}".rstrip())
    return "\n".join(lines)


def format_verdict(verdict: Verdict, seconds: float) -> str:
    """The conclusion, with the first difference and the axis at fault if there is one."""
    first = verdict.first_difference
    lines = [f"not applicable: {reason}" for reason in verdict.not_applicable]
    if first is None:
        lines.append(f"same: this layout computes the training of one process ({seconds:.0f} s)")
        return "\n".join(lines)
    where = f"{first.parameter}: " if first.parameter else ""
    lines.append(f"different: {first.name}: {where}{first.detail} ({seconds:.0f} s)")
    if verdict.blame is not None:
        lines.append(f"at fault: {verdict.blame.axis} ({verdict.blame.sentence})")
    return "\n".join(lines)


def as_json(verdict: Verdict, seconds: float) -> dict[str, Any]:
    """The machine-readable result."""
    first = verdict.first_difference
    return {
        "same": verdict.same,
        "seconds": round(seconds, 2),
        "layouts": [asdict(layout) for layout in verdict.layouts],
        "checks": [asdict(check) for check in verdict.checks],
        "first_difference": None if first is None else asdict(first),
        "blame": None if verdict.blame is None else asdict(verdict.blame),
        "not_applicable": verdict.not_applicable,
    }


if __name__ == "__main__":
    run_command(main)
