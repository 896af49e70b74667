"""What went wrong in a run and which setting to change, from its metrics.jsonl and its settings.

A finding needs a number that no healthy run has, so most thresholds are wide; docs/metrics.md lists them with reasons.
Steps at the start, which compile and fill caches, count in no rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from titan_like.config.monitoring import Health
from titan_like.metrics.run_files import METRICS_FILE, read_records, read_settings
from titan_like.train.health import LossWatch

MOST_LINES = 5
_ENOUGH = 100  # steps, before a curve says anything about the rate
_WINDOW, _SPIKE = 128, 7.0  # losses before a step, and standard deviations above their mean that make it a spike
_SPIKES, _PER_STEPS = 3, 1000  # so many spikes, and one in so many steps
_RISE, _ERRORS = 0.1, 4.0  # nats above the best tenth of the run, and standard errors of a tenth's median
_ABOVE = 1.0  # nats, as in `LossWatch`
_LATE = 0.4  # of what a new run learns, in the second half of its summed rate; a straight line has 0.5
_OVERFIT = 0.02  # of the lowest validation loss
_ENTROPY = 0.85  # of the entropy of equal loads; with 8 experts, as if 5.9 had all tokens
_WAITS, _TIMED = 0.1, 20  # share of the time that a wait takes, and the steps that it is judged by
_AHEAD = 0.05  # of a step, by which the host is ahead of a GPU that does not wait for it
_SPARE, _LOW_MFU = 0.5, 0.4  # a peak that may double; below the 38 to 43 % of Llama 3 (arXiv 2407.21783)

Records = Sequence[Mapping[str, Any]]
Settings = Mapping[str, Any]


class Finding(NamedTuple):
    """One thing to change."""

    name: str
    text: str  # the number that shows it, and the key


def diagnose(records: Records, settings: Settings) -> list[Finding]:
    """What is wrong with a run, the worst first, at most `MOST_LINES`; nothing if all is well.

    ``records`` are the lines of metrics.jsonl in order, and ``settings`` those of `read_settings`.
    """
    first = _diverged(records, settings)
    of_loss = [] if first else [_rate_too_high, _rate_too_low, _overfitting]
    of_time = _data_bound, _host_bound, _communication_bound, _memory_left
    rules: list[Callable[[Records, Settings], Finding | None]] = [*of_loss, _experts_collapsed, *of_time]
    findings = [first, *(rule(records, settings) for rule in rules)]
    return [finding for finding in findings if finding is not None][:MOST_LINES]


def diagnose_folder(folder: Path) -> list[Finding]:
    """`diagnose` for the run in a dump folder."""
    return diagnose(read_records(folder / METRICS_FILE), read_settings(folder))


def _diverged(records: Records, settings: Settings) -> Finding | None:
    """As `LossWatch` judges it while the run trains."""
    watch = LossWatch(
        Health(max_consecutive_skips=10**12, max_diverged_steps=0), "cpu", guess=_guess(settings, math.inf)
    )
    for record in records:
        loss = record.get("loss")
        watch.count(record["step"], math.nan if loss is None else loss, _is_skipped(record))
    text = watch.described()
    return None if text is None else Finding("diverged", text)


def _guess(settings: Settings, unknown: float) -> float:
    """The loss of uniform guessing; ``unknown`` without the vocabulary's size."""
    vocab = settings.get("run.vocab_size")
    return math.log(vocab) if vocab else unknown


def _rate_too_high(records: Records, settings: Settings) -> Finding | None:
    """A loss that rises, stands above that of guessing, or spikes again and again."""
    steps, losses = _curve(records, "loss")
    hint = "lower optimizer.lr or raise lr_scheduler.warmup_steps, unless the data changed"
    if len(losses) < _ENOUGH:
        return None
    tenths = np.array_split(losses, 10)
    medians = [float(np.median(tenth)) for tenth in tenths]
    best, highest = int(np.argmin(medians)), int(np.argmax(medians))
    start = max(float(np.median(losses[:5])), _guess(settings, 0.0))
    if medians[highest] > start + _ABOVE:
        around = steps[sum(map(len, tenths[:highest]))]
        text = f"the loss stood at {medians[highest]:.3f} around step {around}, above an untrained model's {start:.3f}"
        return Finding("rate_too_high", f"the rate may be too high: {text}; {hint}")
    errors = [1.2533 * 1.4826 * float(np.median(abs(t - np.median(t)))) / math.sqrt(len(t)) for t in tenths]
    least = max(_RISE, _ERRORS * math.hypot(errors[best], errors[-1]))
    if min(medians[-2:]) - medians[best] > least:
        since = steps[sum(map(len, tenths[: best + 1])) - 1]
        text = f"the loss has risen from {medians[best]:.3f} around step {since} to {medians[-1]:.3f}"
        return Finding("rate_too_high", f"the rate may be too high: {text}; {hint}")
    spikes = _spikes(losses)
    if len(spikes) >= max(_SPIKES, len(losses) / _PER_STEPS):
        text = f"{len(spikes)} spikes in {len(losses):,} steps, the last at step {steps[spikes[-1]]}"
        return Finding("rate_too_high", f"the rate may be too high: {text}; {hint}, or look at their samples")
    return None


