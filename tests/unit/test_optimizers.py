"""Adafactor and Muon on one process: rounding, scales and skipped steps. test_decoder_pairs.py has their rules."""

import weakref
from typing import Any

import pytest
import torch

from tests.float64 import bound
from titan_like.config.schema import Optimizer
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.muon import owned_matrices
from titan_like.optim.optimizer import build_optimizer, update

SHAPES = {
    "embedding.weight": (20, 8),
    "layers.0.fc1.weight": (32, 8),
    "layers.0.fc1.bias": (32,),
    "layers.0.fc2.weight": (8, 32),
    "layers.1.experts.weight": (24, 8),
    "layers.1.wide_experts.weight": (24, 32),
    "output.weight": (20, 8),
}
EXPERTS = 3  # in each stack of experts
LR = 0.01
Named = list[tuple[str, torch.nn.Parameter]]


def parameters(dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }
    named = [(name, torch.nn.Parameter(value.to(dtype))) for name, value in drawn.items()]
    for name, parameter in named:
        parameter.num_matrices = EXPERTS if "experts" in name else 1
    return named


def worst_difference(found: Named, wanted: Named) -> float:
    return max(((p - q).norm() / q.norm()).item() for (_, p), (_, q) in zip(found, wanted, strict=True))


@pytest.mark.parametrize("weights", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_factor_and_type_of_gradients_do_not_matter(name: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    """No square or momentum is rounded to 16 bits, gradients stay as they are, and a loss scale may be large."""
    narrow, *wide = parameters(weights), parameters(weights), parameters(torch.float64)
    rules = [build_optimizer(named, Optimizer(name=name, lr=LR)) for named in (narrow, *wide)]
    generator, factor = torch.Generator().manual_seed(1), torch.tensor(1 / 7 / 4096, dtype=torch.float64)
    for _ in range(4):
        for (_, p), *others in zip(narrow, *wide, strict=True):
            p.grad_dtype = None
            p.grad = (4096 * torch.randn(p.shape, generator=generator)).to(dtype)
            for _, q in others:
                q.grad = (p.grad * factor.expand(1)).to(q.dtype)
        kept = [p.grad.clone() for _, p in narrow]
        update(rules[0], [p for _, p in narrow], LR, factor, torch.tensor(False))
        for rule, named in zip(rules[1:], wide, strict=True):
            update(rule, [p for _, p in named], LR, None, torch.tensor(False))
        assert all(torch.equal(p.grad, old) for (_, p), old in zip(narrow, kept, strict=True))
    # A product more is rounded than without a factor; 16 bits would round 2^13 times as coarsely.
    alone, exact = wide
    assert worst_difference(narrow, exact) < 8 * worst_difference(alone, exact) + bound()


def test_muon_divides_small_directions_by_the_same_norm_with_a_factor() -> None:
    """By 1e-7, far above the norms of these."""
    scaled, plain = parameters(torch.float64), parameters(torch.float64)
    generator, factor = torch.Generator().manual_seed(1), torch.tensor(1 / 4096, dtype=torch.float64)
    for (_, p), (_, q) in zip(scaled, plain, strict=True):
        q.grad = 1e-10 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = 4096 * q.grad
    for named, own in ((scaled, factor), (plain, None)):
        rule = build_optimizer(named, Optimizer(name="muon", lr=LR, weight_decay=0))
        update(rule, [p for _, p in named], LR, own, torch.tensor(False))
    assert worst_difference(scaled, plain) < bound()


def test_muon_orthogonalises_in_the_type_it_is_told() -> None:
    found = {}
    for label, dtype, told in (
        ("float64", torch.float64, "bfloat16"),  # float64 training never rounds
        ("float32", torch.float32, "float32"),
        ("cpu", torch.float32, None),
        ("bfloat16", torch.float32, "bfloat16"),
    ):
        named, generator = parameters(dtype), torch.Generator().manual_seed(1)
        rule = build_optimizer(named, Optimizer(name="muon", lr=LR, newton_schulz_dtype=told))
        for _ in range(6):
            for _, p in named:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
            update(rule, [p for _, p in named], LR, None, torch.tensor(False))
        found[label] = [(name, torch.nn.Parameter(p.detach().double())) for name, p in named]
    assert worst_difference(found["cpu"], found["float32"]) == 0
    single, half = (worst_difference(found[label], found["float64"]) for label in ("float32", "bfloat16"))
    assert 2**8 * single < half < 0.1  # bfloat16 rounds 2^16 times as coarsely


@pytest.mark.parametrize("rule", [{"name": "adafactor"}, {"name": "adafactor", "beta1": 0.9}, {"name": "muon"}])
def test_skipped_step_changes_no_bit_and_the_next_one_does_not_notice(rule: dict[str, Any]) -> None:
    ends = []
    for skips in ([False, False], [True, False, True, False, True]):
        named = parameters(torch.float32)
        optimizer, taken = build_optimizer(named, Optimizer(lr=LR, **rule)), 0
        for skip in skips:
            for _, p in named:
                p.grad = torch.full_like(p, torch.nan if skip else 1.0 + taken)
            before = [p.detach().clone() for _, p in named], _state(optimizer)
            update(optimizer, [p for _, p in named], LR, None, torch.tensor(skip))
            if skip and before[1]:
                after = [p for _, p in named] + _state(optimizer)
                assert all(map(torch.equal, before[0] + before[1], after))
            taken += not skip
        ends.append([p.detach() for _, p in named] + _state(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_matrices_are_spread_by_their_work() -> None:
    shapes = [(64, 64)] * 8 + [(256, 64)] * 4 + [(8, 8)]
    owned = owned_matrices([(number, 0) for number in range(len(shapes))], shapes, 4)
    for matrices in owned:
        mine = [shapes[number] for number, _ in matrices]
        assert mine.count((64, 64)) == 2 and mine.count((256, 64)) == 1
    assert sorted(matrix for matrices in owned for matrix in matrices) == [(number, 0) for number in range(len(shapes))]
    assert owned_matrices([(0, 0)], [(4, 4)], 3) == [[(0, 0)], [], []]


def test_fused_adamw_lets_go_of_its_state_and_takes_new_groups():
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = FusedAdamW([{"params": [parameters[0]], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(2):
        parameters[0].grad = torch.ones(4)
        optimizer.step()
    moment = weakref.ref(optimizer.state[parameters[0]]["exp_avg"])
    optimizer.forget_state()
    assert moment() is None
    optimizer.add_param_group({**optimizer.param_groups[0], "params": [parameters[1]]})
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        optimizer.step()
        assert all((parameter < old).all() for parameter, old in zip(parameters, before, strict=True))
