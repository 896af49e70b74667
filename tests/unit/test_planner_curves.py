"""What the papers found by measuring, predicted: where optima lie and which way curves bend."""

import math
from itertools import pairwise

import pytest

from benchmarks import planner_pictures as pictures


def values(points):
    return {point.x: point.value for point in points}


def test_models_are_those_of_the_figures():
    assert pictures.gpt(32, 15360, 128).num_parameters() == pytest.approx(91e9, rel=0.01)
    assert pictures.gpt(32, 20480, 128).num_parameters() == pytest.approx(162.2e9, rel=0.001)


def test_a_larger_batch_helps_the_longer_pipelines_most():
    small, large = (values(pictures.tensor_against_pipeline()[f"batch {batch}"]) for batch in (32, 128))
    gains = [large[t] / small[t] for t in (2, 4, 8, 16, 32)]
    assert gains == sorted(gains, reverse=True)


def test_microbatches_of_two_are_best_or_nearly_so():
    """Figure 16: 2 is best for both batches. Equation 1: the best size grows with the batch."""
    best = []
    for batch in (128, 512, 2048):
        rates = values(pictures.microbatch_sizes()[f"batch {batch}"])
        best.append(max(rates, key=rates.get))
        if batch < 2048:
            assert rates[2] > 0.98 * max(rates.values())
            assert rates[16] < rates[8] < rates[4]
    assert best == sorted(best)
    assert best[1] == 2


def test_interleaving_gains_less_as_the_batch_grows():
    """Figure 12; and the bubble of 1 stage is v times that of v."""
    rates, bubbles = pictures.interleaving()
    one, two, four = (values(rates[name]) for name in rates)
    assert all(two[batch] > one[batch] for batch in one)
    for more in (two, four):
        gains = [more[batch] / one[batch] for batch in one]
        assert gains == sorted(gains, reverse=True)
        assert gains[0] > 1.2
    for points in bubbles.values():
        assert all(later.value < earlier.value for earlier, later in pairwise(points))
    single, double, _ = (values(bubbles[name]) for name in bubbles)
    assert all(single[batch] == pytest.approx(2 * double[batch], rel=0.05) for batch in single)


def test_the_study_of_layouts_on_v100s():
    """TP 1 × PP 1 does not fit without ZeRO 1, and is the fastest that does; its table's batches divide."""
    profile = pictures.JEAN_ZAY
    for gpus in pictures.GPU_COUNTS:
        whole = pictures.jean_zay_work(1, 1, 0, gpus, 512)._replace(micro_batch_size=1)
        assert not pictures.fits(whole, profile)
        assert pictures.fits(whole._replace(zero_stage=1), profile)
        for batch in (512, 192):
            seconds = {}
            for tensor, pipeline in pictures.STRATEGIES:
                work = pictures.jean_zay_work(tensor, pipeline, 1, gpus, batch)
                assert work.global_batch_size % (work.micro_batch_size * work.data_parallel) == 0
                time = pictures.predicted(work, profile).total / work.global_batch_size
                assert math.isfinite(time)
                seconds[tensor, pipeline] = time
            assert min(seconds, key=seconds.get) == (1, 1)
