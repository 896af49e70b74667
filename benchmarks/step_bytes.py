"""Bytes that a step of one process moves outside the layers, per parameter, and its peak memory, on fake tensors.

    python benchmarks/step_bytes.py ["gpt gpt2_124m" "llama llama3.1_8b 8"] [--microbatches 1 4] [--json FILE]

A model is a family, a flavor and a number of layers. Counted are adding gradients up, their norm, clipping, AdamW's
update and casting weights: bytes that operators read and write, except those among the last 8 MiB touched, which caches
hold. Memory is that of tensors at the fullest moment of the passes and of the update, next to what the planner says.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import parser_of, write
from tests import whole_step
from titan_like.config.load import load_config
from titan_like.models.registry import model_config
from titan_like.optim import adamw
from titan_like.parallel.gradients import ComputeCopies
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.memory import rank_moments
from titan_like.planner.workload import workload_of
from titan_like.torch_private import TorchDispatchMode, schema_of, tree_leaves

CACHE = 8 << 20
MODELS = ["gpt gpt2_124m 12", "llama llama3.2_1b 16", "llama llama3.1_8b 8"]
_OVERWRITE = {"aten::copy_", "aten::_foreach_copy_"}
_READS_GRADIENTS = "aten::_fused_adamw_"  # though its schema would let it write them


class Traffic(TorchDispatchMode):
    """Adds up bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.is_active = 0, False
        self.cache: OrderedDict[tuple[int, int], int] = OrderedDict()  # (storage, offset) → bytes

    def touch(self, tensor: Any) -> None:
        """Read a tensor."""
        if tensor.untyped_storage().nbytes() <= CACHE // 4:  # it stays in the cache
            return
        key = id(tensor.untyped_storage()), tensor.storage_offset()
        if self.cache.pop(key, 0) < tensor.nbytes:
            self.bytes += tensor.nbytes
        self.cache[key] = tensor.nbytes
        while sum(self.cache.values()) > CACHE:
            self.cache.popitem(last=False)

    def write_back(self, tensor: Any) -> None:
        """A cache holds what is written too, until it goes to memory."""
        self.bytes += tensor.nbytes * (tensor.untyped_storage().nbytes() > CACHE // 4)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, schema = func(*args, **(kwargs or {})), schema_of(func)
        given = dict(zip([one.name for one in schema.arguments], args, strict=False)) | (kwargs or {})
        tensors = {
            name: [leaf for leaf in tree_leaves(value) if hasattr(leaf, "nbytes")] for name, value in given.items()
        }
        known = {id(leaf.untyped_storage()) for leaves in tensors.values() for leaf in leaves}
        made = [
            leaf for leaf in tree_leaves(result) if hasattr(leaf, "nbytes") and id(leaf.untyped_storage()) not in known
        ]
        if (not made and not schema.is_mutable) or "empty" in schema.name:
            return result
        for argument in schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            writes &= not (schema.name == _READS_GRADIENTS and argument.name == "grads")
            for leaf in tensors.get(argument.name, ()):
                if not (writes and schema.name in _OVERWRITE):
                    self.touch(leaf)
                if writes:
                    self.write_back(leaf)
        for leaf in made:
            self.write_back(leaf)
        return result


def measure(model: str, microbatches: int, settings: list[str]) -> dict[str, Any]:
    """The bytes of one step."""
    family, flavor, layers = model.split()
    values = {"model.family": family, "model.flavor": flavor, "model.overrides.num_layers": layers}
    values |= {"training.dtype": "bfloat16", "training.micro_batch_size": 1, "training.global_batch_size": microbatches}
    values |= {"training.seq_len": 1024, "training.steps": 10}
    config = load_config([*(f"--{key}={value}" for key, value in values.items()), *settings])
    shape, where, traffic = model_config(config.model), resolve_layout(config.parallelism, 1), Traffic()

    def counted(original: Callable, *args: Any, **named: Any) -> Any:
        if traffic.is_active:
            return original(*args, **named)
        with traffic:
            traffic.is_active = True
            result = original(*args, **named)
            traffic.is_active = False
        return result

    def update(optimizer: Any, gradients: Any, *rest: Any) -> None:
        gradients.norm()
        original_update(optimizer, gradients, *rest)
        for unit in optimizer._copied:  # as the next step begins
            unit.refresh()

    original_update = whole_step.update
    with ExitStack() as stack:
        for name in ("_on_gradient", "add_gradients", "hand_over"):
            function = getattr(ComputeCopies, name)
            stack.enter_context(mock.patch.object(ComputeCopies, name, lambda *a, f=function, **n: counted(f, *a, **n)))
        stack.enter_context(mock.patch.object(whole_step, "update", partial(counted, update)))
        step = whole_step.whole_step(config, shape, where, 0, adamw.BLOCK["cpu"])
    number = step.weights // 4
    passes, at_update = rank_moments(workload_of(config, shape, where), 0)
    return {
        "model": model, "microbatches": microbatches, "parameters": number, "moved": traffic.bytes / number,
        "passes": step.passes / number, "update": step.update / number,
        "planned_passes": passes.total / number, "planned_update": at_update.total / number,
    }  # fmt: skip


def main() -> None:
    """Print a line for each model and number of microbatches."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    arguments, settings = parser.parse_known_args()
    results = [measure(model, count, settings) for model in arguments.models for count in arguments.microbatches]
    for one in results:
        figures = "  ".join(f"{key} {value:.2f}" for key, value in one.items() if isinstance(value, float))
        print(f"{one['model']:24s} {one['microbatches']} microbatches: {figures} bytes a parameter")
    write(arguments.json, results)


if __name__ == "__main__":
    main()
