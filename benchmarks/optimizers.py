"""Cost of one update by each optimizer in a layout: time, collectives, bytes sent and bytes of state.

    python benchmarks/optimizers.py
    torchrun --nproc_per_node=4 benchmarks/optimizers.py --parallelism.zero_stage 3
    python benchmarks/optimizers.py --rounds 30 --json optimizers.json --model.family llama

Any --section.key of a run sets the model and the layout. Every optimizer updates the same model from the same
gradients. Rounds alternate between the optimizers. A time is the median over the rounds of the slowest process's, from
a barrier to the end of the update. Measure on an idle machine.

Collectives are counted as calls of one process. Bytes are those that it hands over: the input of an all-reduce or an
all-to-all. State is what rank 0 keeps between steps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from runs import machine, parser_of, write
from torch.utils._python_dispatch import TorchDispatchMode

from titan_like.config import load_config
from titan_like.config.load import edit, run_command
from titan_like.config.schema import JobConfig
from titan_like.optim.optimizer import build_optimizer, update
from titan_like.optim.shards import local
from titan_like.parallel.apply import build_parallel_model
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import select_device

OPTIMIZERS = ("adamw", "adafactor", "muon")


class Collectives(TorchDispatchMode):
    """Counts collectives and the bytes that this process hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.rpartition("::")[2]
            if name == "barrier":  # of the measurement
                return func(*args, **(kwargs or {}))
            sent = args[1] if name == "alltoall_base_" else args[0]
            tensors = sent if isinstance(sent, (list, tuple)) else [sent]
            self.calls[name] += 1
            self.bytes += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


class Side:
    """One optimizer with the model that all share."""

    def __init__(self, name: str, config: JobConfig, model: ParallelModel, device: torch.device) -> None:
        section = edit(config, {"optimizer.name": name}).optimizer
        self.model, self.device, self.name, self.seconds = model, device, name, list[float]()
        self.optimizer = build_optimizer(model.named_parameters(), section)
        self.skip = torch.zeros((), dtype=torch.bool, device=device)

    def update(self) -> float:
        """Seconds of one update on this process, from gradients that are the same each time."""
        generator = torch.Generator(self.device).manual_seed(0)
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).normal_(generator=generator)
        self._synchronize()
        dist.barrier()
        began = time.perf_counter()
        update(self.optimizer, self.model.parameters(), 1e-4, None, self.skip)
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def counted(self) -> dict[str, Any]:
        """Collectives of one more update, and the bytes of state on this process."""
        with Collectives() as collectives:
            self.update()
        kept = (local(value) for state in self.optimizer.state.values() for value in state.values())
        state = sum(value.numel() * value.element_size() for value in kept)
        return {"collectives": dict(collectives.calls), "bytes_sent": collectives.bytes, "bytes_of_state": state}


def measure(config: JobConfig, device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure every optimizer. All processes call it."""
    world = dist.get_world_size()
    settings = resolve_settings(config, world)
    mesh = build_mesh(settings.layout, device.type)
    model = build_parallel_model(config, settings.model, mesh, device)
    model.init_weights(config.job.seed)
    sides = [Side(name, config, model, device) for name in OPTIMIZERS]
    for number in range(rounds + 2):  # the first two make the state and fill caches
        for side in sides:
            slowest = torch.tensor(side.update(), device=device, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= 2:
                side.seconds.append(slowest.item())
    found = {side.name: {"median_ms": 1e3 * statistics.median(side.seconds), **side.counted()} for side in sides}
    return {
        "machine": machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "model": f"{config.model.family} {config.model.flavor}",
        "parameters": settings.model.num_parameters(),
        "layout": f"{world} processes ({settings.layout.described()}), ZeRO {config.parallelism.zero_stage}",
        "rounds": rounds,
        "optimizers": found,
    }


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in each process")
    options, settings = parser.parse_known_args(argv)
    torch.set_num_threads(options.threads)
    # An update does not depend on the batch, which only has to be valid in any layout.
    batch = 8 * int(os.environ.get("WORLD_SIZE", "1"))
    defaults = ["--training.steps=1", "--training.micro_batch_size=1", f"--training.global_batch_size={batch}"]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([*defaults, *settings, "--job.dump_folder", folder])
        device = select_device(config.training.dtype)
        with process_group(device):
            result = measure(config, device, options.rounds)
            if dist.get_rank() == 0:
                show(result)
                write(options.json, result)


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    print(f"{result['model']}, {result['parameters']:,} parameters, {result['layout']}, {result['device']}")
    print(f"{'':12}{'ms':>9}{'MB sent':>10}{'MB of state':>13}  collectives")
    for name, found in result["optimizers"].items():
        calls = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items()) or "none"
        sent, state = found["bytes_sent"] / 1e6, found["bytes_of_state"] / 1e6
        print(f"{name:12}{found['median_ms']:9.2f}{sent:10.2f}{state:13.2f}  {calls}")


if __name__ == "__main__":
    run_command(main)
