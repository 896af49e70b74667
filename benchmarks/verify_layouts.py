"""Verify 94 layouts on the command line: how long each takes, and whether any is reported as different.

python benchmarks/verify_layouts.py [--json benchmarks/results/verify_layouts_cpu.json] [--cold] [--only N ...]

With --cold every compiled layout starts with an empty compiler cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parents[1]
SHORT = {
    "tp": "parallelism.tensor_parallel_degree",
    "sp": "parallelism.sequence_parallel",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_schedule",
    "virtual": "parallelism.virtual_stages_per_rank",
    "dp": "parallelism.data_parallel_shard_degree",
    "replicas": "parallelism.data_parallel_replicate_degree",
    "zero": "parallelism.zero_stage",
    "batch": "training.global_batch_size",
    "dtype": "training.dtype",
    "rampup": "training.batch_size_rampup",
    "recompute": "activation_checkpoint.mode",
    "compile": "compile.enable",
    "optimizer": "optimizer.name",
    "decay": "lr_scheduler.decay",
    "cp": "parallelism.context_parallel_degree",
    "method": "parallelism.context_parallel_method",
    "kv_heads": "model.overrides.num_kv_heads",
    "dropout": "model.overrides.dropout",
    "decoder": "training.decoder_seq_len",
    "reset_positions": "data.reset_position_ids",
    "reset_mask": "data.reset_attention_mask",
    "eod_loss": "data.eod_mask_loss",
    "prefix": "data.prefix_lm",
    "ep": "parallelism.expert_parallel_degree",
    "balance": "model.overrides.balance",
    "score": "model.overrides.router_score",
    "renormalize": "model.overrides.renormalize",
    "shared": "model.overrides.num_shared_experts",
    "dense": "model.overrides.num_dense_layers",
    "z_loss": "model.overrides.z_loss_coefficient",
    "qk_norm": "model.overrides.qk_norm",
}
DOCUMENTS = "reset_positions=true reset_mask=true eod_loss=true"
LAYOUTS = f"""
gpt tp=2 dp=1
gpt tp=4 dp=1 sp=true
gpt pp=2 dp=2 zero=1 batch=16
gpt pp=4 dp=1 batch=32
llama tp=2 pp=2 dp=1 zero=0
gpt tp=2 pp=2 dp=2 sp=true zero=3 batch=32
gpt dp=2 zero=2 dtype=bfloat16
gpt dp=2 zero=3 dtype=float16 batch=16
gpt dp=2 zero=0 dtype=bfloat16
gpt replicas=2 dp=2 zero=2 batch=16
llama pp=2 dp=1 schedule=interleaved_1f1b virtual=2 zero=0 batch=32
gpt pp=2 dp=2 schedule=zbv_zero_bubble zero=3 batch=64
gpt pp=2 dp=1 schedule=dualpipe_v batch=64
gpt pp=2 dp=1 schedule=interleaved_zero_bubble virtual=2 batch=32
gpt recompute=full dp=2
gpt recompute=selective tp=2 dp=1 sp=true
llama tp=2 dp=2 sp=true zero=3 dtype=float16 batch=16
gpt optimizer=sgd dp=2 zero=1
gpt decay=wsd dp=2
gpt dp=1 batch=16
gpt dp=2 rampup=[8,8,64] batch=16
gpt pp=2 dp=2 dtype=bfloat16 zero=3 batch=16
gpt schedule=gpipe pp=2 dp=1
gpt schedule=looped_bfs virtual=2 pp=2 dp=1 batch=32
llama tp=2 dp=1 zero=0 recompute=full dtype=bfloat16
gpt tp=4 pp=2 dp=1
gpt dp=4 zero=1 batch=16
llama tp=2 pp=2 dp=2 zero=2 batch=32 sp=true recompute=full
gpt compile=true dp=2
gpt compile=true tp=2 dp=1 sp=true
llama cp=2 method=all_gather dp=1
llama cp=2 method=ulysses dp=1
llama cp=2 method=ring dp=1
llama cp=4 method=all_gather dp=1
llama cp=4 method=ulysses kv_heads=4 dp=1
llama cp=4 method=ring dp=1
llama cp=2 method=all_gather tp=2 sp=true dp=1 zero=0
llama cp=2 method=ulysses tp=2 kv_heads=4 dp=1 zero=0
llama cp=2 method=ring tp=2 sp=true dp=2 zero=3
llama cp=2 method=all_gather pp=2 dp=2 zero=3 batch=32
llama cp=2 method=ulysses pp=2 schedule=interleaved_1f1b virtual=2 dp=1 zero=0 batch=32
llama cp=2 method=ring pp=2 schedule=zbv_zero_bubble dp=1 zero=0 batch=32
llama cp=4 method=all_gather replicas=2 dp=1 zero=2 batch=32
llama cp=2 method=ulysses dp=2 zero=1 recompute=full
llama cp=4 method=ring dp=1 zero=2 dtype=bfloat16
llama cp=2 method=all_gather dp=1 dtype=float16 batch=16
llama cp=2 method=all_gather dp=1 {DOCUMENTS}
llama cp=4 method=ulysses kv_heads=4 dp=1 {DOCUMENTS}
llama cp=4 method=ring dp=1 {DOCUMENTS}
llama cp=2 method=all_gather dp=2 zero=1 prefix=true
llama cp=2 method=ulysses tp=2 kv_heads=4 dp=1 zero=0 {DOCUMENTS} prefix=true
llama cp=2 method=ring dp=1 prefix=true
gpt cp=2 method=ring dp=1 dropout=0 {DOCUMENTS}
gpt cp=4 method=ulysses pp=2 dp=1 dropout=0
bert cp=2 method=ring dp=2 dropout=0
t5 cp=2 method=all_gather tp=2 sp=true dp=1 dropout=0 decoder=64
moe ep=2 dp=2 zero=0
moe ep=2 dp=2 zero=3 batch=16
moe ep=2 dp=4 zero=1 batch=16 z_loss=0.001
moe ep=2 dp=4 zero=2 batch=32 balance=bias score=sigmoid
moe ep=4 dp=4 zero=3 batch=16
moe ep=4 dp=4 zero=0 batch=32 renormalize=false
moe tp=2 sp=true dp=1 zero=0
moe tp=2 sp=true dp=2 zero=3 batch=16 shared=1
moe tp=2 sp=true ep=2 dp=1
moe tp=2 sp=true ep=2 dp=2 zero=2 batch=16 qk_norm=head
moe tp=2 sp=true ep=4 dp=2 zero=3 batch=16
moe tp=2 sp=true ep=2 dp=2 zero=0 dense=1 shared=2
moe tp=2 sp=true ep=2 dp=2 pp=2 zero=1 batch=32
moe tp=2 sp=true ep=4 dp=2 pp=2 zero=3 batch=32 balance=bias
moe ep=2 dp=2 pp=2 schedule=interleaved_1f1b virtual=2 zero=0 batch=32
moe ep=2 dp=2 pp=2 schedule=zbv_zero_bubble zero=3 batch=64
moe ep=2 dp=2 pp=2 schedule=dualpipe_v zero=1 batch=64
moe pp=2 dp=1 schedule=gpipe
moe ep=2 pp=2 dp=2 schedule=looped_bfs virtual=2 batch=32
moe tp=2 sp=true pp=2 dp=1 schedule=interleaved_zero_bubble virtual=2 batch=32
moe ep=2 cp=2 dp=1 method=all_gather
moe ep=4 cp=2 dp=2 method=ring zero=3
moe ep=2 cp=2 dp=1 method=ulysses kv_heads=4 zero=1
moe ep=4 cp=2 tp=2 sp=true dp=1 method=all_gather zero=2
moe ep=2 cp=2 pp=2 dp=2 method=all_gather zero=3 batch=32
moe ep=2 replicas=2 dp=2 zero=2 batch=16
moe ep=2 replicas=2 dp=1 tp=2 sp=true zero=3
moe ep=2 replicas=2 dp=2 zero=0 dtype=bfloat16 batch=16
moe ep=2 dp=2 zero=0 dtype=bfloat16 batch=16
moe ep=2 dp=4 zero=3 dtype=bfloat16 batch=16
moe tp=2 sp=true ep=2 dp=1 dtype=bfloat16
moe tp=2 sp=true ep=2 dp=2 zero=2 dtype=float16 batch=16
moe ep=2 dp=2 recompute=full zero=3 batch=16
moe tp=2 sp=true ep=2 dp=2 recompute=experts batch=16
moe ep=2 dp=2 compile=true
moe ep=2 dp=2 optimizer=sgd balance=none
moe dp=1 batch=16 shared=1 dense=1
moe ep=2 dp=2 {DOCUMENTS}
""".strip().splitlines()
DEGREES = ("tp", "cp", "pp", "dp", "replicas", "ep")


def num_axes(layout: str) -> int:
    """Number of degrees above 1."""
    settings = dict(word.split("=", 1) for word in layout.split()[1:])
    return sum(int(settings.get(name, 1)) > 1 for name in DEGREES)


def verify(layout: str, cache: str | None) -> dict[str, object]:
    """Run the command; returns its last line and its seconds."""
    family, *words = layout.split()
    command = [
        sys.executable,
        str(REPO / "scripts/verify.py"),
        "--job.config_file",
        f"train_configs/debug_{family}.toml",
    ]
    for word in words:
        name, _, value = word.partition("=")
        command += [f"--{SHORT[name]}", value]
    environment = dict(os.environ) | ({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})
    started = time.perf_counter()
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environment, check=False)
    seconds = round(time.perf_counter() - started, 1)
    said = result.stdout.strip().splitlines()
    return {"layout": layout, "exit_code": result.returncode, "seconds": seconds, "said": said[-1] if said else ""}


def main() -> None:
    """Verify the layouts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", type=int, nargs="+", default=list(range(len(LAYOUTS))))
    options = parser.parse_args()
    rows = []
    for number in options.only:
        with tempfile.TemporaryDirectory() as cache:
            row = verify(LAYOUTS[number], cache if options.cold else None)
        rows.append(row)
        print(f"{number:2} {row['seconds']:6} s  exit {row['exit_code']}  {row['layout']}", flush=True)
    of_two = [
        row["seconds"] for row in rows if num_axes(str(row["layout"])) == 2 and "compile" not in str(row["layout"])
    ]
    summary = {
        "layouts": len(rows),
        "same": sum(row["exit_code"] == 0 for row in rows),
        "different": sum(row["exit_code"] == 1 for row in rows),
        "undecided": sum(row["exit_code"] == 3 for row in rows),
        "median_seconds_of_two_axes": statistics.median(of_two) if of_two else None,  # type: ignore[type-var]
    }
    print(summary)
    if options.json:
        Path(options.json).write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
