"""What the processes of the tests of checkpoints do, and how they die."""

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.launch import base_config, full
from tests.distributed.layouts import sizes
from titan_like.checkpoint.loader import model_tensors, optimizer_tensors
from titan_like.config.errors import RunError
from titan_like.train import trainer as trainer_module
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.train.training_state import TrainingState

SETTINGS: dict[str, Any] = sizes(32, 1, 4, 3) | {
    "model.overrides": {"num_layers": 1, "hidden_size": 30, "num_attention_heads": 2},  # shards are uneven
    "checkpoint.enable": True,
    "checkpoint.interval": 1,
    "metrics.log_interval": 1000,
}
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


@dataclass(frozen=True)
class Death:
    """Where a process kills itself: before the n-th file operation of a save, or n bytes into a file.

    With ``instants`` the process first outlives them all, and copies its run's folder there before each operation: what
    it would have left if it had been killed then.
    """

    step: int  # during the save of this step; 0: while it looks for a checkpoint to resume from
    operation: int | None = None
    file: str = ""
    size: int = 0
    rank: int = 0
    instants: Path | None = None


class MortalState(TrainingState):
    """Dies in a save."""

    death: Death | None = None

    def save(self, is_last: bool = False) -> None:
        dies = (
            self.death is not None and self.death.step == self.step and self.death.rank == torch.distributed.get_rank()
        )
        if not dies:
            super().save(is_last)
            return
        operations = die_in(self.run.checkpoint_folder, self.death)
        super().save(is_last)
        self.finish_save()
        survived(self.run.checkpoint_folder.parent, operations)
        raise AssertionError


def die_in(folder: Path, death: Death) -> list[str]:
    """Arrange this process's death; the operations on ``folder`` are listed as they happen."""
    operations: list[str] = []
    copying = threading.Lock()  # held while this function's own operations are not to be listed

    def before(event: str, args: tuple[Any, ...]) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread() and thread.name != "checkpoint":  # which writes in the background
            return
        is_open = event == "open" and str(args[0]).startswith(str(folder))
        if (not is_open and event not in CHANGES) or copying.locked():
            return
        if death.instants is not None:
            with copying:
                shutil.copytree(folder.parent, death.instants / str(len(operations)))
        if len(operations) == death.operation:
            os.kill(os.getpid(), signal.SIGKILL)
        operations.append(" ".join([event, *(Path(str(name)).name for name in args[: 1 + (event == "os.rename")])]))
        if death.file and is_open and str(args[0]).endswith(death.file):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (death.size, death.size))

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills the process that writes further
    sys.addaudithook(before)
    return operations


def survived(dump: Path, operations: list[str]) -> None:
    """Report what the process outlived, then die."""
    listed = list(operations)
    (dump / "operations.json").write_text(json.dumps(listed))
    os.kill(os.getpid(), signal.SIGKILL)


def build(
    folder: Path, dump: Path, settings: dict[str, Any], kind: type[Trainer] = Trainer,
    state: type[TrainingState] = TrainingState,
) -> Any:  # fmt: skip
    """A trainer that has resumed where it can."""
    config = base_config(folder, SETTINGS | {"job.dump_folder": str(dump)} | settings)
    with patch.object(trainer_module, "TrainingState", state):
        return kind(prepare_run(resolve_settings(config)))


def digest(trainer: Trainer) -> str:
    """One number for every bit of the weights and the optimizer's state, on all stages together."""
    tensors = model_tensors(trainer.model) | optimizer_tensors(trainer.model, trainer.state.optimizer)
    here = {name: digest_of(full(tensor).contiguous()) for name, tensor in tensors.items()}
    group = trainer.mesh["pp"].get_group()
    stages: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(stages, here, group=group)
    everywhere: dict[str, str] = {}
    for stage in stages:
        for name, value in stage.items():
            assert everywhere.setdefault(name, value) == value, f"the copies of {name} differ"
    return hashlib.sha256(json.dumps(everywhere, sort_keys=True).encode()).hexdigest()


def digest_of(tensor: torch.Tensor) -> str:
    """Type, shape and every bit."""
    bits = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(bits).hexdigest()}"


def reference(rank: int, folder: Path, dump: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The digests of a run that nothing disturbs, by step."""
    trainer = build(folder, dump, settings)
    data, digests = trainer.load_data(), {}
    while trainer.state.step < trainer.state.total_steps:
        trainer.train_step(data)
        digests[str(trainer.state.step)] = digest(trainer)
    data.close()
    return digests


def train(rank: int, folder: Path, dump: Path, settings: dict[str, Any], death: Death | None = None) -> None:
    """Train (or resume) in ``dump``; append the step and the digest that the run starts from to resumed.jsonl."""
    if death and death.step == 0:
        operations = die_in(dump / "checkpoint", death) if rank == death.rank else []
        build(folder, dump, settings)
        if rank == death.rank:
            survived(dump, operations)
        signal.pause()  # until the job is killed with the rank that died
    trainer = build(folder, dump, settings, state=MortalState)
    trainer.state.death = death
    if trainer.state.step:
        start = {"step": trainer.state.step, "digest": digest(trainer)}
        if rank == 0:
            with open(dump / "resumed.jsonl", "a") as file:
                file.write(json.dumps(start) + "\n")
    trainer.train()


def resume_each(rank: int, folder: Path, dumps: list[Path], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Resume every killed run and train it to its end: what was found and what came out of it."""
    outcomes = []
    for dump in dumps:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            outcome: dict[str, Any] = {}
            try:
                trainer = build(folder, dump, settings)
                outcome |= {"step": trainer.state.step, "digest": digest(trainer)}
                trainer.train()
                outcome["final"] = digest(trainer)
            except RunError as error:
                outcome["error"] = str(error)
        outcomes.append(outcome | {"printed": printed.getvalue()})
    return outcomes


def save_without_update(rank: int, folder: Path, dump: Path, settings: dict[str, Any]) -> None:
    """Save when every step so far was skipped: the optimizer has no state yet."""
    trainer = build(folder, dump, settings)
    trainer.state.step = trainer.state.skipped_steps = 1
    trainer.state.save()


def save_each(rank: int, folder: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Train a step and save, in each layout; the digests."""
    saved = {}
    for name, layout in layouts.items():
        trainer = build(folder, folder / name, {"training.steps": 1} | layout)
        trainer.train()
        saved[name] = digest(trainer)
    return saved


def load_each(
    rank: int, folder: Path, names: dict[str, list[str]], layouts: dict[str, dict[str, Any]]
) -> dict[tuple[str, str], str]:
    """Load the named checkpoints in each layout; the digests by checkpoint and layout."""
    found = {}
    for layout, settings in layouts.items():
        for name in names[layout]:
            trainer = build(folder, folder / name, {"training.steps": 1} | settings)
            assert trainer.state.step == 1
            found[name, layout] = digest(trainer)
    return found


def train_with(rank: int, variables: dict[str, str], *args: Any) -> None:
    """`train` with environment variables."""
    os.environ |= variables
    train(rank, *args)
