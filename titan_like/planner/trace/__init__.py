"""What one process does for one microbatch, found by running the recipe on tensors without memory.

`trace` is the planner's only source for operators, messages, parameters and memory. It builds the model with
`titan_like.parallel.apply`, so whatever the recipe does is in the trace.
"""

from functools import lru_cache
from pathlib import Path

from titan_like.planner.trace.key import TraceKey, default_folder, load, save
from titan_like.planner.trace.program import DifferError, Program


@lru_cache(maxsize=4096)
def trace(key: TraceKey, folder: Path | None = None) -> Program:
    """The program of ``key``, from ``folder`` if it is there, else traced and stored.

    Do not change the result: all callers share it. The folder is `default_folder` unless given.
    """
    cache = folder or default_folder()
    program = load(key, cache)
    if program is None:
        from titan_like.planner.trace.run import run_trace  # importing the recipe takes a second

        program = run_trace(key)
        save(key, program, cache)
    return program


@lru_cache(maxsize=4096)
def estimate(key: TraceKey) -> Program:
    """Estimate what `trace` gives from the programs of microbatches of one and two samples."""
    if key.micro_batch_size <= 2:
        return trace(key)
    single, double = (trace(key._replace(micro_batch_size=samples)) for samples in (1, 2))
    try:
        return single.grown(double, key.micro_batch_size)
    except DifferError:
        return trace(key)
