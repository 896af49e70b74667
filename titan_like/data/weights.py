"""The sources that `data.paths` names, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.config.errors import ConfigError

_LARGEST = 1e100  # weight; sums of weights stay finite


@dataclass(frozen=True)
class Share:
    """The paths of one source of a blend, and its weight. None lets the sources' sizes decide."""

    weight: float | None
    paths: list[str]


def shares_of(paths: list[str], one_source_each: bool) -> list[Share]:
    """Weights and paths in turn, as in ``["0.7", "web", "0.3", "books"]``, as a list of sources.

    Args:
        paths: `data.paths`.
        one_source_each: without weights, whether each path is a source of its own; else all are one.

    Raises:
        ConfigError: some weights are missing, or not positive numbers.
    """
    found = [_number(text) for text in paths[::2]]
    if len(paths) < 2 or found[0] is None:
        return [Share(None, [path]) for path in paths] if one_source_each and len(paths) > 1 else [Share(None, paths)]
    if len(paths) % 2:
        raise ConfigError("data.paths", paths, "weights and paths must come in turn, and the last weight has no path")
    weights = []
    for text, weight in zip(paths[::2], found, strict=True):
        if weight is None or not 0 < weight <= _LARGEST:
            problem = "weights and paths must come in turn, and this stands for a weight; give a positive number"
            raise ConfigError("data.paths", text, f"{problem} of at most {_LARGEST:g}")
        weights.append(weight)
    return [Share(weight, [path]) for weight, path in zip(weights, paths[1::2], strict=True)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
