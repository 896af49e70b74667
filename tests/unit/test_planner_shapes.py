"""What the planner reads from one layer and its tensor-parallel plan."""

import sys
from types import ModuleType

import pytest
import torch
from titan_like.planner.saved_tensors import layer_input_bytes, saved_inside
from titan_like.planner.shapes import Region, description
from titan_like.planner.style_kinds import kind_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from tests.unit.planner_cases import flavor as model
from titan_like.config.errors import ConfigError
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.gpt.model import build
from titan_like.models.gpt.sharding import TENSOR_PARALLEL_PLAN
from titan_like.models.parts import one_of_each, parts_of

GPT, LLAMA = model("gpt", "debug"), model("llama", "debug")  # llama: half as many keys and values
HIDDEN, KV = 128, 64


def test_a_layer_is_built_once_for_all_depths():
    deep = GPT.model_copy(update={"num_layers": 2048})
    assert one_of_each(deep) is one_of_each(GPT)
    assert parts_of(deep) == parts_of(GPT)
    assert all(parameter.is_meta for parameter in one_of_each(deep).parameters())


def test_regions():
    gpt_mlp = Region("mlp", HIDDEN, columns=512, rows=512, outputs=HIDDEN, cores=0, enters=1, leaves=1)
    (gpt,), (llama,) = description(GPT).kinds, description(LLAMA).kinds
    assert gpt.regions == (Region("attention", HIDDEN, 3 * HIDDEN, HIDDEN, HIDDEN, 1, 1, 1), gpt_mlp)
    ffn = LLAMA.ffn_hidden_size
    attention, mlp = llama.regions
    assert attention == Region("attention", HIDDEN, HIDDEN + 2 * KV, HIDDEN, HIDDEN, 1, 1, 1)
    assert mlp == Region("mlp", HIDDEN, 2 * ffn, ffn, HIDDEN, 0, 1, 1)  # gate and up
    assert llama.norms == ("attention_norm", "mlp_norm")
    assert (description(GPT).entry_leaves, description(GPT).head_enters) == (1, 1)


def saved(model, dtype):
    """Of a model whose layers are alike and work on one sequence."""
    (inside,) = saved_inside(model, dtype)
    assert all((one.decoder, one.fixed) == (0, 0) for one in inside.values())
    return {name: one.token for name, one in inside.items()}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_what_autograd_saves_inside(dtype, size):
    ffn = LLAMA.ffn_hidden_size
    # Queries, keys and values share the projection's result; the heads' output.
    assert saved(GPT, dtype) == {"attention": size * (3 * HIDDEN + HIDDEN), "mlp": size * 2 * 512}
    rotated = HIDDEN + KV
    inside = {"attention": size * (HIDDEN + 2 * KV + rotated + HIDDEN), "mlp": size * 4 * ffn}
    assert saved(LLAMA, dtype) == inside
    grouped = GPT.model_copy(update={"num_kv_heads": 2})  # queries of two heads to a key are copied out
    assert saved(grouped, dtype)["attention"] == size * (HIDDEN + 2 * KV + HIDDEN + HIDDEN)
    assert (layer_input_bytes(GPT, "float32", 32), layer_input_bytes(LLAMA, "float32", 32)) == (0, 2 * 4 * 32 * 32 // 2)


def test_looking_changes_no_random_numbers_and_needs_no_gradients():
    dropout = GPT.model_copy(update={"dropout": 0.5, "ffn_hidden_size": 256})
    before = torch.get_rng_state()
    with torch.no_grad():
        assert saved(dropout, "float32")["mlp"] == 4 * 2 * 256
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_s_styles_say_what_they_split():
    linear = nn.Linear(2, 2, device="meta")
    assert kind_of(ColwiseParallel(), linear) == ({"weight": 0, "bias": 0}, (), True, False)
    assert kind_of(RowwiseParallel(), linear) == ({"weight": 1}, (), False, True)
    with pytest.raises(ValueError, match="how PrepareModuleInput splits a Linear is not known"):
        kind_of(PrepareModuleInput(), linear)


def family(monkeypatch, plan):
    """A family in a package without files: GPT with this plan."""
    modules = {"made_up": ModuleType("made_up"), "made_up.model": ModuleType("made_up.model")}
    modules["made_up"].__path__ = []
    modules["made_up.model"].build = build
    monkeypatch.delitem(sys.modules, "made_up.sharding", raising=False)
    if plan is not None:
        modules["made_up.sharding"] = ModuleType("made_up.sharding")
        modules["made_up.sharding"].TENSOR_PARALLEL_PLAN = plan
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    shape = type("MadeUpConfig", (GPTConfig,), {"__module__": "made_up.config"})
    return shape.model_validate(GPT.model_dump())


def test_torch_s_styles_in_a_plan(monkeypatch):
    plan = {name: style for name, style in TENSOR_PARALLEL_PLAN.items() if name != "layers.*.mlp"}
    mixed = plan | {"layers.*.mlp.fc1": ColwiseParallel(), "layers.*.mlp.fc2": RowwiseParallel()}
    (found,), (ours,) = description(family(monkeypatch, mixed)).kinds, description(GPT).kinds
    assert found.regions == ours.regions
    assert [(p.name, p.tensor_dim) for p in found.parameters] == [(p.name, p.tensor_dim) for p in ours.parameters]


def test_wrong_plans_are_one_sentence(monkeypatch):
    wanted = r'mlp an unknown style "regoin"; use one of region, .*correct its sharding'
    with pytest.raises(ConfigError, match=wanted):
        description(family(monkeypatch, TENSOR_PARALLEL_PLAN | {"layers.*.mlp": "regoin"}))
    with pytest.raises(ConfigError, match="the package has no module sharding"):
        description(family(monkeypatch, None))
