"""From a configuration to a verdict: reference, layouts, comparison, and where they differ the place and the axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import Layout
from titan_like.verify import jobs, record
from titan_like.verify.axes import num_processes, on_one_process
from titan_like.verify.blame import DIFFERENT, FAILS, ONE_PROCESS, SAME, UNDECIDED, Blame, find_fault
from titan_like.verify.checks import Check, check_kind
from titan_like.verify.places import PlaceSeen, first_place
from titan_like.verify.processes import DONE, FAILED, WAITING, Outcome, Processes
from titan_like.verify.record import DROPOUT, EXACT, HALF, RESUME, SINGLE, Seen, Truth, num_steps
from titan_like.verify.shrink import Small, in_layout

Progress = Callable[[str], None]
_COMPILING = 900.0  # seconds that compilation may take
_LOCATED = (record.LOSS, record.GRADIENT, record.NORM, record.ZEROS, record.MISSING)


class UndecidedError(Exception):
    """A run was stopped by something that tells nothing of what it computes; the message says by what."""

    def __init__(self, message: str, checks: list[Check] | None = None) -> None:
        super().__init__(message)
        self.checks = checks or []  # of the kinds of runs that came to their end


class NoReferenceError(Exception):
    """The reference did not come to its end; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """What a verification found."""

    outcome: str  # same, different or undecided
    layouts: list[Layout]
    checks: list[Check]  # of all layouts, in the order in which things happen
    blame: Blame | None = None  # where something differs
    place: str | None = None  # the module at fault, where it could be found
    reason: str = ""  # of one that is undecided
    not_applicable: list[str] = field(default_factory=list)

    @property
    def first_difference(self) -> Check | None:
        """The first check that is not right."""
        return next((check for check in self.checks if not check.ok), None)


class Verifier:
    """Verifies layouts of one small run. The reference is computed once."""

    def __init__(self, small: Small, processes: Processes, patience: float = 15.0) -> None:
        """For ``patience`` seconds the processes of a layout may all wait for one another."""
        self.small, self.processes, self.patience = small, processes, patience
        self.kinds = kinds_of(small)
        self._truth: Truth | None = None

    def verify(self, progress: Progress = lambda _: None) -> Verdict:
        """Everything: all kinds of runs in all layouts."""
        missing = [] if DROPOUT in self.kinds else [f"dropout: the {self.small.config.model.family} family has none"]
        checks: list[Check] = []
        layouts = self.small.layouts
        try:
            progress("one process, plainly: the reference")
            self.truth()
            for layout in layouts:
                config = in_layout(self.small.config, layout)
                title = f"{num_processes(config)} processes ({layout.described()})"
                progress(f"{title}: {', '.join(self.kinds)}")
                found = self.check(config, self.kinds)
                checks += [check for kind in self.kinds for check in found[kind]]
                wrong = next((kind for kind in self.kinds if _outcome(found[kind]) != SAME), None)
                if wrong is not None:
                    progress(f"{wrong} differs; looking for the place and the axis")
                    first = next(check for check in found[wrong] if not check.ok)
                    place = self.locate(config, first)
                    blame = self._blame(config, first, _outcome(found[wrong]), progress)
                    return Verdict(DIFFERENT, layouts, checks, blame, place, not_applicable=missing)
        except NoReferenceError as error:
            check = Check(EXACT, 0, record.RUNS, False, 1, 0, detail=f"one process alone fails: {error}")
            blame = Blame(ONE_PROCESS, "the reference itself fails", [])
            return Verdict(DIFFERENT, layouts, [check], blame, not_applicable=missing)
        except UndecidedError as error:
            return Verdict(UNDECIDED, layouts, checks + error.checks, reason=str(error), not_applicable=missing)
        return Verdict(SAME, layouts, checks, not_applicable=missing)

    def truth(self) -> Truth:
        """The reference.

        Raises:
            NoReferenceError: it does not come to its end.
            UndecidedError: it was stopped.
        """
        if self._truth is None:
            file = self.processes.folder / "reference.safetensors"
            (outcome,) = self.processes.run(jobs.make_truth, 1, self.small, self.kinds, file)
            if outcome.is_undecided:
                raise UndecidedError(f"the reference, on one process: {outcome.reason}")
            if not outcome.results:
                raise NoReferenceError(outcome.reason)
            self._truth = outcome.results[0]
        return self._truth

    def check(self, config: JobConfig, kinds: list[str]) -> dict[str, list[Check]]:
        """The checks of each kind of run in one layout. After a run that does not come to its end there are no more.

        Raises:
            UndecidedError: a run was stopped from outside, and nothing differs so far.
        """
        at_once = [kind for kind in kinds if kind != RESUME]
        checks: dict[str, list[Check]] = {kind: [] for kind in kinds}
        if at_once:
            outcomes = self._run(jobs.run_layout, config, self.small, config, self.truth(), at_once)
            for number, kind in enumerate(at_once):
                seen = [outcome.results[number] for outcome in outcomes if len(outcome.results) > number]
                if len(seen) < len(outcomes):
                    checks[kind] = self._unfinished(kind, record.RUNS, outcomes, checks)
                    return checks
                checks[kind] = check_kind(self.truth(), [seen])
            if any(outcome.ending != DONE for outcome in outcomes):  # after its last result
                checks[at_once[-1]] += self._unfinished(at_once[-1], record.ENDS, outcomes, checks)
        if RESUME in kinds and all(_outcome(checks[kind]) == SAME for kind in at_once):
            checks[RESUME] = self._check_resumed(config, checks)
        return checks

    def _check_resumed(self, config: JobConfig, checks: dict[str, list[Check]]) -> list[Check]:
        """A relay: the layout, one process, and the layout again go on from each other's checkpoints.

        The layout gets on for two steps after it has saved the first; the second, which is skipped, is done anew.
        """
        last = num_steps(self.small.steps)
        folder = self.processes.folder / f"relay-{len(list(self.processes.folder.iterdir()))}"
        groups: list[list[Seen]] = []
        for leg, start, end in ((config, None, 3), (on_one_process(config), 1, 2), (config, 2, last)):
            outcomes = self._run(jobs.run_leg, leg, self.small, leg, self.truth(), start, end, folder)
            if any(outcome.ending != DONE for outcome in outcomes):
                return self._unfinished(RESUME, record.RUNS, outcomes, checks)
            groups.append([outcome.results[0] for outcome in outcomes])
        return check_kind(self.truth(), groups)

    def _run(self, function: Callable, config: JobConfig, *arguments: object) -> list[Outcome]:
        patience = None if self.processes.on_gpus else self.patience  # whoever waits for a GPU computes
        allowance = _COMPILING if config.compile.enable else 0.0
        return self.processes.run(function, num_processes(config), *arguments, patience=patience, allowance=allowance)

    def _unfinished(self, kind: str, row: str, outcomes: list[Outcome], checks: dict[str, list[Check]]) -> list[Check]:
        """The check of a run that did not come to its end."""
        stopped = next((outcome for outcome in outcomes if outcome.is_undecided), None)
        if stopped is not None and not any(outcome.ending == FAILED for outcome in outcomes):
            if all(_outcome(found) == SAME for found in checks.values()):
                told = f"the run in {kind} on {len(outcomes)} processes: {stopped.reason}"
                raise UndecidedError(told, [check for found in checks.values() for check in found])
            return []
        return [Check(kind, 0, row, False, 1, 0, detail=_reason(outcomes))]

    def locate(self, config: JobConfig, first: Check) -> str | None:
        """The module at which a layout first goes astray; None where that cannot be told."""
        if first.kind not in (EXACT, SINGLE) or first.row not in _LOCATED or first.step == 0:
            return None
        file = self.processes.folder / f"places-{first.step}.safetensors"
        (recorded,) = self.processes.run(jobs.record_places, 1, self.small, self.truth(), first.step, file)
        outcomes = self._run(jobs.compare_places, config, self.small, config, self.truth(), first.step, file)
        seen: list[PlaceSeen] = [outcome.results[0] for outcome in outcomes if outcome.results]
        if not recorded.results or len(seen) < len(outcomes):
            return None
        place = first_place(recorded.results[0], seen, first.step)
        right = f"the outputs of all modules and their gradients are right in step {first.step}"
        if place is None and first.row == record.LOSS:
            return f"the loss: {right}"
        if place is None and first.row == record.GRADIENT:
            return f"{first.parameter}: {right}, but not its gradient, or the sum over microbatches and processes"
        return place

    def _blame(self, config: JobConfig, first: Check, symptom: str, progress: Progress) -> Blame:
        def outcome_of(changed: JobConfig) -> str:
            try:
                checks = self.check(changed, [first.kind])[first.kind]
                outcome = _outcome(checks)
                if outcome == SAME and first.row not in (record.RUNS, record.ENDS, *(check.row for check in checks)):
                    outcome = UNDECIDED
            except UndecidedError:
                outcome = UNDECIDED
            progress(f"  {num_processes(changed)} processes: {outcome}")
            return outcome

        blame = find_fault(config, symptom, outcome_of)
        if first.kind != RESUME and first.row != record.DROPOUT_RESUMED:
            return blame
        axis = RESUME if blame.axis == ONE_PROCESS else blame.axis
        return Blame(axis, f"only where a run is resumed; {blame.sentence}", blame.trials)


