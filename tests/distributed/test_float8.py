"""Weights that ZeRO gathers in float8, and float8 products in compiled layers. test_verify.py has other layouts."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch.distributed.tensor import DTensor

from tests.distributed.launch import (
    Case,
    Result,
    base_config,
    collect,
    launch,
    run_cases,
    train_case,
    trainer_of,
    worst,
)
from tests.distributed.layouts import sizes
from tests.float64 import bound
from titan_like.config.errors import ConfigError
from titan_like.parallel.data import sharded_modules
from titan_like.parallel.float8 import Float8Gathers

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_seq_len": 16}
TINY: dict[str, Any] = sizes(16, 2, 12, 2)
TINY |= {"model.overrides": SHAPE, "training.dtype": "bfloat16", "float8.enable": True}
ONE = Case("one process", TINY)
STAGES = [Case(f"zero {stage}", TINY | {"parallelism.zero_stage": stage}) for stage in (0, 1, 2, 3)]
RECOMPUTED = Case("recomputed", TINY | {"parallelism.zero_stage": 3, "activation_checkpoint.mode": "full"})


def gathers_in_float8(case: Case, folder: Path) -> set[str]:
    """Names of the parameters that FSDP2 gathers in another form than their own."""
    trainer = trainer_of(folder, case.settings)
    if case.settings["parallelism.zero_stage"]:
        assert len(sharded_modules(trainer.model.stages[0].module)) == 2  # both layers are one unit
    shards = {n: p._local_tensor for n, p in trainer.model.named_parameters() if isinstance(p, DTensor)}
    return {name for name, shard in shards.items() if hasattr(shard, "fsdp_pre_all_gather")}


def on_three_ranks(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Their shards are of unlike sizes."""
    results: dict[str, Result] = {}
    for case in (*STAGES, RECOMPUTED):
        with patch.object(Float8Gathers, "cast", autospec=True, side_effect=Float8Gathers.cast) as cast:
            results[case.name] = train_case(case, folder)
        assert (cast.call_count > 0) == (case is not STAGES[0])
    with patch.object(Float8Gathers, "__init__", lambda *_: None):
        results["gathered in bfloat16"] = train_case(STAGES[3], folder)
    found = gathers_in_float8(STAGES[3], folder)
    assert found == {
        f"layers.{n}.{m}.weight" for n in (0, 1) for m in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
    }
    for change in ({"parallelism.zero_stage": 0}, {"float8.recipe": "rowwise"}, {"float8.enable": False}):
        assert not gathers_in_float8(Case("", STAGES[3].settings | change), folder)
    return {name: vars(result) for name, result in results.items()}


def test_weights_gathered_in_float8_are_those_of_one_process(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    one = run_cases([ONE], 1, tmp_path)["one process"]
    results = {name: Result(**values) for name, values in collect(on_three_ranks, 3, tmp_path)[0].items()}
    for name, result in results.items():
        # Scales are the same, and so are all products; only sums over microbatches may be added in another order.
        within = bound(12 * 16, torch.float32)  # of all tokens
        assert worst(result.gradients, one.gradients)[0] < within, name
        assert result.losses[0] == pytest.approx(one.losses[0], rel=within), name
        assert result.losses == pytest.approx(one.losses, rel=bound(1, torch.bfloat16)), name  # of updated weights
    plain, gathered = results["gathered in bfloat16"], results["zero 3"]
    assert all(torch.equal(value, plain.gradients[name]) for name, value in gathered.gradients.items())
    assert gathered.losses == plain.losses


def compile_many_layers(rank: int, folder: Path, recipe: str) -> None:
    """Layers share a graph: one graph for each would be too many for the compiler."""
    changes: dict[str, Any] = {
        "model.overrides": SHAPE | {"num_layers": 9},
        "compile.enable": True,
        "training.dtype": "float64",
        "training.steps": 1,
        "parallelism.zero_stage": 3,
    }
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = TINY | changes | {"float8.recipe": recipe}
    compiled = train_case(Case("", settings), folder)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    eager = train_case(Case("", settings | {"compile.enable": False}), folder)
    assert worst(compiled.gradients, eager.gradients)[0] < bound()


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cannot compile attention in float64 here")
def test_compiled_layers_share_a_graph_and_compute_the_same(tmp_path: Path, recipe: str) -> None:
    base_config(tmp_path, {})
    launch(compile_many_layers, 2, tmp_path, recipe)


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    launch(refuse, 2, tmp_path)


def refuse(rank: int, folder: Path) -> None:
    changes = {"model.overrides": SHAPE | {"ffn_hidden_size": 80}, "parallelism.tensor_parallel_degree": 2}
    message = (
        r"tensor_parallel_degree = 2: leaves a process 40 × 32 of layers\.0\.mlp\.fc1, but .* multiples of 16; lower"
    )
    with pytest.raises(ConfigError, match=message):
        train_case(Case("", TINY | changes), folder)
    train_case(Case("", TINY | changes | {"float8.filter": ["layers.*.mlp"], "training.steps": 1}), folder)
