"""What a trace says that a compiled layer keeps, beside torch's own partitioner."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_like.config import ConfigError
from titan_like.config.load import load_config
from titan_like.models.registry import build_model, model_config
from titan_like.parallel.layout import Layout
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.run import microbatch
from titan_like.planner.workload import workload_of

RUN = ["--training.seq_len=64", "--training.micro_batch_size=2", "--training.global_batch_size=2"]
RUN += ["--training.steps=1", "--training.dtype=bfloat16", "--compile.enable=true", "--model.flavor=debug"]


def bytes_kept(layer: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes that torch's partitioner keeps of a layer for the backward pass: its output too, but no input."""
    names, parameters = zip(*layer.named_parameters(), *layer.named_buffers(), strict=True)
    kept: dict[int, int] = {}  # by address of a storage

    def function(parameters: list[torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        in_order = iter(given)
        given_inputs = tree_map_only(torch.Tensor, lambda _: next(in_order), inputs)
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), given_inputs)

    def compile_forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: torch.Tensor) -> Any:
            found = graph(*args)
            ours, theirs = (
                {one.untyped_storage() for one in some if isinstance(one, torch.Tensor)} for some in (found, args)
            )
            kept.update((storage.data_ptr(), storage.nbytes()) for storage in ours)
            for storage in theirs:
                kept.pop(storage.data_ptr(), None)
            return found

        return make_boxed_func(run)

    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    aot_function(function, compile_forward, lambda graph, _: graph, partition, select_decomp_table())(
        list(parameters), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))
    )
    return sum(kept.values())


@pytest.mark.parametrize(
    ("family", "settings", "within"),
    [
        ("gpt", {"dropout": 0.0}, 0),
        ("llama", {}, 0),
        ("bert", {"dropout": 0.0, "norm_placement": "post"}, 0),
        ("moe", {}, 0.01),  # which keeps a few more indices of rows
    ],
)
def test_a_compiled_layer_keeps_what_torchs_partitioner_does(
    family: str, settings: dict[str, Any], within: float, tmp_path: Path
) -> None:
    overrides = [f"--model.overrides.{name}={value}" for name, value in settings.items()]
    config = load_config([*RUN, f"--model.family={family}", *overrides])
    shape = model_config(config.model)
    key = TraceKey.of(workload_of(config, shape, Layout()))
    with torch.device("cpu"):
        model = build_model(shape, family).to(torch.bfloat16)
    layer, found = model.layers["0"], list[tuple[Any, ...]]()
    layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs))
    batch = microbatch(key)
    model(batch)
    hidden, context = found[0]
    context = context._replace(positions=None)  # which no layer here reads, so a compiler makes them no input
    layer._forward_pre_hooks.clear()
    kept = bytes_kept(layer, (hidden.detach().requires_grad_(), context))
    assert trace(key, tmp_path).layers[0].kept == pytest.approx(kept, rel=within)


def test_what_a_compiler_recomputes_within_a_budget_is_not_predicted() -> None:
    budget = ["--activation_checkpoint.mode=budget", "--activation_checkpoint.budget=0.5"]
    config = load_config([*RUN, *budget, "--model.family=llama"])
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.mode = .budget.*does not predict"):
        TraceKey.of(workload_of(config, model_config(config.model), Layout()))
