"""Which layers a stage holds."""

from itertools import combinations

import pytest

from titan_like.config.schema import Model
from titan_like.models.registry import model_config
from titan_like.parallel.split import LAYER_UNIT_BYTES, balanced_layers, layer_costs, units_of_layers


def slowest(counts: tuple[int, ...], last_extra: float) -> float:
    return max([*counts[:-1], counts[-1] + last_extra])


@pytest.mark.parametrize("last_extra", [0.0, 0.25, 1.0, 2.4, 7.0])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [4, 5, 9, 12])
def test_no_other_split_is_faster(num_layers: int, num_stages: int, last_extra: float) -> None:
    counts = balanced_layers(num_layers, num_stages, last_extra)
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    cuts = (tuple(b - a for a, b in zip((0, *c), (*c, num_layers), strict=True))
            for c in combinations(range(1, num_layers), num_stages - 1))  # fmt: skip
    assert slowest(tuple(counts), last_extra) == min(slowest(other, last_extra) for other in cuts)


def test_output_matrix_counts_as_its_products() -> None:
    # Llama 3 8B: 128,256 × 4,096 against 218 million weights and, at 8,192 tokens, 2·8192·4096 of attention.
    model = model_config(Model(family="llama", flavor="llama3.1_8b"))
    layers, output = layer_costs(model, 8192)
    assert set(layers) == {1.0}
    assert output == pytest.approx(128256 * 4096 / (218.1e6 + 2 * 8192 * 4096), rel=1e-3)


@pytest.mark.parametrize(
    ("percent", "lengths"),
    [([33] * 7, [3, 3, 1]), ([50] * 3, [2, 1]), ([51] * 3, [1, 1, 1]), ([10, 200, 10, 40, 60], [1, 1, 2, 1])],
)
def test_layers_share_a_unit_until_it_is_full(percent: list[int], lengths: list[int]) -> None:
    assert units_of_layers([LAYER_UNIT_BYTES * size // 100 for size in percent]) == lengths
