"""The scan of Mamba-2 against its recurrence, in loops over positions and documents."""

import pytest
import torch

from tests.reference.state_space import mamba2, recurrence
from tests.unit.test_delta_net import PACKED, SEQ, WHOLE
from titan_like.models.batch import Context
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.state_space import Mamba2, StateSpaceCore, state_space_scan

GROUPS, HEADS, SIZE, STATE, HIDDEN, EPS = 2, 6, 5, 7, 12, 0.01
OPTIONS = {"heads": HEADS, "head_size": SIZE, "state_size": STATE, "chunk_size": 8}


def inputs(dtype=torch.float64, decay=1.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, SEQ, HEADS, SIZE, generator=generator, dtype=torch.float64)
    b, c = (torch.randn(2, SEQ, GROUPS, STATE, generator=generator, dtype=torch.float64) for _ in "bc")
    g = -decay * torch.rand(2, SEQ, HEADS, generator=generator, dtype=torch.float64)
    return [one.to(dtype).requires_grad_() for one in (x, b, c, g)]


def by_definition(x, b, c, g, starts):
    group = [head * GROUPS // HEADS for head in range(HEADS)]
    heads = [
        recurrence(x[:, :, h], b[:, :, group[h]], c[:, :, group[h]], g[:, :, h].exp(), starts) for h in range(HEADS)
    ]
    return torch.stack(heads, 2)


@pytest.mark.parametrize("decay", [0.01, 30.0])
@pytest.mark.parametrize("starts", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_chunks_compute_the_recurrence_and_its_gradients(chunk, starts, decay):
    ours, theirs = inputs(decay=decay), inputs(decay=decay)
    result = state_space_scan(*ours, starts, chunk)
    expected = by_definition(*theirs, WHOLE if starts is None else starts)
    assert (result - expected).abs().max() < 1e-12
    for one in (result, expected):
        (one * torch.arange(SIZE)).sin().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        # Differences of logs that add up to decay · SEQ are rounded like these.
        assert (one.grad - other.grad).abs().max() < 1e-12 * max(1, decay) * max(1, other.grad.abs().max())


def layer(dtype=torch.float64, **others):
    torch.manual_seed(3)
    options = OPTIONS | {"groups": GROUPS, "min_step": 0.0, "bias": False, "conv_bias": True} | others
    core = StateSpaceCore(HEADS, options["groups"], SIZE, STATE, options["min_step"], options["chunk_size"])
    module = Mamba2(HIDDEN, core, 3, EPS, options["bias"], options["conv_bias"]).to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_((name == "norm.weight") + 0.5 * torch.randn_like(parameter))
    return options, module


@pytest.mark.parametrize(
    "others", [{}, {"groups": 1, "bias": True, "min_step": 0.7}, {"groups": 3, "conv_bias": False}], ids=str
)
@pytest.mark.parametrize("starts", [None, PACKED], ids=["whole", "packed"])
def test_a_layer_is_its_definition(starts, others):
    options, module = layer(**others)
    x, theirs = (torch.randn(2, SEQ, HIDDEN, dtype=torch.float64) for _ in range(2))
    theirs.copy_(x)
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    def linear(name, value):
        result = value @ weights[f"{name}.weight"].t()
        return result + weights[f"{name}.bias"] if options["bias"] else result

    mask = None if starts is None else KeyRanges(starts, torch.arange(1, SEQ + 1).expand(2, -1))
    result = module(x.requires_grad_(), Context(document_mask=mask))
    documents = WHOLE if starts is None else starts
    expected = mamba2(options, weights, linear, EPS, theirs.requires_grad_(), documents)
    assert (result - expected).abs().max() < 1e-12 * expected.abs().max()
    for one in (result, expected):
        one.sin().sum().backward()
    gradients = [(p.grad, weights[name].grad) for name, p in module.named_parameters()]
    for one, other in [*gradients, (x.grad, theirs.grad)]:
        assert (one - other).abs().max() < 1e-12 * max(1, other.abs().max())


def test_in_16_bits_it_scans_in_float32():
    _, exact = layer()
    _, rounded = layer(torch.bfloat16)
    exact.load_state_dict({name: value.double() for name, value in rounded.state_dict().items()})
    x = torch.randn(2, SEQ, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    result, expected = rounded(x, Context()), exact(x.double(), Context())
    assert result.dtype == torch.bfloat16
    # Six roundings one after the other: projection, convolution, gated scan, norm, its weight, projection.
    assert (result - expected).norm() < 6 * 2**-8 * expected.norm()
