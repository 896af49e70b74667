"""Measure the cost of saving a checkpoint: slower steps, and bytes per second compared with torch.save.

    python benchmarks/checkpoint_cost.py --json checkpoint_cost.json

One process trains a GPT with 100 million parameters. Each round makes a synchronous save, a torch.save of the same
tensors that is flushed to disk too, loads both from disk, and makes two saves in the background. Steps continue during
a background save until it is on disk, with undisturbed steps before and after it.

The stall is the time for which training stands still because of a background save: until `save` returns and, in the
next step, until the tensors are copied. The slowdown is the total extra time of the steps during the save. Without a
GPU it includes copying and writing on the cores that also compute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from titan_like.checkpoint.loader import load_checkpoint, model_tensors, optimizer_tensors
from titan_like.checkpoint.step_folders import checkpoint_path
from titan_like.config import load_config
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

SETTINGS = [
    "--model.flavor", "gpt2_124m", "--model.overrides.num_layers", "9", "--model.overrides.dropout", "0.0",
    "--training.seq_len", "128", "--training.micro_batch_size", "1", "--training.global_batch_size", "4",
    "--training.steps", "1000", "--evaluation.interval", "0", "--checkpoint.enable", "true",
    "--checkpoint.keep_latest", "1", "--data.tokenizer", "byte",
]  # fmt: skip


class Watched(Trainer):
    """Records how long updates wait for a save."""

    waited = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        wait = self.saver.before_update

        def timed() -> None:
            started = time.perf_counter()
            wait()
            self.waited += time.perf_counter() - started

        self.saver.before_update = timed  # type: ignore[method-assign]


def seconds(action: Callable[[], object]) -> float:
    """Run ``action`` and return the seconds it takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """torch.save, flushed to disk."""
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def out_of_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache, so that the next read comes from the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def waited_for(trainer: Watched, folder: Path) -> dict[str, float]:
    """Seconds of a synchronous save, of loading it, and of torch.save and torch.load of the same tensors."""
    tensors = model_tensors(trainer.model) | optimizer_tensors(trainer.model, trainer.optimizer)
    trainer.saver.in_background = False
    found = {"save": seconds(lambda: trainer.save(is_last=True))}
    found["torch_save"] = seconds(lambda: torch_save(tensors, folder / "tensors.pt"))
    out_of_cache(folder)
    path = checkpoint_path(trainer.saver.folder, trainer.step)
    found["load"] = seconds(lambda: load_checkpoint(path, trainer.model, trainer.optimizer))
    found["torch_load"] = seconds(lambda: torch.load(folder / "tensors.pt", weights_only=True))
    return found


def beside_training(trainer: Watched, data: Any) -> dict[str, float]:
    """Seconds of a background save, and of the steps during it compared with those before and after."""
    before = seconds(lambda: trainer.train_step(data))
    trainer.saver.in_background, trainer.waited, beside = True, 0.0, []
    blocked = seconds(lambda: trainer.save())
    began = time.perf_counter()
    while not beside or trainer.saver.is_writing:
        beside.append(seconds(lambda: trainer.train_step(data)))
    ended = time.perf_counter()
    trainer.finish_save()
    step = (before + seconds(lambda: trainer.train_step(data))) / 2
    return {
        "step": step,
        "background_save_at_most": blocked + ended - began,
        "stall": blocked + trainer.waited,
        "step_that_saves": blocked + beside[0],
        "slowdown": blocked + sum(beside) - len(beside) * step,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch: leave a core to the saves")
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name, process_group(torch.device("cpu")):
        config = load_config([*SETTINGS, "--job.dump_folder", name, "--checkpoint.async", "true"])
        trainer = Watched(prepare_run(resolve_settings(config)))
        data = trainer._load_data()
        trainer.train_step(data)
        tensors = model_tensors(trainer.model) | optimizer_tensors(trainer.model, trainer.optimizer)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        beside_training(trainer, data)  # creates the buffers
        rounds = [
            [waited_for(trainer, Path(name)), *(beside_training(trainer, data) for _ in range(2))]
            for _ in range(options.rounds)
        ]
        data.close()
    medians = {
        key: statistics.median(part[key] for parts in rounds for part in parts if key in part)
        for key in rounds[0][0] | rounds[0][1]
    }
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "parameters": trainer.run.model.num_parameters(),
        "bytes": size,
        "seconds": medians,
        "stall_over_save": medians["stall"] / medians["save"],
        "slowdown_over_save": medians["slowdown"] / medians["save"],
        "gigabytes_per_second": {
            key: size / 1e9 / medians[key] for key in ("save", "torch_save", "load", "torch_load")
        },
        "rounds": rounds,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
