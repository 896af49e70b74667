"""Float8 products: what they compute, which modules have them, and what is refused."""

from dataclasses import replace
from importlib import util
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.float8 import convert_to_float8_training

from tests.float64 import bound
from tests.reference.float8 import Float8Linear
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Float8, JobConfig, Model
from titan_like.models.batch import Batch
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import build_model, model_config
from titan_like.parallel import float8
from titan_like.parallel.float8 import Float8Experts, Float8LinearConfig, float8_linears, use_float8
from titan_like.parallel.weight_gradients import defer_weight_gradients
from titan_like.train.rules import resolve_for_inference, resolve_settings
from titan_like.train.setup import select_device


def config(**fields: Any) -> JobConfig:
    tree = {"model": {"overrides": {"num_layers": 2}}, "training": {"steps": 1}, "float8": {"enable": True} | fields}
    return JobConfig.model_validate(tree)


def model_of(shape: TransformerConfig) -> Any:
    with torch.device("meta"):
        return build_model(shape, "gpt")


def float8_linear(recipe: str, dtype: torch.dtype, emulates: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    model = nn.Linear(64, 48).to(dtype)
    layers = nn.ModuleDict({"0": nn.ModuleDict({"fc": model})})
    whole: Any = nn.Module()
    whole.layers, whole.absent = layers, frozenset()
    use_float8(whole, Float8(enable=True, recipe=recipe), emulates)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_s_own_module_computes_the_same_bits(recipe: str, dtype: torch.dtype) -> None:
    module = float8_linear(recipe, dtype)
    plain = nn.Sequential(nn.Linear(64, 48).to(dtype))
    plain[0].load_state_dict(module.state_dict())
    options = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = convert_to_float8_training(plain, config=options)
    found = []
    for model in (module, theirs):
        x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        output = model(x)
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(dtype))
        found.append([output, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(ours, other) for ours, other in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torch_s_kernel_computes_what_is_emulated(recipe: str) -> None:
    if recipe == "rowwise" and torch.__version__ < "2.13":
        pytest.skip("here the CPU has no kernel for this")
    found = []
    for emulates in (True, False):  # 21 tokens: a number that the kernel has to fill up
        module = float8_linear(recipe, torch.bfloat16, emulates)
        x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        module(x).square().sum().backward()
        found.append([x.grad, module.weight.grad])
    for emulated, computed in zip(*found, strict=True):
        assert emulated is not None and computed is not None
        # The last bit of a bfloat16 result moves what is next rounded to float8 by a step of that at most.
        assert (computed - emulated).norm() <= bound(1, torch.float8_e4m3fn) * emulated.norm()


def test_a_split_backward_pass_defers_the_same_product() -> None:
    shape = model_config(config().model)
    gradients = []
    for defers in (False, True):
        model = build_model(shape, "gpt").double()
        model.init_weights(3)
        use_float8(model, config().float8, emulates=True)
        deferred = defer_weight_gradients(model) if defers else None
        torch.manual_seed(0)
        model.eval()(Batch(torch.arange(8)[None]))[..., : shape.vocab_size].logsumexp(-1).sum().backward()
        for product in deferred.take() if deferred is not None else ():
            product.add()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= bound() * gradient.norm(), name


@pytest.mark.parametrize(
    ("overrides", "patterns", "expected"),
    [
        ({}, [], {"attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"}),
        ({}, ["layers.*.mlp.fc?"], {"attention.qkv", "attention.proj"}),
        ({}, ["layers.*.attention", "layers.*.mlp.fc2"], {"mlp.fc1"}),
        ({"tied_embeddings": False}, ["layers.0", "layers.1.mlp"], {"attention.qkv", "attention.proj"}),
        ({"ffn_hidden_size": 100}, [], {"attention.qkv", "attention.proj"}),
    ],
)
def test_the_filter_and_the_sizes_choose_modules_of_the_layers(
    overrides: dict[str, Any], patterns: list[str], expected: set[str]
) -> None:
    job = JobConfig.model_validate({"model": {"overrides": overrides | {"num_layers": 2}}})
    model = model_of(model_config(job.model))
    found = {name for name, _ in float8_linears(model, Float8(enable=True, filter=patterns))}
    layers = (1,) if "layers.0" in patterns else (0, 1)
    assert found == {f"layers.{number}.{name}" for number in layers for name in expected}
    use_float8(model, Float8(enable=True, filter=patterns), emulates=True)
    assert {name for name, module in model.named_modules() if hasattr(module, "float8")} == found
    assert len({id(module.float8) for module in model.modules() if hasattr(module, "float8")}) == 1


def test_what_cannot_be_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(model_config(config().model))
    with pytest.raises(ConfigError, match=r'float8\.filter.*"layers\.\*\.mlp\.fc9" fits no module of the layers; use'):
        use_float8(model, Float8(enable=True, filter=["layers.*.mlp.fc9"]), emulates=True)
    odd = JobConfig.model_validate({"model": {"overrides": {"hidden_size": 36, "ffn_hidden_size": 36}}})
    with pytest.raises(
        ConfigError, match=r"float8\.enable.*no linear module .* has sides that are multiples of 16; set"
    ):
        use_float8(model_of(model_config(odd.model)), Float8(enable=True), emulates=True)
    assert resolve_settings(config(), 1)
    original = util.find_spec
    monkeypatch.setattr("titan_like.train.rules.find_spec", lambda name: None if name == "torchao" else original(name))
    with pytest.raises(ConfigError, match=r"float8\.enable.*needs torchao; pip install \"titan_like\[float8\]\""):
        resolve_settings(config(), 1)
    assert not resolve_for_inference(config(), 1)[0].float8.enable


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_a_gpu_without_float8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    assert select_device("bfloat16").type == "cuda"
    if not refused:
        assert select_device("bfloat16", float8=True).type == "cuda"
        return
    with pytest.raises(ConfigError, match=r"float8\.enable.*A100 has no float8 arithmetic, .* 8\.9 .* set it to false"):
        select_device("bfloat16", float8=True)


ENDS = torch.tensor([0, 3, 20, 20, 21, 37], dtype=torch.int32)  # of the rows of 3 experts and 2 microbatches


def float8_experts(recipe: str, emulates: bool = True) -> Float8Experts:
    return Float8Experts(Float8LinearConfig.from_recipe_name(recipe), emulates)


def expert_factors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows, matrices and the gradient of the output. Each expert's numbers are of another size."""
    draws = torch.Generator().manual_seed(2)
    shapes = (37, 64), (3, 48, 64), (37, 48)
    x, matrices, gradient = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes)
    sizes = torch.tensor([1.0, 30.0, 1000.0], dtype=torch.float64)
    of_row = sizes.repeat_interleave(torch.tensor([3, 17, 17]))[:, None]
    return [x.to(dtype) for x in (x * of_row, matrices / sizes[:, None, None], gradient * of_row)]


def products_of(product: Float8Experts, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output and the gradients of the rows and of the matrices."""
    x, matrices, gradient = expert_factors(dtype)
    x, matrices = x.requires_grad_(), matrices.requires_grad_()
    output = product.linear(x, matrices, ENDS)
    return [output.detach(), *torch.autograd.grad(output, (x, matrices), gradient)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_each_expert_and_microbatch_is_quantised_by_itself(recipe: str) -> None:
    x, matrices, gradient = expert_factors(torch.float64)
    x, matrices, expected = x.requires_grad_(), matrices.requires_grad_(), []
    for group, (start, stop) in enumerate(pairwise([0, *ENDS.tolist()])):
        expected.append(Float8Linear.apply(x[start:stop], matrices[group // 2], recipe))
    output = torch.cat(expected)
    found = products_of(float8_experts(recipe), torch.float64)
    for ours, definition in zip(found, [output, *torch.autograd.grad(output, (x, matrices), gradient)], strict=True):
        torch.testing.assert_close(ours, definition, rtol=bound(), atol=bound())


def kernel(a: Any, b: Any, offsets: torch.Tensor, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """What torch's kernel for Hopper checks and computes."""
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (a[0], b[0], a[1], b[1])
        ]
        ends = torch.empty(offsets.shape, dtype=torch.int32, device="cuda")
        checked = torch._scaled_grouped_mm(*fakes, ends, out_dtype=dtype, use_fast_accum=fast)
    assert offsets.is_contiguous() and dtype == torch.bfloat16
    parts = list(pairwise([0, *offsets.tolist()]))
    if b[0].ndim == 3:
        rows = (a[0].float() / a[1][:, None]), b[0].float() / b[1][:, None]
        result = torch.cat([rows[0][start:stop] @ matrix for (start, stop), matrix in zip(parts, rows[1], strict=True)])
    else:
        assert all(start % 16 == 0 for start, _ in parts)
        scales = (scale.unflatten(0, (len(parts), -1)) for scale in (a[1], b[1]))
        result = torch.stack(
            [
                (a[0][:, start:stop].float() / by_row[:, None]) @ (b[0][start:stop].float() / by_column)
                for (start, stop), by_row, by_column in zip(parts, *scales, strict=True)
            ]
        )
    assert result.shape == checked.shape
    return result.to(dtype)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_grouped_kernel_gets_what_is_emulated(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "grouped_float8_product", kernel)
    computed, emulated = (products_of(float8_experts(recipe, emulates), torch.bfloat16) for emulates in (False, True))
    for ours, expected in zip(computed, emulated, strict=True):
        assert ours.dtype == torch.bfloat16
        errors = (ours.float() - expected.float()).norm(dim=-1)  # the kernel rounds each microbatch's product
        assert (errors <= 2**-7 * expected.float().norm(dim=-1)).all()


def test_master_weights_are_rounded_before_they_are_cast() -> None:
    """float32 master weights give the numbers of their 16-bit copies."""
    x, matrices, _ = expert_factors(torch.float32)
    product, rows = float8_experts("rowwise"), x.bfloat16()
    assert torch.equal(product.linear(rows, matrices, ENDS), product.linear(rows, matrices.bfloat16(), ENDS))


def test_experts_have_float8_products_and_routers_have_none() -> None:
    shape = model_config(Model(family="moe", overrides={"num_layers": 1, "num_shared_experts": 1}))
    with torch.device("meta"):
        model = build_model(shape, "moe")
    patterns = ["layers.*.attention", "layers.*.mlp.experts.up"]
    use_float8(model, Float8(enable=True, filter=patterns), emulates=True)
    found = {name for name, module in model.named_modules() if getattr(module, "float8", None) is not None}
    names = "experts.gate", "experts.down", "shared.gate", "shared.up", "shared.down"
    assert found == {f"layers.0.mlp.{name}" for name in names}
