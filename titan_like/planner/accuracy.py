"""How far predictions are from measured rows, by group, and whether they choose the layout that was fastest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from titan_like.planner.measured import Row, adapted
from titan_like.planner.memory import memory
from titan_like.planner.profile import profile_for_group
from titan_like.planner.step_time import step_time


@dataclass(frozen=True)
class Prediction:
    """A row beside what the planner says of it."""

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
        """Of the step time, relative to the measured one."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True)
class Sweep:
    """Layouts of one model on as many GPUs with about the same batch, all measured."""

    name: str
    layouts: int
    regret: float  # measured time of the layout predicted to be fastest, over the fastest measured, minus 1
    rank_correlation: float  # Spearman's


@dataclass(frozen=True)
class GroupAccuracy:
    """One GPU and study. Errors are relative; absolute values but for the bias, which is the median with its sign."""

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
    wrongly_fits: int = 0  # rows measured to fit that are predicted not to

    @property
    def worst_regret(self) -> float | None:
        """Over all sweeps."""
        return max((sweep.regret for sweep in self.sweeps), default=None)

    @property
    def rank_correlation(self) -> float | None:
        """Mean over sweeps, each weighed by its layouts."""
        if not self.sweeps:
            return None
        return float(np.average([s.rank_correlation for s in self.sweeps], weights=[s.layouts for s in self.sweeps]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "regret": self.worst_regret, "rank_correlation": self.rank_correlation}


def predict_row(row: Row) -> Prediction | None:
    """What the row's own profile says; None where no profile covers its GPU, study and type."""
    profile = profile_for_group(row.gpu, row.study, row.work.zero_stage)
    if profile is None:
        return None
    profile = adapted(profile, row)
    if row.work.dtype not in profile.device.peak:
        return None
    used = memory(row.work, profile)
    compared = used.ranks[0].total if row.memory_of_first else used.largest
    seconds = step_time(row.work, profile).total
    gib = 2**30
    return Prediction(row, profile.name, seconds, compared / gib, used.capacity / gib, used.largest / gib)


def accuracy(predictions: Sequence[Prediction]) -> list[GroupAccuracy]:
    """By group, in the order of first appearance."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[prediction.row.group].append(prediction)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: list[Prediction]) -> GroupAccuracy:
    errors = np.array([member.error for member in members])
    size = np.abs(errors)
    with_memory = [member for member in members if member.row.memory_gib]
    memory_errors = np.array([abs(m.memory_gib / m.row.memory_gib - 1) for m in with_memory if m.row.memory_gib])
    return GroupAccuracy(
        name,
        sorted({member.profile for member in members}),
        len(members),
        float(np.median(size)),
        float(size.mean()),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(np.median(errors)),
        sweeps(members),
        len(with_memory),
        float(np.median(memory_errors)) if with_memory else None,
        float(np.quantile(memory_errors, 0.9)) if with_memory else None,
        sum(m.memory_gib > m.capacity_gib for m in with_memory),
    )


def sweeps(members: Sequence[Prediction]) -> list[Sweep]:
    """Where at least three layouts of one model, number of GPUs and type were measured; batches within a fifth count
    as one, and times are compared per sample. A layout that was measured several times counts once, with its median."""
    found: dict[str, dict[tuple, list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for member in members:
        work = member.row.work
        model = work.model
        name = (
            f"{member.row.model} {model.num_layers}x{model.hidden_size}/{model.num_attention_heads} "
            f"s{work.seq_len} {member.row.gpus} GPUs {work.dtype} batch {round(4 * math.log2(work.global_batch_size))}"
            f" {member.row.session}"
        )
        layout = (work.tensor, work.pipeline, work.virtual_stages, work.context, work.micro_batch_size)
        found[name][(*layout, work.zero_stage, work.recompute)].append(member)
    results = []
    for name, layouts in found.items():
        if len(layouts) < 3:
            continue
        measured = [
            float(np.median([m.row.seconds / m.row.work.global_batch_size for m in ms])) for ms in layouts.values()
        ]
        predicted = [
            float(np.median([m.seconds / m.row.work.global_batch_size for m in ms])) for ms in layouts.values()
        ]
        chosen = int(np.argmin(predicted))
        regret = measured[chosen] / min(measured) - 1
        results.append(Sweep(name, len(layouts), regret, spearman(predicted, measured)))
    return results


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks, equal values sharing their mean rank."""
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values)
    return np.array([(np.sum(array < value) + np.sum(array <= value) - 1) / 2 for value in array])
