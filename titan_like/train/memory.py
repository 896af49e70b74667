"""What holds a GPU's memory: snapshots on request, and an account of it when memory runs out."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_like.config.errors import NEXT_LINE, first_line
from titan_like.optim.shards import local_bytes
from titan_like.torch_private import dump_memory_snapshot, record_memory_history
from titan_like.train.observer import Observer
from titan_like.train.pending_step import PendingStep
from titan_like.train.setup import Run

_PACKAGE = Path(__file__).resolve().parents[1]


class MemoryWatch(Observer):
    """Writes snapshots of the GPU's memory where `profiling.memory_snapshot_steps` or SIGUSR2 asks for them."""

    def __init__(self, run: Run) -> None:
        """Call this before the model is built, so that the lines that allocate the model are recorded too."""
        self._run, self._steps = run, run.config.profiling.memory_snapshot_steps
        self._has_gpu = run.device.type == "cuda"
        self._records = self._has_gpu and bool(self._steps)
        if self._records:
            record_memory_history(True)

    def end_step(self, issued: PendingStep) -> None:
        """Write a snapshot that is due. A signal's begins with a record of the next step, unless all are recorded."""
        signals, step = self.trainer.signals, issued.step
        if not signals.asks_for_snapshot and step not in self._steps:
            return
        if self._has_gpu and not self._records:
            record_memory_history(True)
            self._records = True
            return
        text = f" memory of rank {dist.get_rank()} after step {step}: {self._snapshot(f'step-{step}')}"
        self.trainer.console.print(text)  # on rank 0
        if signals.asks_for_snapshot and dist.get_rank():
            print(text, flush=True)
        signals.asks_for_snapshot, self._records = False, self._has_gpu and bool(self._steps)
        if self._has_gpu and not self._records:
            record_memory_history(False)

    def _snapshot(self, name: str) -> str:
        """Write a snapshot. Returns where it is, or why it is not."""
        path = Path(self._run.config.job.dump_folder, "memory", f"{name}-rank-{dist.get_rank()}.pickle")
        if not self._has_gpu:
            return "not recorded, because the run uses no GPU"
        try:
            dump_memory_snapshot(path)
        except OSError as error:
            return f"{path} is not written ({first_line(error)})"
        return f"{path} (drop it on https://pytorch.org/memory_viz)"

    def account(self, error: BaseException) -> str:
        """What to change after an allocation failed in a step and, for a GPU's, what held its memory: several lines."""
        config = self._run.config
        kept = config.activation_checkpoint.mode, config.parallelism.zero_stage, config.training.dtype
        lines = [memory_hints(config.training.micro_batch_size, *kept, self._run.layout.weight_shards)]
        if isinstance(error, torch.OutOfMemoryError):
            lines.append(f"rank {dist.get_rank()} holds {_largest(self._holders(), 'of')}")
            if self._records:
                lines.append(f"allocated: {_largest(_allocating_lines(torch.cuda.memory_snapshot()), 'at')}")
            hint = "--profiling.memory_snapshot_steps 1 records which lines allocate it"
            lines.append(self._snapshot("out-of-memory") if self._records else hint)
        return NEXT_LINE.join(lines)

    def _holders(self) -> Counter[str]:
        """Bytes on the GPU, by what they are. ZeRO's parameters are this rank's shards."""
        parameters, held = list(self.trainer.model.parameters()), Counter[str]()
        held["parameters"] = local_bytes(parameters)
        held["gradients"] = local_bytes(p.grad for p in parameters if p.grad is not None)
        states = (value for state in self.trainer.state.optimizer.state.values() for value in state.values())
        held["optimizer state"] = local_bytes(value for value in states if torch.is_tensor(value))
        allocated = torch.cuda.memory_allocated()
        held["activations, gathered weights and other tensors"] = allocated - held.total()
        held["gaps between tensors"] = torch.cuda.memory_reserved() - allocated
        return held


def memory_hints(micro_batch_size: int, recompute: str, zero_stage: int, dtype: str, shards: int) -> str:
    """What to change, besides ``training.micro_batch_size``, in a run that does not fit; ``shards``: of its weights."""
    hints = ["lower it or training.seq_len" if micro_batch_size > 1 else "lower training.seq_len"]
    if recompute != "full":
        hints.append('set activation_checkpoint.mode = "full"')
    if zero_stage < 3 and shards > 1:
        hints.append(f"raise parallelism.zero_stage from {zero_stage}")
    if dtype == "float32":
        hints.append('set training.dtype = "bfloat16"')
    return ", ".join([*hints, "or use more processes"])


def _allocating_lines(segments: Iterable[dict[str, Any]]) -> Counter[str]:
    """Bytes in use, of the segments of `torch.cuda.memory_snapshot`, by this package's innermost line, or else any."""
    held = Counter[str]()
    for block in (block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"):
        frames, line = block.get("frames", []), "lines of C++ (backward passes, communication)"
        for frame in sorted(frames, key=lambda frame: not frame["filename"].startswith(str(_PACKAGE)))[:1]:
            line = f"{frame['filename'].removeprefix(f'{_PACKAGE.parent}/')}:{frame['line']} in {frame['name']}"
        held[line] += block["size"]
    return held


def _largest(held: Counter[str], word: str) -> str:
    return ", ".join(f"{size / 2**30:.3g} GiB {word} {name}" for name, size in (+held).most_common(3))
