"""Nothing is compiled again after the second step, and one graph of a model computes what its layers do.

`test_layout_matrix` has the gradients of compiled layers.
"""

import shutil
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.debugging import aot_eager

from tests.distributed.launch import Case, base_config, collect, launch, train_case, trainer_of, worst
from tests.distributed.layouts import sizes, tensor
from tests.float64 import bound
from titan_like.config.schema import ActivationCheckpoint
from titan_like.models.layers.experts import Experts
from titan_like.parallel.compile import compile_layers
from titan_like.parallel.experts import SplitExperts
from titan_like.parallel.extend import extend
from titan_like.verify.watch import steps_alone

SETTINGS = sizes(32, 2, 8, 6) | {"model.overrides": {"num_layers": 2}, "training.dtype": "bfloat16"}
SETTINGS |= {"data.reset_position_ids": True, "data.reset_attention_mask": True}
SETTINGS |= {"compile.enable": True, "checkpoint.enable": False}
SETTINGS |= {"compile.scope": "layers"}
WHOLE = sizes(32, 2, 8, 6) | {"model.overrides": {"num_layers": 2}, "training.dtype": "float64", "training.steps": 2}
WHOLE |= {"training.micro_batch_size": 2, "checkpoint.enable": False}
SPLIT_EXPERTS = tensor(2, True) | {"parallelism.expert_tensor_parallel_degree": 2}


def traced_alone():
    """Graphs run as they were traced. What would be compiled again is traced again first."""
    return patch("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))


def trace_steadily(rank, folder, family, layout=None):
    with traced_alone():
        return train_steadily(rank, folder, family, layout)


def train_steadily(rank, folder, family, layout=None):
    trainer = trainer_of(folder, SETTINGS | {"model.family": family} | (layout or {}))
    data = trainer.load_data()
    for _ in range(2):
        trainer.train_step(data)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            trainer.train_step(data)
    data.close()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def graphs_of_recomputed_experts(rank, folder):
    with traced_alone():
        train_with_recomputed_experts(folder)


def train_with_recomputed_experts(folder):
    modes = {"activation_checkpoint.mode": "experts", "model.family": "moe", "training.dtype": "float32"}
    trainer = trainer_of(folder, SETTINGS | modes | {"model.overrides": {"num_layers": 4}})
    steps_alone(trainer, 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def float8_experts_in_one_graph(rank, folder):
    settings = SETTINGS | {"model.family": "moe", "float8.enable": True, "training.steps": 1}
    compiled, eager = (
        train_case(Case("", settings | {"training.dtype": "float64", "compile.enable": value}), folder)
        for value in (True, False)
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert worst(compiled.gradients, eager.gradients)[0] < bound()


def whole_models_compute_the_same(rank, folder, layouts):
    for layout in layouts:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        settings = WHOLE | {"compile.enable": True, "compile.scope": "model"} | layout
        without_layers = patch("titan_like.parallel.apply.compile_layers", side_effect=AssertionError)
        with traced_alone(), without_layers:
            compiled = train_case(Case("", settings), folder)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, layout
        eager = train_case(Case("", settings | {"compile.enable": False}), folder)
        assert worst(compiled.gradients, eager.gradients)[0] < bound(), layout
        assert worst(compiled.weights, eager.weights)[0] < bound(), layout


COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="torch.compile on a CPU needs a C++ compiler")


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_nothing_is_compiled_again_after_the_second_step(tmp_path, family):
    """From step to step documents change, and in GPT dropout's seeds."""
    launch(trace_steadily, 1, tmp_path, family)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallelism.expert_parallel_degree": 2, "parallelism.zero_stage": 3},
        pytest.param(SPLIT_EXPERTS | {"training.dtype": "float32"}, marks=pytest.mark.exhaustive),
    ],
)
def test_split_experts_are_a_graph_for_any_number_of_rows(tmp_path, layout):
    """The others are what is before and after the exchange, in and around the module with the experts."""
    assert collect(trace_steadily, 2, tmp_path, "moe", layout) == [5, 5]


@pytest.mark.exhaustive
def test_the_graph_of_split_experts_keeps_to_a_budget():
    sizes = SimpleNamespace(hidden_size=64, expert_ffn_hidden_size=96, num_experts=4, experts_per_token=2)
    sizes.expert_bias, sizes.activation = False, "silu"
    rows, ends = torch.randn(512, 64, requires_grad=True), torch.arange(128, 513, 128, dtype=torch.int32)
    kept = list[int]()
    for section in (ActivationCheckpoint(), ActivationCheckpoint(mode="budget", budget=0.0)):
        layer = torch.nn.Module()
        layer.experts = Experts(sizes)
        extend(layer.experts, SplitExperts, group=None, tensor_group=None)
        weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        compile_layers(SimpleNamespace(layers={"0": layer}), section, fullgraph=False)
        saved = list[torch.Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            layer.experts.compute(rows, ends)
        kept.append(sum(x.nbytes for x in saved if x.untyped_storage().data_ptr() not in weights))
    assert kept[0] > 4 * rows.nbytes and kept[1] < 1.1 * rows.nbytes


@pytest.mark.exhaustive
def test_float8_experts_compile(tmp_path):
    base_config(tmp_path, {})
    launch(float8_experts_in_one_graph, 1, tmp_path)


def test_layers_that_an_axis_alters_share_a_graph(tmp_path):
    launch(graphs_of_recomputed_experts, 1, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (1, [{"model.family": "llama", "activation_checkpoint.mode": "selective", "compile.scope": "auto"}]),
        (2, [{"parallelism.zero_stage": stage} for stage in (0, 1)]),
        pytest.param(1, [{"model.family": family} for family in ("bert", "t5", "moe")], marks=pytest.mark.exhaustive),
        pytest.param(
            1,
            [
                {"model.family": "moe", "model.overrides": {"num_layers": 2, "mtp_layers": 1}},
                {"model.family": "llama", "data.reset_attention_mask": True, "data.reset_position_ids": True},
                {"model.family": "moe", "activation_checkpoint.mode": "experts"},
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["one process", "data parallel", "families", "more"],
)
def test_one_graph_of_a_model_computes_the_same(tmp_path, ranks, layouts):
    base_config(tmp_path, {})
    launch(whole_models_compute_the_same, ranks, tmp_path, layouts)
