"""Experts and their router, against their definitions. `tests/reference` has their balance over steps."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import MOE, moe_config, random_model, save_checkpoint
from titan_like.checkpoint.loader import load_checkpoint, model_tensors
from titan_like.config.schema import Model
from titan_like.models import hugging_face
from titan_like.models.layers import experts
from titan_like.models.layers.experts import Router, SparseMLP, expert_product
from titan_like.models.registry import model_config


def random_mlp(**values: Any) -> SparseMLP:
    """A float64 block whose every number is random."""
    mlp, generator = SparseMLP(moe_config(**values)).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in mlp.parameters():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        for buffer in (mlp.router.load, mlp.router.bias):
            if buffer is not None:
                buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
    return mlp


def inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", MOE)
@in_float64()
def test_an_imported_auxiliary_loss_weighs_what_it_weighs_in_transformers(name):
    """Of one layer, and of layers that route alike."""
    module, dense = hugging_face.family_of(MOE[name]), MOE[name].num_dense_layers
    from_fields = hugging_face.family_module("moe").from_fields
    fields = module.to_fields(MOE[name]) | {"router_aux_loss_coef": 0.05, "output_router_logits": True}
    padding = torch.arange(7) >= torch.tensor([[3], [7], [6]])
    for layers in (1, 8):
        config = from_fields(hugging_face.Fields(fields | {"num_hidden_layers": layers + dense}))
        assert module.to_fields(config)["router_aux_loss_coef"] == 0.05
        router = Router(config).double()
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
        x = inputs().flatten(0, 1)
        router(x, padding)
        router.load.copy_(router.counts / router.counts.sum())
        router.loss_sums.zero_()
        router(x, padding)
        ours = layers * config.balance_coefficient * router.loss_sums[0] / 16
        attention, logits = (~padding).long(), (F.linear(x, router.weight),) * layers
        theirs = load_balancing_loss_func(logits, config.num_experts, config.experts_per_token, attention)
        assert ours.item() == pytest.approx(0.05 * theirs.item(), rel=bound())


@pytest.mark.slow
def test_coefficients_go_out_as_they_came_in():
    """Digit for digit. transformers adds no loss without output_router_logits, and then the source's stays."""
    from_fields = hugging_face.family_module("moe").from_fields
    for name, digits, layers, chosen in product(MOE, (0.001, 0.007, 0.02), range(2, 95, 3), (1, 2, 5)):
        module, config = hugging_face.family_of(MOE[name]), MOE[name]
        fields = module.to_fields(config) | {"num_hidden_layers": layers, "num_experts_per_tok": chosen}
        if chosen > 1 or name != "mixtral":
            active = {"router_aux_loss_coef": digits, "output_router_logits": True}
            read = from_fields(hugging_face.Fields(fields | active))
            assert module.to_fields(read)["router_aux_loss_coef"] == digits
    for change in ({"router_aux_loss_coef": 0.0}, {"output_router_logits": False}):
        none = from_fields(hugging_face.Fields(fields | active | change))
        assert none.balance == "none" and "router_aux_loss_coef" not in module.to_fields(none)


def test_flavors_have_the_published_coefficients():
    """Here a layer's loss counts by itself; DeepSeekMoE's does in its own code."""
    published = {"mixtral_8x7b": 0.02 / 16, "mixtral_8x22b": 0.001 / 28, "qwen3_30b_a3b": 0.001 / 6}
    published |= {"qwen3_235b_a22b": 0.008 / 94, "olmoe_1b_7b": 0.01 / 2, "deepseek_moe_16b": 0.001}
    for flavor, coefficient in published.items():
        assert model_config(Model(family="moe", flavor=flavor)).balance_coefficient == pytest.approx(coefficient)


def test_the_grouped_product_and_the_loop_are_one():
    """torch's product is that of bfloat16, and the loop that of float64. One expert has no rows."""
    x, ends = inputs(torch.bfloat16).flatten(0, 1), torch.tensor([0, 6, 17, 17, 21], dtype=torch.int32)
    linear, own = random_mlp().experts.gate.bfloat16(), torch.Generator().manual_seed(1)
    upstream = torch.randn(21, 24, generator=own).bfloat16()
    results = []
    for kind in (torch.float64, torch.bfloat16):
        linear.weight, rows = torch.nn.Parameter(linear.weight.detach().to(kind)), x.to(kind).requires_grad_()
        result = linear(rows, ends)
        results.append((result, *torch.autograd.grad(result, (rows, linear.weight), upstream.to(kind))))
    assert results[0][2].unflatten(0, (5, -1))[[0, 3]].eq(0).all()
    for exact, found in zip(*results, strict=True):  # summed in float32 and rounded once, by half a unit at most
        assert found.dtype == torch.bfloat16
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 64 * 2**-24 * exact.abs().max()).all()


