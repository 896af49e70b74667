"""Loss spikes and steps without an update."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from titan_like.config.errors import RunError
from titan_like.config.schema import Health
from titan_like.train.health import LossWatch, robust_z


def test_robust_z_by_hand() -> None:
    # median 3; distances 2 1 0 1 97, their median 1; one such distance is 1/1.4826 standard deviations
    assert robust_z(6.0, [1, 2, 3, 4, 100]) == pytest.approx(3 / 1.4826)
    assert robust_z(0.0, [1, 2, 3, 4, 100]) == pytest.approx(-3 / 1.4826)


def test_robust_z_is_that_of_a_normal_distribution_with_outliers_among_the_others() -> None:
    quantiles = [NormalDist(5.0, 0.2).inv_cdf((i + 0.5) / 2000) for i in range(2000)]
    assert robust_z(6.0, quantiles) == pytest.approx(5.0, rel=0.01)
    assert robust_z(6.0, quantiles + [50.0] * 40) == pytest.approx(5.0, rel=0.1)  # a mean would move by 0.9


def test_losses_that_hardly_differ_do_not_make_the_next_one_a_spike() -> None:
    assert robust_z(2.1, [2.0] * 50) == pytest.approx(5.0)  # 5% above, in units of 1%
    assert robust_z(2.0, [2.0] * 50) == 0.0


def watch(**settings: object) -> LossWatch:
    return LossWatch(Health.model_validate({"loss_spike_factor": 6.0, "loss_spike_window": 8} | settings))


def test_a_spike_needs_half_a_window_and_is_not_remembered() -> None:
    losses = watch()
    for step, loss in enumerate((3.0, 3.1, 2.9), start=1):
        losses.add(step, loss, skipped=False)
        assert not losses.is_spike(100.0)
    losses.add(4, 3.0, skipped=False)
    assert losses.is_spike(100.0) and not losses.is_spike(3.2) and not losses.is_spike(0.1)
    losses.add(5, 100.0, skipped=True)
    assert list(losses.recent) == [3.0, 3.1, 2.9, 3.0] and losses.is_spike(100.0)
    for step in range(6, 20):
        losses.add(step, 3.0 + step % 2, skipped=False)
    assert len(losses.recent) == 8


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_is_not_a_spike(loss: float) -> None:
    losses = watch()
    for step in range(8):
        losses.add(step, 3.0, skipped=False)
    assert not losses.is_spike(loss)
    assert not watch(loss_spike_factor=0.0).is_spike(1e9)


def test_falling_noisy_losses_are_no_spikes() -> None:
    losses, noise = watch(loss_spike_window=64), random.Random(0)
    for step in range(2000):
        loss = 2 + 8 * math.exp(-step / 200) + noise.gauss(0, 0.05)
        assert not losses.is_spike(loss), step
        losses.add(step, loss, skipped=False)
    assert losses.is_spike(3.0)


def test_too_many_skips_in_a_row_end_the_run_with_a_sentence() -> None:
    losses = watch(max_consecutive_skips=3)
    for step in (1, 2, 4, 5):
        losses.add(step, math.nan, skipped=True)
        if step == 2:
            losses.add(3, 2.0, skipped=False)
    with pytest.raises(RunError, match=r"^3 steps in a row up to step 6 .*health.max_consecutive_skips.*optimizer.lr"):
        losses.add(6, math.nan, skipped=True)


def test_the_watch_goes_on_where_a_checkpoint_left_it() -> None:
    first = watch(max_consecutive_skips=3)
    for step in range(6):
        first.add(step, 3.0, skipped=False)
    first.add(6, 90.0, skipped=True)
    second = LossWatch(first.section, list(first.recent), first.consecutive_skips)
    assert second.is_spike(90.0)
    second.add(7, 90.0, skipped=True)
    with pytest.raises(RunError):
        second.add(8, 90.0, skipped=True)
