from itertools import product

import pytest
import torch

from tests.reference.training import learning_rate
from titan_like.config import load_config
from titan_like.config.schema import JobConfig, LRScheduler, Optimizer, Training
from titan_like.data.loading.batch_size import (
    global_batch_size_at,
    in_samples,
    rampup_batch_sizes,
    total_samples,
    total_steps,
)
from titan_like.models.registry import model_config
from titan_like.optim.optimizer import LossScaler
from titan_like.optim.schedule import describe_warmup, lr_factor
from titan_like.parallel.layout import Layout
from titan_like.train.rules import check_rules


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant", "inverse_sqrt", "wsd"])
def test_rates_are_those_of_the_definition(decay):
    for total, warmup, decay_steps, ratio in product((1, 2, 20, 200), (0, 1, 8), (None, 5, 12), (0.0, 0.3)):
        if decay_steps is not None and not warmup <= decay_steps <= total:  # which rules refuse
            continue
        section = LRScheduler(decay=decay, warmup_steps=warmup, decay_steps=decay_steps, min_lr_ratio=ratio)
        config = JobConfig(lr_scheduler=section, optimizer=Optimizer(lr=2.0))
        for step in range(1, total + 1):
            assert 2 * lr_factor(section, step, total) == pytest.approx(learning_rate(config, step, total), abs=1e-15)


def test_loss_scale_halves_on_overflow_and_doubles_after_a_quiet_interval():
    scaler = LossScaler("cpu", scale=64.0, growth_interval=3)
    seen = []
    for overflowed in (False, False, True, False, False, False, False, False, False, True, True):
        scaler.update(torch.tensor(overflowed))
        seen.append(scaler.scale.item())
    assert seen == [64, 64, 32, 32, 32, 64, 64, 64, 128, 64, 32]


def test_loss_scale_starts_at_two_to_the_16_and_never_falls_below_one():
    scaler = LossScaler("cpu")
    assert scaler.scale == 65536
    for _ in range(40):
        scaler.update(overflowed=torch.tensor(True))
    assert scaler.scale == 1


def megatron_batch_size(start, increment, ramp_samples, final, consumed):
    """Megatron-LM's RampupBatchsizeNumMicroBatches, read from its description of --rampup-batch-size."""
    samples_per_increment = ramp_samples / ((final - start) / increment)
    if consumed > ramp_samples:
        return final
    return start + int(consumed / samples_per_increment) * increment


@pytest.mark.parametrize(
    ("start", "increment", "ramp_samples", "final"),
    [(32, 32, 65_536, 288), (16, 16, 5_000, 256), (16, 8, 300, 64), (4, 4, 7, 8), (16, 4, 100, 16)],
)
def test_rampup_equals_megatron_s(start, increment, ramp_samples, final):
    training = Training(global_batch_size=final, batch_size_rampup=[start, increment, ramp_samples])
    consumed, sizes = 0, []
    while consumed <= 1.2 * ramp_samples:
        size = global_batch_size_at(training, consumed)
        expected = final if start == final else megatron_batch_size(start, increment, ramp_samples, final, consumed)
        assert size == expected, consumed
        sizes.append(size)
        consumed += size
    assert sizes[0] == start
    assert sizes[-1] == final
    assert sizes == sorted(sizes)
    assert set(sizes) <= set(rampup_batch_sizes(training))
    assert rampup_batch_sizes(training) == list(range(start, final + 1, increment))


@pytest.mark.parametrize("rampup", [None, [4, 4, 100], [2, 7, 33], [16, 1, 50]])
@pytest.mark.parametrize("samples", [1, 3, 15, 16, 17, 99, 100, 101, 1000])
def test_total_steps_takes_the_whole_batches_that_samples_or_tokens_allow(rampup, samples):
    settings = {"global_batch_size": 16, "seq_len": 32, "batch_size_rampup": rampup}
    consumed = steps = 0
    while True:
        batch = global_batch_size_at(Training(**settings), consumed)
        if consumed + batch > samples:
            break
        consumed, steps = consumed + batch, steps + 1
    assert total_steps(Training(samples=samples, **settings)) == steps
    assert total_steps(Training(tokens=samples * 32, **settings)) == steps
    assert total_steps(Training(tokens=samples * 32 + 31, **settings)) == steps  # part of a sample is none
    assert total_steps(Training(steps=samples, **settings)) == samples
    in_epochs = in_samples(Training(epochs=0.1, **settings), 10 * samples)  # as many steps as hold them all
    assert (in_epochs.samples, total_steps(in_epochs)) == (samples, steps + (consumed < samples))
    assert total_samples(Training(steps=steps, **settings)) == consumed if steps else consumed == 0


@pytest.mark.parametrize(
    ("epochs", "samples", "expected"),
    [(0.29, 100, 29), (0.55, 9, 5), (1.05, 9, 9), (0.001, 10, 1)],  # 0.29 · 100 is 28.999999999999996
)
def test_epochs_are_the_nearest_number_of_samples_and_at_least_one(epochs, samples, expected):
    assert in_samples(Training(epochs=epochs), samples).samples == expected


def check(*argv, data_parallel=1):
    """The steps of a run that the rules let pass."""
    config = load_config([f"--{word}" for word in argv])
    check_rules(config, model_config(config.model), Layout(1, 1, data_parallel, 1, 1))
    return total_steps(config.training)


@pytest.mark.parametrize(("decay", "peak"), [("cosine", 60), ("constant", 60), ("inverse_sqrt", 60), ("wsd", 54)])
def test_warmup_ends_with_a_shorter_run(decay, peak):
    settings = LRScheduler(warmup_steps=100, decay=decay)
    assert check("training.steps=60", "lr_scheduler.warmup_steps=100", f"lr_scheduler.decay={decay}") == 60
    values = [lr_factor(settings, step, 60) for step in range(1, 61)]
    assert values[:peak] == [step / peak for step in range(1, peak + 1)]
    assert all(value < 1 for value in values[peak:])  # wsd decays over the last tenth
    assert describe_warmup(settings, 60) == (
        f"lr_scheduler.warmup_steps = 100 is too long for this run; the warm-up takes {peak}"
    )
    assert describe_warmup(settings, 111 if decay == "wsd" else 100) is None
