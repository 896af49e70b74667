"""Weak scaling: models that grow with the processes, measured here as far as there are any, and predicted beyond.

    python benchmarks/weak_scaling.py [--processes 1,2] [--rounds 3] [--json FILE] [--picture FILE.png]

Three studies, each point marked as measured or predicted:
- this machine: a GPT whose layers' parameters grow with the processes, which split it by tensor parallelism. Efficiency
  is the FLOP/s of a process relative to one process alone in the same round.
- arXiv 1909.08053, section 5.1: 1.2 to 8.3 billion parameters, tensor parallel within 8 GPUs, data parallel to 512.
  Predicted with the profile of its machines (dgx2_v100), beside what its figure 5 states.
- arXiv 2104.04473, Table 1: 1.7 billion parameters on 32 GPUs to a trillion on 3,072, predicted (selene_2021) beside
  what the table states. No row of it was fitted.

Measure on an idle machine with a core for each process. On GPUs the measured models are those of 1909.08053.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.accuracy import predict_row
from benchmarks.published_rows import published_rows
from benchmarks.runs import arguments, machine, parser_of, train, write
from benchmarks.stacks import predicted
from titan_like.config.schema import ActivationCheckpoint
from titan_like.metrics.flops import megatron_flops_per_token
from titan_like.models.gpt.config import GPTConfig
from titan_like.planner.workload import Workload

PAPER = {1: (40, 1536, 16), 2: (54, 1920, 20), 4: (64, 2304, 24), 8: (72, 3072, 32)}  # layers, hidden size, heads
CPU = {1: (4, 256, 4), 2: (4, 368, 4), 4: (4, 512, 4), 8: (4, 736, 8)}
STATED = {1: 1.0, 2: 0.95, 4: 0.82, 8: 0.77, 64: 0.96, 128: 0.83, 256: 0.79, 512: 0.74}  # figure 5: weak scaling
FULL = ActivationCheckpoint(mode="full")  # both papers recompute layers, and count that
SAMPLES, SEQ, VOCAB = 8, 1024, 51200  # of a model-parallel group


def measure(processes: int, steps: int) -> float:
    """FLOP/s of a process, from the median step after two."""
    on_gpus = torch.cuda.is_available()
    layers, hidden, heads = (PAPER if on_gpus else CPU)[processes]
    seq, batch = (SEQ, SAMPLES) if on_gpus else (256, 8)
    settings = {
        "model.overrides.num_layers": layers, "model.overrides.hidden_size": hidden, "model.overrides.dropout": 0.0,
        "model.overrides.num_attention_heads": heads, "model.overrides.max_seq_len": seq, "training.seq_len": seq,
        "training.micro_batch_size": batch, "training.global_batch_size": batch, "training.steps": steps + 2,
        "parallelism.tensor_parallel_degree": processes, "training.dtype": "bfloat16" if on_gpus else "float32",
        "compile.enable": on_gpus,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        records = train(arguments(settings), folder, processes)
    return statistics.median(1e12 * record["tflops_per_device"] for record in records[2:])


def measured(counts: list[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Efficiencies of each number of processes, the median over rounds."""
    found: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        rates = [measure(count, steps) for count in counts]
        found = {count: [*of, rate / rates[0]] for (count, of), rate in zip(found.items(), rates, strict=True)}
    return [{"gpus": count, "measured": statistics.median(of), "rounds": of} for count, of in found.items()]


def megatron_2019() -> list[dict[str, Any]]:
    """Predicted efficiencies next to those of figure 5. From 64 GPUs on, there are 64 replicas of 1, 2, 4 or 8 GPUs."""
    points, rates = [], dict[int, float]()
    for gpus, stated in STATED.items():
        tensor = gpus if gpus <= 8 else gpus // 64
        replicas, (layers, hidden, heads) = gpus // tensor, PAPER[tensor]
        sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        model = GPTConfig(**sizes, vocab_size=VOCAB, max_seq_len=SEQ)
        work = Workload(model, SEQ, SAMPLES, SAMPLES * replicas, tensor=tensor, shard=replicas)
        work = work._replace(recompute="full", dtype="float16")
        flops = megatron_flops_per_token(model, SEQ, FULL) * SEQ * SAMPLES * replicas
        rates[gpus] = flops / predicted(work, "dgx2_v100").total / gpus
        points.append({"gpus": gpus, "stated": stated, "predicted": rates[gpus] / rates[1]})
    return points


def ptdp_table_1() -> list[dict[str, Any]]:
    """TFLOP/s of a GPU in the rows of Table 1."""
    points = []
    for row in (row for row in published_rows() if row.study == "ptdp_table1"):
        found = predict_row(row)
        assert found is not None
        tokens = row.work.seq_len * row.work.global_batch_size
        flops = megatron_flops_per_token(row.work.model, row.work.seq_len, FULL) * tokens
        rates = {"stated": row.seconds, "predicted": found.seconds}
        points.append({"gpus": row.gpus, **{name: flops / of / row.gpus / 1e12 for name, of in rates.items()}})
    return points


def draw(studies: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel for each study."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    labels = ("efficiency of a process", "weak scaling efficiency", "TFLOP/s of a GPU")
    styles = {"measured": "o-", "stated": "o-", "predicted": "x--"}
    for panel, (name, points), label in zip(figure.subplots(1, 3), studies.items(), labels, strict=True):
        for kind, style in styles.items():
            known = [point for point in points if kind in point]
            if known:
                told = "measured by its authors" if kind == "stated" else kind
                panel.plot([p["gpus"] for p in known], [p[kind] for p in known], style, label=told)
        panel.set(xscale="log", xlabel="processes", ylabel=label, title=name)
        panel.set_xticks([p["gpus"] for p in points], [str(p["gpus"]) for p in points], fontsize=8, rotation=60)
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, predict, print."""
    parser = parser_of(__doc__)
    there = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    default = ",".join(str(count) for count in CPU if count <= there)
    parser.add_argument("--processes", default=default, help=f"to measure, from 1 on (default: {default})")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    counts = [int(word) for word in options.processes.split(",")]
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{there} CPU cores"
    studies = {
        f"this machine ({where})": measured(counts, options.rounds, options.steps),
        "1909.08053, V100": megatron_2019(),
        "2104.04473, A100": ptdp_table_1(),
    }
    for name, points in studies.items():
        print(name)
        for point in points:
            kinds = [kind for kind in ("measured", "stated", "predicted") if kind in point]
            print(f"  {point['gpus']:5d}  {'  '.join(f'{kind} {point[kind]:7.3f}' for kind in kinds)}")
    write(options.json, {"machine": machine(), "studies": studies})
    if options.picture:
        draw(studies, options.picture)


if __name__ == "__main__":
    main()
