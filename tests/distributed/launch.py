"""Run training cases in worker processes and return what they computed.

Groups and models take time to make, so one launch runs many cases one after the other.
"""

import gc
import io
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.float64 import bound, exact_rope
from titan_like.checkpoint import saver
from titan_like.config.schema import JobConfig
from titan_like.optim.shards import full_tensor
from titan_like.parallel import split
from titan_like.parallel.mesh import build_mesh
from titan_like.train import trainer as trainer_module
from titan_like.train.observer import Observer
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import distance
from titan_like.verify.processes import DONE, Group, Member, Outcome
from titan_like.verify.watch import Watch, steps_alone


@dataclass
class Case:
    """One training run: settings over the defaults of `base_config`."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    unit_bytes: int = 900_000  # in float64 two layers of a GPT of hidden size 64

    def layer_units(self) -> AbstractContextManager[Any]:
        """Let layers share units of communication up to this size, as if the model were larger."""
        return patch.object(split, "LAYER_UNIT_BYTES", self.unit_bytes)


@dataclass
class Result:
    """What rank 0 saw. Gradients are of the first step, before clipping; weights are of the end."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def base_config(folder: Path, settings: dict[str, Any]) -> JobConfig:
    """A short fp32 run of the debug model on generated text."""
    text = folder / "text.txt"
    if folder.is_dir() and not text.exists():
        generator = torch.Generator().manual_seed(0)
        letters = torch.randint(97, 123, (60_000,), generator=generator)
        unfinished = folder / f"text.{os.getpid()}"
        unfinished.write_text("".join(map(chr, letters.tolist())))
        os.replace(unfinished, text)
    tree: dict[str, Any] = {
        "job": {"dump_folder": str(folder), "seed": 7},
        "data": {"dataset": "text", "paths": [str(text)]},
        "training": {"seq_len": 64, "micro_batch_size": 4, "global_batch_size": 16, "steps": 20},
        "optimizer": {"lr": 1e-3},
        "lr_scheduler": {"decay": "constant"},
    }
    for dotted, value in settings.items():
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = value
    return JobConfig.model_validate(tree)


def by_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors by name. One that is there twice must be the same twice."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        value = full(tensor)
        assert torch.equal(whole.setdefault(name, value), value), f"the copies of {name} differ"
    return whole


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which this rank may hold a part."""
    return full_tensor(tensor).detach().clone()


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 norm of the difference as a share of the expected tensor's norm."""
    return distance(value, expected) / expected.double().norm().item()


