"""From a small run to a verdict: compute the reference, run the layout, compare, and locate what differs."""

import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_like.config.errors import require
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.parallel.axes import ACCUMULATION, AXES, Axis, other_layout
from titan_like.parallel.layout import Layout
from titan_like.verify.compare import (
    DATA,
    DROPOUT,
    EXACT,
    GRADIENTS,
    HALF,
    LARGE,
    LOSSES,
    RESUME,
    SINGLE,
    Check,
    Reference,
    Report,
    Row,
    combine,
)
from titan_like.verify.data import WORKERS, observe_data, read_alone
from titan_like.verify.observe import ResumedRun, observe, observe_dropout, observe_places, observe_resumed
from titan_like.verify.places import first_place
from titan_like.verify.processes import DONE, FAILED, Group, Outcome
from titan_like.verify.reference import compute_reference, train_alone
from titan_like.verify.shrink import MOST_PROCESSES, Options, Small, resolve, shrink

SAME, DIFFERENT, FAILS, UNDECIDED = "same", "different", "fails", "undecided"
ONE_PROCESS = "one_process"
_COMPILING = 900.0  # seconds that compilation may take
_LOST = "onnection|remote process exited"  # in messages of gloo and NCCL after another process has failed
_LOCATED = (Row.SCORES, *LOSSES, *GRADIENTS, *GRADIENTS.values(), Row.ZEROS)


class UndecidedError(Exception):
    """A run was stopped, so its result is unknown; the message names the reason."""


@dataclass(frozen=True)
class Blame:
    """The axis at fault: a name from `AXES`, several joined by " + ", or one_process."""

    axis: str
    sentence: str
    trials: dict[str, str]  # axis left out, next to axes that stay out → same, different, fails or undecided


@dataclass
class Verdict:
    """The result of a verification: its checks, and the place and the axis of the first difference."""

    outcome: str  # same, different or undecided
    layout: Layout
    checks: list[Check]  # in the order in which things happen
    blame: Blame | None = None  # if something differs
    place: str | None = None  # the module at fault, if it was found
    reason: str = ""  # if undecided
    not_applicable: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)  # sizes that are smaller than the run's
    left_out: list[str] = field(default_factory=list)  # settings of the run that nothing here checks

    @property
    def first_difference(self) -> Check | None:
        """The first check that differs. Figures that are only reported come last, because they name no place."""
        wrong = [check for check in self.checks if not check.ok]
        return min(wrong, key=lambda check: check.row == Row.FIGURES, default=None)