def kinds_of(small: Small) -> list[str]:
    """The types to run in, dropout where the family has it, and a run that is resumed."""
    own = small.config.training.dtype
    kinds = [EXACT, SINGLE, *([own] if own in HALF else [])]
    return [*kinds, *([] if small.dropout is None else [DROPOUT]), RESUME]


def summary(checks: list[Check], kind: str) -> str:
    """One line on a kind of run: what came nearest to a difference."""
    mine = [check for check in checks if check.kind == kind]
    wrong = [check for check in mine if not check.ok]
    measured = [check for check in mine if check.allowed and check.ok and math.isfinite(check.nearness)]
    if wrong or not mine:
        return f"{kind:9} {'different' if wrong else 'not compared'}"
    steps = max(check.step for check in mine)
    counted = f"{len({check.row for check in mine})} rows, {steps} step{'s' if steps > 1 else ''}"
    if not measured:
        return f"{kind:9} same  {counted}"
    nearest = max(measured, key=lambda check: check.nearness)
    return (
        f"{kind:9} same  {counted}; nearest to a difference: {nearest.row} {nearest.parameter}".rstrip()
        + f" {nearest.worst:.1e} of {nearest.allowed:.1e}"
    )


def _outcome(checks: list[Check]) -> str:
    """What the checks of a run come to."""
    if any(not check.ok and check.row in (record.RUNS, record.ENDS) for check in checks):
        return FAILS
    return SAME if all(check.ok for check in checks) else DIFFERENT


def _reason(outcomes: list[Outcome]) -> str:
    """Why processes did not come to their end."""
    failures = [outcome for outcome in outcomes if outcome.ending == FAILED]
    if not failures:
        return next((outcome.reason for outcome in outcomes if outcome.ending != DONE), WAITING)
    # Whoever fails takes its connections along, and others then fail for the want of them.
    first = next((outcome for outcome in failures if "onnection" not in outcome.reason), failures[0])
    return f"rank {first.rank}: {first.reason}"
