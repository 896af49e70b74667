"""Errors of predicted step times before and after a profile takes the links that bench_comm.py has measured.

    python benchmarks/search_cpu.py --out outputs/search_cpu
    python benchmarks/comm_profile.py --search outputs/search_cpu

The runs are those of a measured search on this machine, and the profiles that it measured (plan.py microbenchmark) have
links of their own. For each number of processes, bench_comm.py measures collectives unless
benchmarks/results/links_gloo_N.json holds some; --measure replaces these. Nothing is fitted on the runs. Measure on an
idle machine; a size may take minutes where processes are more than cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import ROOT, parser_of, torchrun, write
from benchmarks.search_cpu import ENVIRONMENT
from titan_like.planner.commands.calibrate import log_errors
from titan_like.planner.links import read_measurements, with_links
from titan_like.planner.profile import load_profile
from titan_like.planner.rows import read_rows
from titan_like.planner.stack import of_own_trainer

LARGEST = {2: "1g", 4: "256m", 8: "64m"}  # of bench_comm.py: memory and time on this machine


def measure(processes: int, file: Path) -> None:
    """Run bench_comm.py, which prints what it finds."""
    words = ["scripts/bench_comm.py", "--largest", LARGEST.get(processes, "64m"), "--json", str(file)]
    subprocess.run([*torchrun(processes), *words], cwd=ROOT, env=ENVIRONMENT, check=True)


def main() -> None:
    """Predict every run twice, print and write the errors."""
    parser = parser_of(__doc__)
    parser.add_argument("--search", type=Path, required=True, help="folder of benchmarks/search_cpu.py")
    parser.add_argument("--measure", action="store_true", help="measure collectives anew")
    options = parser.parse_args()
    layouts = json.loads((options.search / "results.json").read_text())["layouts"]
    names = [row["layout"] for row in layouts if row["outcome"] == "ok"]
    rows, left_out = read_rows(str(options.search / "rows.json"))
    assert len(rows) == len(names) and not left_out, left_out
    found: dict[int, dict[str, Any]] = {}
    for processes in sorted({row.work.num_gpus for row in rows} - {1}):
        file = ROOT / f"benchmarks/results/links_gloo_{processes}.json"
        if options.measure or not file.exists():
            measure(processes, file)
        start = load_profile(str(options.search / f"cpu_{processes}.toml"))
        here = [at for at, row in enumerate(rows) if row.work.num_gpus == processes]
        errors = {}
        for when, profile in (("before", start), ("after", with_links(start, read_measurements(str(file), True)))):
            own = of_own_trainer(profile, "float32").changed(one_node=True)
            errors[when] = np.expm1(log_errors([rows[at] for at in here], own)).tolist()
        medians = {when: statistics.median(map(abs, some)) for when, some in errors.items()}
        found[processes] = {"runs": [], "median_error": medians}
        for at, before, after in zip(here, errors["before"], errors["after"], strict=True):
            found[processes]["runs"].append({"layout": names[at], "before": before, "after": after})
            print(f"{names[at]:32s} {before:+7.1%} before {after:+7.1%} after")
        print(f"{processes} processes, median error: {medians['before']:.1%} before, {medians['after']:.1%} after")
    write(options.json, found)


if __name__ == "__main__":
    main()
