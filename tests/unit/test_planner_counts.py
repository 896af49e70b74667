"""What one GPT layer computes, moves, sends and keeps, counted by hand, against its trace."""

import pytest

from benchmarks.stack_profiles import profiles
from tests.unit.planner_cases import flavor
from titan_like.planner.cost import Kernels, attention_time, gemm_time, pass_times
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.program import Collective
from titan_like.planner.workload import Workload

B, S, H, HEADS = 2, 64, 128, 4
TOKENS, BSH = B * S, B * S * H
WORK = Workload(flavor("gpt", "debug", max_seq_len=S), S, B, B)  # bfloat16
QUIET = profiles()["selene_2021"].changed(nvlink_latency=0.0, network_latency=0.0, causal_half=True)


def traced(**changes):
    return trace(TraceKey.of(WORK._replace(**changes)))


def sizes(one):
    """How often a pass has products of each size."""
    found = {}
    for gemm, count in one.gemms.items():
        found[gemm[:4]] = found.get(gemm[:4], 0) + count
    return found


@pytest.mark.parametrize("tensor", [1, 2])
def test_products(tensor):
    layer = traced(tensor=tensor).layers[0]
    linear = [(H, 3 * H // tensor), (H // tensor, H), (H, 4 * H // tensor), (4 * H // tensor, H)]  # inputs, outputs
    assert sizes(layer.forward) == {(TOKENS, outputs, inputs, 1): 1 for inputs, outputs in linear}
    backward = {}
    for inputs, outputs in linear:
        for size in ((TOKENS, inputs, outputs, 1), (outputs, inputs, TOKENS, 1)):
            backward[size] = backward.get(size, 0) + 1
    assert sizes(layer.backward) == backward
    assert sum(gemm.flops * n for gemm, n in layer.forward.gemms.items()) == 24 * BSH * H // tensor
    ((core, _),) = layer.forward.attention.items()
    assert core.flops() == 4 * B * S * S * H // tensor and core.flops(causal=True) == core.flops() // 2
    ((core, _),) = layer.backward.attention.items()
    assert core.backward and core.flops() == 8 * B * S * S * H // tensor


def test_what_is_between_products():
    """Two norms and two sums of the hidden states, and an activation of four times their width, two bytes each."""
    forward = traced().layers[0].forward
    assert forward.eager_bytes[0] == pytest.approx(2 * BSH * (2 * 2 + 2 * 3 + 8), rel=0.01)  # statistics and parameters
    assert forward.launches == 4 + 1 + 2 + 2 + 1
    assert forward.fused_bytes[0] < forward.eager_bytes[0]


@pytest.mark.parametrize(
    ("changes", "kept"),  # in b·s·h; arXiv 2205.05198, section 4, without dropout, and with fused attention
    [
        ({}, 2 + 6 + 2 + 2 + 2 + 8 + 8 + 2),  # norm; q, k, v; core; sum; norm; fc1; gelu; output
        ({"tensor": 2}, 2 + 3 + 1 + 2 + 2 + 4 + 4 + 2),
        ({"tensor": 2, "sequence_parallel": True}, 2 + 8 + 4 + 4),  # half: norm and sum in each of two parts, output
        ({"recompute": "full"}, 2),
    ],
)
def test_what_is_kept(changes, kept):
    if changes.get("sequence_parallel"):  # what tensor parallelism splits, and half of the rest
        kept = (3 + 1 + 4 + 4) + (2 + 2 + 2 + 2 + 2) / 2 + 1 - 1 + 1
    assert traced(**changes).layers[0].kept == pytest.approx(BSH * kept, rel=0.02)


def test_messages():
    plain, split = (traced(tensor=2, sequence_parallel=on).layers[0] for on in (False, True))
    for one in (plain.forward, plain.backward):
        assert one.collectives == {Collective("all_reduce", "tp", False): (2, 2 * 2 * BSH)}
    for one in (split.forward, split.backward):
        kinds = ("all_gather", "reduce_scatter")
        assert one.collectives == {Collective(kind, "tp", False): (2, 2 * 2 * BSH) for kind in kinds}


def test_recomputation_repeats_the_forward_pass_but_for_its_last_product():
    layer, again = traced().layers[0], traced(recompute="full").layers[0]
    repeated = [gemm for gemm in again.backward.gemms if gemm.recomputed]
    assert sorted(gemm[:4] for gemm in repeated) == sorted(size for size in sizes(layer.forward) if size[2] != 4 * H)
    assert [core.recomputed for core in again.backward.attention].count(True) == 1
    assert again.forward.gemms == layer.forward.gemms


def test_seconds_are_those_of_the_parts():
    layer = traced(tensor=2).layers[0]
    found = pass_times(layer.forward, True, {"tp": (2, 1)}, Kernels("bfloat16"), QUIET)
    products = sum(gemm_time(gemm, "bfloat16", QUIET) for gemm in layer.forward.gemms)
    ((core, _),) = layer.forward.attention.items()
    eager, fused = layer.forward.eager_bytes[0], layer.forward.fused_bytes[0]
    moved = ((1 - QUIET.fusion) * eager + QUIET.fusion * fused) / QUIET.memory_rate
    assert found.compute == pytest.approx(products + attention_time(core, "bfloat16", QUIET) + moved)
    assert found.exposed == pytest.approx(2 * QUIET.links.all_reduce(2 * BSH, 2, 1) * QUIET.tensor_exposed)
    assert found.host == layer.forward.launches * QUIET.operator_time
    compiled = pass_times(layer.forward, True, {"tp": (2, 1)}, Kernels("bfloat16", compiled=True), QUIET)
    assert compiled.compute < found.compute and compiled.host < found.host
    assert pass_times(layer.forward, True, {}, Kernels("bfloat16"), QUIET).exposed == 0


def test_attention_to_both_sides_computes_what_a_causal_mask_hides():
    profile = profiles()["megatron_lm_h100"].changed(causal_half=True)
    ((core, _),) = traced().layers[0].forward.attention.items()
    causal, full = (attention_time(core._replace(causal=on), "bfloat16", profile) for on in (True, False))
    peak = 989.4e12 * profile.attention_efficiency
    assert full == pytest.approx(2 * causal) == pytest.approx(4 * B * S * S * H / peak)


def test_dtensors_cost_the_host_time_in_eager_layers():
    from titan_like.planner.step_time import steps_of

    profile = QUIET.changed(tensor_host_forward=0.003, tensor_host_backward=0.005)
    for tensor, compiled, more in ((2, False, 0.008), (2, True, 0.0), (1, False, 0.0)):
        work = WORK._replace(tensor=tensor, compiled=compiled)
        (found,), (plain,) = steps_of(work, profile).stages, steps_of(work, QUIET).stages
        assert found.host - plain.host == pytest.approx(4 * more, abs=1e-9)
