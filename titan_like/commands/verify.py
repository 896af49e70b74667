"""Verify that a layout trains like one process: python scripts/verify.py --job.config_file FILE.toml

Shrinks the configuration's model and trains it for a few steps twice: with a reference loop in one process, and in the
configuration's layout on CPU processes or GPUs of this machine. Compares samples, losses, gradients, norms, updates,
weights, dropout and a resumed run. After a difference, it names the module and the axis of the layout at fault. Exit
codes: 0 the same, 1 different, 2 bad input, 3 undecided, for example because time ran out.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from titan_like.config import load_config
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, write_json
from titan_like.verify.shrink import Options

if TYPE_CHECKING:
    from titan_like.config.schema import JobConfig
    from titan_like.verify.compare import Check
    from titan_like.verify.verify import Verdict


def build_parser() -> argparse.ArgumentParser:
    """The options that verification adds to the run's settings."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    parser.add_argument("--steps", type=int, default=4, help="updates to compare (default: 4)")
    parser.add_argument(
        "--processes",
        type=int,
        help="number of processes of the job, if a shard degree of -1 leaves it open (default: the product of the "
        "degrees, with 2 data-parallel ranks if that is valid)",
    )
    parser.add_argument("--full_size", action="store_true", help="keep the sizes of model, sequences and microbatches")
    parser.add_argument("--keep_layout", action="store_true", help="keep degrees above 4, for any number of processes")
    parser.add_argument("--gpus", action="store_true", help="use this machine's GPUs, one per process")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one run may take (default: 120)")
    parser.add_argument("--verbose", action="store_true", help="print every row instead of one line per kind of run")
    return parser


def main(argv: list[str]) -> int:
    """Verify the configuration's layout and print a line for each kind of run, or a table."""
    options, settings = build_parser().parse_known_args(argv)
    sizes = {"full_size": options.full_size, "keep_layout": options.keep_layout, "on_gpus": options.gpus}
    checked = Options(options.steps, options.processes, options.timeout, **sizes)
    config = load_config(settings)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _verify(config, checked, options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _verify(config: JobConfig, checked: Options, options: argparse.Namespace) -> int:
    """Print and write the verdict on a configuration's layout. Returns the exit code."""
    from titan_like.verify.processes import start_fork_server

    started = time.perf_counter()
    start_fork_server(on_gpus=options.gpus)  # it imports while this process does
    from titan_like.verify.verify import verifier_of

    verifier = verifier_of(config, checked)
    verifier.progress = lambda line: print(line, file=sys.stderr, flush=True)
    verdict = verifier.verify()
    seconds = time.perf_counter() - started
    if options.verbose:
        print(format_table(verdict))
    print(format_verdict(verdict, verifier.kinds, seconds))
    write_json(options.json, as_json(verdict, seconds))
    return {"same": 0, "different": 1, "undecided": 3}[verdict.outcome]


def _terminate(number: int, _: object) -> NoReturn:
    """Leave as after Ctrl-C, so that processes end and temporary folders are removed on the way out."""
    signal.signal(number, signal.SIG_IGN)  # the cleanup is not interrupted
    raise SystemExit(128 + number)


def format_table(verdict: Verdict) -> str:
    """One line for each row and kind of run: the largest difference over all steps, its tolerance and parameter."""
    rows: dict[str, Check] = {}
    for check in verdict.checks:
        name = f"{check.row} ({check.kind})"
        previous = rows.get(name)
        if previous is None or (previous.ok and (not check.ok or check.nearness > previous.nearness)):
            rows[name] = check
    width = max((len(name) for name in rows), default=0)
    lines = [f"{'':{width}}  {'':9}  {'worst':>9}  {'allowed':>9}"]
    for name, check in rows.items():
        worst, allowed = f"{check.worst:.2e}", f"{check.allowed:.2e}"
        if not check.allowed:  # an exact check
            worst, allowed = f"{check.worst:.3g}", "0"
        outcome = "same" if check.ok else "DIFFERENT"
        lines.append(f"{name:{width}}  {outcome:9}  {worst:>9}  {allowed:>9}  {check.parameter}".rstrip())
    return "\n".join(lines)


def format_verdict(verdict: Verdict, kinds: list[str], seconds: float) -> str:
    """A line for each kind of run, then the conclusion: the first difference, its place and the axis at fault."""
    lines = [f"smaller than the run: {', '.join(verdict.limits)}"] if verdict.limits else []
    if verdict.left_out:
        lines.append(f"not verified: {', '.join(verdict.left_out)} (docs/verify.md has all limits)")
    lines += [f"not applicable: {reason}" for reason in verdict.not_applicable]
    lines += [format_kind(verdict.checks, kind) for kind in kinds]
    if verdict.outcome == "same":
        lines.append(f"same: this layout computes the training of one process ({seconds:.0f} s)")
    if verdict.outcome == "undecided":
        from titan_like.verify.processes import TOO_LONG  # this imports torch

        hint = "; give it more with --timeout" if verdict.reason.endswith(TOO_LONG) else ""
        lines.append(f"undecided: {verdict.reason}{hint} ({seconds:.0f} s)")
    if (first := verdict.first_difference) is not None:
        step = f" in step {first.step}" if first.step else ""
        parameter = f"{first.parameter}: " if first.parameter else ""
        lines.append(f"different: {first.row}{step} ({first.kind}): {parameter}{first.detail} ({seconds:.0f} s)")
    if verdict.place is not None:
        lines.append(f"place: {verdict.place}")
    if verdict.blame is not None:
        lines.append(f"at fault: {verdict.blame.axis} ({verdict.blame.sentence})")
    return "\n".join(lines)


def format_kind(checks: list[Check], kind: str) -> str:
    """One line for a kind of run, with the value that is nearest to its tolerance."""
    of_kind = [check for check in checks if check.kind == kind]
    if not of_kind or not all(check.ok for check in of_kind):
        return f"{kind:9} {'different' if of_kind else 'not compared'}"
    steps = max(check.step for check in of_kind)
    line = f"{kind:9} same  {len({check.row for check in of_kind})} rows, {steps} step{'s' if steps > 1 else ''}"
    measured = [check for check in of_kind if check.allowed and math.isfinite(check.nearness)]
    if not measured:
        return line
    nearest = max(measured, key=lambda check: check.nearness)
    name = f"{nearest.row} {nearest.parameter}".rstrip()
    return f"{line}; nearest to a difference: {name} {nearest.worst:.1e} of {nearest.allowed:.1e}"


def as_json(verdict: Verdict, seconds: float) -> dict[str, Any]:
    """The machine-readable result."""
    checks = [{**asdict(check), "ok": check.ok} for check in verdict.checks]
    first = verdict.first_difference and {**asdict(verdict.first_difference), "ok": False}
    return {"seconds": round(seconds, 2), **asdict(verdict), "checks": checks, "first_difference": first}


run = partial(run_command, main)
