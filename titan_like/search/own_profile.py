"""The profile of this machine's CPU, which a search measures when it first needs one and keeps."""

from __future__ import annotations

import os
import platform
import subprocess
import time

import torch

from titan_like.config.errors import RunError
from titan_like.planner.profile import Profile, load_profile
from titan_like.planner.trace.key import default_folder
from titan_like.search.trial import Place, Plan


def own_profile(processes: int, place: Place) -> Profile:
    """The profile of this CPU for this many processes, from the user's cache or measured now, which is printed.

    ``place`` starts titan-plan. A `RunError` if the measurement fails.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or ("all" if processes == 1 else "1")  # torchrun's default
    stack = f"{len(os.sched_getaffinity(0))}cores_{threads}threads_torch{torch.__version__}"
    path = default_folder().with_name("profiles") / f"{platform.node()}_{stack}_{processes}.toml"
    if not path.is_file():
        many = f"{processes} process{'es' if processes > 1 else ''}"
        print(f"measuring this CPU with {many} for the planner, once; it takes about a minute", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        began, words = time.monotonic(), ["microbenchmark", f"--out={path}"]
        done = subprocess.run(place.command(processes, words, 0, Plan(0, 0, 0.0, None)), stdout=subprocess.DEVNULL)
        if done.returncode or not path.is_file():
            raise RunError("the CPU could not be measured, see above; give --profile or --grid to search without")
        print(f"measured in {time.monotonic() - began:.0f} s and kept in {path}", flush=True)
    return load_profile(str(path))
