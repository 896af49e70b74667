"""How far predictions are off on rows that differ from those of a fit: `UNSEEN` of titan_like/planner/predict.py.

    python benchmarks/bands.py --points FILE.csv [FILE.json] [--only RECIPE …] [--json PATH]

For each kind of difference it fits profiles to rows without it and predicts the rows with it. Other GPUs and types: a
recipe's rows of each in turn, from its others, and from the rows of the same software on another GPU. More GPUs: from
the rows on one node, or on the fewest nodes that have four rows. Several GPUs: other stacks' bf16 rows, from this
trainer's on one H100. Experts: from dense models on the same GPU.

A band is √(p90² + UNSEEN²) with the p90 of rows left out of the fit. Its coverage of a recipe's rows is computed with
the UNSEEN that all other recipes give.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file
from benchmarks.measured_rows import Row, read_rows
from benchmarks.profile_recipes import RECIPES
from benchmarks.runs import parser_of, write
from titan_like.planner.commands.calibrate import fit, leave_one_group_out, log_errors
from titan_like.planner.predict import UNSEEN
from titan_like.planner.profile import Profile
from titan_like.planner.stack import of_own_trainer

FEWEST = 4  # rows to fit to
SAME_SOFTWARE = [
    ("fsdp_a100", "fsdp_h100"),
    ("dgx2_v100", "selene_2021"),
    ("jean_zay_v100", "jean_zay_a100"),
    ("megatron_bridge_h100", "megatron_bridge_gb200", "megatron_bridge_gb300"),
]


class Case(NamedTuple):
    """Rows of a recipe that differ in one thing from those that a profile is fitted to."""

    kind: str
    recipe: str  # of these rows
    fitted: str  # of the rows of the fit
    known: list[Row]
    unseen: list[Row]


def cases(rows: dict[str, list[Row]]) -> Iterator[Case]:
    """All of them. ``rows``: by recipe."""
    for name, of_recipe in rows.items():
        start = RECIPES[name].begin(name)
        yield from in_turn("another GPU", name, of_recipe, lambda row, start=start: row.adapted(start).device.name)
        yield from in_turn("another type", name, of_recipe, lambda row: row.work.dtype)
        nodes = [(-(-row.gpus // start.gpus_per_node), row) for row in of_recipe]
        few = sorted(count for count, _ in nodes)[:FEWEST][-1:]
        known = [row for count, row in nodes if [count] <= few]
        yield Case("more GPUs", name, name, known, [row for count, row in nodes if [count] > few])
    for stack in SAME_SOFTWARE:
        for fitted, name in permutations(stack, 2):
            yield Case("another GPU", name, fitted, rows[fitted], rows[name])
    for name in ("fsdp_h100", "torchtitan_h100", "megatron_lm_h100"):
        there = [row for row in rows[name] if row.work.dtype == "bfloat16"]
        yield Case("several GPUs", name, "titan_h100", rows["titan_h100"], there)
    for name in (name for name, recipe in RECIPES.items() if recipe.like):
        for fitted in SAME_SOFTWARE[-1]:
            gpu = RECIPES[fitted].begin(fitted).device.name
            there = [row for row in rows[name] if row.adapted(RECIPES[name].begin(name)).device.name == gpu]
            yield Case("experts", name, fitted, rows[fitted], there)


def in_turn(kind: str, name: str, rows: list[Row], property_of: Callable[[Row], str]) -> Iterator[Case]:
    """Each value of a property, with the rows that have others."""
    for value in sorted({property_of(row) for row in rows}):
        known = [row for row in rows if property_of(row) != value]
        yield Case(kind, name, name, known, [row for row in rows if property_of(row) == value])


class Fits:
    """Fitted constants and their p90 on groups left out, each computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Profile, float]] = {}

    def of(self, name: str, rows: list[Row]) -> tuple[Profile, float]:
        """The profile of a recipe on some of its rows, and its own p90."""
        key, recipe, start = (name, *map(id, rows)), RECIPES[name], RECIPES[name].begin(name)
        if key not in self._known:
            groups = leave_one_group_out(rows, start, recipe.names, recipe.group).values()
            held = np.concatenate([np.abs(np.expm1(log_errors(some, profile))) for profile, some in groups])
            self._known[key] = fit(rows, start, recipe.names), float(np.quantile(held, 0.9))
        return self._known[key]

    def judge(self, case: Case) -> tuple[float, np.ndarray]:
        """The fit's own p90, and the errors on what it has not seen: with its constants on the other's cluster."""
        profile, own = self.of(case.fitted, case.known)
        if case.kind == "several GPUs":  # as this trainer's default predicts them
            bandwidth = RECIPES[case.recipe].begin(case.recipe).node_bandwidth
            profile = of_own_trainer(profile, "bfloat16").changed(node_bandwidth=bandwidth)
        elif case.recipe != case.fitted:
            constants = {constant: getattr(profile, constant) for constant in RECIPES[case.fitted].names}
            profile = RECIPES[case.recipe].begin(case.recipe).changed(**constants)
        return own, np.abs(np.expm1(log_errors(case.unseen, profile)))


def summary(errors: np.ndarray) -> dict[str, float]:
    """Figures of absolute errors."""
    return {"n": len(errors), "median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}


def main() -> None:
    """Fit, predict, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--points", nargs="+", required=True, help="CSV or JSON of measured rows")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="predict these recipes' rows")
    options = parser.parse_args()
    read = [row for path in options.points for row in read_rows(path)[0]]
    rows, fits = {name: recipe.chosen(name, read) for name, recipe in RECIPES.items()}, Fits()
    found: dict[str, dict[str, list[Any]]] = {kind: defaultdict(list) for kind in UNSEEN}
    for case in cases(rows):
        if case.recipe in options.only and len(case.known) >= FEWEST and case.unseen:
            found[case.kind][case.recipe].append(fits.judge(case))
    result: dict[str, Any] = {}
    for kind, by_recipe in found.items():
        pooled = {name: np.concatenate([errors for _, errors in judged]) for name, judged in by_recipe.items()}
        print(f"{kind}: UNSEEN is {UNSEEN[kind]}")
        result[kind] = {"all": summary(np.concatenate(list(pooled.values())))} if pooled else {}
        for name, judged in by_recipe.items():
            result[kind][name] = summary(pooled[name])
            others = [errors for other, errors in pooled.items() if other != name]
            if others:
                wider = float(np.quantile(np.concatenate(others), 0.9))
                inside = np.concatenate([errors <= np.hypot(own, wider) for own, errors in judged])
                result[kind][name]["coverage"] = float(inside.mean())
        for name, one in result[kind].items():
            told = f", the band covers {one['coverage']:.0%}" if "coverage" in one else ""
            print(f"  {name:34s} n {one['n']:3d}, median {one['median']:.1%}, p90 {one['p90']:.1%}{told}")
    write(options.json, result)


if __name__ == "__main__":
    main()
