"""Errors of predictions on measured rows, by group, and whether predictions choose the layout that was fastest.

Rows that ran out of memory have no time. They count only in the judgement of what fits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.measured_rows import Row
from benchmarks.stack_profiles import profile_for_group
from benchmarks.stacks import STACKS, memory
from titan_like.planner.profile import Profile

SMALL_REGRET = 0.02


@dataclass(frozen=True)
class Prediction:
    """A measured row next to the planner's prediction."""

    row: Row
    profile: str
    seconds: float
    memory_gib: float  # of the rank that was measured, else of the fullest
    capacity_gib: float
    largest_gib: float = 0.0  # of the fullest rank

    @property
    def fits(self) -> bool:
        """Whether every rank is predicted to fit."""
        return max(self.memory_gib, self.largest_gib) <= self.capacity_gib

    @property
    def error(self) -> float:
        """Error of the step time, relative to the measured one."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True)
class Sweep:
    """Measured layouts of one model on the same number of GPUs with about the same batch."""

    name: str
    layouts: int
    regret: float  # measured time of the layout predicted to be fastest over the fastest measured time, minus 1
    rank_correlation: float  # Spearman's
    noise: float | None = None  # the worst over layouts measured several times: largest time over smallest, minus 1


@dataclass(frozen=True)
class GroupAccuracy:
    """One GPU and study. Errors are relative and absolute, except the bias, which is the median of signed errors."""

    name: str
    profiles: list[str]
    n: int
    median: float
    mean: float
    p90: float
    largest: float
    bias: float
    sweeps: list[Sweep] = field(default_factory=list)
    memory_n: int = 0
    memory_median: float | None = None
    memory_p90: float | None = None
    out_of_memory: int = 0  # rows that ran out of memory
    wrongly_fits: int = 0  # those of them that are predicted to fit
    wrongly_too_large: int = 0  # rows with measured memory that are predicted not to fit

    @property
    def choice(self) -> dict[str, float]:
        """Of the sweeps: those within 2 % of the fastest, the worst regret, and the mean rank correlation."""
        if not self.sweeps:
            return {}
        regrets, layouts = [sweep.regret for sweep in self.sweeps], [sweep.layouts for sweep in self.sweeps]
        mean = float(np.average([sweep.rank_correlation for sweep in self.sweeps], weights=layouts))
        small = sum(regret <= SMALL_REGRET for regret in regrets)
        return {"small_regrets": small, "worst_regret": max(regrets), "rank_correlation": mean}

    def as_dict(self) -> dict[str, Any]:
        """The group for JSON."""
        choice = self.choice
        regret = {"regret": choice.get("worst_regret"), "small_regrets": choice.get("small_regrets", 0)}
        return asdict(self) | regret | {"rank_correlation": choice.get("rank_correlation")}


def predict_row(row: Row, profile: Profile | None = None) -> Prediction | None:
    """The prediction of a profile, by default the row's own; None if none covers its GPU, study and data type."""
    profile = profile or profile_for_group(row.gpu, row.study, row.work.zero_stage, row.session)
    if profile is None:
        return None
    adapted = row.adapted(profile)
    if row.work.dtype not in adapted.device.peak:
        return None
    stack = STACKS.get(profile.name)
    if stack is not None and row.sums_in_float32:
        stack = replace(stack, gradient_state=stack.gradient_state + 4)
    used = memory(row.work, adapted, stack, row.flash)
    compared = used.ranks[0].total if row.memory_of_first else used.largest
    gib = 2**30
    return Prediction(
        row, profile.name, row.predicted(profile), compared / gib, used.capacity / gib, used.largest / gib
    )


def accuracy(predictions: Sequence[Prediction]) -> list[GroupAccuracy]:
    """Accuracy by group, in the order of first appearance."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[prediction.row.group].append(prediction)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: list[Prediction]) -> GroupAccuracy:
    timed = [member for member in members if not member.row.out_of_memory]
    failed = [member for member in members if member.row.out_of_memory]
    errors = np.array([member.error for member in timed] or [0.0])
    size, with_memory = np.abs(errors), [member for member in timed if member.row.memory_gib]
    memory_errors = np.array([abs(m.memory_gib / m.row.memory_gib - 1) for m in with_memory if m.row.memory_gib])
    return GroupAccuracy(
        name,
        sorted({member.profile for member in members}),
        len(timed),
        float(np.median(size)),
        float(size.mean()),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(np.median(errors)),
        sweeps(timed),
        len(with_memory),
        float(np.median(memory_errors)) if with_memory else None,
        float(np.quantile(memory_errors, 0.9)) if with_memory else None,
        len(failed),
        sum(member.fits for member in failed),
        sum(not member.fits for member in with_memory),
    )


def sweeps(members: Sequence[Prediction]) -> list[Sweep]:
    """Group rows into sweeps of at least three layouts, with one model, number of GPUs and data type in one session.

    Batches within a twentieth of each other count as one, and times are compared per sample. A layout that was measured
    several times counts once, with its median.
    """
    found: dict[str, dict[tuple, list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for member in members:
        work = member.row.work
        model = work.model
        batch = 2 ** (round(16 * math.log2(work.global_batch_size)) / 16)  # steps of 4 %
        name = (
            f"{member.row.model} {model.num_layers}x{model.hidden_size}/{model.num_attention_heads} s{work.seq_len} "
            f"{member.row.gpus} GPUs {work.dtype} batch about {batch:.0f} {member.row.session}"
        )
        layout = (work.tensor, work.pipeline, work.virtual_stages, work.context, work.micro_batch_size)
        found[name][(*layout, work.zero_stage, work.recompute)].append(member)
    return [_sweep(name, list(layouts.values())) for name, layouts in found.items() if len(layouts) >= 3]


def _sweep(name: str, layouts: list[list[Prediction]]) -> Sweep:
    times = [[m.row.seconds / m.row.work.global_batch_size for m in members] for members in layouts]
    measured = [float(np.median(several)) for several in times]
    predicted = [float(np.median([m.seconds / m.row.work.global_batch_size for m in members])) for members in layouts]
    regret = measured[int(np.argmin(predicted))] / min(measured) - 1
    spreads = [max(several) / min(several) - 1 for several in times if len(several) > 1]
    return Sweep(name, len(layouts), regret, rank_correlation(predicted, measured), max(spreads, default=None))


def judgement(predictions: Sequence[Prediction], groups: int) -> dict[str, float]:
    """What is recorded of a profile besides its error band, from rows of ``groups`` groups left out of the fit in turn.

    The constants of memory are not fitted, so its errors are those of the rows themselves.
    """
    found = _group("", list(predictions))
    kept: dict[str, float] = {"rows": found.n, "groups": groups, "mean": found.mean, "p90": found.p90}
    if found.sweeps:
        noise = [sweep.noise for sweep in found.sweeps if sweep.noise is not None]
        kept |= {"sweeps": len(found.sweeps)} | found.choice | ({"noise": max(noise)} if noise else {})
    if found.memory_median is not None and found.memory_p90 is not None:
        kept |= {"memory_rows": found.memory_n, "memory_median": found.memory_median, "memory_p90": found.memory_p90}
        kept["memory_too_large"] = found.wrongly_too_large
    return kept


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; equal values share their mean rank. 1 if all values of one side are equal."""
    from scipy.stats import spearmanr  # an optional dependency

    if len(set(first)) == 1 or len(set(second)) == 1:
        return 1.0
    return float(spearmanr(first, second).statistic)
