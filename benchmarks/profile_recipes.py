"""How each shipped profile is fitted: on which rows, from which constants, and which of them are free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measured_rows import Row
from benchmarks.stacks import STACKS
from titan_like.metrics.devices import find_device
from titan_like.planner.predict import of_own_trainer
from titan_like.planner.profile import Profile, builtin_profiles

COMPUTE = ("gemm_efficiency", "gemm_depth", "memory_efficiency", "nvlink_efficiency")
NETWORK = ("network_efficiency", "message_efficiency")
REST = ("microbatch_time", "step_time")


def by_shape(row: Row) -> str:
    """Groups rows by model size."""
    return f"{row.work.model.num_layers}x{row.work.model.hidden_size}"


def by_layout(row: Row) -> str:
    """Groups rows by layout, for a study of one model."""
    return f"tp{row.work.tensor} pp{row.work.pipeline} cp{row.work.context}"


@dataclass(frozen=True)
class Recipe:
    """How to fit one profile: its rows, their sources, the constants to fit."""

    description: str
    studies: tuple[tuple[str, str], ...]  # (prefix of the GPU's name, study) of the rows that it is fitted on
    device: str
    node_bandwidth: float
    names: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()  # covered by the profile, but not fitted on
    covered: tuple[tuple[str, str], ...] = ()  # rows covered by the profile, if not those above
    start: dict[str, Any] = field(default_factory=dict)
    gpus_per_node: int = 8
    rows: Callable[[Row], bool] = lambda row: row.work.expert == 1
    group: Callable[[Row], str] = by_shape

    def begin(self, name: str) -> Profile:
        """The profile before the fit."""
        profile = Profile(name, find_device(self.device), self.gpus_per_node, self.node_bandwidth, **self.start)
        return profile if name in STACKS else of_own_trainer(profile, profile.dtype)


_MEGATRON_H100 = {
    "accumulation_bytes": 0.0,  # the product that makes a gradient adds it to the sum
    "fusion": 0.6,
    "contention": 0.05,
    "optimizer_traffic": 36.0,
    "overlap": 0.9,
    "causal_half": True,
    "attention_efficiency": 0.5,
    "gemm_efficiency": 0.75,
    "message_exposed": 0.05,
    "tensor_exposed": 0.5,
    "gather_hidden": True,
}

_FOUNDRY = {"gradient_bytes": 2, "fusion": 0.6}

_NARROW_TYPES = (
    "gemm_efficiency",
    "attention_efficiency",
    "nvlink_efficiency",
    "float8_relative",
    "float4_relative",
    "contention",
)
# Megatron-LM's fp16 training sums gradients over data-parallel ranks in fp16 (only bf16 training sets
# --accumulate-allreduce-grads-in-fp32 by default), and copies them to float32 for the update.
_HALF_GRADIENTS = {"gradient_bytes": 2, "accumulation_bytes": 6.0, "fusion": 0.6}
# Half-precision weights and gradients; master weights, moments and a float32 copy of the gradients are sharded. The
# overheads are the rest of the memory in rows that measured it.
_DEEPSPEED_ZERO1 = {"accumulation_bytes": 6.0, "fusion": 0.6}

_BLOOM_NAMES = (*COMPUTE, *NETWORK, *REST, "operator_time")
_BLOOM = {
    "gradient_bytes": 2,
    "network_efficiency": 0.3,
    "overlap": 0.01,
    "blocking_launches": True,  # CUDA_LAUNCH_BLOCKING=1, a workaround for hangs
    "operator_time": 2e-5,
    **_DEEPSPEED_ZERO1,
    "overhead_bytes": 9.1e9,
    "fragmentation": 0.11,
}
_EARLY = ("bloom 02-1", "bloom 02-20", "bloom 02-21", "bloom 02-22", "bloom 02-23", "bloom 02-24")


def _early(row: Row) -> bool:
    return row.session.startswith(_EARLY)


RECIPES: dict[str, Recipe] = {
    "selene_2021": Recipe(
        "A100, Megatron-LM of 2021 on Selene (arXiv 2104.04473): 8 x HDR InfiniBand, unfused attention, fp16",
        (("A100", "ptdp_table2"), ("A100", "tf=hw96")),
        "A100-80GB",
        200e9,
        (*COMPUTE, *NETWORK, *REST, "contention"),
        also=(("A100", "ptdp_table1"),),
        start={"dtype": "float16", "overlap_in_pipeline": False, **_HALF_GRADIENTS},
        rows=lambda row: row.work.zero_stage == 0,
    ),
    "selene_2021_zero3": Recipe(
        "A100, DeepSpeed ZeRO-3 of 2021 on Selene, as arXiv 2104.04473, Table 2, compares with",
        (("A100", "ptdp_table2"),),
        "A100-80GB",
        200e9,
        ("network_efficiency", "overlap", "network_latency", "contention"),
        start={
            "dtype": "float16",
            "fusion": 0.6,
            "gradient_bytes": 2,
            "only_zero": 3,
            "network_efficiency": 0.1,
            "gathers_per_layer": 12,  # DeepSpeed gathered each weight and bias separately
            "overlap": 0.1,
            "gemm_efficiency": 0.77,
            "gemm_depth": 163.0,
            "memory_efficiency": 0.71,
            "nvlink_efficiency": 0.77,
        },
        rows=lambda row: row.work.zero_stage == 3,
    ),
    "selene_2022": Recipe(
        "A100, Megatron-LM of 2022 on Selene (arXiv 2205.05198): sequence parallelism, selective recomputation",
        (("A100", "korthikanti_t5"),),
        "A100-80GB",
        200e9,
        (*COMPUTE, *NETWORK, *REST),
        start={"dtype": "float16", "overlap_in_pipeline": False, **_HALF_GRADIENTS},
    ),
    "vtrain_a100": Recipe(
        "A100, Megatron-DeepSpeed on 64 nodes with 8 x 100 Gb/s (VIA-Research/vTrain, ground_truth_multi)",
        (("A100", "vtrain_multi"),),
        "A100-80GB",
        100e9,
        (*COMPUTE, *NETWORK, *REST),
        start={"dtype": "float16", "step_time": 0.3, "overlap": 0.01, **_HALF_GRADIENTS},
    ),
    "vtrain_a100_node": Recipe(
        "A100, Megatron-DeepSpeed on one node, small models bound by the host (VIA-Research/vTrain, "
        "ground_truth_single)",
        (("A100", "vtrain_single"),),
        "A100-80GB",
        100e9,
        (*COMPUTE, "operator_time", *REST),
        start={"dtype": "float16", **_HALF_GRADIENTS, "operator_time": 3e-5, "step_time": 0.01},
        group=by_layout,
    ),
    "jean_zay_a100": Recipe(
        "A100, Megatron-DeepSpeed with ZeRO 1 on Jean-Zay: 4 x 100 Gb/s Omni-Path (BLOOM's chronicles), since 25 "
        "February 2022, when PCI-Express and NUMA settings were mended",
        (("A100", "bloom"),),
        "A100-80GB",
        50e9,
        _BLOOM_NAMES,
        also=(("A100", "production"),),
        start=_BLOOM,
        rows=lambda row: not _early(row),
        group=by_layout,
    ),
    "jean_zay_a100_early": Recipe(
        "A100, Megatron-DeepSpeed with ZeRO 1 on Jean-Zay: 4 x 100 Gb/s Omni-Path (BLOOM's chronicles), before 25 "
        "February 2022",
        (("A100", "bloom"),),
        "A100-80GB",
        50e9,
        (*_BLOOM_NAMES, "misaligned_rate"),
        covered=tuple(("A100", session) for session in _EARLY),
        start=_BLOOM,
        rows=lambda row: _early(row),
        group=lambda row: str(row.work.model.hidden_size),
    ),
    "jean_zay_v100": Recipe(
        "V100, Megatron-LM and DeepSpeed on Jean-Zay: 4 GPUs a node, 4 x 100 Gb/s Omni-Path shared with others, "
        "whose noise its users put at 40 %",
        (("V100", "jz_v100"),),
        "V100-32GB",
        50e9,
        ("gemm_efficiency", "memory_efficiency", "nvlink_efficiency", "network_efficiency", "message_efficiency"),
        start={
            "dtype": "float16",
            "fusion": 0.6,
            "gradient_bytes": 2,
            "nvlink_switch": False,
            "network_efficiency": 0.34,
            "gemm_depth": 60.0,  # smaller tiles than on A100
            "nvlink_efficiency": 0.2,
            **_DEEPSPEED_ZERO1,
            "overhead_bytes": 2e9,
        },
        gpus_per_node=4,
        rows=lambda row: row.work.zero_stage < 3,
    ),
    "jean_zay_v100_zero3": Recipe(
        "V100, DeepSpeed ZeRO-3 on Jean-Zay",
        (("V100", "jz_v100"),),
        "V100-32GB",
        50e9,
        ("gemm_efficiency", "network_efficiency", "overlap"),
        start={
            "dtype": "float16",
            "fusion": 0.6,
            "gradient_bytes": 2,
            "nvlink_switch": False,
            "network_efficiency": 0.34,
            "gathers_per_layer": 12,
            "ring_part": 0.25,  # one of four cards, as shown by rows that differ only in tensor parallelism
            "only_zero": 3,
        },
        gpus_per_node=4,
        rows=lambda row: row.work.zero_stage == 3,
        group=by_layout,
    ),
    "dgx2_v100": Recipe(
        "V100, Megatron-LM of 2021 on DGX-2: 16 GPUs on NVLink switches",
        (("V100", "tf=hw96"),),
        "V100-32GB",
        100e9,
        ("gemm_efficiency", "nvlink_efficiency"),
        start={"dtype": "float16", **_HALF_GRADIENTS},
        gpus_per_node=16,
    ),
    "fsdp_a100": Recipe(
        "A100, PyTorch FSDP with fused attention, bf16 (MosaicML llm-foundry, fms-fsdp)",
        (("A100", "foundry"), ("A100", "tokens/s/gpu")),
        "A100-80GB",
        200e9,
        ("gemm_efficiency", "gemm_depth", "memory_efficiency", "attention_efficiency", *REST, "overlap", "contention"),
        start={
            **_FOUNDRY,
            "optimizer_traffic": 36.0,
            "overlap": 0.9,
            "causal_half": True,
            "attention_efficiency": 0.35,
        },
    ),
    "fsdp_h100": Recipe(
        "H100, PyTorch FSDP with fused attention, bf16 (MosaicML llm-foundry, fms-fsdp)",
        (("H100", "foundry"), ("H100", "tokens/s/gpu")),
        "H100-80GB",
        200e9,
        ("gemm_efficiency", "memory_efficiency", "attention_efficiency", "step_time", "overlap", "contention"),
        start={
            **_FOUNDRY,
            "optimizer_traffic": 36.0,
            "overlap": 0.9,
            "causal_half": True,
            "attention_efficiency": 0.25,
            "gemm_efficiency": 0.7,
        },
        group=lambda row: f"{row.model} {row.work.recompute} {row.work.seq_len}",
    ),
    "torchtitan_h100": Recipe(
        "H100 (96 GB HBM2e, 500 W), torchtitan: FSDP2, eager and compiled, bf16 and float8",
        (("H100", "torchtitan"),),
        "H100-96GB",
        200e9,
        (
            "gemm_efficiency",
            "attention_efficiency",
            "nvlink_efficiency",
            "float8_relative",
            "float8_rowwise",
            "fusion",
            "contention",
        ),
        start={
            "fusion": 0.3,
            "gradient_bytes": 4,
            "optimizer_traffic": 36.0,
            "overlap": 0.9,
            "causal_half": True,
            "attention_efficiency": 0.4,
            "gemm_efficiency": 0.65,
            "memory_efficiency": 0.75,
        },
        group=by_layout,
    ),
    "titan_h100": Recipe(
        "H100, this trainer: one process, bf16, compiled layers and loss; links and overlap are those of fsdp_h100",
        (("H100", "titan_like"), ("H200", "titan_like")),
        "H100-80GB",
        200e9,
        ("gemm_efficiency", "attention_efficiency", "memory_efficiency", "operator_time", "step_time"),
        start={
            "causal_half": True,
            "attention_efficiency": 0.25,
            "gemm_efficiency": 0.7,
            "operator_time": 3.6e-5,  # of vtrain_a100_node, whose small models the host binds too
            "launch_norm": 16,  # a step lasts as long as its launches or its kernels, whichever takes longer
            "microbatch_time": 1e-4,
            "step_time": 2e-3,
            "overlap": 0.88,
        },
        group=lambda row: row.model,
    ),
    "megatron_lm_h100": Recipe(
        "H100, Megatron-LM Core 0.8 of 2024: 8 x 400 Gb/s, fused attention, overlapped communication, bf16",
        (("H100", "tf=model"),),
        "H100-80GB",
        400e9,
        ("gemm_efficiency", "attention_efficiency", "network_efficiency", "contention"),
        start=_MEGATRON_H100,
    ),
    "megatron_bridge_h100": Recipe(
        "H100, Megatron-Bridge of 2025 and 2026: 8 x 400 Gb/s, fused attention, overlapped communication",
        (("H100", "mbridge"),),
        "H100-80GB",
        400e9,
        ("gemm_efficiency", "attention_efficiency", "network_efficiency", "float8_relative"),
        # The rows are float8 and determine only the product of the first and the last constant. The efficiency of bf16
        # products comes from Megatron-LM's bf16 rows of 2024 (`megatron_lm_h100`: 0.66).
        start={**_MEGATRON_H100, "gemm_efficiency": 0.66},
    ),
    "megatron_bridge_gb200": Recipe(
        "GB200, Megatron-Bridge of 2025 and 2026: 72 GPUs on one NVLink switch; float8 and 4-bit types",
        (("GB200", "mbridge"),),
        "GB200",
        3.6e12,
        _NARROW_TYPES,
        start={**_MEGATRON_H100, "contention": 0.15},
        gpus_per_node=72,
    ),
    "megatron_bridge_gb300": Recipe(
        "GB300, Megatron-Bridge of 2025 and 2026: 72 GPUs on one NVLink switch; float8 and 4-bit types",
        (("GB300", "mbridge"),),
        "GB300",
        7.2e12,
        _NARROW_TYPES,
        start={**_MEGATRON_H100, "contention": 0.15},
        gpus_per_node=72,
    ),
    "nemo_h100": Recipe(
        "H100, NeMo 24.07: 8 x 400 Gb/s, float8",
        (("H100", "nemo2407"),),
        "H100-80GB",
        400e9,
        ("gemm_efficiency", "attention_efficiency", "float8_relative"),
        start=_MEGATRON_H100,
    ),
}


# Only what experts add is fitted; the rest is as in rows of dense models on the same GPU.
_OF_DENSE = (*_NARROW_TYPES, "memory_efficiency", "network_efficiency")


def _experts(
    gpu: str, session: str, like: str, also: tuple[str, ...] = (), node_bandwidth: float = 0.0, **start: Any
) -> Recipe:
    """The recipe of Megatron-Bridge's rows with experts on one GPU: old ones, from containers before 26.06, or new.

    Its scripts (scripts/performance) sum gradients in bf16, and force routers to load all experts equally. The new ones
    replay whole steps as CUDA graphs, with products of experts that are fused and hide the all-to-alls.
    """
    dense, word = builtin_profiles()[like], f"mbridge experts{session}"
    which = f"{session} containers," if session else ""
    return Recipe(
        f"{gpu}, Megatron-Bridge,{which} models with experts; other constants are those of {like}",
        tuple((one, "mbridge") for one in (gpu, *also)),
        gpu,
        node_bandwidth or dense.node_bandwidth,
        ("grouped_relative", "expert_exposed"),
        covered=tuple((one, word) for one in (gpu, *also)),
        start={**_MEGATRON_H100, **{name: getattr(dense, name) for name in _OF_DENSE}, "gradient_bytes": 2, **start},
        gpus_per_node=8 if node_bandwidth else dense.gpus_per_node,
        rows=lambda row: row.session.startswith(word),
        group=lambda row: row.model.partition(" (")[0],
    )


_EIGHT = {"node_bandwidth": 400e9}  # GPUs a node
RECIPES |= {
    "megatron_bridge_experts_gb200_old": _experts("GB200", " old", "megatron_bridge_gb200"),
    "megatron_bridge_experts_gb200": _experts("GB200", " new", "megatron_bridge_gb200"),
    "megatron_bridge_experts_gb300_old": _experts("GB300", " old", "megatron_bridge_gb300"),
    "megatron_bridge_experts_gb300": _experts("GB300", " new", "megatron_bridge_gb300"),
    "megatron_bridge_experts_b200": _experts("B200", "", "megatron_bridge_gb200", also=("B300", "H100"), **_EIGHT),
}
