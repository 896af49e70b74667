"""The program of a larger microbatch, estimated from those of one sample and of two."""

from __future__ import annotations

from typing import Any

from titan_like.planner.trace.program import Program


def grown(one: Program, two: Program, samples: int) -> Program:
    """Where the programs differ by numbers alone, these grow in proportion to the samples; else operators are repeated.

    A head may differ in the number of chunks of its loss, and a pass in the moments that may be the fullest.
    """
    first, second = (program.tree["segments"] for program in (one, two))
    return Program.from_json({"groups": one.groups, "segments": _grown(first, second, samples)})


class _DifferError(Exception):
    pass


def _grown(one: Any, two: Any, samples: int, name: str = "") -> Any:
    if isinstance(one, bool | str) or one is None:
        if one != two:
            raise _DifferError
        return one
    if isinstance(one, int):
        return one + (samples - 1) * (two - one)
    if isinstance(one, dict):
        return {key: _grown(value, two[key], samples, key) for key, value in one.items()}
    try:
        if len(one) != len(two):
            raise _DifferError
        return [_grown(a, b, samples) for a, b in zip(one, two, strict=True)]
    except _DifferError:
        if name in _COUNTED:  # rows whose last numbers count, as many as said
            return [[*row[: -_COUNTED[name]], *(samples * n for n in row[-_COUNTED[name] :])] for row in one]
        if name == "moments":
            return [[samples * activations, gradients] for activations, gradients in one]
        raise


_COUNTED = {"gemms": 1, "attention": 1, "collectives": 2}
