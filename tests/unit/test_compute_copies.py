"""A process that shares its weights with no other computes with copies of them."""

import pytest
import torch
from torch import nn

from tests.float64 import bound
from titan_like.optim import adamw
from titan_like.optim.adamw import FusedAdamW
from titan_like.parallel.gradients import ComputeCopies


def model():
    """Three layers, of which the last shares its weight with the first."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    layers[2].weight = layers[0].weight
    return layers


def expected_gradients(inputs, dtype):
    """Autograd through casts, which adds the gradients of microbatches in float32."""
    plain = model()
    for x in inputs:
        weights = {name: parameter.to(dtype) for name, parameter in plain.named_parameters()}
        torch.func.functional_call(plain, weights, x.to(dtype)).float().square().sum().backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("unit_bytes", [1, 8 * 8 * 2, 1 << 20], ids=["each weight", "some", "one unit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_casts(dtype, unit_bytes):
    inputs = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    layers = model()
    copies = ComputeCopies(layers, dtype, unit_bytes=unit_bytes)
    copies.refresh()
    for x in inputs:
        layers(x.to(dtype)).float().square().sum().backward()
        copies.add_gradients()
    copies.hand_over()
    expected = expected_gradients(inputs, dtype)
    for name, parameter in layers.named_parameters():
        assert parameter.dtype == torch.float32
        # Sums in float32 of three microbatches, and of two uses of a weight.
        assert (parameter.grad - expected[name]).norm() <= bound(6, torch.float32) * expected[name].norm()


def test_units_are_added_up_before_the_backward_pass_ends():
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    copies = ComputeCopies(layers, torch.bfloat16, unit_bytes=1)
    copies.refresh()
    waiting = []
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    x.register_hook(lambda _: waiting.append(sum(layer.weight.grad is not None for layer in layers)))
    layers(x).sum().backward()
    assert waiting[0] <= 1


def test_a_weight_without_a_gradient_gets_none():
    layers = model()
    copies = ComputeCopies(layers, torch.bfloat16)
    copies.refresh()
    layers[0](torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    copies.add_gradients()
    copies.hand_over()
    received = {name for name, parameter in layers.named_parameters() if parameter.grad is not None}
    assert received == {"0.weight", "0.bias"}


def test_copies_are_made_again_when_weights_change_outside_an_update():
    layers = model()
    (unit,) = ComputeCopies(layers, torch.bfloat16).units
    unit.refresh()
    unit.note_written()
    with torch.no_grad():
        layers[0].weight.mul_(2)
    unit.refresh()
    assert torch.equal(vars(layers[0])["weight"], layers[0].weight.bfloat16())


def test_the_last_backward_pass_frees_copies_and_the_update_makes_them_again(monkeypatch):
    monkeypatch.setitem(adamw.BLOCK, "cpu", 20)  # so that a weight is in several blocks
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    copies = ComputeCopies(layers, torch.bfloat16, unit_bytes=1)
    groups = [{"params": list(layers.parameters()), "weight_decay": 0.1}]
    optimizer = FusedAdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    optimizer.write_copies(copies.units)
    held = [vars(layer)["weight"] for layer in layers]
    for _ in range(2):
        copies.refresh()
        for is_last in (False, True):
            copies.before_backward(is_last)
            layers(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
            copies.add_gradients()
            assert all((copy.untyped_storage().nbytes() == 0) == is_last for copy in held)
        copies.hand_over()
        optimizer.step()
        assert all(torch.equal(copy, layer.weight.bfloat16()) for copy, layer in zip(held, layers, strict=True))
        assert all(parameter.grad is None for parameter in layers.parameters())
