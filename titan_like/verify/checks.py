"""What the processes of a layout saw, held against the reference: one row for each thing that must agree.

Tolerances follow from rounding alone. One process that computes in a type is itself some way from the exact result
(`Errors`, measured on this very run). A layout sums the same numbers in another order and with other partial sums, so
it is another draw from the same rounding: it may be `MARGIN` times as far. Where chance makes the measured distance
tiny there is a floor of a few units of rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.verify.results import RunSeen, StepSeen, Truth

MARGIN = 8.0
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
FLOOR = {"float64": 1e-12, "float32": 8 * EPS["float32"], "bfloat16": EPS["bfloat16"], "float16": EPS["float16"]}
WEIGHTS_FLOOR = 1e-10  # AdamW magnifies what rounding does to small gradients
# The trainer may report losses in float32 whatever it computes in.
REPORTED = 8 * EPS["float32"]
# Of the unit of a half type: with the same pieces rounded alike, what is left is the order of float32 sums, which now
# and then tips a rounding to the half type.
SAME_TYPE_SHARE = 1 / 32
# A parameter's gradient that is smaller than this share of all gradients' norm is compared with that instead.
NEGLIGIBLE = 1e-8


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    ok: bool
    worst: float  # largest relative difference, or how many things are wrong
    tolerance: float  # 0: must be equal
    parameter: str | None = None  # where the worst is; of a difference, the first parameter in the model's order
    detail: str = ""  # of a difference, a clause that says what was seen


def check_run(config: JobConfig, truth: Truth, runs: list[RunSeen]) -> list[Check]:
    """All rows of one kind of run, in the order in which things happen."""
    kind = runs[0].kind
    checks = [
        _initial_weights(config, truth, runs),
        _replicas(truth, runs, "initial weights equal on replicas", [run.initial_digests for run in runs]),
        _samples(config, truth, runs),
        _counters(config, truth, runs),
        _missing_gradients(truth, runs),
        _losses(truth, runs, range(1)),
        _gradients(truth, runs, range(1)),
    ]
    if kind in ("bfloat16", "float16") and rounds_as_one_process(config, truth):
        checks.append(_same_type(truth, runs))
    checks.append(_equal_on_ranks(runs))
    if len(truth.steps) > 1:
        checks.append(_losses(truth, runs, range(1, len(truth.steps))))
    checks.append(_grad_norms(truth, runs))
    if kind == "float64":
        checks.append(_zeros(truth, runs))
    if len(truth.steps) > 1:
        checks.append(_gradients(truth, runs, range(1, len(truth.steps))))
    checks += [
        _weights(truth, runs),
        _replicas(truth, runs, "weights equal on replicas", [run.digests for run in runs]),
        _validation(truth, runs),
        _bad_step(runs),
    ]
    return [_in_kind(check, kind) for check in checks]


def _in_kind(check: Check, kind: str) -> Check:
    return Check(f"{check.name} ({kind})", check.ok, check.worst, check.tolerance, check.parameter, check.detail)


def rounds_as_one_process(config: JobConfig, truth: Truth) -> bool:
    """Whether a layout rounds the same numbers to a half type as one process does with the same microbatches."""
    section = config.parallelism
    sums_differently = section.tensor_parallel_degree * section.context_parallel_degree > 1
    other_pieces = config.training.micro_batch_size != truth.micro_batch_size
    return not (sums_differently or other_pieces or config.compile.enable or config.training.reduce_dtype != "float32")


def _worst_of(name: str, found: Iterable[tuple[float, float, str | None, str]], what: str = "differs") -> Check:
    """The row of several relative differences, each (difference, tolerance, parameter, where), in order.

    The first that is too large is named; where none is, the one nearest to its tolerance.
    """
    nearest: tuple[float, float, str | None] = (0.0, 0.0, None)
    first: tuple[float, float, str | None, str] | None = None
    highest = -1.0
    for difference, tolerance, parameter, where in found:
        if not difference <= tolerance and first is None:  # NaN is too large too
            first = difference, tolerance, parameter, where
        if difference / tolerance > highest:
            highest, nearest = difference / tolerance, (difference, tolerance, parameter)
    if first is None:
        return Check(name, True, *nearest)
    difference, tolerance, parameter, where = first
    return Check(name, False, difference, tolerance, parameter, f"{what} by {difference:.3g} {where}".rstrip())


def _wrong(name: str, problems: list[tuple[str | None, str]]) -> Check:
    """The row of something that must hold exactly: what is wrong, each (parameter, clause)."""
    if not problems:
        return Check(name, True, 0, 0)
    parameter, clause = problems[0]
    return Check(name, False, len(problems), 0, parameter, clause)


def tolerance_of(kind: str, error: float) -> float:
    """How far a layout may be from the exact result when one process is ``error`` away. Relative, both."""
    return max(FLOOR[kind], MARGIN * error)


def _initial_weights(config: JobConfig, truth: Truth, runs: list[RunSeen]) -> Check:
    problems: list[tuple[str | None, str]] = []
    problems += [(second, f"it begins with the random numbers of {first}") for first, second in truth.alike]
    holders: dict[str, set[int]] = {}
    for run in runs:
        for name in run.initial:
            holders.setdefault(name, set()).add(run.coordinates.get("pp", 0))
    table = "embedding.weight" if config.model.flavors[config.model.flavor].get("tied_embeddings") else None
    for name in [*truth.names, *sorted(holders.keys() - set(truth.names))]:
        if name not in holders:
            problems.append((name, "no process has this parameter"))
        elif name not in truth.names:
            problems.append((name, "one process has no such parameter"))
        elif len(holders[name]) > 1 and name != table:
            problems.append((name, f"pipeline ranks {sorted(holders[name])} all have this parameter"))
        for run in runs:
            if run.initial.get(name):
                problems.append((name, f"{run.initial[name]} elements differ on rank {run.rank}"))
    return _wrong("initial weights", problems)


def _replicas(truth: Truth, runs: list[RunSeen], title: str, digests: list[dict[str, list[str]]]) -> Check:
    problems: list[tuple[str | None, str]] = []
    for name in truth.names:
        holders: dict[str, list[int]] = {}
        for run, held in zip(runs, digests, strict=True):
            for value in held.get(name, []):
                holders.setdefault(value, []).append(run.rank)
        if len(holders) > 1:
            groups = " and ".join(f"those of ranks {sorted(set(ranks))}" for ranks in holders.values())
            problems.append((name, f"the copies differ: {groups}"))
    return _wrong(title, problems)


def _data_rank(run: RunSeen) -> tuple[int, ...]:
    """Which samples a process sees: its place in all dimensions whose processes see different ones."""
    return tuple(place for name, place in run.coordinates.items() if name.startswith("dp"))


def _samples(config: JobConfig, truth: Truth, runs: list[RunSeen]) -> Check:
    """Microbatch k of a step holds consecutive samples, and each data-parallel rank takes its consecutive part."""
    problems: list[tuple[str | None, str]] = []
    ranks = sorted({_data_rank(run) for run in runs})
    size = config.training.micro_batch_size
    for number, expected in enumerate(truth.steps, start=1):
        first = expected.consumed_samples - expected.batch_size
        tokens = 0
        seen: dict[tuple[int, ...], StepSeen] = {}
        for run in runs:
            step = run.steps[number - 1]
            if step.samples != seen.setdefault(_data_rank(run), step).samples:
                problems.append((None, f"step {number}: rank {run.rank} has other samples than its replicas"))
        counts = Counter(sample for step in seen.values() for batch in step.samples for sample in batch)
        wrong = [sample for sample in range(first, expected.consumed_samples) if counts[sample] != 1]
        if wrong or sum(counts.values()) != expected.batch_size:
            times = f"sample {wrong[0]} is trained on {counts[wrong[0]]} times" if wrong else "there are others"
            problems.append((None, f"step {number}: {times}"))
        for place, data_rank in enumerate(ranks):
            for k, batch in enumerate(seen[data_rank].samples):
                start = first + (k * len(ranks) + place) * size
                if batch != list(range(start, start + size)) and not problems:
                    problems.append((None, f"step {number}: data rank {place} has {batch} as microbatch {k}"))
        tokens = sum(step.valid_tokens for step in seen.values())
        if tokens != expected.valid_tokens:
            problems.append((None, f"step {number}: {tokens} valid tokens, and there are {expected.valid_tokens}"))
    return _wrong("samples, each exactly once", problems)


def _counters(config: JobConfig, truth: Truth, runs: list[RunSeen]) -> Check:
    problems: list[tuple[str | None, str]] = []
    for number, expected in enumerate(truth.steps, start=1):
        for run in runs:
            step = run.steps[number - 1]
            values = {
                "global batch size": (step.batch_size, expected.batch_size),
                "consumed samples": (step.consumed_samples, expected.consumed_samples),
                "consumed tokens": (step.consumed_tokens, expected.consumed_samples * config.training.seq_len),
            }
            for name, (value, wanted) in values.items():
                if value != wanted:
                    problems.append((None, f"step {number}: {name} is {value}, not {wanted}, on rank {run.rank}"))
            if not math.isclose(step.lr, expected.lr, rel_tol=1e-9, abs_tol=1e-15):
                problems.append((None, f"step {number}: the learning rate is {step.lr:.6g}, not {expected.lr:.6g}"))
            if step.is_skipped:
                problems.append((None, f"step {number} was skipped on rank {run.rank}: its numbers are not finite"))
    return _wrong("learning rate and counters", problems)


def _missing_gradients(truth: Truth, runs: list[RunSeen]) -> Check:
    problems: list[tuple[str | None, str]] = []
    for number in range(1, len(truth.steps) + 1):
        for name in truth.names:
            for run in runs:
                if run.steps[number - 1].gradients.get(name, 0.0) is None:
                    problems.append((name, f"it has no gradient in step {number} on rank {run.rank}"))
    return _wrong("missing gradients", problems)


def _scalars(
    title: str,
    truth: Truth,
    runs: list[RunSeen],
    values: Callable[[RunSeen], list[float]],
    expected: list[float],
    errors: list[float],
    floor: float,
    at: Callable[[int], str],
) -> Check:
    tolerance = max(tolerance_of(runs[0].kind, max(errors)), floor)
    return _worst_of(
        title,
        (
            (abs(values(run)[i] - wanted) / abs(wanted), tolerance, None, f"{at(i)} on rank {run.rank}: "
             f"{values(run)[i]:.9g}, not {wanted:.9g}")
            for i, wanted in enumerate(expected)
            for run in runs
        ),
    )  # fmt: skip


def _losses(truth: Truth, runs: list[RunSeen], steps: range) -> Check:
    part = slice(steps.start, steps.stop)
    return _scalars(
        f"loss of {_titled(steps)}",
        truth,
        runs,
        lambda run: [step.loss for step in run.steps[part]],
        [step.loss for step in truth.steps[part]],
        truth.errors[runs[0].kind].loss[part],
        REPORTED,
        lambda i: f"in step {steps[i] + 1}",
    )


def _titled(steps: range) -> str:
    """Steps by their numbers, which begin at 1."""
    return f"step {steps.stop}" if len(steps) == 1 else f"steps {steps.start + 1} to {steps.stop}"


def _grad_norms(truth: Truth, runs: list[RunSeen]) -> Check:
    return _scalars(
        "gradient norm before clipping", truth, runs, lambda run: [step.grad_norm for step in run.steps],
        [step.grad_norm for step in truth.steps], truth.errors[runs[0].kind].grad_norm, 0.0,
        lambda i: f"in step {i + 1}",
    )  # fmt: skip


def _validation(truth: Truth, runs: list[RunSeen]) -> Check:
    when = ("before step 1", "after step 1", f"after step {len(truth.steps)}")
    return _scalars(
        "validation loss", truth, runs, lambda run: run.validation, truth.validation,
        truth.errors[runs[0].kind].validation, REPORTED, lambda i: when[i],
    )  # fmt: skip


def _equal_on_ranks(runs: list[RunSeen]) -> Check:
    problems: list[tuple[str | None, str]] = []
    for number, first in enumerate(runs[0].steps, start=1):
        for run in runs[1:]:
            step = run.steps[number - 1]
            for name, value, other in (("loss", first.loss, step.loss), ("norm", first.grad_norm, step.grad_norm)):
                if value != other and not (math.isnan(value) and math.isnan(other)):
                    clause = f"{name} of step {number} is {value!r} on rank 0 and {other!r} on rank {run.rank}"
                    problems.append((None, clause))
    for run in runs[1:]:
        if run.validation != runs[0].validation:
            problems.append((None, f"rank {run.rank} reports other validation losses than rank 0"))
    return _wrong("losses and norms equal on all ranks", problems)


def _gradients(truth: Truth, runs: list[RunSeen], steps: range) -> Check:
    kind = runs[0].kind

    def differences() -> Iterable[tuple[float, float, str | None, str]]:
        for index in steps:
            expected, errors = truth.steps[index], truth.errors[kind].gradients[index]
            for name in truth.names:
                size = max(expected.gradients[name], NEGLIGIBLE * expected.grad_norm)
                tolerance = tolerance_of(kind, errors[name] / size)
                for run in runs:
                    distance = run.steps[index].gradients.get(name)
                    if distance is not None:
                        yield distance / size, tolerance, name, f"in step {index + 1} on rank {run.rank}"

    return _worst_of(f"gradients of {_titled(steps)}", differences())


def _same_type(truth: Truth, runs: list[RunSeen]) -> Check:
    kind = runs[0].kind
    table_is_rounded_apart = len({run.coordinates.get("pp", 0) for run in runs}) > 1

    def differences() -> Iterable[tuple[float, float, str | None, str]]:
        expected = truth.steps[0]
        for name in truth.names:
            if name == "embedding.weight" and table_is_rounded_apart:  # each stage rounds its part of the sum
                continue
            size = max(expected.gradients[name], NEGLIGIBLE * expected.grad_norm)
            for run in runs:
                if name in run.steps[0].same_type:
                    distance = run.steps[0].same_type[name] / size
                    yield distance, SAME_TYPE_SHARE * EPS[kind], name, f"on rank {run.rank}"

    return _worst_of("gradients of step 1 against one process in this type", differences())


def _zeros(truth: Truth, runs: list[RunSeen]) -> Check:
    problems: list[tuple[str | None, str]] = []
    for number, expected in enumerate(truth.steps, start=1):
        for run in runs:
            found = run.steps[number - 1].num_zeros
            if found is None or abs(found - expected.num_zeros) > 2 * expected.uncertain_zeros:
                clause = f"step {number}: {found} on rank {run.rank}, not {expected.num_zeros}"
                problems.append((None, clause))
    return _wrong("elements of gradients that are zero", problems)


def _weights(truth: Truth, runs: list[RunSeen]) -> Check:
    kind, errors = runs[0].kind, truth.errors[runs[0].kind]

    def differences() -> Iterable[tuple[float, float, str | None, str]]:
        for name in truth.names:
            size = truth.weights[name] or 1.0
            for run in runs:
                if name in run.weights:
                    by_rounding = max(tolerance_of(kind, errors.weights[name] / size), WEIGHTS_FLOOR)
                    tolerance = max(by_rounding, errors.tipped[name] / size)
                    yield run.weights[name] / size, tolerance, name, f"on rank {run.rank}"

    steps = len(truth.steps)
    return _worst_of(f"weights after {steps} step{'s' if steps > 1 else ''}", differences())


def _bad_step(runs: list[RunSeen]) -> Check:
    problems: list[tuple[str | None, str]] = []
    for run in runs:
        assert run.bad_step is not None
        if run.bad_step.changed:
            problems.append((run.bad_step.changed[0], f"rank {run.rank} updates with gradients that are not finite"))
        if not run.bad_step.counted:
            problems.append((None, f"rank {run.rank} does not count the step as skipped"))
    return _wrong("a step that is not finite is skipped on all ranks", problems)
