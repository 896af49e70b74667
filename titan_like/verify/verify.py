"""From a configuration to a verdict: reference, layouts, comparison, and where they differ the axis at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import Layout
from titan_like.verify.axes import num_processes
from titan_like.verify.blame import Blame, find_fault
from titan_like.verify.checks import Check, check_run
from titan_like.verify.masks import check_dropout
from titan_like.verify.processes import Outcome, Prepare, Processes, Task
from titan_like.verify.results import DropoutSeen, RunSeen, Truth
from titan_like.verify.shrink import Small, edit, in_layout

DROPOUT = "dropout"
EXACT, SINGLE = "float64", "float32"
Progress = Callable[[str], None]


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
        truth = self.truth()
        self.small = Small(with_clipping(self.small.config, truth), self.small.layouts, self.small.dropout)
        checks: list[Check] = []
        blame = None
        for layout in self.small.layouts:
            config = in_layout(self.small.config, layout)
            size = num_processes(config)
            progress(f"{size} processes ({describe_layout(layout)}): {', '.join(self.kinds)}")
            found = self.check(config, self.kinds)
            checks = merge(checks, found)
            failed = [kind for kind in self.kinds if any(not check.ok for check in found[kind])]
            if failed:
                kind = failed[0]
                progress(f"{kind} differs; leaving out one axis after the other")

                def differs(changed: JobConfig, kind: str = kind) -> bool:
                    different = any(not check.ok for check in self.check(changed, [kind])[kind])
                    progress(f"  {num_processes(changed)} processes: {'different' if different else 'same'}")
                    return different

                blame = find_fault(config, differs)
                break
        missing = [] if DROPOUT in self.kinds else [f"dropout: the {self.small.config.model.family} family has none"]
        return Verdict(self.small.layouts, checks, blame, missing)

    def truth(self) -> Truth:
        """The reference."""
        if self._truth is None:
            dtypes = [kind for kind in self.kinds if kind not in (EXACT, DROPOUT)]
            arguments = (self.small.config, self.steps, dtypes, str(self._folder))
            task = Task("titan_like.verify.reference:compute_truth", arguments, self.prepare)
            (outcome,) = self.processes.run(task, 1)
            if not outcome.results:
                raise RuntimeError(f"the reference failed:\n{outcome.failure}")
            self._truth = outcome.results[0]
        return self._truth

    def check(self, config: JobConfig, kinds: list[str]) -> dict[str, list[Check]]:
        """The rows of each kind of run in one layout."""
        truth = self.truth()
        arguments = (config, truth, kinds, self.small.dropout, self.processes.timeout)
        task = Task("titan_like.verify.observe:observe", arguments, self.prepare)
        outcomes = self.processes.run(task, num_processes(config))
        rows: dict[str, list[Check]] = {}
        for number, kind in enumerate(kinds):
            seen = [outcome.results[number] for outcome in outcomes if len(outcome.results) > number]
            if len(seen) < len(outcomes):
                rows[kind] = [_failure(outcomes, kind)] if len(rows) == number else []
                return rows | {later: [] for later in kinds[number + 1 :]}
            rows[kind] = check_kind(config, truth, seen)
        return rows


def check_kind(config: JobConfig, truth: Truth, seen: list[RunSeen | DropoutSeen]) -> list[Check]:
    """The rows of one kind of run."""
    with_dropout = [run for run in seen if isinstance(run, DropoutSeen)]
    if with_dropout:
        return check_dropout(config, truth, with_dropout)
    return check_run(config, truth, [run for run in seen if isinstance(run, RunSeen)])


def _failure(outcomes: list[Outcome], kind: str) -> Check:
    """The row of a run that did not come to its end."""
    failed = next((outcome for outcome in outcomes if outcome.ending == "failed"), None)
    if failed is None:
        ranks = [outcome.rank for outcome in outcomes if outcome.ending == "stopped"]
        return Check(f"the layout runs ({kind})", False, len(ranks), 0, None, f"ranks {ranks} did not come to an end")
    last_line = (failed.failure or "no message").strip().splitlines()[-1]
    return Check(f"the layout runs ({kind})", False, 1, 0, None, f"rank {failed.rank}: {last_line}")


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


def describe_layout(layout: Layout) -> str:
    """Its degrees above 1."""
    names = {"pipeline": "pipeline", "replicate": "replicas", "shard": "data", "context": "context", "tensor": "tensor"}
    degrees = [f"{title} {getattr(layout, name)}" for name, title in names.items() if getattr(layout, name) > 1]
    return " × ".join(degrees) or "no parallelism"


def open_processes(folder: Path, timeout: float) -> Processes:
    """CPU processes on this machine."""
    return Processes(folder, timeout)
