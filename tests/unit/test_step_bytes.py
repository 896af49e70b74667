"""What a step moves and holds outside the layers, counted on fake tensors."""

import pytest

from benchmarks.step_bytes import measure


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "moved", "held"), [(1, 30.01, 16.02), (4, 62.01, 18.02)])
def test_a_step_touches_every_parameter_once(microbatches: int, moved: float, held: float) -> None:
    """A 16-bit gradient is read for the norm (2) and by the update, which moves 28 bytes.

    With several microbatches it is added to another one (8) or to a float32 sum (10 each), and then 4 bytes are read
    twice. Weights, moments and the copies take 14 bytes, and gradients 2 or 4: all are one unit, which frees nothing.
    """
    step = measure("gpt gpt2_124m 12", microbatches, [])
    assert step["moved"] <= moved
    assert step["update"] <= held
    assert step["planned_update"] == pytest.approx(step["update"], rel=0.002)
