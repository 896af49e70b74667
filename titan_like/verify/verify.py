"""From a configuration to a verdict: reference, layouts, comparison, and where they differ the axis at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import Layout
from titan_like.verify.axes import num_processes
from titan_like.verify.blame import DIFFERENT, FAILS, ONE_PROCESS, SAME, Blame, find_fault
from titan_like.verify.checks import Check, check_run
from titan_like.verify.masks import check_dropout
from titan_like.verify.processes import Outcome, Prepare, Processes, Task
from titan_like.verify.results import DropoutSeen, RunSeen, Truth
from titan_like.verify.shrink import Small, edit, in_layout

DROPOUT = "dropout"
EXACT, SINGLE = "float64", "float32"
_RUNS, _ENDS = "the layout runs", "the layout ends"  # rows
Progress = Callable[[str], None]


class NoReferenceError(Exception):
    """The reference did not come to its end; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """What a verification found."""

    layouts: list[Layout]
    checks: list[Check]
    blame: Blame | None  # None where nothing differs
    not_applicable: list[str]

    @property
    def same(self) -> bool:
        """Whether every layout computed the training of one process."""
        return all(check.ok for check in self.checks)

    @property
    def first_difference(self) -> Check | None:
        """The first row that is not right."""
        return next((check for check in self.checks if not check.ok), None)


class Verifier:
    """Verifies layouts of one small run. The reference is computed once."""

    patience = 10.0  # seconds that the processes of a layout may all wait for one another

    def __init__(self, small: Small, steps: int, processes: Processes, prepare: Prepare | None = None) -> None:
        """``prepare`` makes a context manager within which every process works, the reference's too."""
        self.small, self.steps, self.processes, self.prepare = small, steps, processes, prepare
        self.kinds = kinds_of(small.config, small.dropout)
        folder = processes.folder / "reference"
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._truth: Truth | None = None

    def verify(self, progress: Progress = lambda _: None) -> Verdict:
        """Everything: all kinds of runs in all layouts."""
        progress("one process, plainly: the reference")
        missing = [] if DROPOUT in self.kinds else [f"dropout: the {self.small.config.model.family} family has none"]
        try:
            truth = self.truth()
        except NoReferenceError as error:
            check = Check("one process trains", False, 1, 0, None, str(error))
            return Verdict(self.small.layouts, [check], Blame(ONE_PROCESS, "the reference itself fails", []), missing)
        self.small = Small(with_clipping(self.small.config, truth), self.small.layouts, self.small.dropout)
        checks: list[Check] = []
        blame = None
        for layout in self.small.layouts:
            config = in_layout(self.small.config, layout)
            size = num_processes(config)
            progress(f"{size} processes ({layout.described()}): {', '.join(self.kinds)}")
            found = self.check(config, self.kinds)
            checks = merge(checks, found)
            failed = [kind for kind in self.kinds if any(not check.ok for check in found[kind])]
            if failed:
                kind = failed[0]
                progress(f"{kind} differs; leaving out one axis after the other")

                def outcome_of(changed: JobConfig, kind: str = kind) -> str:
                    outcome = _outcome(self.check(changed, [kind])[kind])
                    progress(f"  {num_processes(changed)} processes: {outcome}")
                    return outcome

                blame = find_fault(config, _outcome(found[kind]), outcome_of)
                break
        return Verdict(self.small.layouts, checks, blame, missing)

    def truth(self) -> Truth:
        """The reference.

        Raises:
            NoReferenceError: it does not come to its end.
        """
        if self._truth is None:
            dtypes = [kind for kind in self.kinds if kind not in (EXACT, DROPOUT)]
            arguments = (self.small.config, self.steps, dtypes, str(self._folder))
            task = Task("titan_like.verify.reference:compute_truth", arguments, self.prepare)
            (outcome,) = self.processes.run(task, 1)
            if not outcome.results:
                raise NoReferenceError(_reason([outcome]))
            self._truth = outcome.results[0]
        return self._truth

    def check(self, config: JobConfig, kinds: list[str]) -> dict[str, list[Check]]:
        """The rows of each kind of run in one layout. A run that does not come to its end is the last, with one row."""
        truth = self.truth()
        arguments = (config, truth, kinds, self.small.dropout, self.processes.timeout)
        task = Task("titan_like.verify.observe:observe", arguments, self.prepare)
        # Compilers are processes that are not seen, and whoever waits for a GPU computes.
        patience = None if config.compile.enable or self.processes.on_gpus else self.patience
        outcomes = self.processes.run(task, num_processes(config), patience)
        rows: dict[str, list[Check]] = {kind: [] for kind in kinds}
        for number, kind in enumerate(kinds):
            seen = [outcome.results[number] for outcome in outcomes if len(outcome.results) > number]
            if len(seen) < len(outcomes):
                rows[kind] = [Check(f"{_RUNS} ({kind})", False, 1, 0, None, _reason(outcomes))]
                return rows
            rows[kind] = check_kind(config, truth, seen)
        if any(outcome.ending != "done" for outcome in outcomes):  # after its last result
            rows[kinds[-1]].append(Check(_ENDS, False, 1, 0, None, _reason(outcomes)))
        return rows


def check_kind(config: JobConfig, truth: Truth, seen: list[RunSeen | DropoutSeen]) -> list[Check]:
    """The rows of one kind of run."""
    with_dropout = [run for run in seen if isinstance(run, DropoutSeen)]
    if with_dropout:
        return check_dropout(config, truth, with_dropout)
    return check_run(config, truth, [run for run in seen if isinstance(run, RunSeen)])


def _outcome(checks: list[Check]) -> str:
    """What the rows of a run come to."""
    if any(not check.ok and check.name.startswith((_RUNS, _ENDS)) for check in checks):
        return FAILS
    return SAME if all(check.ok for check in checks) else DIFFERENT


def _reason(outcomes: list[Outcome]) -> str:
    """Why processes did not come to their end."""
    failures = [
        (outcome.rank, (outcome.failure or "no message").strip().splitlines()[-1])
        for outcome in outcomes
        if outcome.ending == "failed"
    ]
    if not failures:
        ranks = [outcome.rank for outcome in outcomes if outcome.ending == "stopped"]
        return f"ranks {ranks} did not come to an end: they wait for one another, or compute for too long"
    # Whoever fails takes its connections along, and others then fail for the want of them.
    rank, message = next((failure for failure in failures if "onnection" not in failure[1]), failures[0])
    return f"rank {rank}: {message}"


def kinds_of(config: JobConfig, dropout: float | None) -> list[str]:
    """The types to run in, and dropout where the family has it."""
    own = config.training.dtype
    kinds = [EXACT, SINGLE, *([own] if own not in (EXACT, SINGLE) else [])]
    return kinds if dropout is None else [*kinds, DROPOUT]


def with_clipping(config: JobConfig, truth: Truth) -> JobConfig:
    """The configuration with the reference's norm to clip at."""
    return edit(config, {"training.max_norm": truth.max_norm})


def merge(checks: list[Check], found: dict[str, list[Check]]) -> list[Check]:
    """The rows of several layouts as one table: of each row the one nearest to, or farthest above, its tolerance."""
    rows = {check.name: check for check in checks}
    for check in (check for kind in found.values() for check in kind):
        known = rows.get(check.name)
        if known is None or (known.ok and (not check.ok or _nearness(check) > _nearness(known))):
            rows[check.name] = check
    return list(rows.values())


def _nearness(check: Check) -> float:
    return check.worst / check.tolerance if check.tolerance else check.worst
