"""The program of a larger microbatch, estimated from those of one sample and of two."""

from __future__ import annotations

from typing import Any

from titan_like.planner.trace.program import Program


def grown(one: Program, two: Program, samples: int) -> Program:
    """Where the programs differ by numbers alone, these grow in proportion to the samples; else operators are repeated.

    A head may differ in the number of chunks of its loss, and a pass in the moments that may be the fullest.
    """
    return Program.from_json(_grown(one.tree, two.tree, samples))


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
        if name in ("gemms", "attention"):
            return [[operator, samples * count] for operator, count in one]
        if name == "collectives":
            return [[kind, [samples * calls, samples * size]] for kind, (calls, size) in one]
        if name == "moments":
            return [[samples * activations, gradients] for activations, gradients in one]
        raise
