"""Shapes and layouts that the trainer does not run itself: sequences shared by processes, attention to both sides."""

import pytest

from benchmarks.accuracy import predict_row
from benchmarks.measured_rows import row_from
from benchmarks.stack_memory import layer_activations, memory
from tests.unit.planner_cases import flavor
from titan_like.planner.layer_time import layer_cost
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import Workload

H100 = builtin_profiles()["megatron_lm_h100"]
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
    found = predict_row(row)
    # Within what the profile says of itself, on rows that it was fitted on.
    assert found.seconds == pytest.approx(row.seconds, rel=H100.error_p90)


@pytest.mark.parametrize("context", [2, 16])
def test_processes_that_share_a_sequence_gather_keys_and_values(context):
    model, seq = flavor("llama", "llama3.1_8b"), 65536
    quiet = H100.changed(nvlink_latency=0.0, network_latency=0.0, tensor_exposed=1.0)
    work = Workload(model, seq, 1, 16, context=context, dtype="bfloat16")
    cost = layer_cost(work, quiet)
    both = 2 * seq * 8 * 128 * 2  # keys and values, 8 heads of 128 elements in two bytes
    link = 450e9 * quiet.nvlink_efficiency
    if context > 8:  # over two nodes, with all their cards
        link = min(link, 4e11 * quiet.network_efficiency)
    assert cost.forward_tensor == pytest.approx((context - 1) / context * both / link)
    assert cost.backward_tensor == pytest.approx(cost.forward_tensor)  # their gradients back
    alone = layer_cost(work._replace(context=1), quiet)
    assert cost.forward == pytest.approx(alone.forward / context, rel=0.02)
    assert layer_activations(work)[0][0] == pytest.approx(layer_activations(work._replace(context=1))[0][0] / context)


def test_sharing_sequences_saves_memory_and_costs_time():
    model = flavor("llama", "llama3.1_8b")
    works = [Workload(model, 131072, 1, 8, shard=8, context=c, zero_stage=3, dtype="bfloat16") for c in (1, 2, 4, 8)]
    held = [memory(work, H100).largest for work in works]
    assert held == sorted(held, reverse=True)
    gpu_seconds = [step_time(work, H100).total * work.num_gpus for work in works]
    assert gpu_seconds == sorted(gpu_seconds)


def test_attention_to_both_sides_computes_what_a_causal_mask_hides():
    model = flavor("gpt", "1.7b")
    gpt = Workload(model, 512, 8, 1024, shard=64, dtype="bfloat16")
    bert = gpt._replace(causal=False)
    left_out = (
        0.5 * 4 * 8 * 512**2 * model.hidden_size / (989.4e12 * H100.attention_efficiency)
    )  # that a causal mask hides
    costs = [layer_cost(work, H100) for work in (gpt, bert)]
    assert costs[1].forward - costs[0].forward == pytest.approx(left_out)
    assert costs[1].backward - costs[0].backward == pytest.approx(2.5 * left_out)
    selene = builtin_profiles()["selene_2021"]  # unfused attention computes the whole matrix
    assert step_time(gpt._replace(flash=False), selene) == step_time(bert._replace(flash=False), selene)


def test_rows_of_bert_attend_to_both_sides():
    table = {
        "model": "BERT-1.3B", "layers": 24, "hidden": 2048, "heads": 32, "seq": 512, "vocab": 30522, "gpu": "A100-80GB",
        "gpus": 8, "tp": 1, "pp": 1, "gbs": 1024, "mbs": 8, "step_time_s": 10, "notes": "mine",
    }  # fmt: skip
    row = {key: str(value) for key, value in table.items()}
    assert not row_from(row).work.causal
    assert row_from(row | {"model": "GPT-1.3B"}).work.causal
