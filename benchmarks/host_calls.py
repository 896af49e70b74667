"""What the host does in a steady step, in numbers that need no GPU.

    python benchmarks/host_calls.py [--layers 12 48] [--dtype bfloat16] [--eager] [--json FILE]
    torchrun --nproc_per_node=2 benchmarks/host_calls.py [--zero_stage 1] [--hidden_size 768] [as above]

A GPU waits whenever the host cannot issue work fast enough, so these counts decide the speed of small models:

operators        dispatched by Python or autograd, without those that another operator calls
autograd nodes   run by the backward pass
Python calls     of functions, built-in ones included

All are counted outside compiled regions. The model is a GPT-2 of narrow layers, because the counts of one process do
not depend on its width. Those of several do: small layers share messages. Growth per layer is the difference between
two depths, divided by that of the layers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import FrameType
from typing import Any

from runs import ROOT, arguments, machine, parser_of, trainer_of, write

sys.path.insert(0, str(ROOT))
_COMPILER = ("torch/_dynamo/", "torch/_functorch/", "torch/_inductor/", "torchinductor_")
_REGIONS = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")


class CallCounter:
    """Counts calls of Python and built-in functions, except those made from compiled regions."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._inside = 0  # depth of frames inside a compiled region

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """What `sys.setprofile` calls."""
        if event == "call":
            if self._inside or any(part in frame.f_code.co_filename for part in _COMPILER):
                self._inside += 1
            if self._inside <= 1:
                self.calls[frame.f_code.co_qualname] += 1
        elif event == "return":
            self._inside = max(0, self._inside - 1)
        elif event == "c_call" and not self._inside:
            self.calls["built-in"] += 1


def count_step(step: Callable[[], object]) -> dict[str, Counter[str]]:
    """Run a step twice: operators and autograd nodes of the first, Python calls of the second, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    operators: Counter[str] = Counter()
    nodes: Counter[str] = Counter()
    for event in profiler.events():
        above, parent = [], event.cpu_parent
        while parent is not None:
            above.append(parent.name)
            parent = parent.cpu_parent
        if any(name.startswith(_REGIONS) for name in above):
            continue
        if event.name.startswith(("aten::", "c10d::", "_c10d", "titan_like::")):
            if not any("::" in name and not name.startswith("autograd::") for name in above):
                operators[event.name] += 1
        elif event.name.startswith("autograd::engine::evaluate_function"):
            nodes[event.name.rpartition(": ")[2]] += 1
    counter = CallCounter()
    sys.setprofile(counter)
    try:
        step()
    finally:
        sys.setprofile(None)
    return {"operators": operators, "autograd nodes": nodes, "Python calls": counter.calls}


def measure(options: argparse.Namespace, folder: str) -> list[dict[str, Counter[str]]]:
    """Count a step of a GPT-2 of each depth, on each of the processes that torchrun has started."""
    hidden, processes = options.hidden_size, int(os.environ.get("WORLD_SIZE", "1"))
    found = []
    for layers in options.layers:
        shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 2, "ffn_hidden_size": 4 * hidden}
        settings = {
            "job.config_file": str(ROOT / "train_configs/debug_gpt.toml"),
            "job.dump_folder": folder,
            **{f"model.overrides.{key}": value for key, value in shape.items()},
            "training.dtype": options.dtype,
            "training.seq_len": 32,
            "training.micro_batch_size": 2,
            "training.global_batch_size": 2 * options.microbatches * processes,
            "training.max_norm": 1.0,
            "parallelism.zero_stage": options.zero_stage,
            "checkpoint.enable": False,
            "evaluation.interval": 0,
            "metrics.log_interval": 1000,
            "compile.enable": not options.eager,
        }
        trainer, data = trainer_of(arguments(settings))
        with closing(data):
            for _ in range(4):
                trainer.train_step(data)
            found.append(count_step(partial(trainer.train_step, data)))
    return found


def main() -> None:
    """Count for each depth and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 48])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--zero_stage", type=int, default=0, choices=range(4))
    parser.add_argument("--eager", action="store_true", help="do not compile layers")
    parser.add_argument("--names", action="store_true", help="print what is counted, by name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, folder)
    if os.environ.get("RANK", "0") != "0":
        return
    rows, few, many = [], *options.layers
    print(f"\n{'':16} {few:>8} layers {many:>8} layers   per layer")
    for what in found[0]:
        counts = [counter[what].total() for counter in found]
        growth = (counts[1] - counts[0]) / (many - few)
        rows.append({"what": what, str(few): counts[0], str(many): counts[1], "per_layer": growth})
        print(f"{what:16} {counts[0]:>15,} {counts[1]:>15,} {growth:>11.1f}")
        if options.names:
            grown = {name: (n - found[0][what][name]) / (many - few) for name, n in found[1][what].items()}
            for name, each in sorted(grown.items(), key=lambda item: -item[1])[:30]:
                print(f"    {found[0][what][name]:>6} {each:>8.2f} a layer  {name}")
    names = ("dtype", "hidden_size", "microbatches", "zero_stage")
    settings = {name: getattr(options, name) for name in names} | {"compiled": not options.eager}
    write(options.json, {"machine": machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