@dataclass
class Verifier:
    """Verifies one small run."""

    small: Small
    timeout: float = 120.0  # seconds that one run may take
    patience: float = 15.0  # seconds for which the processes of a layout may all wait for one another
    most: int = MOST_PROCESSES  # processes that may run at once
    start: Callable[..., Any] = Group  # what runs a function on every rank, and waits for its end, as `Group` does
    kinds: list[str] = field(default_factory=list)  # kinds of runs; empty: all applicable ones
    progress: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        half = [self.small.config.training.dtype] if self.small.config.training.dtype in HALF else []
        dropout = [DROPOUT] if self.small.dropout else []
        data = [DATA] if self.small.own_data is not None else []
        self.kinds = self.kinds or [*data, EXACT, SINGLE, *half, *dropout, RESUME]

    def verify(self) -> Verdict:
        """Compare all kinds of runs in the layout with one reference. If they differ, find the place and the axis."""
        layout = Layout.of(self.small.config.parallelism)
        subject = "context parallelism" if layout.context > 1 else f"the {self.small.config.model.family} family"
        missing = [] if DROPOUT in self.kinds else [f"dropout: {subject} has none"]
        verdict = Verdict(SAME, layout, [], None, None, "", missing, self.small.limits, self.small.left_out)
        with tempfile.TemporaryDirectory(prefix="verify-") as folder:
            self.folder = Path(folder)
            try:
                self._verify_layout(verdict)
            except UndecidedError as error:
                verdict.outcome, verdict.reason = UNDECIDED, str(error)
        return verdict

    def _verify_layout(self, verdict: Verdict) -> None:
        config, layout = self.small.config, verdict.layout
        training, file = [kind for kind in self.kinds if kind != DATA], self.folder / "reference.safetensors"
        if DATA in self.kinds:
            self.progress(f"{layout.num_processes} processes ({layout.described()}): reading the run's own data")
            alone = self._alone(verdict, read_alone, self.small)
            if isinstance(alone, str):
                verdict.not_applicable.append(f"the run's own data, which cannot be read here: {alone}")
                self.kinds.remove(DATA)
            elif alone is not None:
                self.reference = alone
                sizes = " and ".join(f"{len(digests)} of {split}" for split, digests in alone.own_data.items())
                verdict.left_out = [*verdict.left_out, f"samples of data.dataset after the first {sizes}"]
                self.check(config, [DATA], verdict.checks)
        if training and all(check.ok for check in verdict.checks):
            self.progress("one process: the reference")
            alone = self._alone(verdict, compute_reference, self.small, training, file)
            if isinstance(alone, str):
                raise UndecidedError(alone)
            if alone is not None:
                self.reference = alone
                self.progress(f"{layout.num_processes} processes ({layout.described()}): {', '.join(training)}")
                self.check(config, training, verdict.checks)
        first = verdict.first_difference
        if first is None or verdict.blame is not None:  # the reference itself fails
            return
        self.progress(f"{first.kind} differs; looking for the place and the axis")
        symptom = _outcome([check for check in verdict.checks if check.kind == first.kind])
        verdict.place, verdict.blame = self.locate(config, first), self.blame(config, first, symptom)
        verdict.outcome = DIFFERENT

    def _alone(
        self, verdict: Verdict, function: Callable[..., Reference | str], *arguments: Any
    ) -> Reference | str | None:
        """What a function returns on one process. If it fails, that is the verdict, and None is returned."""
        (alone,) = self.start(function, 1, *arguments).wait(self.timeout)
        if alone.is_undecided:
            raise UndecidedError(f"the reference, on one process: {alone.reason}")
        if alone.result is None:
            verdict.outcome, verdict.blame = DIFFERENT, Blame(ONE_PROCESS, "the reference itself fails", {})
            kind, row = (DATA, Row.DATA) if function is read_alone else (EXACT, Row.RUNS)
            verdict.checks.append(Check(kind, 0, row, "", 1, detail=f"one process alone fails: {alone.reason}"))
        return alone.result

    def check(self, config: JobConfig, kinds: list[str], checks: list[Check]) -> None:
        """Add the checks of each kind of run in one layout, up to the first that differs or does not finish.

        Raises an `UndecidedError` if a run was stopped from outside, and nothing differs so far.
        """
        for kind in kinds:
            if not all(check.ok for check in checks):
                return
            runs = [({DROPOUT: observe_dropout, DATA: observe_data}.get(kind, observe), config, kind)]
            runs = self._resume_sequence(config) if kind == RESUME else runs
            groups: list[list[Report]] = []
            for run in runs:
                outcomes = self._run_layout(self.reference, *run)
                groups.append([outcome.result for outcome in outcomes if outcome.result is not None])
                if any(outcome.ending != DONE for outcome in outcomes):
                    break
            is_complete = len(groups) == len(runs) and len(groups[-1]) == len(outcomes)
            if is_complete:
                checks += combine(self.reference, groups)
            self._add_unfinished(kind, Row.ENDS if is_complete else Row.RUNS, outcomes, checks)

    def _resume_sequence(self, config: JobConfig) -> list[tuple[Any, ...]]:
        """The layout, the layout again, another one, and the first once more resume from each other's checkpoints.

        The next two resume from a checkpoint after which the first trains on, and which is not the first that it saves.
        If there are enough steps, a good step follows the first of them, which an asynchronous save must not see.
        The other layout repeats a step whose update is skipped. The first and the last choose a checkpoint themselves.
        """
        folder, other = Path(tempfile.mkdtemp(dir=self.folder)), other_layout(config, self.most)
        skipped, last = max(self.small.bad_steps), self.small.num_steps
        is_followed = skipped > 2 and skipped - 2 not in self.small.bad_steps
        start, keep = (skipped - 2, 3) if is_followed else (skipped - 1, 2)
        return [
            (observe_resumed, config, ResumedRun(folder, 0, skipped + 1, keep)),
            (observe_resumed, config, ResumedRun(folder, start, last, keep=0, loads_start=True)),
            (observe_resumed, other, ResumedRun(folder, skipped - 1, skipped, keep, loads_start=True)),
            (observe_resumed, config, ResumedRun(folder, skipped, last, keep)),
        ]

    def _run_layout(
        self, reference: Reference, function: Callable, config: JobConfig, *arguments: Any
    ) -> list[Outcome]:
        seconds = self.timeout + (_COMPILING if config.compile.enable else 0.0)
        processes = Layout.of(config.parallelism).num_processes
        # A dataset may wait for a server, or be busy in the loader's thread: neither is a deadlock.
        patience = math.inf if function is observe_data else self.patience
        return self.start(function, processes, reference, config, *arguments).wait(seconds, patience)

    def _add_unfinished(self, kind: str, row: Row, outcomes: list[Outcome], checks: list[Check]) -> None:
        """Add the check of a run that did not finish."""
        unfinished = [outcome for outcome in outcomes if outcome.ending != DONE]
        failures = [outcome for outcome in unfinished if outcome.ending == FAILED]
        stopped = next((outcome for outcome in unfinished if outcome.is_undecided), None)
        if stopped is not None and not failures:
            if all(check.ok for check in checks):
                raise UndecidedError(f"the run in {kind} on {len(outcomes)} processes: {stopped.reason}")
        elif unfinished:
            reason = unfinished[0].reason
            if failures:  # when one process fails its connections close, and others fail because of that
                first = next((outcome for outcome in failures if not re.search(_LOST, outcome.reason)), failures[0])
                reason = f"rank {first.rank}: {first.reason}"
            checks.append(Check(kind, 0, row, "", 1, detail=reason))

    def locate(self, config: JobConfig, first: Check) -> str | None:
        """The module at which a layout departs from the reference, in words; None if it cannot be found."""
        if first.kind not in (EXACT, SINGLE, *HALF) or first.row not in _LOCATED or first.step == 0:
            return None
        dtype = first.kind if first.kind in HALF else EXACT
        small, step = replace(self.small, num_steps=first.step), f"step {first.step}"
        if first.row in LARGE:
            config, small = edit(config, self.small.longer), self.small.large
            step = "the longer sequences"
        arguments = small, [dtype], self.folder / "places.safetensors", partial(train_alone, with_outputs=True)
        (alone,) = self.start(compute_reference, 1, *arguments).wait(self.timeout)
        if not isinstance(alone.result, Reference):
            return None
        outcomes = self._run_layout(alone.result, observe_places, config, dtype)
        if any(outcome.result is None for outcome in outcomes):
            return None
        place = first_place(alone.result, [outcome.result for outcome in outcomes], step)
        if place is None and not config.compile.enable and first.row in (*LOSSES, *GRADIENTS):
            quantity = f"{first.parameter}: its gradient, or the sum of it" if first.row in GRADIENTS else "the loss"
            return f"{quantity}: no module's output differs in {step} by more than rounding"
        return place

    def blame(self, config: JobConfig, first: Check, symptom: str) -> Blame:
        """Find the axis at fault by runs without some of the axes."""
        if first.row == Row.DATA and first.parameter == WORKERS:
            return Blame(WORKERS, "without data workers every rank reads its samples", {})
        if first.row == Row.DATA and first.parameter == RESUME:
            return Blame(RESUME, "only where a run is resumed: a new one reads its samples on every rank", {})
        blame = self.find_fault(config, first, first.kind, symptom)
        if first.row == Row.DATA and blame.axis == ONE_PROCESS:
            cause = "also on one process a sample depends on earlier reads, or on random numbers without a seed"
            return replace(blame, sentence=f'data.dataset = "{config.data.dataset}" itself: {cause}')
        if first.kind != RESUME and first.row != Row.RESUMED:
            return blame
        axis = RESUME if blame.axis == ONE_PROCESS else blame.axis
        if axis == RESUME:  # unless the sequence's other layout, with other microbatches, is wrong by itself
            alone = other_layout(config, self.most)
            outcome = self.outcome_of(alone, first, EXACT)
            if outcome in (DIFFERENT, FAILS):
                return self.find_fault(alone, first, EXACT, outcome)
        return Blame(axis, f"only where a run is resumed; {blame.sentence}", blame.trials)

    def outcome_of(self, config: JobConfig, first: Check, kind: str) -> str:
        """The outcome of a kind of run in a layout. It is undecided if it lacks the row of the ``first`` difference."""
        checks: list[Check] = []
        try:
            self.check(config, [kind], checks)
            outcome, rows = _outcome(checks), {check.row for check in checks}
            if outcome == SAME and first.row not in (Row.RUNS, Row.ENDS, *rows):
                outcome = UNDECIDED
        except UndecidedError:
            outcome = UNDECIDED
        layout = Layout.of(config.parallelism)
        processes = "1 process" if layout.num_processes == 1 else f"{layout.num_processes} processes"
        self.progress(f"  {processes} ({layout.described()}): {outcome}")
        return outcome

    def find_fault(self, config: JobConfig, first: Check, kind: str, symptom: str) -> Blame:
        """Leave out one axis after the other, for good if the difference stays. At fault are axes that have to stay.

        ``symptom`` is what the whole layout shows: different or fails. A trial that fails where the layout finished
        met another problem and proves nothing: a bug that drops the last microbatch leaves none at all in a run with
        one microbatch. An axis without which such trials fail is at fault only if there is no other.
        """
        trials, required = dict[str, str](), list[Axis]()
        for axis in AXES:
            reduced = axis.drop(config)
            if reduced == config:
                continue
            trials[axis.name] = self.outcome_of(reduced, first, kind)
            if trials[axis.name] in (DIFFERENT, symptom):
                config = reduced
            else:
                required.append(axis)
        vanishes = [axis for axis in required if trials[axis.name] == SAME]
        needed = vanishes or [axis for axis in required if axis is not ACCUMULATION]
        if not needed:
            culprit = "without any parallelism: the trainer itself, or the model"
            return Blame(ONE_PROCESS, f"the difference is there also on one process {culprit}", trials)
        # A part is named instead of its whole, and accumulation only if nothing else is left.
        wholes = {name for axis in needed for name in axis.within}
        parts = [axis for axis in needed if axis.name not in wholes]
        guilty = [axis for axis in parts if axis is not ACCUMULATION] or parts
        *titles, last = [axis.title for axis in guilty]
        axes = f"{', '.join(titles)} and {last} together: without any one of them" if titles else f"{last}: without it"
        consequence = "every difference vanishes" if vanishes else "there is nothing to compare"
        several = "; it takes several microbatches to show" if len(parts) > len(guilty) else ""
        return Blame(" + ".join(axis.name for axis in guilty), f"{axes} {consequence}{several}", trials)


def verifier_of(config: JobConfig, options: Options) -> Verifier:
    """The verifier of a configuration's layout.

    Raises a `ConfigError` if there is no valid layout, or there are fewer GPUs than processes.
    """
    small = shrink(config, resolve(config, options.processes), options)
    if not options.on_gpus:
        return Verifier(small, options.timeout)
    needed, gpus = Layout.of(small.config.parallelism).num_processes, torch.cuda.device_count()
    reason = f"this machine has {gpus} GPUs, but the verification needs {needed}; leave --gpus out to use CPUs"
    require(gpus >= needed, "--gpus", needed, reason)
    # A process that waits for its GPU looks idle.
    return Verifier(small, options.timeout, patience=math.inf, most=gpus, start=partial(Group, on_gpus=True))


def _outcome(checks: list[Check]) -> str:
    """The outcome of a run, given its checks."""
    if any(not check.ok and check.row in (Row.RUNS, Row.ENDS) for check in checks):
        return FAILS
    return SAME if all(check.ok for check in checks) else DIFFERENT
