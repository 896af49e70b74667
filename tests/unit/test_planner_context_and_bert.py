"""Sequences that processes share: published layouts, what they gather, and what it saves and costs."""

import pytest

from benchmarks.accuracy import predict_row
from benchmarks.measured_rows import row_from
from benchmarks.stack_profiles import profiles
from tests.unit.planner_cases import flavor, layer_times
from titan_like.planner.memory import memory
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import Workload

H100 = profiles()["megatron_lm_h100"]
LLAMA = flavor("llama", "llama3.1_8b")
# arXiv 2407.21783, Table 4: GPUs, context parallel, tokens of a sequence, sequences, data parallel, TFLOP/s per GPU.
LLAMA_405B = [(8192, 1, 8192, 2048, 64, 430), (16384, 1, 8192, 2048, 128, 400), (16384, 16, 131072, 128, 8, 380)]


@pytest.mark.parametrize(("gpus", "context", "seq", "batch", "data", "tflops"), LLAMA_405B)
def test_llama_3_405b_in_the_paper_s_layouts(gpus, context, seq, batch, data, tflops):
    table = {
        "model": "Llama3-405B", "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "seq": seq,
        "vocab": 128256, "gpu": "H100-80GB", "gpus": gpus, "gpus_per_node": 8, "tp": 8, "pp": 16, "dp": data,
        "cp": context, "mbs": 1, "zero": "2/3", "seq_parallel": 1, "gbs": batch, "tflops_per_gpu": tflops,
        "notes": "tf=model; bf16",
    }  # fmt: skip
    row = row_from({key: str(value) for key, value in table.items()})
    assert row.work.context == context
    # Within what the profile says of itself, on rows that it was fitted on.
    assert predict_row(row).seconds == pytest.approx(row.seconds, rel=H100.error_p90)


@pytest.mark.parametrize("context", [2, 16])
def test_processes_that_share_a_sequence_gather_keys_and_values(context):
    quiet = H100.changed(nvlink_latency=0.0, network_latency=0.0, tensor_exposed=1.0)
    work = Workload(LLAMA, 65536, 1, 16, context=context)
    forward, backward, _ = layer_times(work, quiet)
    both = 2 * 65536 * 8 * 128 * 2  # keys and values, 8 heads of 128 elements in two bytes
    link = 450e9 * quiet.nvlink_efficiency
    if context > 8:  # over two nodes, with all their cards
        link = min(link, 4e11 * quiet.network_efficiency)
    assert forward.exposed == pytest.approx((context - 1) / context * both / link)
    assert backward.exposed >= forward.exposed  # their gradients back
    whole, part = (trace(TraceKey.of(one)).layers[0] for one in (work._replace(context=1), work))
    assert 0.95 * whole.kept / context <= part.kept <= 1.05 * whole.kept / context + both


def test_sharing_sequences_saves_memory_and_costs_time():
    works = [Workload(LLAMA, 131072, 1, 8, shard=8, context=c, zero_stage=3) for c in (1, 2, 4, 8)]
    held = [memory(work, H100).largest for work in works]
    assert held == sorted(held, reverse=True)
    gpu_seconds = [step_time(work, H100).total * work.num_gpus for work in works]
    assert gpu_seconds == sorted(gpu_seconds)
