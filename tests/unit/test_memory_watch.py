"""Which steps write a snapshot of the GPU's memory, and what it is said to hold."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.scripts import run_here
from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import Layout
from titan_like.train import memory
from titan_like.train.memory import MemoryWatch
from titan_like.train.trainer import Trainer

GIB = 2**30
PACKAGE = Path(memory.__file__).parents[1]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of torch, and printed."""
    calls: list[Any] = []
    monkeypatch.setattr(memory, "record_memory_history", calls.append)
    monkeypatch.setattr(memory, "dump_memory_snapshot", lambda path: calls.append(path.name))
    monkeypatch.setattr(memory.dist, "get_rank", lambda: 0)
    return calls


def watch(folder: Path, device: str, steps: list[int]) -> Any:
    config = JobConfig.model_validate({
        "job": {"dump_folder": str(folder)},
        "profiling": {"memory_snapshot_steps": steps},
        "training": {"micro_batch_size": 1, "dtype": "bfloat16", "steps": 9},
        "activation_checkpoint": {"mode": "full"},
        "parallelism": {"zero_stage": 1},
    })  # fmt: skip
    run: Any = SimpleNamespace(config=config, device=torch.device(device), layout=Layout(shard=2))
    result: Any = MemoryWatch(run)
    signals, shown = SimpleNamespace(asks_for_snapshot=False), []
    trainer = SimpleNamespace(signals=signals, console=SimpleNamespace(print=shown.append), state=SimpleNamespace())
    trainer.shown = shown
    result.attach(trainer)
    return result


def run(watched: Any, asked_in: int) -> list[str]:
    """Five steps, in one of which a signal arrives; the printed lines."""
    for step in range(1, 6):
        watched.trainer.signals.asks_for_snapshot |= step == asked_in
        watched.end_step(SimpleNamespace(step=step))
    return watched.trainer.shown


def test_snapshots_of_named_steps_and_for_a_signal(tmp_path: Path, done: list[Any]) -> None:
    shown = run(watch(tmp_path, "cuda", [2, 4]), 3)
    assert done == [True, *(f"step-{step}-rank-0.pickle" for step in (2, 3, 4))]
    path = f"{tmp_path}/memory/step-2-rank-0.pickle"
    assert shown[0] == f" memory of rank 0 after step 2: {path} (drop it on https://pytorch.org/memory_viz)"


def test_a_signal_to_a_run_that_records_nothing_records_one_step(tmp_path: Path, done: list[Any]) -> None:
    watched = watch(tmp_path, "cuda", [])
    assert len(run(watched, 3)) == 1
    assert done == [True, "step-4-rank-0.pickle", False]
    run(watched, 1)  # and again
    assert done[3:] == [True, "step-2-rank-0.pickle", False]


def test_a_full_disk_and_a_run_without_a_gpu_only_say_so(
    tmp_path: Path, done: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(28, "No space left on device")

    assert "no GPU" in run(watch(tmp_path, "cpu", [2]), 0)[0] and done == []
    monkeypatch.setattr(memory, "dump_memory_snapshot", refuse)
    (line,) = run(watch(tmp_path, "cuda", [2]), 0)
    assert line.endswith("step-2-rank-0.pickle is not written ([Errno 28] No space left on device)")


def test_the_account_of_a_run_that_records(tmp_path: Path, done: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment as torch.cuda.memory_snapshot() describes it, in GiB; and a run that has gone almost all the way."""
    of_torch = {"filename": "/x/torch/nn/functional.py", "line": 7, "name": "linear"}
    ours = [{"filename": f"{PACKAGE}/models/mlp.py", "line": line, "name": "forward"} for line in (41, 99)]
    blocks = [
        {"size": 3 * GIB, "state": "active_allocated", "frames": [of_torch, *ours]},  # innermost first
        {"size": 4 * GIB, "state": "active_pending_free", "frames": ours},
        {"size": 50 * GIB, "state": "inactive", "frames": ours},
        {"size": 2 * GIB, "state": "active_allocated", "frames": [of_torch]},
        {"size": GIB, "state": "active_allocated", "frames": []},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"blocks": blocks[:2]}, {"blocks": blocks[2:]}])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 60 * GIB)
    watched = watch(tmp_path, "cuda", [9])
    watched.trainer.model = torch.nn.Linear(1, GIB // 4, bias=False, device="meta")
    watched.trainer.state.optimizer = torch.optim.SGD(watched.trainer.model.parameters())
    assert watched.account(torch.OutOfMemoryError()).splitlines() == [
        "lower training.seq_len, raise parallelism.zero_stage from 1, or use more processes",
        "       rank 0 holds 50 GiB of gaps between tensors, "
        "9 GiB of activations, gathered weights and other tensors, 1 GiB of parameters",
        "       allocated: 7 GiB at titan_like/models/mlp.py:41 in forward, "
        "2 GiB at /x/torch/nn/functional.py:7 in linear, 1 GiB at lines of C++ (backward passes, communication)",
        f"       {tmp_path}/memory/out-of-memory-rank-0.pickle (drop it on https://pytorch.org/memory_viz)",
    ]
    assert "holds" not in watched.account(MemoryError())  # the host's


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_runs_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "_update", lambda *_, **__: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"))
    settings = "--job.config_file=debug_gpt", f"--job.dump_folder={tmp_path}", "--profiling.memory_snapshot_steps=9"
    assert run_here("train.py", *settings) == 2
    memory.record_memory_history(False)
    first, holders, lines, snapshot = capfd.readouterr().err.partition("error: ")[2].splitlines()[:4]
    assert "Tried to allocate 1048576.00 GiB" in first and "lower it" in first
    assert re.search(r"rank 0 holds [\d.e-]+ GiB of ", holders)
    assert re.search(r"allocated: .* GiB at titan_like/[a-z/_]+\.py:\d+ in \w+", lines)
    path = tmp_path / "memory" / "out-of-memory-rank-0.pickle"
    assert snapshot == f"       {path} (drop it on https://pytorch.org/memory_viz)"
    assert path.stat().st_size > 10_000
