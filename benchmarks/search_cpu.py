"""A measured search on this machine's CPUs, and how well the planner ranks the layouts, calibrated on the others.

    OMP_NUM_THREADS=1 python benchmarks/search_cpu.py --out outputs/search_cpu
    OMP_NUM_THREADS=1 python benchmarks/search_cpu.py --out outputs/search_cpu --json benchmarks/results/search_cpu.json

Measures a profile with as many processes as layouts have (plan.py microbenchmark), because processes share the cores,
then the layouts of search_cpu.toml (scripts/search.py). What is measured already is not measured again. A layout's time
is predicted twice: by the profile as it was measured, and by one that is fitted to all other layouts with as many
processes, so never with a constant that the layout itself has told. Measure on an idle machine; `machine` says how
idle it was. On two cores it takes about a quarter of an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import ROOT, machine, parser_of, torchrun, write
from titan_like.planner.commands.calibrate import fit, informed, log_errors
from titan_like.planner.profile import load_profile
from titan_like.planner.rows import Row, read_rows
from titan_like.planner.stack import of_own_trainer
from titan_like.search.results import judgement

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def run(*command: str) -> None:
    """Run a script of this repository."""
    subprocess.run([sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, check=True)


def measure(out: Path, counts: list[int], more: list[str]) -> None:
    """Measure the profiles and the layouts, as far as they are not measured yet."""
    out.mkdir(parents=True, exist_ok=True)
    for count in counts:
        profile = out / f"cpu_{count}.toml"
        if not profile.exists():
            run(*torchrun(count)[1:], "scripts/plan.py", "microbenchmark", "--out", str(profile))
    layouts = ["--job.config_file", "benchmarks/search_cpu_run.toml", "--grid", "benchmarks/search_cpu.toml"]
    how = ["--processes", ",".join(map(str, counts)), "--profile", f"{out}/cpu_{{processes}}.toml"]
    run("scripts/search.py", *layouts, *how, "--warmup", "2", "--steps", "3", "--dump_folder", str(out), *more)


def fitted_to_others(rows: list[Row], profile_file: Path) -> list[float]:
    """The predicted step time of each row, with the profile fitted to all others."""
    start = of_own_trainer(load_profile(str(profile_file)), rows[0].work.dtype)
    names, seconds = informed(rows, start), []
    for row in rows:
        others = [other for other in rows if other is not row]
        profile = fit(others, start, names) if others else start
        seconds.append(float(row.seconds * np.exp(log_errors([row], profile)[0])))
    return seconds


def main() -> None:
    """Measure, fit and judge."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the search")
    parser.add_argument("--processes", default="1,2,4,8")
    options, more = parser.parse_known_args()
    out, counts = options.out.resolve(), [int(word) for word in options.processes.split(",")]
    about = machine()
    measure(out, counts, more)
    layouts = json.loads((out / "results.json").read_text())["layouts"]
    measured = [row for row in layouts if row["outcome"] == "ok"]
    rows, left_out = read_rows(out / "rows.json")
    assert len(rows) == len(measured) and not left_out, left_out
    calibrated: list[dict[str, Any]] = []
    for count in counts:
        here = [at for at, row in enumerate(measured) if row["processes"] == count]
        seconds = fitted_to_others([rows[at] for at in here], out / f"cpu_{count}.toml")
        calibrated += [measured[at] | {"predicted_step_time_s": time} for at, time in zip(here, seconds, strict=True)]
    result = {
        "machine": about,
        "profiles_as_measured": judgement(measured),
        "fitted_to_other_layouts": judgement(calibrated),
        "layouts": [
            {name: row[name] for name in ("layout", "step_time_s", "predicted_step_time_s")} for row in calibrated
        ],
    }
    for name in ("profiles_as_measured", "fitted_to_other_layouts"):
        print(f"{name}: {json.dumps(result[name], indent=2)}")
    write(options.json, result)


if __name__ == "__main__":
    main()
