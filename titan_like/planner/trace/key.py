"""What a trace depends on, and the traces on disk."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

import titan_like
from titan_like.config.options import write_output_file
from titan_like.config.paths import parse_json
from titan_like.models.config import TransformerConfig
from titan_like.planner.trace.program import Program
from titan_like.planner.workload import Adapters, Workload, stored_dtype


class TraceKey(NamedTuple):
    """What a traced microbatch depends on: no depth, data parallelism, ZeRO stage, schedule, batch or hardware."""

    model: TransformerConfig  # with one layer of each kind
    seq_len: int
    decoder_seq_len: int
    micro_batch_size: int
    dtype: str
    recompute: str
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    context_method: str = "all_gather"
    expert: int = 1
    expert_tensor: int = 1
    expert_load: float = 1.0
    pipelined: bool = False  # the two ends are in different stages
    splits_backward: bool = False
    compiled: bool = False
    offload: bool = False
    lora: Adapters = Adapters()
    frozen_input: bool = False  # the first layer's input, which comes from a frozen table, has no gradient

    @classmethod
    def of(cls, work: Workload) -> TraceKey:
        """The key of a run's recomputed layers, or of all if there are none."""
        return cls(
            _one_of_each(work.model, work.dropout), work.seq_len, work.decoder_seq_len, work.micro_batch_size,
            stored_dtype(work.dtype), work.recompute, work.tensor, work.sequence_parallel and work.tensor > 1,
            work.context, work.context_method if work.context > 1 else "all_gather", work.expert,
            work.expert_tensor, work.expert_load if work.expert > 1 else 1.0, work.pipeline > 1,
            work.splits_backward, work.compiled, work.offload, work.lora,
        )  # fmt: skip

    @property
    def file_name(self) -> str:
        """The name under which the trace is kept. It changes with the code that the trace runs, and with torch."""
        classes, rest = (type(self.model), *self.model.named_classes), self._replace(model=None)  # type: ignore[arg-type]
        described = f"{classes} {self.model.model_dump_json()} {tuple(rest)} {torch.__version__} {_code(*classes)}"
        return f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"


@lru_cache(maxsize=1024)
def _one_of_each(model: TransformerConfig, dropout: bool) -> TransformerConfig:
    """One object for all depths, so that keys are compared quickly."""
    small = model.one_of_each()
    small = small if dropout or not getattr(small, "dropout", 0) else small.model_copy(update={"dropout": 0.0})
    return _MODELS.setdefault(small, small)


_MODELS: dict[TransformerConfig, TransformerConfig] = {}


@cache
def _code(*classes: type) -> str:
    """Hash of the code that a trace runs with these classes, a family's and those that its fields name."""
    root = Path(titan_like.__file__).parent
    names = "models", "parallel", "config", "torch_private"
    folders = [*(root / name for name in names), Path(__file__).parent]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    for kind in classes:
        file = Path(inspect.getfile(kind))
        if not file.is_relative_to(root):
            files += sorted(file.parent.rglob("*.py")) if "." in kind.__module__ else [file]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def default_folder() -> Path:
    """Where a user's traces are kept: titan_like/traces in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_like" / "traces"


def load(key: TraceKey, folder: Path) -> Program | None:
    """A stored trace, if there is a whole one."""
    try:
        return Program.from_json(parse_json((folder / key.file_name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # absent, or cut short
        return None


def save(key: TraceKey, program: Program, folder: Path) -> None:
    """Store a trace under its final name at once. A folder that cannot be written costs the next run a second."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_output_file(folder / key.file_name, json.dumps(program.tree))
