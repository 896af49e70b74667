"""Tokens per second of two processes that split a model along one axis, compared with one process.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 7 --json scaling.json
    python benchmarks/scaling.py --layouts one "tensor 2" --steps 4

Every process computes with one thread, so two of them have twice the hardware. All layouts train the same model on the
same global batches with train.py, one after the other in new processes; the order rotates from round to round. A run's
tokens per second are the tokens of the steps after the first over their time. A layout's speed-up is the median over
rounds of its tokens per second over that of one process in the same round. Measure on an idle machine with at least two
cores.

The ideal speed-up is 2 for data and tensor parallelism, and 2 / (1 + bubble) for the pipeline schedule with m
microbatches.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from typing import Any

from runs import arguments, machine, parser_of, train, write

from titan_like.parallel.schedules.simulate import ideal_bubble

MODEL = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "max_seq_len": 256}
SEQ_LEN, GLOBAL_BATCH = 256, 16
TENSOR = ["--parallelism.tensor_parallel_degree=2", "--training.micro_batch_size=4"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {  # processes, settings
    "one": (1, ["--training.micro_batch_size=4"]),
    "data 2": (2, ["--training.micro_batch_size=4"]),
    "tensor 2": (2, TENSOR),
    "tensor 2, sequence parallel": (2, [*TENSOR, "--parallelism.sequence_parallel=true"]),
    "pipeline 2, 1f1b": (2, ["--parallelism.pipeline_parallel_degree=2", "--training.micro_batch_size=1"]),
}
AT_LEAST = {"data 2": 1.8, "tensor 2": 1.4, "pipeline 2, 1f1b": 1.6}


def measure(layout: str, steps: int) -> dict[str, float]:
    """Run train.py; returns the tokens per second after the first step and the last loss."""
    processes, settings = LAYOUTS[layout]
    common = {f"model.overrides.{key}": value for key, value in MODEL.items()}
    common |= {"training.seq_len": SEQ_LEN, "training.global_batch_size": GLOBAL_BATCH, "training.steps": steps + 1}
    with tempfile.TemporaryDirectory() as folder:
        lines = train([*arguments(common), *settings], folder, processes, CUDA_VISIBLE_DEVICES="")
    seconds = sum(line["step_time_s"] for line in lines[1:])
    return {"tokens_per_second": steps * GLOBAL_BATCH * SEQ_LEN / seconds, "loss": lines[-1]["loss"]}


def summarise(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Speed-ups over one process, a row for each layout."""
    rows = []
    for layout, found in runs.items():
        ratios = [
            run["tokens_per_second"] / one["tokens_per_second"] for run, one in zip(found, runs["one"], strict=True)
        ]
        ideal = float(LAYOUTS[layout][0])
        if layout.startswith("pipeline"):
            ideal /= 1 + ideal_bubble("1f1b", 2, 1, GLOBAL_BATCH)
        rows.append(
            {
                "layout": layout,
                "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in found), 1),
                "speed_up": round(statistics.median(ratios), 3),
                "speed_ups": [round(ratio, 3) for ratio in ratios],
                "at_best": round(ideal, 3),
                "wanted": AT_LEAST.get(layout),
                "loss": found[-1]["loss"],
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'layout':<28} {'tokens/s':>9} {'speed-up':>9} {'at best':>8} {'wanted':>7}   in each round")
    for row in rows:
        wanted = "" if row["wanted"] is None else f"{row['wanted']:.1f}"
        rounds = " ".join(f"{ratio:.2f}" for ratio in row["speed_ups"])
        print(
            f"{row['layout']:<28} {row['tokens_per_second']:>9.0f} {row['speed_up']:>9.2f} {row['at_best']:>8.2f} "
            f"{wanted:>7}   {rounds}"
        )


def main() -> None:
    """Measure all layouts in turn, print and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="always with one process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run, after one of warm-up")
    options = parser.parse_args()
    layouts = list(dict.fromkeys(["one", *options.layouts]))
    runs: dict[str, list[dict[str, float]]] = {layout: [] for layout in layouts}
    for number in range(options.rounds):
        shift = number % len(layouts)
        for layout in layouts[shift:] + layouts[:shift]:
            runs[layout].append(measure(layout, options.steps))
            speed = runs[layout][-1]["tokens_per_second"]
            print(
                f"round {number + 1} of {options.rounds}: {layout}: {speed:.0f} tokens/s", file=sys.stderr, flush=True
            )
    rows = summarise(runs)
    show(rows)
    shape = {"model": MODEL, "seq_len": SEQ_LEN, "global_batch_size": GLOBAL_BATCH}
    write(options.json, {"machine": machine(), **shape, "layouts": rows})


if __name__ == "__main__":
    main()
