"""Draw the pictures in README.md, docs/planner.md and docs/long_context.md: predictions. Needs matplotlib.

    python benchmarks/planner_pictures.py
    python benchmarks/planner_pictures.py --only jean_zay

Prints the numbers behind the curves. It measures nothing and takes at most a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.accuracy import predict_row
from benchmarks.published_rows import published_rows
from benchmarks.stack_profiles import profiles
from benchmarks.stacks import STACKS, memory, predicted
from titan_like.config.schema import ActivationCheckpoint
from titan_like.metrics.devices import find_device
from titan_like.metrics.flops import megatron_flops_per_token
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.registry import config_class, flavors
from titan_like.planner.memory import memory as own_memory
from titan_like.planner.stack import default_profile
from titan_like.planner.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SEQ = 2048
SELENE, JEAN_ZAY = "selene_2021", "jean_zay_v100"


class Point(NamedTuple):
    """One prediction. ``value`` is on the picture's vertical axis."""

    x: float
    value: float
    fits: bool = True


Curves = dict[str, list[Point]]


def gpt(layers: int, hidden: int, heads: int) -> GPTConfig:
    """A GPT of arXiv 2104.04473, with its vocabulary of 51,200."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return GPTConfig(**sizes, vocab_size=51200, max_seq_len=SEQ)


def ptdp(model: GPTConfig, micro_batch_size: int, global_batch_size: int, **degrees: int) -> Workload:
    """A run as in that paper: dropout, full recomputation, float16."""
    schedule = "interleaved_1f1b" if degrees.get("virtual_stages", 1) > 1 else "1f1b"
    work = Workload(model, SEQ, micro_batch_size, global_batch_size, schedule=schedule, recompute="full", **degrees)
    return work._replace(dropout=True, dtype="float16")


def tflops(work: Workload, name: str) -> float:
    """TFLOP/s of one GPU in the paper's convention."""
    per_token = megatron_flops_per_token(work.model, work.seq_len, ActivationCheckpoint(mode="full"))
    tokens = work.global_batch_size * work.seq_len
    return tokens * per_token / predicted(work, name).total / work.num_gpus / 1e12


def fits(work: Workload, name: str) -> bool:
    """Whether the fullest GPU has enough memory."""
    return memory(work, profiles()[name], STACKS[name], flash=False).fits


def microbatch_sizes() -> Curves:
    """Figure 16: 91 billion parameters, tensor 8 × pipeline 8 on 64 GPUs. TFLOP/s per GPU by microbatch size."""
    model, curves = gpt(32, 15360, 128), Curves()
    for batch in (128, 512, 2048):
        works = [ptdp(model, size, batch, tensor=8, pipeline=8) for size in (1, 2, 4, 8, 16)]
        points = [Point(work.micro_batch_size, tflops(work, SELENE), fits(work, SELENE)) for work in works]
        curves[f"batch {batch}"] = points
    return curves


