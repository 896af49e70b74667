"""Experts and their router, against definitions that take one token at a time."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.unit.hugging_face_cases import MOE, llama_config, moe_config, random_model, save_checkpoint
from titan_like.checkpoint.loader import CheckpointWeights, load_checkpoint, model_tensors
from titan_like.config.errors import ConfigError
from titan_like.config.load import load_config
from titan_like.config.schema import Model
from titan_like.hugging_face.convert import to_hugging_face
from titan_like.models import hugging_face
from titan_like.models.layers import experts
from titan_like.models.layers.experts import Router, SparseMLP, expert_product
from titan_like.models.registry import flavors, model_config
from titan_like.parallel.expert_balance import FIGURES, ExpertBalance
from titan_like.planner.dry_run import dry_run

DEBUG = ["--job.config_file", str(Path(__file__).parents[2] / "train_configs/debug_moe.toml")]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "experts_per_token": 3},
    {"router_score": "sigmoid", "routed_scaling": 2.5, "num_shared_experts": 2},
    {"router_score": "sigmoid", "balance": "bias", "z_loss_coefficient": 0.01},
    {"balance": "bias", "renormalize": False},
    {"experts_per_token": 1, "renormalize": False},
    {"experts_per_token": 5, "z_loss_coefficient": 0.3, "balance_coefficient": 0.2},
]


def random_mlp(**values: Any) -> SparseMLP:
    """A float64 block whose every number is random."""
    mlp, generator = SparseMLP(moe_config(**values)).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in mlp.parameters():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        mlp.router.load.copy_(torch.rand(5, generator=generator, dtype=torch.float64))
        if mlp.router.bias is not None:
            mlp.router.bias.copy_(torch.randn(5, generator=generator, dtype=torch.float64))
    return mlp


def inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(dtype)


def by_definition(
    mlp: SparseMLP, x: torch.Tensor, padding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """(the result, Σ over real tokens of the auxiliary and of the z-loss, real tokens sent to each expert)."""
    config, ffn, hidden = mlp.router.config, 24, 64
    rows, balance, z, counts = [], x.new_zeros(()), x.new_zeros(()), [0] * 5

    def swiglu(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return down @ (F.silu(gate @ token) * (up @ token))

    for token, is_real in zip(x.flatten(0, 1), (~padding).flatten().tolist(), strict=True):
        logits = mlp.router.weight @ token
        scores = logits.exp() / logits.exp().sum() if config.router_score == "softmax" else 1 / (1 + (-logits).exp())
        ranked = scores.tolist() if mlp.router.bias is None else (scores + mlp.router.bias).tolist()
        chosen = sorted(range(5), key=lambda e: -ranked[e])[: config.experts_per_token]
        total = sum(scores[e] for e in chosen) if config.renormalize else 1.0
        row = torch.zeros_like(token)
        for e in chosen:
            counts[e] += is_real
            gate, up = (getattr(mlp.experts, name).weight[e * ffn : (e + 1) * ffn] for name in ("gate", "up"))
            down = mlp.experts.down.weight[e * hidden : (e + 1) * hidden]
            row = row + config.routed_scaling * scores[e] / total * swiglu(gate, up, down, token)
        if mlp.shared is not None:
            row = row + swiglu(mlp.shared.gate.weight, mlp.shared.up.weight, mlp.shared.down.weight, token)
        rows.append(row)
        balance = balance + is_real * 5 * sum(mlp.router.load[e] * scores[e] / scores.sum() for e in range(5))
        z = z + is_real * logits.exp().sum().log() ** 2
    return torch.stack(rows).view_as(x), balance, z, counts


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("values", SWITCHES, ids=str)
def test_results_losses_and_gradients_are_those_of_a_loop_over_tokens(values, pads):
    """Padding gets the same results, but is in no loss and no count."""
    mlp, factor = random_mlp(**values), 0.37
    config = mlp.router.config
    mlp.router.loss_factor.fill_(factor)
    x, upstream = inputs().requires_grad_(), torch.randn(3, 7, 64, dtype=torch.float64)
    tensors = {"x": x, **dict(mlp.named_parameters())}
    padding = (torch.arange(7) >= torch.tensor([[3], [7], [6]])) & pads
    result = mlp(x, padding) if pads else mlp(x)
    found = torch.autograd.grad((result * upstream).sum(), tuple(tensors.values()))
    expected, balance, z, counts = by_definition(mlp, x, padding)
    extra = config.z_loss_coefficient * z + config.balance_coefficient * balance * (config.balance == "auxiliary")
    wanted = torch.autograd.grad((expected * upstream).sum() + factor * extra, tuple(tensors.values()))
    assert (result - expected).abs().max() < 1e-12 * expected.abs().max()
    for name, one, other in zip(tensors, found, wanted, strict=True):
        assert (one - other).norm() < 1e-12 * other.norm(), name
    assert mlp.router.counts.tolist() == counts and sum(counts) == (16 if pads else 21) * config.experts_per_token
    assert mlp.router.loss_sums.tolist() == pytest.approx([balance.item(), z.item()], rel=1e-12)
    # Outside of training nothing is counted.
    with torch.no_grad():
        assert torch.equal(mlp.eval()(x), result)
    assert mlp.router.counts.tolist() == counts


@pytest.mark.parametrize("name", MOE)
def test_an_imported_auxiliary_loss_weighs_what_it_weighs_in_transformers(name):
    """Of one layer, and of layers that route alike; transformers rounds it to float32."""
    module, dense = hugging_face.family_of(MOE[name]), MOE[name].num_dense_layers
    fields = module.to_fields(MOE[name]) | {"router_aux_loss_coef": 0.05}
    padding = torch.arange(7) >= torch.tensor([[3], [7], [6]])
    for layers in (1, 8):
        config = module.from_fields(hugging_face.Fields(fields | {"num_hidden_layers": layers + dense}))
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
        assert ours.item() == pytest.approx(0.05 * theirs.item(), rel=1e-6)


def test_coefficients_go_out_as_they_came_in():
    """Digit for digit; a model without balance has none."""
    for name, digits, layers, chosen in product(MOE, (0.001, 0.007, 0.02), range(2, 95, 3), (1, 2, 5)):
        module, config = hugging_face.family_of(MOE[name]), MOE[name]
        fields = module.to_fields(config) | {"num_hidden_layers": layers, "num_experts_per_tok": chosen}
        if chosen > 1 or name != "mixtral":
            read = module.from_fields(hugging_face.Fields(fields | {"router_aux_loss_coef": digits}))
            assert module.to_fields(read)["router_aux_loss_coef"] == digits
    none = module.from_fields(hugging_face.Fields(fields | {"router_aux_loss_coef": 0.0}))
    assert none.balance == "none" and module.to_fields(none)["router_aux_loss_coef"] == 0
    assert module.to_fields(moe_config(balance="none"))["router_aux_loss_coef"] == 0


def test_flavors_have_the_published_coefficients():
    """Here a layer's loss counts by itself; DeepSeekMoE's does in its own code."""
    published = {"mixtral_8x7b": 0.02 / 16, "mixtral_8x22b": 0.001 / 28, "qwen3_30b_a3b": 0.001 / 6}
    published |= {"qwen3_235b_a22b": 0.008 / 94, "olmoe_1b_7b": 0.01 / 2, "deepseek_moe_16b": 0.001}
    for flavor, coefficient in published.items():
        assert model_config(Model(family="moe", flavor=flavor)).balance_coefficient == pytest.approx(coefficient)


def test_an_expert_without_tokens_gets_zeros():
    mlp = random_mlp(balance="bias")
    assert mlp.router.bias is not None
    mlp.router.bias[2], mlp.router.bias[4] = -100, -100
    mlp(inputs()).square().sum().backward()
    assert mlp.router.counts[[2, 4]].tolist() == [0, 0] and mlp.router.counts.sum() == 42
    for name in ("gate", "up", "down"):
        gradient = getattr(mlp.experts, name).weight.grad.unflatten(0, (5, -1))
        assert [bool(one.any()) for one in gradient] == [True, True, False, True, False]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_torch_does_not_group_are_looped_over(monkeypatch, dtype):
    """An odd number of columns, and another type."""
    monkeypatch.setattr(experts, "grouped_product", None)
    linear = experts.ExpertLinear(moe_config(), 7, 3)
    torch.nn.init.normal_(linear.weight)
    x, ends = torch.randn(4, 7), torch.tensor([1, 1, 3, 3, 4], dtype=torch.int32)
    expected = torch.stack([linear.weight.view(5, 3, 7)[e] @ row for e, row in zip((0, 2, 2, 4), x, strict=True)])
    torch.testing.assert_close(linear.to(dtype)(x.to(dtype), ends).float(), expected, rtol=0.02, atol=0.05)
    torch.library.opcheck(expert_product, (x, linear.weight.float().view(5, 3, 7).detach(), ends))


def balance_of(model: torch.nn.Module) -> ExpertBalance:
    alone = MagicMock()  # a mesh whose dimensions all have one rank
    alone.__getitem__.return_value.size.return_value = alone.get_group.return_value.size.return_value = 1
    alone.__getitem__.return_value.get_group.return_value.size.return_value = 1
    return ExpertBalance(SimpleNamespace(stages=[SimpleNamespace(module=model)]), alone)  # type: ignore[arg-type]


@pytest.mark.parametrize("recomputes", [False, True])
def test_loads_biases_and_figures_of_a_step(recomputes):
    model = random_model(moe_config(balance="bias", num_dense_layers=1, z_loss_coefficient=0.1))
    routers = [model.layers[name].mlp.router for name in ("1", "2")]
    seen: list[list[torch.Tensor]] = [[], []]
    for router, inputs in zip(routers, seen, strict=True):
        router.reset()
        router.register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0].detach()))
    if recomputes:
        for layer in model.layers.values():
            layer.forward = lambda *args, own=layer.forward: checkpoint(own, *args, use_reentrant=False)
    balance = balance_of(model)
    tokens = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(2))

    def step(is_skipped: bool) -> dict[str, float]:
        balance.begin(3.0, 48)
        for microbatch in tokens:
            model(microbatch[None])[..., :101].square().sum().backward()
        return dict(zip(FIGURES, balance.finish(torch.tensor(is_skipped)).tolist(), strict=True))

    skipped = step(is_skipped=True)
    assert balance.loss_factor.tolist() == [3 / 48] * 2
    assert balance.load.tolist() == [[0.2] * 5] * 2 and not balance.bias.any()
    assert balance.counts.sum() == 0 and balance.loss_sums.sum() == 0
    assert {len(inputs) for inputs in seen} == {4 if recomputes else 2}
    found = step(is_skipped=False)  # the same tokens, with the same weights
    assert found == pytest.approx(skipped, rel=1e-12)
    shares, z = [], 0.0
    for router, inputs in zip(routers, seen, strict=True):
        counts = [0] * 5
        for token in torch.cat(inputs[:1] + inputs[2 if recomputes else 1 :][:1])[:, None]:
            logits = F.linear(token, router.weight)[0]
            z += logits.logsumexp(0).item() ** 2 / 48
            for e in sorted(range(5), key=lambda e: -logits[e].item())[:2]:
                counts[e] += 1
        shares.append([count / 96 for count in counts])
        assert router.load.tolist() == pytest.approx(shares[-1], rel=1e-15)
        signs = [0.001 * ((count < 96 / 5) - (count > 96 / 5)) for count in counts]
        assert router.bias.tolist() == pytest.approx(signs)
    entropies = [-sum(share * math.log(share) for share in load if share) / math.log(5) for load in shares]
    expected = (2.0, z, 5 * min(map(min, shares)), 5 * max(map(max, shares)), sum(entropies) / 2)
    assert list(found.values()) == pytest.approx(expected)  # with equal loads a layer's balance loss is 1


def test_a_model_without_experts_has_no_figures():
    model = random_model(llama_config())
    balance = balance_of(model)
    balance.begin(1.0, 48)
    assert balance.finish(torch.tensor(False)).shape == (0,)


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


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"experts_per_token": 6}, "experts_per_token 6 is more than num_experts 5"),
        ({"experts_per_token": 1}, "experts_per_token 1 with renormalize"),
        ({"num_dense_layers": 3}, "num_dense_layers 3 of num_layers 3 leave no layer with experts"),
        ({"hidden_size": 66}, "num_attention_heads 4 does not divide hidden_size 66"),
        ({"head_size": 7}, "head_size 7 is odd"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(values, told):
    with pytest.raises(ValueError, match=told):
        moe_config(**values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts = 1, which MixtralForCausalLM cannot represent"),
        ({"router_score": "sigmoid"}, "router_score = sigmoid"),
        ({"balance": "bias"}, "balance = bias"),
        ({"renormalize": False}, "renormalize = False"),
        ({"num_dense_layers": 1}, "num_dense_layers = 1"),
    ],
)
def test_what_transformers_lacks_is_not_exported(tmp_path, values, told):
    path = save_checkpoint(tmp_path, random_model(moe_config(**values)).float())
    with pytest.raises(ConfigError, match=told):
        to_hugging_face(CheckpointWeights(path), tmp_path / "hf", None, 10**9, None)


def test_a_dry_run_counts_what_a_token_uses():
    """Each of 16 processes has its share of the 8 experts."""
    settings = ["--model.flavor=mixtral_8x7b", "--training.global_batch_size=64", "--checkpoint.enable=false"]
    found = dry_run(load_config([*DEBUG, *settings, "--cluster.nodes=2", "--cluster.gpus_per_node=8"]))
    total, expert = 46_702_792_704, 3 * 4096 * 14336  # mistralai/Mixtral-8x7B-v0.1 has this many
    assert (found.num_parameters, found.active_parameters) == (total, total - 32 * 6 * expert)
    routers = 32 * 8 * 4096  # of which 8 processes have a row
    assert 0 <= found.state.num_parameters - total / 16 <= routers / 16


def test_flavors_have_the_parameters_that_their_authors_give():
    """In billions, in total and of those that a token uses with the output matrix, but without the embedding table."""
    given = {
        "mixtral_8x7b": (46.7, 12.7),
        "mixtral_8x22b": (140.6, 39.0),
        "qwen3_30b_a3b": (30.5, 3.0),
        "qwen3_235b_a22b": (235.1, 21.6),
        "olmoe_1b_7b": (6.9, 1.2),
        "deepseek_moe_16b": (16.4, 2.6),
    }
    for flavor, (total, active) in given.items():
        model = model_config(Model(family="moe", flavor=flavor))
        parts = model.parts
        used = parts.head_matrices + sum(
            count * kind.matrices[0] for count, kind in zip(model.layer_counts, parts.kinds, strict=True)
        )
        assert (round(model.num_parameters() / 1e9, 1), round(used / 1e9, 1)) == (total, active), flavor
    assert set(given) | {"debug"} == set(flavors("moe"))
