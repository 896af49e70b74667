"""What each process compares with the reference, and the checks that all reports give together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from titan_like.models.layers.init import local_parts
from titan_like.optim.shards import local
from titan_like.verify.samples import batches
from titan_like.verify.shrink import Small

if TYPE_CHECKING:
    from titan_like.verify.places import Outputs

# Kinds of runs, next to `HALF`
EXACT, SINGLE, DROPOUT, RESUME, DATA = "float64", "float32", "dropout", "resume", "data"
HALF = ("bfloat16", "float16")
EPS = {EXACT: 2.0**-52, SINGLE: 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


class Row(StrEnum):
    """Rows of the table, in the order in which things happen within a step."""

    INITIAL = "initial weights"
    CHECKPOINTS = "checkpoints that are kept, and resumed from"
    MODE = "modules in training mode"
    SAMPLES = "samples, each exactly once"
    DATA = "samples of the run's own data"
    BATCH = "batch size, samples and tokens"
    RATE = "learning rate"
    LOSS_SCALE = "loss scale"
    SUMS = "precision of sums"
    KEPT = "share that dropout keeps, and its scale"
    MASKS_DIFFER = "dropout different where activations are"
    MASKS_EQUAL = "dropout equal where activations are"
    MASKS_AGAIN = "dropout drawn again in recomputation"
    DROPOUT_AGAIN = "gradients of another run with this seed"
    SCORES = "scores of routers"
    CHOICE = "experts that routers choose of the reference's scores"
    LOSS = "loss"
    SKIPPED = "steps that are not finite are skipped on all ranks"
    GRADIENT = "gradients"
    NORM = "gradient norm"
    FIGURES = "losses and loads of experts that are reported"
    EQUAL = "losses and norms equal on all ranks"
    ZEROS = "gradient elements that are zero"
    STATE = "optimizer state"
    UPDATE = "updates from these gradients"
    WEIGHT = "weights"
    REPLICAS = "copies equal on all ranks"
    RESUMED = "state of a resumed run"
    FRESH = "gradients of a new process with these weights"
    VALIDATION = "validation loss"
    WHOLE_VALIDATION = "validation loss on the whole split"
    LARGE_LOSS = "loss of longer sequences with large logits"
    LARGE_GRADIENT = "gradients of longer sequences with large logits"
    LARGE_NORM = "gradient norm of longer sequences with large logits"
    DROPOUT_RESUMED = "dropout of a run resumed in another layout"
    RUNS = "the layout runs"
    ENDS = "the layout ends"
    PLACE = "what a module computes"  # only to find the place of another difference


# Some process must report each of the reference's numbers in these rows, and in `_AT_THE_ENDS` unless runs resume.
_COVERED = (Row.KEPT, Row.SCORES, Row.LOSS, Row.NORM, Row.GRADIENT, Row.WEIGHT, Row.VALIDATION)
LOSSES = (Row.LOSS, Row.LARGE_LOSS)
GRADIENTS = {Row.GRADIENT: Row.NORM, Row.LARGE_GRADIENT: Row.LARGE_NORM}  # with the row of their norm
ROUTERS = (Row.SCORES, Row.CHOICE)
LARGE = (Row.LARGE_LOSS, Row.LARGE_GRADIENT, Row.LARGE_NORM)
_AT_THE_ENDS = (Row.INITIAL, Row.WHOLE_VALIDATION, *LARGE)


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 norm of the difference, in float64. NaN if either tensor contains one."""
    return (value.detach().double() - expected.detach().double()).norm().item()


