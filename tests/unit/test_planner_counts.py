"""Seconds of a pass from what its trace has: GEMMs, attention, memory traffic, messages and the host."""

import pytest

from benchmarks.stack_profiles import profiles
from tests.unit.planner_cases import flavor
from titan_like.planner.cost import Kernels, attention_time, gemm_time, pass_times
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import Workload

B, S, H, HEADS = 2, 64, 128, 4
TOKENS, BSH = B * S, B * S * H
WORK = Workload(flavor("gpt", "debug", max_seq_len=S), S, B, B)  # bfloat16
QUIET = profiles()["selene_2021"].changed(nvlink_latency=0.0, network_latency=0.0, causal_half=True)


def traced(**changes):
    return trace(TraceKey.of(WORK._replace(**changes)))


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