def tensor_against_pipeline() -> Curves:
    """Figure 13: 162 billion parameters on 64 GPUs, tensor × pipeline = 64. TFLOP/s per GPU by tensor-parallel size."""
    model, curves = gpt(32, 20480, 128), Curves()
    for batch in (32, 128):
        works = [ptdp(model, 1, batch, tensor=size, pipeline=64 // size) for size in (2, 4, 8, 16, 32)]
        curves[f"batch {batch}"] = [Point(work.tensor, tflops(work, SELENE)) for work in works]
    return curves


def interleaving() -> tuple[Curves, Curves]:
    """Figure 12: GPT-3 on 96 GPUs, tensor 8 × pipeline 12: TFLOP/s per GPU by batch size, and the bubble in per cent of
    the step without it."""
    model = gpt(96, 12288, 96)
    rates, bubbles = Curves(), Curves()
    for v, batch in product((1, 2, 4), (12, 24, 36, 48, 60, 120, 240)):
        work, name = ptdp(model, 1, batch, tensor=8, pipeline=12, virtual_stages=v), f"{v} stage{'s' * (v > 1)} per GPU"
        time = predicted(work, SELENE)
        rates.setdefault(name, []).append(Point(batch, tflops(work, SELENE)))
        bubbles.setdefault(name, []).append(Point(batch, 100 * time.bubble / (time.total - time.bubble)))
    return rates, bubbles


# A study on Jean-Zay compared TP × PP × DP and ZeRO stages on 8 to 128 GPUs. These are its largest microbatches that
# fitted, by (tensor, pipeline), GPUs and global batch.
STRATEGIES = ((1, 1), (2, 1), (1, 2), (2, 2))
GPU_COUNTS = (8, 16, 32, 64, 128)


def microbatch_of_study(tensor: int, pipeline: int, gpus: int, batch: int) -> int:
    """Samples per microbatch in the study's table."""
    if (tensor, pipeline) == (2, 1):
        return 3 if (batch, gpus) == (192, 128) else 4
    if (tensor, pipeline) == (1, 2):
        return 2 if gpus == 8 else 4
    return {(1, 1): (2, 3), (2, 2): (4, 6)}[tensor, pipeline][batch == 192]


def jean_zay_work(tensor: int, pipeline: int, zero: int, gpus: int, batch: int) -> Workload:
    """A run of GPT-3's 1.3B, the model of the family whose largest microbatches are closest to the table's."""
    model = GPTConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, vocab_size=50257, max_seq_len=SEQ)
    if (batch, gpus, tensor * pipeline) == (192, 128, 1):
        batch = 256  # as the study did
    size, data = microbatch_of_study(tensor, pipeline, gpus, batch), gpus // tensor // pipeline
    while batch % (size * data):  # three entries of the table do not divide the batch
        size -= 1
    work = Workload(model, SEQ, size, batch, tensor, pipeline, shard=data, zero_stage=zero)
    return work._replace(dtype="float16")


def jean_zay(batch: int) -> Curves:
    """Thousands of tokens per second by number of GPUs, one curve per strategy."""
    curves: Curves = {}
    for tensor, pipeline in STRATEGIES:
        for zero in (0, 1):
            if (tensor, pipeline, zero) == (1, 1, 0):  # does not fit into memory
                continue
            points = []
            for gpus in GPU_COUNTS:
                work = jean_zay_work(tensor, pipeline, zero, gpus, batch)
                rate = work.global_batch_size * SEQ / predicted(work, JEAN_ZAY).total / 1000
                points.append(Point(gpus, rate, fits(work, JEAN_ZAY)))
            curves[f"TP{tensor} PP{pipeline} ZeRO {zero}"] = points
    return curves


def plot(panel: Axes, curves: Curves, x_label: str, y_label: str, title: str, doubling: bool = False) -> None:
    """Print and plot curves over a logarithmic axis with ticks at the points; hollow markers do not fit into memory.

    ``doubling`` makes the vertical axis logarithmic too.
    """
    for name, points in curves.items():
        values = "  ".join(f"{p.x:g}: {p.value:.4g}{'' if p.fits else ' (does not fit)'}" for p in points)
        print(f"{name:24s}{values}", flush=True)
    colours: dict[str, str] = {}
    for name, points in curves.items():
        family, _, zero = name.partition(" ZeRO ")
        colour = colours.setdefault(family, f"C{len(colours)}")
        style = "--" if zero == "0" else "-"
        values = [point.value for point in points]
        panel.plot([point.x for point in points], values, style, color=colour, label=name, linewidth=1.4)
        for point in points:
            face = colour if point.fits else "white"
            panel.plot(point.x, point.value, "o", color=colour, markerfacecolor=face, markersize=4.5)
    ticks = sorted({point.x for points in curves.values() for point in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    panel.minorticks_off()
    if doubling:
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
    else:
        panel.set_ylim(bottom=0)
    panel.tick_params(labelsize=8)
    panel.set_xlabel(x_label, fontsize=9)
    panel.set_ylabel(y_label, fontsize=9)
    panel.set_title(title, fontsize=9, loc="left")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def long_sequences(seq_len: int, gpus: int) -> Curves:
    """GiB of activations on a GPU by the number of processes that share a sequence, one curve per method."""
    model = config_class("llama").model_validate(flavors("llama")["llama3.1_8b"] | {"max_seq_len": seq_len})
    profile = default_profile(find_device("H100"))
    curves: Curves = {}
    for method in ("all_gather", "ulysses", "ring"):
        points = []
        for size in (1, 2, 4, 8, 16):
            if method == "ulysses" and model.num_kv_heads % size:
                continue
            shards = gpus // size
            work = Workload(model, seq_len, 1, shards, context=size, context_method=method, shard=shards, zero_stage=3)
            found = own_memory(work._replace(recompute="full"), profile)
            points.append(Point(size, found.ranks[0].activations / 2**30, found.fits))
        curves[method] = points
    return curves


def draw_predicted(path: Path) -> None:
    """Predicted against measured step times of the published rows; the band is 10 % wide on either side."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.2, 3.6), layout="constrained")
    panel = drawing.subplots()
    found = [predict_row(row) for row in published_rows() if not row.out_of_memory]
    groups = {"PTD-P, Table 1: nothing fitted on it": True, "other published runs": False}
    for (name, is_test), style in zip(groups.items(), ("o", "x"), strict=True):
        own = [one for one in found if one is not None and (one.row.study == "ptdp_table1") == is_test]
        panel.plot([one.row.seconds for one in own], [one.seconds for one in own], style, label=name)
        errors = sorted(abs(one.error) for one in own)
        print(f"{name}: {len(own)} runs, median error {errors[len(own) // 2]:.1%}, largest {errors[-1]:.1%}")
    ends = [one.row.seconds for one in found if one is not None]
    span = [0.7 * min(ends), 1.4 * max(ends)]
    panel.fill_between(span, [0.9 * end for end in span], [1.1 * end for end in span], alpha=0.2, color="0.5")
    panel.set(xscale="log", yscale="log", xlabel="measured, seconds a step", ylabel="predicted", xlim=span, ylim=span)
    panel.legend(fontsize=8)
    drawing.savefig(path, dpi=110)


RATE = "TFLOP/s per GPU"


def curves_of(name: str) -> list[tuple[Any, ...]]:
    """The arguments of `plot` for each panel of a picture."""
    if name == "microbatch_size":
        return [(microbatch_sizes(), "microbatch size", RATE, "91B parameters, tensor 8 × pipeline 8, 64 A100")]
    if name == "tensor_against_pipeline":
        label, title = "tensor-parallel size (pipeline: 64 over it)", "162B parameters, 64 A100 in nodes of 8"
        return [(tensor_against_pipeline(), label, RATE, title)]
    if name == "bubble_batch_size":
        rates, bubbles = interleaving()
        title, bubble = "175B parameters, tensor 8 × pipeline 12, 96 A100", "bubble, % of the step without it"
        return [(bubbles, "batch size", bubble, title), (rates, "batch size", RATE, title)]
    if name == "jean_zay":
        title = "1.3B parameters, V100-32GB in nodes of 4, batch {}"
        label = "thousand tokens per second"
        return [(jean_zay(batch), "GPUs", label, title.format(batch), True) for batch in (512, 192)]
    title, label = "Llama 3.1 8B, {:,} tokens, {} H100, ZeRO 3, recomputation", "GiB of activations"
    sizes = ((131072, 32), (1048576, 64))
    return [(long_sequences(*size), "context-parallel degree", label, title.format(*size), True) for size in sizes]


def draw_curves(name: str, path: Path) -> None:
    """Draw a picture's panels side by side."""
    from matplotlib.figure import Figure

    panels = curves_of(name)
    made = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
    for panel, arguments in zip(made.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        plot(panel, *arguments)
    made.savefig(path, dpi=130)


CURVES = ("microbatch_size", "tensor_against_pipeline", "bubble_batch_size", "jean_zay", "long_sequences")
PICTURES: dict[str, Callable[[Path], None]] = {name: partial(draw_curves, name) for name in CURVES}
PICTURES["predicted"] = draw_predicted


def main() -> None:
    """Read the command line and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--only", choices=list(PICTURES), help="draw only this picture")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, draw_one in PICTURES.items():
        if options.only in (None, name):
            print(f"{name}.png")
            draw_one(options.folder / f"{name}.png")


if __name__ == "__main__":
    main()
