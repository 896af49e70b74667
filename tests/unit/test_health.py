"""Loss spikes and steps without an update."""

import math
import random
import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit.plain_loop import logged, prepared, run_settings
from tests.unit.record_cases import write_indexed
from titan_like.config.errors import RunError
from titan_like.config.monitoring import Health
from titan_like.data.batch import Batch, without_labels
from titan_like.data.source import Source
from titan_like.metrics.writers import JsonLinesWriter, RunEnd
from titan_like.parallel.model import LossFunction, WholeModel
from titan_like.train.health import LossWatch, robust_z
from titan_like.train.job import process_group, run_job
from titan_like.train.signals import StopSignals
from titan_like.train.trainer import Trainer


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """A run that fails leaves its process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 63, 64])
def test_robust_z_is_to_the_bit_what_python_says(count: int) -> None:
    numbers = random.Random(count)
    others = [float(torch.tensor(numbers.gauss(3, 0.3))) for _ in range(count)]  # as float32 losses are
    middle = statistics.median(others)
    deviation = 1.4826 * statistics.median(abs(other - middle) for other in others)
    expected = (4.0 - middle) / max(deviation, 0.01 * abs(middle), 1e-30)
    losses = torch.tensor([math.nan] * (64 - count) + others, dtype=torch.float64)
    assert robust_z(torch.tensor(4.0, dtype=torch.float64), losses).item() == expected


def watch(**settings: object) -> LossWatch:
    return LossWatch(Health.model_validate({"loss_spike_factor": 6.0, "loss_spike_window": 8} | settings), "cpu")


def add(losses: LossWatch, *values: float, skipped: bool = False) -> None:
    for value in values:
        losses.add(torch.tensor(value), torch.tensor(skipped))


def is_spike(losses: LossWatch, loss: float) -> bool:
    return bool(losses.is_spike(torch.tensor(loss)))


def test_a_spike_needs_half_a_window_and_is_not_remembered() -> None:
    losses = watch()
    for loss in (3.0, 3.5, 2.5):
        add(losses, loss)
        assert not is_spike(losses, 100.0)
    add(losses, 3.0)
    assert is_spike(losses, 100.0) and not is_spike(losses, 3.7) and not is_spike(losses, 0.1)
    add(losses, 100.0, skipped=True)
    assert losses.recent == [3.0, 3.5, 2.5, 3.0] and is_spike(losses, 100.0)
    add(losses, *(3.0 + step % 2 for step in range(6, 20)))
    assert losses.recent == [3.0, 4.0] * 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_is_not_a_spike(loss: float) -> None:
    losses = watch()
    add(losses, *[3.0] * 8)
    assert not is_spike(losses, loss)
    assert not is_spike(watch(loss_spike_factor=0.0), 1e9)


def test_too_many_skips_in_a_row_end_the_run_with_a_sentence() -> None:
    losses = watch(max_consecutive_skips=3)
    for step, skipped in enumerate((True, True, False, True, True), start=1):
        losses.count(step, math.nan, skipped)
    with pytest.raises(RunError, match=r"^3 steps in a row up to step 6 .*health.max_consecutive_skips.*optimizer.lr"):
        losses.count(6, math.nan, skipped=True)


def test_the_watch_goes_on_where_a_checkpoint_left_it() -> None:
    first = watch(max_consecutive_skips=3)
    add(first, *[3.0] * 6)
    first.count(7, 90.0, skipped=True)
    second = LossWatch(first.section, "cpu", first.recent, first.consecutive_skips)
    assert is_spike(second, 90.0)
    second.count(8, 90.0, skipped=True)
    with pytest.raises(RunError):
        second.count(9, 90.0, skipped=True)


GUESS = math.log(50_257)


def course(*parts: tuple[float, float, int], noise: float = 0.1) -> list[float]:
    """Losses that go from one value to another in that many steps, part after part."""
    numbers = random.Random(0)
    return [
        first + (last - first) * step / steps + numbers.gauss(0, noise)
        for first, last, steps in parts
        for step in range(steps)
    ]


COURSES = {
    "from scratch": course((10.9, 3.0, 300)),
    "warm-up that rises and falls": course((10.9, 11.6, 15), (11.6, 4.0, 300)),
    "fine-tuning": course((2.1, 1.6, 100), noise=0.4),
    "fine-tuning on samples of one length after another": course((0.8, 0.8, 60), (2.6, 2.4, 60), noise=0.4),
    "another mix of data": course((10.9, 1.0, 300), (2.7, 2.4, 60)),
    "spikes": [30.0 if step % 5 == 0 else loss for step, loss in enumerate(course((10.9, 3.0, 300)), start=1)],
    "three steps": [2.0, 9.0, 4.0],
    "one skipped step": [math.nan],
}
DIVERGED = {  # with the step from which
    "the unigrams' loss again": (course((10.9, 3.0, 300), (7.5, 7.5, 60), noise=0.05), 301),
    "above guessing": ([5.6, 5.8, 300.0, 800.0, 894.0, 894.0], 3),
    "in fine-tuning": (course((2.0, 1.5, 100), (9.0, 9.0, 30)), 101),
    "at once in fine-tuning": (course((1.0, 1.0, 4), (8.0, 8.0, 60)), 5),
    "after an initialization far above guessing": (course((300.0, 4.0, 50), (4.0, 4.0, 50), (90.0, 90.0, 30)), 101),
    "skipped": ([5.4, 6e10] + [math.nan] * 18, 2),
    "mostly skipped": ([5.0 if step % 3 == 0 else math.nan for step in range(1, 61)], 1),
}


def judged(losses: list[float], **settings: object) -> LossWatch:
    result = LossWatch(Health.model_validate(settings), "cpu", guess=GUESS)
    for step, loss in enumerate(losses, start=1):
        result.count(step, loss, skipped=math.isnan(loss))
    return result


@pytest.mark.parametrize("name", COURSES)
def test_usual_courses_of_the_loss_are_no_divergence(name: str) -> None:
    assert judged(COURSES[name], max_diverged_steps=1).described() is None


@pytest.mark.parametrize("name", DIVERGED)
def test_a_run_that_has_diverged_says_so_with_the_step_and_numbers(name: str) -> None:
    losses, since = DIVERGED[name]
    told = judged(losses).described()
    last = next(loss for loss in reversed(losses) if not math.isnan(loss))
    assert told is not None and told.startswith(f"the run has diverged since step {since}: the last loss is {last:.6g}")
    skipped = sum(math.isnan(loss) for loss in losses[-20:])
    assert (f" and {skipped} of the last 20 updates were skipped (" in told) == (skipped > 0)
    assert f"{losses[0]:.6g} at first" in told or math.isnan(losses[0])


def test_a_run_ends_after_so_many_steps_of_a_divergence_that_does_not_pass() -> None:
    losses = course((10.9, 3.0, 300), (8.0, 8.0, 100), (3.0, 3.0, 50))
    passed = judged(losses, max_diverged_steps=101)
    assert passed.described() is None
    with pytest.raises(RunError, match=r"^the run has diverged since step 301: .*; health.max_diverged_steps = 40 "):
        judged(losses, max_diverged_steps=40)
    # The next start of such a run, with a lower rate, has as many steps to recover, and knows how low the loss was.
    before = judged(losses[:350])
    again = LossWatch(Health(max_diverged_steps=40), "cpu", guess=GUESS, levels=before.levels)
    for step in range(351, 391):
        again.count(step, 8.0, skipped=False)
    assert "since step 301" in str(again.described())
    with pytest.raises(RunError, match="since step 301"):
        again.count(391, 8.0, skipped=False)


@pytest.mark.parametrize("factors", [(1.0, math.nan), (math.inf, 1.0)], ids=["at the end", "in between"])
def test_a_last_validation_that_is_not_finite_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], factors: tuple[float, float]
) -> None:
    forward, remaining = WholeModel.forward, iter(factors)

    def planted(self: WholeModel, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        factor = next(remaining)
        forward(self, batches, lambda output, number: loss_function(output * factor, number))

    monkeypatch.setattr(WholeModel, "forward", planted)
    run = prepared(short_run(tmp_path, training__steps=4, evaluation__interval=2, evaluation__steps=1))
    run_job(run)
    validated = [line["validation_loss"] for line in logged(run.config)[1::2]]
    assert [loss is None for loss in validated] == [not math.isfinite(factor) for factor in factors]
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last == " the loss of the last validation is not finite") == math.isnan(factors[-1])


PAIRS = {"model.overrides.sentence_head": "pair", "data.sentence_objective": "sentence_order"}
NO_LABELS = "4 samples of step {} have no labels: all of their tokens are special tokens, padding or prompts"


def short_run(folder: Path, **changes: object) -> dict[str, object]:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return run_settings(folder) | {"training.steps": 3} | named


def ends(folder: Path) -> str:
    """Data without anything but ends of documents, as a setting."""
    return f'["{write_indexed(folder / "ends", [[[256] * 9]] * 2000)}"]'


@pytest.mark.parametrize(
    "changes",
    [
        {"model.family": "gpt", "data.eod_mask_loss": "true"},
        {"model.family": "bert"},
        {"model.family": "bert", "model.overrides.vocab_size": 261, **PAIRS},
    ],
    ids=["gpt", "bert", "pairs"],
)
def test_a_batch_of_special_tokens_alone_says_so(tmp_path: Path, changes: dict[str, object]) -> None:
    data = {"data.dataset": "indexed", "data.paths": ends(tmp_path), "health.skip_nonfinite": "false"}
    run = prepared(short_run(tmp_path) | data | changes)
    with pytest.raises(RunError) as error:
        run_job(run)
    assert str(error.value).startswith(f"the {NO_LABELS.format(1)}; look at the data or raise training.global_batch_s")
    assert "optimizer.lr" not in str(error.value)


def leave_out_labels(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Let the samples of some steps, of 4 each, and those of validation have no labels."""
    read = Source.__getitem__

    def without_some_labels(self: Source, index: int) -> Batch:
        sample, is_chosen = read(self, index), index // 4 + 1 in steps or self.request.split == "validation"
        return without_labels(sample) if is_chosen else sample

    monkeypatch.setattr(Source, "__getitem__", without_some_labels)


