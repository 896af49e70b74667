"""What all processes of a layout saw, put together: a check for each step and row."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from titan_like.verify import record
from titan_like.verify.record import DROPOUT, RESUME, Key, Measure, Seen, Truth

# Every number of the reference in these rows must be reported by some process.
_COVERED = (record.INITIAL, record.LOSS, record.NORM, record.GRADIENT, record.WEIGHT, record.VALIDATION)
_AT_THE_END = (record.LARGE_LOSS, record.LARGE_GRADIENT, record.LARGE_NORM, record.WHOLE_VALIDATION)
_BACKWARD = (record.GRADIENT, record.LARGE_GRADIENT, record.SAME_TYPE)  # rows whose first parameter is the last one


@dataclass(frozen=True)
class Check:
    """One row of the table, in one step."""

    kind: str  # of the run: a type, dropout, resume
    step: int
    row: str
    ok: bool
    worst: float  # largest relative difference, or how many things are wrong
    allowed: float  # 0: must be equal
    parameter: str = ""  # where it is wrong, or nearest to it
    detail: str = ""  # of a difference, a clause that says what was seen

    @property
    def nearness(self) -> float:
        """Sorts checks by how near they are to a difference, or how far beyond."""
        return Measure(self.worst, self.allowed).nearness

    @property
    def title(self) -> str:
        """What differs, when and in which run."""
        when = f" in step {self.step}" if self.step else ""
        return f"{self.row}{when} ({self.kind})"


def check_kind(truth: Truth, groups: list[list[Seen]]) -> list[Check]:
    """All checks of one kind of run, in the order in which things happen.

    Each group has what the processes saw that ran at the same time: there are several where a run was resumed.
    """
    kind = groups[0][0].kind
    found: dict[Key, list[tuple[Measure, int]]] = defaultdict(list)
    for seen in (seen for group in groups for seen in group):
        for key, measure in seen.measures.items():
            found[key].append((measure, seen.rank))
    if kind != DROPOUT:
        for key, measure in _of_all_ranks(truth, kind, groups, set(found)):
            found[key].append((measure, -1))
    rows: dict[tuple[int, str], list[Key]] = defaultdict(list)
    order = {name: position for position, name in enumerate(truth.names)}
    for key in found:
        rows[key.step, key.row].append(key)
    checks = []
    for (step, row), keys in sorted(rows.items(), key=lambda item: Key(*item[0]).order):
        backward = -1 if row in _BACKWARD else 1
        keys.sort(key=lambda key: backward * order.get(key.name, -1))
        checks.append(_check(kind, step, row, {key: found[key] for key in keys}))
    return checks


def _check(kind: str, step: int, row: str, found: dict[Key, list[tuple[Measure, int]]]) -> Check:
    """Of several numbers: the first that is wrong is named; where none is, the nearest to it."""
    worst = {key: max(measures, key=lambda one: one[0].nearness) for key, measures in found.items()}
    wrong = next(((key, *one) for key, one in worst.items() if not one[0].ok), None)
    if wrong is None:
        key, (measure, _) = max(worst.items(), key=lambda item: item[1][0].nearness)
        return Check(kind, step, row, True, measure.difference, measure.allowed, key.name)
    key, measure, rank = wrong
    count = sum(not measure.ok for measure, _ in worst.values())
    told = measure.detail or f"differs by {measure.difference:.3g}"
    where = "" if rank < 0 else f" on rank {rank}"
    others = f", and {count - 1} more" if count > 1 else ""
    return Check(kind, step, row, False, measure.difference, measure.allowed, key.name, f"{told}{where}{others}")


def _of_all_ranks(
    truth: Truth, kind: str, groups: list[list[Seen]], reported: set[Key]
) -> Iterator[tuple[Key, Measure]]:
    """What no process can see alone."""
    dtype = record.EXACT if kind == RESUME else kind
    rows = _COVERED[1:] if kind == RESUME else _COVERED if dtype in record.HALF else _COVERED + _AT_THE_END
    for key in truth.allowed[dtype]:
        if key.row in rows and key not in reported:
            yield key, Measure(1, 0, "no process has it")
    if kind == record.EXACT:
        for first, second in truth.alike:
            yield Key(0, record.INITIAL, second), Measure(1, 0, f"it begins with the random numbers of {first}")
    for group in groups:
        yield from _equal(group)
        yield from _samples(truth, group)


def _equal(group: list[Seen]) -> Iterator[tuple[Key, Measure]]:
    """Numbers that all ranks report, and copies of parameters."""
    first = group[0]
    for key, value in first.scalars.items():
        problem = None
        for seen in group[1:]:
            other = seen.scalars.get(key, math.nan)
            if value != other and not (math.isnan(value) and math.isnan(other)):
                problem = f"the {key.row} is {value!r} on rank {first.rank} and {other!r} on rank {seen.rank}"
                break
        yield _exact(Key(key.step, record.EQUAL, key.row), problem)
    known: dict[Key, tuple[str, int]] = {}
    for seen in group:
        for key, digest in seen.digests.items():
            other_digest, rank = known.setdefault(key, (digest, seen.rank))
            problem = None if digest == other_digest else f"ranks {rank} and {seen.rank} hold different copies"
            yield _exact(key._replace(name=key.name.split()[0]), problem)


def _samples(truth: Truth, group: list[Seen]) -> Iterator[tuple[Key, Measure]]:
    """Data-parallel processes share each step's samples out, and all that hold a part of the model see the same."""
    for step in group[0].samples:
        by_place: dict[tuple[int, ...], list[list[int]]] = {}
        problem = None
        for seen in group:
            place = tuple(rank for name, rank in seen.coordinates.items() if name.startswith("dp"))
            drawn = seen.samples.get(step, [])
            if by_place.setdefault(place, drawn) != drawn:
                problem = f"rank {seen.rank} takes other samples than the processes that share its part of the batch"
        batch, consumed = truth.samples_of(step)
        taken = sorted(index for drawn in by_place.values() for microbatch in drawn for index in microbatch)
        wanted = list(range(consumed - batch, consumed))
        if taken != wanted and problem is None:
            problem = _difference(taken, wanted)
        yield _exact(Key(step, record.SAMPLES), problem)


def _difference(taken: list[int], wanted: list[int]) -> str:
    twice = sorted({index for index in taken if taken.count(index) > 1})
    missing, strange = sorted(set(wanted) - set(taken)), sorted(set(taken) - set(wanted))
    clauses = {"twice": twice, "never": missing, "though they belong elsewhere": strange}
    return "; ".join(f"samples {_listed(some)} are taken {how}" for how, some in clauses.items() if some)


def _listed(indices: Iterable[int]) -> str:
    texts = ["of no step" if index < 0 else str(index) for index in indices]
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")


def _exact(key: Key, problem: str | None) -> tuple[Key, Measure]:
    return key, Measure(float(problem is not None), 0.0, problem or "")