def test_grouped_biases_are_those_of_the_loop():
    """Of outputs that a tensor-parallel rank has, too. One expert has no rows."""
    ends, own = torch.tensor([0, 6, 17, 17, 21], dtype=torch.int32), torch.Generator().manual_seed(1)
    linear = random_mlp(expert_bias=True).experts.gate.bfloat16()
    result, upstream = torch.empty(21, 40), torch.randn(21, 40, generator=own).bfloat16()
    linear.first_bias = 8
    (exact, gradient), (rows, other) = (
        (found := linear.to(kind).bias_rows(result.to(kind), ends),
         torch.autograd.grad(found, linear.bias, upstream.to(kind))[0])
        for kind in (torch.float64, torch.bfloat16)
    )  # fmt: skip
    assert torch.equal(rows.double(), exact) and exact[:, :8].eq(0).all() and exact[:, 32:].eq(0).all()
    assert torch.equal(exact[0, 8:32], linear.bias[24:48].double())
    torch.testing.assert_close(other.double(), gradient, rtol=2**-8, atol=bound(64, torch.float32))  # sums of 21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_torch_does_not_group_are_looped_over(monkeypatch, dtype):
    """An odd number of columns, and another type."""
    monkeypatch.setattr(experts.F, "grouped_mm", None)
    linear = experts.ExpertLinear(moe_config(), 7, 3)
    torch.nn.init.normal_(linear.weight)
    x, ends = torch.randn(4, 7).to(dtype), torch.tensor([1, 1, 3, 3, 4], dtype=torch.int32)
    weight = linear.to(dtype).weight.view(5, 3, 7)
    expected = torch.stack([weight[e].double() @ row.double() for e, row in zip((0, 2, 2, 4), x, strict=True)])
    within = {"rtol": bound(1, dtype), "atol": bound(7, torch.float32) * float(expected.abs().max())}
    torch.testing.assert_close(linear(x, ends).double(), expected, **within)
    torch.library.opcheck(expert_product, (x.float(), weight.float().detach(), ends))


def test_loads_and_biases_are_saved_and_counts_are_not(tmp_path):
    model, other = (random_model(moe_config(balance="bias"), seed=seed).float() for seed in (1, 2))
    for number, layer in enumerate(model.layers.values()):
        layer.mlp.router.load.copy_(torch.arange(5.0) + number)
        layer.mlp.router.bias.copy_(-torch.arange(5.0) - number)
    buffers = {name for name in model_tensors(model) if name.startswith("buffers.")}
    assert buffers == {f"buffers.layers.{n}.mlp.router.{name}" for n in range(3) for name in ("load", "bias")}
    load_checkpoint(save_checkpoint(tmp_path, model), other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_checkpoint_without_loads_begins_with_equal_ones(tmp_path):
    model, other = random_model(moe_config(balance="none")).float(), random_model(moe_config(balance="bias")).float()
    other.init_weights(0)
    path = save_checkpoint(tmp_path, model)
    load_checkpoint(path, other)
    assert other.layers["1"].mlp.router.bias.tolist() == [0] * 5


def test_initial_weights():
    """Each expert has numbers of its own; loads are equal; matrices that write to the residual stream are smaller."""
    model = random_model(moe_config(num_shared_experts=1)).float()
    model.init_weights(3)
    mlp = model.layers["1"].mlp
    for name, std in (("gate", 0.02), ("up", 0.02), ("down", 0.02 / math.sqrt(6))):
        weight = getattr(mlp.experts, name).weight.detach()
        first, *others = weight.unflatten(0, (5, -1))
        assert all(F.cosine_similarity(first.flatten(), other.flatten(), dim=0).abs() < 0.15 for other in others)
        assert weight.std().item() == pytest.approx(std, rel=0.05)  # of 7680 numbers
        assert getattr(mlp.shared, name).weight.std().item() == pytest.approx(std, rel=0.1)
    assert mlp.router.load.tolist() == pytest.approx([0.2] * 5)


def test_flavors_use_the_parameters_that_their_authors_give():
    """Billions of those that a token uses with the output matrix, but without the embedding table."""
    given = {
        "mixtral_8x7b": 12.7, "mixtral_8x22b": 39.0, "qwen3_30b_a3b": 3.0, "qwen3_235b_a22b": 21.6,
        "olmoe_1b_7b": 1.2, "deepseek_moe_16b": 2.6,
    }  # fmt: skip
    for flavor, active in given.items():
        model = model_config(Model(family="moe", flavor=flavor))
        of_layers = zip(model.layer_counts, model.parts.kinds, strict=True)
        used = model.parts.head_matrices + sum(count * kind.matrices[0] for count, kind in of_layers)
        assert round(used / 1e9, 1) == active, flavor