def _spikes(losses: np.ndarray) -> list[int]:
    """Where the loss is `_SPIKE` standard deviations above the mean of the losses before, once in a quarter window.

    The spike score of OLMo 2 (arXiv 2501.00656) counts such values, with 1,000 losses. Here a spike counts no higher
    than its limit afterwards, so that it does not hide the next one.
    """
    found: list[int] = []
    recent = deque[float](maxlen=_WINDOW)
    total = squares = 0.0
    for i, loss in enumerate(losses.tolist()):
        if len(recent) >= _WINDOW // 2:
            mean = total / len(recent)
            deviation = math.sqrt(max(squares / len(recent) - mean**2, 0.0))
            limit = mean + _SPIKE * max(deviation, 0.01 * mean)
            if loss > limit and (not found or i - found[-1] > _WINDOW // 4):
                found.append(i)
            loss = min(loss, limit)
        oldest = recent[0] if len(recent) == _WINDOW else 0.0
        total, squares = total + loss - oldest, squares + loss**2 - oldest**2
        recent.append(loss)
    return found


def _rate_too_low(records: Records, settings: Settings) -> Finding | None:
    """A new run whose loss falls in a straight line, where one with a suitable rate falls fast at first.

    The line is straight over the summed learning rate, so that a decay does not bend it. A power law with exponent 1/2
    that begins at a hundredth of the run has 5 % of its fall in the second half, one with exponent 0.1 has 12 %.
    """
    vocab, name = settings.get("run.vocab_size"), "rate_too_low"
    known = [(r["loss"], r["lr"]) for r in records if r.get("loss") is not None and r.get("lr") is not None]
    if not vocab or len(known) < _ENOUGH or settings.get("lora.rank"):
        return None
    losses, spent = np.array([loss for loss, _ in known]), np.cumsum([lr for _, lr in known])
    some = max(5, len(losses) // 20)
    middle = int(np.searchsorted(spent, spent[-1] / 2))
    start, end = float(np.median(losses[:5])), float(np.median(losses[-some:]))
    half = float(np.median(losses[max(0, middle - some // 2) : middle + some // 2 + 1]))
    if start < 0.8 * math.log(vocab) or start - end < 0:  # it goes on from trained weights
        return None
    hint = f"raise optimizer.lr ({settings.get('optimizer.lr')})"
    if abs(losses - start).max() < 0.05 * start:
        return Finding(
            name, f"the rate may be too low: the loss is still {end:.3f}, after {start:.3f} at first; {hint}"
        )
    share = (half - end) / (start - end)
    if not _LATE < share < 1 - _LATE / 2:
        return None
    text = f"{share:.0%} of the fall from {start:.3f} to {end:.3f} came in the second half of the summed rate"
    return Finding(name, f"the rate may be too low: {text}, {_LATE:.0%} would be much; {hint}")


def _overfitting(records: Records, settings: Settings) -> Finding | None:
    """A validation loss that rises while the training loss falls."""
    curve = [(record["step"], loss) for record in records if (loss := _validation(record)) is not None]
    if len(curve) < 4:
        return None
    best, lowest = min(curve, key=lambda point: point[1])
    last = min(loss for _, loss in curve[-2:])
    steps, losses = _curve(records, "loss")
    some = max(5, len(losses) // 20)
    then, now = losses[(steps > best - some) & (steps <= best + some)], losses[-some:]
    if last <= (1 + _OVERFIT) * lowest or not len(then) or np.median(now) > np.median(then):
        return None
    text = f"the validation loss has risen from {lowest:.3f} at step {best} to {curve[-1][1]:.3f}"
    falls = f"while the training loss fell to {np.median(now):.3f}"
    hint = "set checkpoint.keep_best and evaluation.patience, or train on more data"
    return Finding("overfitting", f"overfitting: {text}, {falls}; {hint}")


def _experts_collapsed(records: Records, settings: Settings) -> Finding | None:
    last = records[-max(5, len(records) // 10) :]
    entropies, largest = (_values(last, key) for key in ("expert_load_entropy", "max_expert_share"))
    if len(records) < _TIMED or not entropies or (entropy := median(entropies)) >= _ENTROPY:
        return None
    text = (
        f"the entropy of their loads is {entropy:.2f} of its maximum, the largest load {median(largest):.1f} × the mean"
    )
    hint = 'raise model.overrides.balance_coefficient, or bias_update_rate with balance = "bias"'
    return Finding("experts_collapsed", f"experts have collapsed: {text}; {hint}")


def _data_bound(records: Records, settings: Settings) -> Finding | None:
    timed = _timed(records)
    share = _share(timed, "data_time_s")
    if share is None or share < _WAITS or (_ahead(timed) or 0.0) > _AHEAD:
        return None
    workers = settings.get("data.num_workers", 0)
    hint = f"raise data.num_workers ({workers})" + (
        ", or tokenize beforehand (titan-preprocess)" if settings.get("data.dataset") != "indexed" else ""
    )
    return Finding("data_bound", f"data-bound: {share:.0%} of the time is spent waiting for data; {hint}")


def _host_bound(records: Records, settings: Settings) -> Finding | None:
    """A GPU that has done a step as soon as the host has issued it."""
    timed = _timed(records)
    ahead, waits = _ahead(timed), _share(timed, "data_time_s") or 0.0
    if ahead is None or ahead >= _AHEAD or waits >= _WAITS:
        return None
    hint = "raise training.micro_batch_size, or set compile.cudagraphs on one GPU"
    if not settings.get("compile.enable"):
        hint = "set compile.enable, or raise training.micro_batch_size"
    text = f"the GPU is done {ahead:.1%} of a step after the host has issued it"
    return Finding("host_bound", f"host-bound: {text}, so it waits for the host; {hint}")


def _communication_bound(records: Records, settings: Settings) -> Finding | None:
    shares = _values(records, "exposed_communication")
    if not shares or (share := median(shares)) < _WAITS:
        return None
    text = f"pipeline ranks wait for messages {share:.0%} of the time (exposed_communication)"
    hint = "lower parallelism.pipeline_parallel_degree or virtual_stages_per_rank, or keep a pipeline within nodes"
    return Finding("communication_bound", f"communication-bound: {text}; {hint}")


def _memory_left(records: Records, settings: Settings) -> Finding | None:
    """A GPU whose memory would hold twice as much, where that would save time."""
    memory, peaks = settings.get("run.device_memory_bytes"), _values(records, "peak_memory_bytes")
    timed = _timed(records)
    if not memory or not timed or not peaks or max(peaks) > _SPARE * memory:
        return None
    text = f"memory is left over: at most {max(peaks) / 2**30:.1f} of {memory / 2**30:.0f} GiB"
    if settings.get("activation_checkpoint.mode") == "full":
        hint = 'activation_checkpoint.mode = "none" saves the second forward, up to a quarter of the step'
        return Finding("memory_left", f"{text}; {hint}")
    mfu, size = _values(timed, "mfu_model"), settings.get("training.micro_batch_size", 1)
    degrees = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")
    split = math.prod(settings.get(f"parallelism.{degree}", 1) for degree in degrees)
    ranks = max(1, settings.get("run.processes", 1) // split)
    passes = settings.get("training.global_batch_size", 1) / (size * ranks)
    if passes < 2 or not mfu or median(mfu) >= _LOW_MFU:
        return None
    hint = f"training.micro_batch_size = {2 * size} would give {passes / 2:.0f} larger passes a step instead of"
    return Finding("memory_left", f"{text}, at {median(mfu):.0%} MFU; {hint} {passes:.0f}")


def _is_skipped(record: Mapping[str, Any]) -> bool:
    return any(record.get(key) for key in ("skipped", "nan", "spike"))


def _values(records: Records, key: str) -> list[float]:
    return [value for record in records if (value := record.get(key)) is not None]


def _curve(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of steps with an update."""
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None and not _is_skipped(r)]
    return np.array([step for step, _ in points]), np.array([value for _, value in points])


def _validation(record: Mapping[str, Any]) -> float | None:
    """The loss of the validation split or, without one, the mean of the sets'."""
    losses = [value for key, value in record.items() if key.startswith("validation_loss/") and value is not None]
    main: float | None = record.get("validation_loss")
    return main if main is not None else fmean(losses) if losses else None


def _timed(records: Records) -> Records:
    """The steps whose times count: the last nine tenths; none if they are few."""
    timed = records[max(5, len(records) // 10) :]
    return timed if len(timed) >= _TIMED else []


def _share(timed: Records, key: str) -> float | None:
    """A time over that of the steps."""
    total = sum(_values(timed, "step_time_s"))
    return sum(_values(timed, key)) / total if total else None


def _ahead(timed: Records) -> float | None:
    """How far the host is ahead of the GPU, in steps: the median of the steps that were read at once."""
    leads = [
        r["host_lead_s"] / r["step_time_s"] for r in timed if r.get("host_lead_s") is not None and r["step_time_s"]
    ]
    return median(leads) if leads else None
