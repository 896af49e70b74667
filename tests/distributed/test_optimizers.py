"""Checkpoints, host reads, collectives and state of Adafactor and Muon. `test_layout_matrix` has their training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect, runs_exhaustive_tests, trainer_of
from tests.distributed.layouts import RULE_NAMES, pipeline, tensor, with_rule, zero
from tests.distributed.test_host_reads import CountReads, refuse
from titan_like.checkpoint.loader import model_tensors, optimizer_tensors
from titan_like.optim.shards import local
from titan_like.optim.state_size import optimizer_state
from titan_like.train.trainer import Trainer

TOLERANCE = 1e-10
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {  # of four processes
    "zero 3 of 4": ("llama", zero(3)),
    "zero 2, replicas": ("llama", zero(2, 2)),
    "zero 1, tensor with SP": ("gpt", zero(1) | tensor(2, True)),
    "zero 3, tensor": ("llama", zero(3) | tensor()),
    "tensor with SP, 2 stages": ("gpt", tensor(2, True) | pipeline()),
}


def settings(rule: str, family: str, layout: dict[str, Any]) -> dict[str, Any]:
    batch = {"training.seq_len": 16, "training.micro_batch_size": 2, "training.global_batch_size": 8}
    return batch | {"training.dtype": "float64"} | with_rule(rule, family) | layout


# ---- checkpoints

# With the same model.
PAIRS = [("zero 3, tensor", "zero 2, replicas"), ("tensor with SP, 2 stages", "zero 1, tensor with SP")]
MOVES = [("adafactor", *PAIRS[0]), ("muon", *PAIRS[1])]
MORE_MOVES = [("muon", *PAIRS[0]), ("adafactor", *PAIRS[1])]
SAVED = 2

Job = tuple[str, Path | None, dict[str, Any]]


def jobs(folder: Path, moves: list[tuple[str, str, str]]) -> tuple[list[Job], list[Job]]:
    """What `crash_worker.train_from` takes: runs that keep all their checkpoints, and runs that go on from those."""
    own: list[Job] = []
    going_on: list[Job] = []
    keeps = {"checkpoint.interval": 100, "checkpoint.keep_latest": 0, "training.steps": SAVED + 2}
    for optimizer, *pair in moves:
        before, after = (settings(optimizer, *LAYOUTS[name]) | keeps for name in pair)
        own.append((f"{optimizer} {pair[0]}", None, before))
        going_on.append((f"{optimizer} {pair[0]} → {pair[1]}", folder / f"{optimizer} {pair[0]}", after))
    return own, going_on


@pytest.fixture(scope="module")
def losses(on_four: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of the steps after the saved one: of each layout's own run, and of each that goes on from another's."""
    return on_four[0]["losses"]


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [*MOVES, *(pytest.param(*move, marks=pytest.mark.exhaustive) for move in MORE_MOVES)],
)
def test_goes_on_in_another_layout(losses: dict[str, list[float]], optimizer: str, before: str, after: str) -> None:
    wanted = losses[f"{optimizer} {before}"]
    assert len(wanted) == 2 and wanted[-1] < wanted[0]
    assert losses[f"{optimizer} {before} → {after}"] == pytest.approx(wanted, rel=TOLERANCE)


# ---- what a step does besides computing