def difference_in(row: Row, value: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the difference, or of what routers compute for each token the largest difference."""
    if row in ROUTERS:
        return (value.detach().double() - expected.detach().double()).abs().max().item()
    return distance(value, expected)


class Key(NamedTuple):
    """Identifies one compared number or tensor: its step, its row, and its parameter, module or sample."""

    step: int  # from 1; 0 is before the first
    row: Row
    name: str = ""  # the parameter's, in rows with one number per parameter


@dataclass(frozen=True)
class Check:
    """One comparison on one process, or the comparison that represents its whole row in a step."""

    kind: str  # the run's: a type, dropout or resume
    step: int
    row: Row
    parameter: str
    worst: float  # relative difference, or number of violations
    allowed: float = 0.0  # 0: must be equal
    detail: str = ""  # what differs, as a clause
    rank: int | None = None  # None: all processes together

    @property
    def ok(self) -> bool:
        """Whether the worst difference is within the tolerance. NaN never is."""
        return self.worst <= self.allowed

    @property
    def nearness(self) -> float:
        """How near the check is to a difference, to sort by: above 1, or above 0 if it must be equal, it differs."""
        if self.allowed and not math.isnan(self.worst):
            return self.worst / self.allowed
        return math.inf if self.worst else 0.0


@dataclass(frozen=True)
class Reference:
    """The training that every layout has to reproduce. Its numbers and tensors are in a file that processes share."""

    small: Small
    file: Path  # holds the numbers and tensors, float64
    indices: dict[str, int]  # indices of the first samples by their digests
    names: list[str]  # all parameters' names, in the model's order
    sizes: dict[Key, float]  # L2 norm that a difference is relative to
    allowed: dict[str, dict[Key, float]]  # by type or kind of run, the largest relative difference
    outputs: Outputs | None = None  # the modules whose outputs are compared, to find a place
    own_data: dict[str, list[str]] = field(default_factory=dict)  # digests of the first samples of each split

    def allowed_in(self, kind: str) -> dict[Key, float]:
        """The largest relative differences in a kind of run."""
        return self.allowed[kind if kind in self.allowed else EXACT]

    def whole(self, key: Key) -> torch.Tensor:
        """Read a whole tensor."""
        return _opened(self.file).get_tensor(str(key))

    def part(self, key: Key, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's part of ``value``, and the same part of the reference's tensor."""
        file, expected = _opened(self.file), []
        for part, offset in local_parts(value):
            bounds = tuple(slice(start, start + length) for start, length in zip(offset, part.shape, strict=True))
            expected.append(file.get_slice(str(key))[bounds] if bounds else file.get_tensor(str(key)))
        joined = torch.cat(expected) if len(expected) > 1 else expected[0]
        return local(value), joined.to(value.device)


@cache
def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")


@dataclass
class Report:
    """The checks of one process of a layout in one kind of run."""

    kind: str
    rank: int
    data_rank: int = 0  # the same for processes that see the same samples
    checks: dict[Key, Check] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)  # step → indices
    shared: list[tuple[Key, str]] = field(default_factory=list)  # must be equal wherever the key is

    def add(self, key: Key, difference: float, allowed: float, detail: str = "") -> None:
        """Add a measurement. Of two with one key the worse counts: a process may hold a tied table twice."""
        check = Check(self.kind, *key, difference, allowed, detail, self.rank)
        if key not in self.checks or check.nearness > self.checks[key].nearness:
            self.checks[key] = check

    def require(self, holds: bool, key: Key, reason: str) -> None:
        """Add something that must hold exactly, with what is wrong where it does not."""
        self.add(key, float(not holds), 0.0, reason)

    def share(self, key: Key, value: str) -> None:
        """Add a value that must be the same wherever the key is: on several processes, or several times on this one."""
        self.shared.append((key, value))

    def compare(self, reference: Reference, key: Key, value: torch.Tensor | float) -> None:
        """Compare a number or this process's part of a tensor, if the reference has it in this kind of run.

        The difference is relative to the whole tensor's norm. A number must be the same on all processes as well.
        """
        allowed = reference.allowed_in(self.kind)
        if key not in allowed:
            return
        if not isinstance(value, torch.Tensor):
            row = Row.FIGURES if key.row == Row.FIGURES else Row.EQUAL
            self.share(Key(key.step, row, f"{key.row} {key.name}".rstrip()), repr(value))
            value = torch.tensor(value, dtype=torch.float64)
        part, expected = reference.part(key, value)
        if part.numel():
            message = "" if part.ndim else f"{part.item():.9g}, not {expected.item():.9g}"
            difference = distance(part, expected) / reference.sizes[key]
            self.add(key, difference, allowed[key], message)

    def compare_routers(self, reference: Reference, key: Key, value: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare what a router computes for tokens of this process with the reference's part for the same tokens."""
        allowed = reference.allowed_in(self.kind)
        if key in allowed:
            difference = difference_in(key.row, value, expected) / reference.sizes[key]
            self.add(key, difference, allowed[key])


def combine(reference: Reference, groups: list[list[Report]]) -> list[Check]:
    """One check per step and row of one kind of run, in the order in which things happen.

    Each group has the reports of processes that ran together. A run that was resumed has several groups.
    """
    checks = [check for group in groups for report in group for check in report.checks.values()]
    checks += _of_all_ranks(reference, groups, {Key(check.step, check.row, check.parameter) for check in checks})
    rows, names = list(Row), {name: position for position, name in enumerate(reference.names)}

    def order(check: Check) -> tuple[int, int, int]:
        backward = -1 if check.row in GRADIENTS else 1  # from the model's last parameter
        return check.step, rows.index(check.row), backward * names.get(check.parameter, -1)

    checks.sort(key=order)
    return [_of_row(list(group)) for _, group in groupby(checks, key=lambda check: (check.step, check.row))]


def _of_row(checks: list[Check]) -> Check:
    """The first parameter that differs, with the number of others that do; else the check nearest to a difference."""
    wrong = {check.parameter: check for check in checks if not check.ok}
    first = next(iter(wrong), None)
    worst = max((c for c in checks if first is None or c.parameter == first), key=lambda check: check.nearness)
    if worst.ok:
        return replace(worst, detail="")
    on_rank = "" if worst.rank is None else f" on rank {worst.rank}"
    and_more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return replace(worst, detail=f"{worst.detail or f'differs by {worst.worst:.3g}'}{on_rank}{and_more}")


def _of_all_ranks(reference: Reference, groups: list[list[Report]], reported: set[Key]) -> Iterator[Check]:
    """Checks that take the reports of several processes."""
    kind = groups[0][0].kind
    rows = _COVERED if kind == RESUME else _COVERED + _AT_THE_ENDS
    for key in reference.allowed_in(kind):
        if key.row in rows and key not in reported:
            yield Check(kind, *key, 1, detail="no process has it")
    for group in groups:
        first_values: dict[Key, tuple[str, int]] = {}
        for report in group:
            for key, value in report.shared:
                first, rank = first_values.setdefault(key, (value, report.rank))
                message = f"{first} on rank {rank} and {value} on rank {report.rank}"
                yield Check(kind, key.step, key.row, key.name.split(" @ ")[0], float(value != first), detail=message)
        due = batches(reference.small.config, reference.small.num_steps)
        for step in group[0].samples:
            drawn = {report.data_rank: report.samples.get(step, []) for report in group}  # the same on all of a rank
            taken, expected = Counter(index for indices in drawn.values() for index in indices), Counter(due[step])
            missing, surplus = (sorted(counter.elements())[:4] for counter in (expected - taken, taken - expected))
            message = f"samples {missing} are not taken, and {surplus} (-1: of no step) are taken twice or out of turn"
            yield Check(kind, step, Row.SAMPLES, "", float(taken != expected), detail=message)