def worst(values: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest `relative` difference of two sets of tensors with the same names, and its name."""
    assert values.keys() == expected.keys()
    return max((relative(values[name], expected[name]), name) for name in expected)


def all_stages(trainer: Trainer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of every pipeline rank."""
    group = trainer.mesh["pp"].get_group()
    stages: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(stages, tensors, group=group)
    return by_name(item for stage in stages for item in stage.items())


def trainer_of(folder: Path, settings: dict[str, Any], observer: Observer | None = None) -> Trainer:
    """A trainer with settings over the defaults of `base_config`."""
    return Trainer(prepare_run(resolve_settings(base_config(folder, settings))), observer=observer)


def losses_of_layouts(
    rank: int, folder: Path, layouts: dict[str, dict[str, Any]], settings: dict[str, Any]
) -> dict[str, list[float]]:
    """The losses of each layout's run, whose settings are with their sections."""
    found = {}
    for name, layout in layouts.items():
        trainer = trainer_of(folder, settings | layout)
        with exact_rope():
            found[name] = [record.loss for record in steps_alone(trainer, trainer.state.total_steps)]
    return found


class Collectives(TorchDispatchMode):
    """Records each collective of compiled code and the layers: its name, and the bytes that go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            self.calls.append((func._schema.name.partition("::")[2], args[0].nbytes, result.nbytes))
        return result


def train_case(case: Case, folder: Path) -> Result:
    """Train one case in this process group."""
    watch = Watch()
    with case.layer_units():
        training = trainer_of(folder, case.settings, watch)
    data = training.load_data()
    records = [training.read_step(training.train_step(data))]
    gradients = all_stages(training, by_name(watch.gradients))
    records += [training.read_step(training.train_step(data)) for _ in range(training.state.total_steps - 1)]
    data.close()
    weights = all_stages(training, by_name(training.model.named_parameters()))
    return Result([r.loss for r in records], [r.grad_norm for r in records], gradients, weights)


def run_cases(cases: list[Case], world_size: int, folder: Path) -> dict[str, Result]:
    """Train all cases on one set of processes; results by case name."""
    return {name: Result(**values) for name, values in collect(train_cases, world_size, folder, cases)[0].items()}


def train_layouts(layouts: Mapping[str, tuple[int, Case, Case]], folder: Path) -> dict[str, Result]:
    """Train each case on its number of ranks, and the case with which it is compared on one; results by case name."""
    references = {reference.name: reference for _, _, reference in layouts.values()}
    found = run_cases(list(references.values()), 1, folder)
    for ranks in sorted({ranks for ranks, *_ in layouts.values()}):
        found |= run_cases([case for size, case, _ in layouts.values() if size == ranks], ranks, folder)
    return found


def assert_same(
    result: Result, expected: Result, tolerance: float, weights: float | None = None, heads: int = 4
) -> None:
    """Losses, norms, gradients and weights are the same, the weights to a tolerance of their own if there is one."""
    assert result.losses == pytest.approx(expected.losses, rel=min(tolerance, bound(dtype=torch.float32)))
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
    assert worst(result.gradients, expected.gradients) <= (tolerance, "")
    found, wanted = (without_key_biases(one.weights, heads) for one in (result, expected))
    assert worst(found, wanted) <= (weights or tolerance, "")


def without_key_biases(weights: Mapping[str, torch.Tensor], heads: int = 4) -> dict[str, torch.Tensor]:
    """Weights; of a fused bias, [head, (query, key, value), head_dim], no keys (`test_layout_matrix` says why)."""
    return {
        name: weight.view(heads, 3, -1)[:, [0, 2]] if name.endswith("qkv.bias") else weight
        for name, weight in weights.items()
    }


def train_cases(rank: int, folder: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Train all cases in this process group; on rank 0, the fields of each `Result`."""
    results = {case.name: vars(train_case(case, folder)) for case in cases}
    return results if rank == 0 else {}


def start_group(function: Callable[..., Any], world_size: int, *args: Any) -> Group:
    """Begin to call ``function(rank, *args)`` on every rank of a fresh gloo process group."""
    return Group(_call, world_size, function, args)


def launch(function: Callable[..., Any], world_size: int, *args: Any, seconds: float = 600.0) -> list[Outcome]:
    """Call ``function(rank, *args)`` on every rank of a fresh gloo process group, which must end well."""
    outcomes = start_group(function, world_size, *args).wait(seconds)
    told = [f"rank {outcome.rank}: {outcome.reason}\n{outcome.printed}" for outcome in outcomes]
    assert all(outcome.ending == DONE for outcome in outcomes), "\n".join(told)
    return outcomes


def collect(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`launch`, and what ``function`` returned on each rank: tensors, numbers and words in lists and dictionaries."""
    outcomes = launch(function, world_size, *args)
    return [torch.load(io.BytesIO(outcome.result), weights_only=True) for outcome in outcomes]


def died(outcomes: list[Outcome]) -> bool:
    """Whether a process was killed, and not by its launcher."""
    return any(outcome.exit_code in (-signal.SIGKILL, -signal.SIGXFSZ) for outcome in outcomes)


def _call(member: Member, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    # Groups take long to make, and gloo has a thread for each that wakes a hundred times a second. So trainers of one
    # layout, one after the other, share theirs.
    gc.set_threshold(10_000)  # as in tests/conftest.py
    meshes = patch.object(trainer_module, "build_mesh", cache(build_mesh))
    with meshes, patch.object(saver, "background_group", cache(saver.background_group)):
        torch.save(function(member.rank, *args), returned := io.BytesIO())
        return returned.getvalue()