QUIET = {"metrics.log_interval": 100, "training.steps": 12, "training.dtype": "float32", "lr_scheduler.warmup_steps": 0}


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This process's part of the weights and the optimizer's state."""
    tensors = model_tensors(trainer.model) | optimizer_tensors(trainer.model, trainer.optimizer)
    return {name: local(tensor).clone() for name, tensor in tensors.items()}


def watch_steps(rank: int, folder: Path) -> dict[str, list[Any]]:
    found = {}
    for name in ("zero 3 of 4", "zero 1, tensor with SP"):
        for optimizer in RULE_NAMES:
            family, layout = LAYOUTS[name]
            trainer = trainer_of(folder, settings(optimizer, family, layout) | QUIET)
            data = trainer._load_data()
            for _ in range(2):
                trainer.train_step(data)
            with CountReads() as reads, patch.object(torch.Tensor, "tolist", refuse), CountUpdates(trainer) as counted:
                trainer.train_step(data)
            before, complete = bits(trainer), trainer._complete_gradients

            def spoil(trainer: Trainer = trainer, complete: Any = complete) -> None:
                complete()
                local(next(p for n, p in trainer.model.named_parameters() if n.endswith("proj.weight")).grad).fill_(
                    torch.inf
                )

            trainer._complete_gradients = spoil  # type: ignore[method-assign]
            trainer.train_step(data)
            after = bits(trainer)
            assert len(after) > 20
            differ = [key for key in before if not torch.equal(before[key], after[key])]
            trainer._complete_gradients = complete  # type: ignore[method-assign]
            trainer.train_step(data)
            moved = [key for key, value in bits(trainer).items() if value.numel() and torch.equal(value, after[key])]
            data.close()
            kept = optimizer_state(trainer.run.config.optimizer)
            planned = sum(4 * kept.of(name, local(value).shape) for name, value in trainer.model.named_parameters())
            state = [value for key, value in before.items() if key.startswith("optimizer.") and value.ndim]
            held = sum(value.numel() * value.element_size() for value in state)
            traffic = trainer.optimizer.traffic()
            beyond = held - planned, sum(counted.counts.values()) - sum(each.calls for each in traffic)
            sent = counted.bytes, sum(each.bytes for each in traffic)
            found[f"{optimizer} {name}"] = [dict(reads.seen), dict(counted.counts), differ, moved, beyond, sent]
    return found


class CountUpdates(TorchDispatchMode):
    """Counts the collectives of the optimizer's update alone."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.inside, self.bytes, self.counts = False, 0, Counter[str]()
        trainer.optimizer.register_step_pre_hook(lambda *_: setattr(self, "inside", True))
        trainer.optimizer.register_step_post_hook(lambda *_: setattr(self, "inside", False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and self.inside:
            name = func._schema.name.removeprefix("c10d::")
            self.counts[name] += 1
            handed_over = args[1] if name == "alltoall_base_" else args[0][0]
            self.bytes += handed_over.numel() * handed_over.element_size()
        return func(*args, **(kwargs or {}))


def do_everything(rank: int, folder: Path, moves: list[tuple[str, str, str]]) -> dict[str, Any]:
    """What the tests look at: processes take long to start."""
    own, going_on = (crash_worker.train_from(rank, folder, some, {}, SAVED) for some in jobs(folder, moves))
    return {"losses": own | going_on, "watched": watch_steps(rank, folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    base_config(folder, {})
    return folder


@pytest.fixture(scope="module")
def on_four(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    moves = MOVES + (MORE_MOVES if runs_exhaustive_tests(request) else [])
    return collect(do_everything, 4, folder, moves)


@pytest.fixture(scope="module")
def watched(on_four: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rank and run: values read, collectives, what a skipped step changed, and what the next one did not."""
    return [of_rank["watched"] for of_rank in on_four]


@pytest.mark.parametrize("optimizer", RULE_NAMES)
@pytest.mark.parametrize("name", ["zero 3 of 4", "zero 1, tensor with SP"])
def test_step_waits_for_nothing_and_a_skipped_one_changes_nothing(
    watched: list[dict[str, Any]], optimizer: str, name: str
) -> None:
    for of_rank in watched:
        reads, _, differ, *_ = of_rank[f"{optimizer} {name}"]
        assert reads == {} and differ == []
    stuck = [set(of_rank[f"{optimizer} {name}"][3]) for of_rank in watched]
    assert set.intersection(*stuck) == set()  # the step after it changes everything


def test_collectives_of_an_update(watched: list[dict[str, Any]]) -> None:
    """Adafactor: an all-reduce of squares and one of updates, for the layers and for each table, in each group."""
    for of_rank in watched:
        tables = 2  # llama: the embedding and the output; GPT: token and position embeddings
        assert of_rank["adafactor zero 3 of 4"][1] == {"allreduce_": 2 * (1 + tables)}
        # Tensor parallelism splits the first of GPT's tables, but not the second.
        assert of_rank["adafactor zero 1, tensor with SP"][1] == {"allreduce_": 2 * (1 + tables) + 2 * 2}
        for name in ("zero 3 of 4", "zero 1, tensor with SP"):
            assert of_rank[f"muon {name}"][1] == {"alltoall_base_": 2}


def test_state_and_collectives_are_planned(watched: list[dict[str, Any]]) -> None:
    for name in watched[0]:
        state_and_calls, sent = zip(*[of_rank[name][4:] for of_rank in watched], strict=True)
        assert state_and_calls == ((0, 0),) * 4
        counted, planned = zip(*sent, strict=True)
        # Muon's owners send back what they own, which is about what each process has.
        assert counted == planned if "adafactor" in name else sum(counted) == sum(planned), name
