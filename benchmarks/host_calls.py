"""What the host does in a steady step, in numbers that need no GPU.

    python benchmarks/host_calls.py [--layers 12 48] [--dtype bfloat16] [--scope model | --eager] [--json FILE]
    python benchmarks/host_calls.py --bare [as above]
    torchrun --nproc_per_node=2 benchmarks/host_calls.py [--zero_stage 1] [--hidden_size 768] [as above]

A GPU waits whenever the host cannot issue work fast enough, so these counts decide the speed of small models:

launches         of kernels: those of graphs, libraries' too, and operators outside of them that compute something
compiled entries of graphs: forward and backward passes
operators        dispatched by Python or autograd, without those that another operator calls
autograd nodes   run by the backward pass
Python calls     of functions, built-in ones included

The last three are counted outside compiled regions. `--bare` counts for a plain GPT in a minimal loop with the same
clipping and optimizer, compiled as one graph with its loss.

The model is a GPT-2 of narrow layers, because the counts of one process do not depend on its width. Those of several
do: small layers share messages. Growth per layer is the difference between two depths, divided by that of the layers.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any

from runs import ROOT, arguments, machine, parser_of, trainer_of, write

sys.path.insert(0, str(ROOT))
_COMPILER = ("torch/_dynamo/", "torch/_functorch/", "torch/_inductor/", "torchinductor_")
_KERNEL = re.compile(r"\s+(?:\w+ = )?(?:cpp_fused_\w*|extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(")
# Operators that compute nothing, and those that are what they call.
_FREE = "empty empty_like empty_strided new_empty view as_strided select slice unsqueeze squeeze unbind split detach t "
_FREE += "transpose permute expand alias resize_ promote_types result_type lift_fresh narrow tensor_split chunk "
_FREE += "split_with_sizes"
_COMPOSED = "to _to_copy linear matmul reshape flatten contiguous reciprocal_ stack hstack"
_REGIONS = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")


class CallCounter:
    """Counts calls of Python and built-in functions, except those made from compiled regions."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.graphs: Counter[str] = Counter()  # by the file with the compiler's code
        self._inside = 0  # depth of frames inside a compiled region

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """What `sys.setprofile` calls."""
        if event == "call":
            if frame.f_code.co_qualname == "Runner.call":
                self.graphs[frame.f_code.co_filename] += 1
            if self._inside or any(part in frame.f_code.co_filename for part in _COMPILER):
                self._inside += 1
            if self._inside <= 1:
                self.calls[frame.f_code.co_qualname] += 1
        elif event == "return":
            self._inside = max(0, self._inside - 1)
        elif event == "c_call" and not self._inside:
            self.calls["built-in"] += 1


def launches_of(event: Any) -> int:
    """Kernels that an operator outside of graphs launches on a GPU, which has one for all tensors of a list."""
    name = event.name.removeprefix("aten::")
    if name in _FREE.split():
        return 0
    return sum(map(launches_of, event.cpu_children)) if name in _COMPOSED.split() else 1


def kernels_in(file: str) -> int:
    """Kernels that a graph of the compiler launches: its own, and those of libraries and operators."""
    return sum(bool(_KERNEL.match(line)) for line in Path(file).read_text(encoding="utf-8").splitlines())


def count_step(step: Callable[[], object]) -> dict[str, Counter[str]]:
    """Run a step twice: operators and autograd nodes of the first, the other numbers of the second, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    operators: Counter[str] = Counter()
    nodes: Counter[str] = Counter()
    launches: Counter[str] = Counter()
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
                launches[event.name] += launches_of(event)
        elif event.name.startswith("autograd::engine::evaluate_function"):
            nodes[event.name.rpartition(": ")[2]] += 1
    counter = CallCounter()
    sys.setprofile(counter)
    try:
        step()
    finally:
        sys.setprofile(None)
    launches["in graphs"] = sum(kernels_in(file) * count for file, count in counter.graphs.items())
    entries = Counter({"graphs": counter.graphs.total()})
    counted = {"launches": launches, "compiled entries": entries, "operators": operators, "autograd nodes": nodes}
    return counted | {"Python calls": counter.calls}


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
            "compile.scope": options.scope,
        }
        trainer, data = trainer_of(arguments(settings))
        with closing(data):
            step = bare_step(trainer.run, options.eager) if options.bare else partial(trainer.train_step, data)
            for _ in range(4):
                step()
            found.append(count_step(step))
    return found


def bare_step(run: Any, eager: bool) -> Callable[[], object]:
    """A step of `plain_models` in a minimal loop, on the same tokens again and again."""
    import torch
    import torch.nn.functional as F
    from overhead import bare_loop
    from plain_models import PlainTransformer

    training, size = run.config.training, run.model.vocab_size
    model = PlainTransformer(run.model, training.seq_len)

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    batch = torch.randint(size, (training.micro_batch_size, 2, training.seq_len))
    steps = bare_loop(run.config, loss_of if eager else torch.compile(loss_of), list(model.parameters()), repeat(batch))
    return partial(next, steps)


def main() -> None:
    """Count for each depth and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 48])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--zero_stage", type=int, default=0, choices=range(4))
    parser.add_argument("--eager", action="store_true", help="do not compile layers")
    parser.add_argument("--scope", default="layers", choices=("auto", "layers", "model"), help="compile.scope")
    parser.add_argument("--bare", action="store_true", help="count for a minimal loop")
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
            for name, each in sorted(grown.items(), key=lambda item: -item[1])[:400]:
                print(f"    {found[0][what][name]:>6} {each:>8.2f} a layer  {name}")
    names = ("dtype", "hidden_size", "microbatches", "zero_stage", "scope", "bare")
    settings = {name: getattr(options, name) for name in names} | {"compiled": not options.eager}
    write(options.json, {"machine": machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