@pytest.mark.parametrize(("family", "dtype"), [("gpt", "float64"), ("t5", "float64"), ("gpt", "float16")])
def test_a_batch_without_labels_is_skipped_and_others_are_not(
    tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float16 it is no overflow, so the loss scale stays."""
    leave_out_labels(monkeypatch, 2)
    changes = {"model.family": family, "training.dtype": dtype, "evaluation.interval": 3, "evaluation.steps": 1}
    run = prepared(short_run(tmp_path) | changes)
    run_job(run)
    lines = logged(run.config)
    assert [line["nan"] for line in lines] == [0, 1, 0] and lines[2]["loss"] > 1
    assert dtype != "float16" or [line["loss_scale"] for line in lines] == [2**16] * 3
    printed = capsys.readouterr().out
    assert printed.count("have no labels") == 2 and f" the {NO_LABELS.format(2)}" in printed
    assert " the samples for validation have no labels" in printed


def test_exports_wait_for_an_update_and_a_resumed_run_knows_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2 and 5, the last, are skipped. The export of step 2 is made after step 3, and that of step 5 is not."""
    leave_out_labels(monkeypatch, 2, 5)
    changes = {"training.dtype": "float32", "checkpoint.enable": "true", "checkpoint.interval": 2}
    settings = short_run(tmp_path, health__loss_spike_factor=9) | changes | {"checkpoint.hugging_face_interval": 2}
    run = prepared(settings | {"training.steps": 5})
    run_job(run)
    folder = Path(run.config.job.dump_folder)
    found = {kind: sorted(path.name for path in (folder / kind).iterdir()) for kind in ("checkpoint", "hugging_face")}
    assert found["hugging_face"] == ["step-3", "step-4"] and found["checkpoint"][-1] == "step-5"
    losses = [line["loss"] for line in logged(run.config) if not line["nan"]]
    with process_group(torch.device("cpu")):
        state = Trainer(prepared(settings | {"training.steps": 7})).state
    assert state.step == 5 and state.losses.recent == losses and len(losses) == 3
    assert state.losses.consecutive_skips == 1 and state.losses.levels == {"since": 0.0, "first": losses[0]}


DIVERGES = {"optimizer__name": "sgd", "optimizer__lr": 1e6, "health__skip_nonfinite": "false"}


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, RunEnd()),
        ({"training__steps": 20}, RunEnd(signal=signal.SIGTERM)),
        (DIVERGES | {"training__steps": 20}, RunEnd(1, reason="RunError: the loss of step ")),
    ],
    ids=["done", "stopped", "failed"],
)
def test_trackers_are_told_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], end: RunEnd
) -> None:
    """test_trackers.py has what they make of it."""
    run, stop, ends = prepared(short_run(tmp_path, **changes)), StopSignals(), list[RunEnd]()
    monkeypatch.setattr(JsonLinesWriter, "close", lambda _, told: ends.append(told))
    with pytest.raises(RunError) if end.reason else nullcontext():
        run_job(run, stop, lambda _: setattr(stop, "received", end.signal))
    (told,) = ends
    assert told._replace(reason="") == end._replace(reason="") and told.reason.startswith(end.reason)


def test_many_batches_without_labels_end_the_run_with_the_cause() -> None:
    losses = watch(max_consecutive_skips=2)
    losses.count(1, math.nan, skipped=True, has_labels=False)
    with pytest.raises(RunError, match=r"the batch of step 2 has no labels.*no more; look at the data$"):
        losses.count(2, math.nan, skipped=True, has_labels=False)
