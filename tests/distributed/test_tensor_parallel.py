"""Dropout, plans that do not fit and logits of tensor parallelism.

`test_layout_matrix` has parity, and `test_step_traffic` what is sent.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.launch import collect
from tests.float64 import bound
from tests.losses import summed_loss
from titan_like.config.schema import Model
from titan_like.models.batch import Batch
from titan_like.models.gpt import sharding
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.parallel.tensor import apply_tensor_parallel, full_logits
from titan_like.parallel.tensor_styles import TensorParallel


def build(family: str, mesh: DeviceMesh | None, sequence_parallel: bool = False, **overrides: Any) -> Transformer:
    with torch.device("meta"):
        model = build_model(model_config(Model(family=family, overrides=overrides)), family)
    if mesh is not None:
        apply_tensor_parallel(model, mesh, sequence_parallel)
    model.to_empty(device="cpu")
    model.init_weights(3)
    return model.double()


def with_plan(plan: dict[str, Any]) -> Any:
    return patch.object(sharding, "TENSOR_PARALLEL_PLAN", plan)


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (2, 32), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[0, 5:] = IGNORED_LABEL
    return tokens, labels


def measure(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {"errors": {}}
    tokens, _ = tokens_and_labels()
    for family in ("gpt", "llama", "bert"):
        whole = build(family, None)
        with torch.no_grad():
            # Logits are whole only where they are asked for.
            logits = build(family, mesh, True).eval()(Batch(tokens))
            assert logits.to_local().shape[-1] == whole.config.padded_vocab_size // 2
            last = full_logits(logits, slice(-1, None))
            torch.testing.assert_close(last, whole.eval()(Batch(tokens))[:, -1:])
    found["dropout"] = dropout_draws(mesh)
    found["torch's styles"] = largest_difference_with_torch_s_styles(mesh)
    for name, change in {
        "no such module": lambda plan: plan | {"layers.*.attention_nrom": "norm"},
        "no such style": lambda plan: plan | {"layers.*.mlp.fc1": "row_lienar"},
        "parameter left out": lambda plan: {key: value for key, value in plan.items() if key != "norm"},
    }.items():
        with torch.device("meta"):
            model = build_model(model_config(Model()), "gpt")
        with with_plan(change(sharding.TENSOR_PARALLEL_PLAN)), pytest.raises(ValueError) as refused:
            apply_tensor_parallel(model, mesh, False)
        found["errors"][name] = str(refused.value)
    return found


def largest_difference_with_torch_s_styles(mesh: DeviceMesh) -> float:
    """Of any gradient, relative to its norm, between our styles and a plan that has torch's for the MLPs."""
    tokens, labels = tokens_and_labels()
    ours = build("gpt", mesh)
    plan: dict[str, Any] = dict(sharding.TENSOR_PARALLEL_PLAN)
    del plan["layers.*.mlp"]
    plan |= {"layers.*.mlp.fc1": ColwiseParallel(), "layers.*.mlp.fc2": RowwiseParallel()}
    with with_plan(plan):
        mixed = build("gpt", mesh)
    assert not isinstance(mixed.layers["0"].mlp.fc1, TensorParallel)  # it is torch's
    for model in (ours, mixed):
        summed_loss(model, tokens, labels).backward()
    differences = []
    for name, parameter in ours.named_parameters():
        wanted, seen = parameter.grad.full_tensor(), mixed.get_parameter(name).grad.full_tensor()
        differences.append(((seen - wanted).norm() / wanted.norm()).item())
    return max(differences)


def dropout_draws(mesh: DeviceMesh) -> dict[str, list[float]]:
    """What one layer's attention gives with dropout. `test_resume` compares what ranks draw."""
    layer = build("gpt", mesh, dropout=0.5).layers["0"]
    core = layer.attention.core
    inputs = [torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    torch.manual_seed(5)
    attention = core(*inputs)
    torch.manual_seed(5)
    recomputed = checkpoint(core, *inputs, use_reentrant=False)
    kept = recomputed.detach().clone()
    torch.manual_seed(6)
    gradient = torch.autograd.grad(recomputed.sum(), inputs[2])[0]
    expected = torch.autograd.grad(attention.sum(), inputs[2])[0]
    draws = {"attention": attention, "again": kept, "gradient": gradient, "expected": expected}
    return {name: value.flatten().tolist() for name, value in draws.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return collect(measure, 2)


def test_recomputation_draws_the_same_dropout(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["dropout"]["again"] == rank["dropout"]["attention"]
        assert rank["dropout"]["gradient"] == rank["dropout"]["expected"]


def test_plans_that_do_not_fit_are_errors(found: list[dict[str, Any]]) -> None:
    assert "attention_nrom" in found[0]["errors"]["no such module"]
    assert "norm.weight" in found[0]["errors"]["parameter left out"]
    assert 'an unknown style "row_lienar"; use one of region, column_linear,' in found[0]["errors"]["no such style"]


def test_torch_s_own_styles_can_stand_in_a_plan(found: list[dict[str, Any]]) -> None:
    assert found[0]["torch's styles"] < bound()
