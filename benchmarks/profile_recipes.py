"""How each profile is fitted: to which rows, which of its constants, and from where.

A profile's file states the stack: its device and network, and how the software works. A recipe adds what only the fit
needs. A new profile begins as such a file, without fitted constants.

What files state because of a stack's software:

- Megatron-LM's fp16 training sums gradients over data-parallel ranks in fp16 (`gradient_bytes` 2); only its bf16
  training sets --accumulate-allreduce-grads-in-fp32. Since 2023, the product that makes a gradient adds it to the sum
  (`accumulation_bytes` 0).
- DeepSpeed's ZeRO 3 gathers each weight and bias by itself (`gathers_per_layer` 12). On Jean-Zay its rings used one of
  four network cards (`ring_part` 0.25), as rows show that differ in tensor parallelism alone.
- BLOOM ran with CUDA_LAUNCH_BLOCKING=1, a workaround for hangs (`launch_norm` 1). PCI-Express and NUMA settings of
  its cluster were mended on 25 February 2022, so there are two profiles.
- Megatron-Bridge's scripts for experts sum gradients in bf16 and force routers to load all experts equally. Containers
  from 26.06 on replay whole steps as CUDA graphs, with products of experts that are fused and hide the all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from benchmarks.measured_rows import Row
from benchmarks.stack_profiles import ROWS, profiles
from titan_like.planner.profile import Profile

COMPUTE = ("gemm_efficiency", "gemm_depth", "memory_efficiency", "nvlink_efficiency")
NETWORK = ("network_efficiency", "message_efficiency")
REST = ("microbatch_time", "step_time")
BLOOM = (*COMPUTE, *NETWORK, *REST, "operator_time")
MATH = ("gemm_efficiency", "attention_efficiency")
NARROW_TYPES = (*MATH, "nvlink_efficiency", "float8_relative", "float4_relative", "contention")
OF_DENSE = (*NARROW_TYPES, "memory_efficiency", "network_efficiency")  # what models with experts share with others
EXPERTS = ("grouped_relative", "expert_exposed")
BETWEEN_NODES = ("grouped_relative", "all_to_all_efficiency")  # where nothing hides the all-to-alls


def by_shape(row: Row) -> str:
    """Groups rows by model size."""
    return f"{row.work.model.num_layers}x{row.work.model.hidden_size}"


def by_layout(row: Row) -> str:
    """Groups rows by layout, for a study of one model."""
    return f"tp{row.work.tensor} pp{row.work.pipeline} cp{row.work.context}"


@dataclass(frozen=True)
class Recipe:
    """How to fit one profile."""

    names: tuple[str, ...]  # of the constants to fit
    priors: dict[str, float] = field(default_factory=dict)  # their means, if not the defaults of `Profile`
    studies: tuple[tuple[str, str], ...] = ()  # (prefix of the GPU's name, study) of the rows, if not all it covers
    rows: Callable[[Row], bool] = lambda row: row.work.expert == 1  # which of these
    group: Callable[[Row], str] = by_shape  # rows that are left out together
    like: str = ""  # the profile of dense models that its `OF_DENSE` come from

    def begin(self, name: str) -> Profile:
        """The profile before the fit."""
        known = profiles()
        default = {constant.name: constant.default for constant in fields(Profile)}
        shared = {constant: getattr(known[self.like], constant) for constant in OF_DENSE} if self.like else {}
        return known[name].changed(**shared, **{one: self.priors.get(one, default[one]) for one in self.names})

    def chosen(self, name: str, rows: Iterable[Row]) -> list[Row]:
        """The rows that the profile of this name is fitted to."""
        studies = self.studies or ROWS[name].groups
        timed = [row for row in rows if not row.out_of_memory and self.rows(row)]
        return [row for row in timed if any(row.gpu.startswith(gpu) and row.study == study for gpu, study in studies)]


def _early(row: Row) -> bool:
    days = ("02-1", "02-20", "02-21", "02-22", "02-23", "02-24")
    return row.session.startswith(tuple(f"bloom {day}" for day in days))


def _experts(
    gpus: tuple[str, ...], session: str, like: str, names: tuple[str, ...] = EXPERTS, grouped: float = 0.9
) -> Recipe:
    """Megatron-Bridge's rows with experts, from old or new containers."""
    word = f"mbridge experts{session}"
    return Recipe(
        names,
        {"grouped_relative": grouped},
        studies=tuple((gpu, "mbridge") for gpu in gpus),
        rows=lambda row: row.session.startswith(word),
        group=lambda row: row.model.partition(" (")[0],
        like=like,
    )


RECIPES: dict[str, Recipe] = {
    "selene_2021": Recipe(
        (*COMPUTE, *NETWORK, *REST, "contention"),
        studies=(("A100", "ptdp_table2"), ("A100", "tf=hw96")),  # Table 1 is the test set
        rows=lambda row: row.work.zero_stage == 0,
    ),
    "selene_2021_zero3": Recipe(
        ("network_efficiency", "overlap", "network_latency", "contention"),
        {"network_efficiency": 0.1, "overlap": 0.1},
        rows=lambda row: row.work.zero_stage == 3,
    ),
    "selene_2022": Recipe((*COMPUTE, *NETWORK, *REST)),
    "vtrain_a100": Recipe((*COMPUTE, *NETWORK, *REST), {"step_time": 0.3}),
    "vtrain_a100_node": Recipe(
        (*COMPUTE, "operator_time", *REST), {"operator_time": 3e-5, "step_time": 0.01}, group=by_layout
    ),
    "jean_zay_a100": Recipe(
        BLOOM,
        {"network_efficiency": 0.3, "operator_time": 2e-5},
        (("A100", "bloom"),),
        lambda row: not _early(row),
        by_layout,
    ),
    "jean_zay_a100_early": Recipe(
        (*BLOOM, "misaligned_rate"),
        {"network_efficiency": 0.3, "operator_time": 2e-5},
        (("A100", "bloom"),),
        _early,
        lambda row: str(row.work.model.hidden_size),
    ),
    "jean_zay_v100": Recipe(
        ("gemm_efficiency", "memory_efficiency", "nvlink_efficiency", *NETWORK),
        {"nvlink_efficiency": 0.2, "network_efficiency": 0.34},
        rows=lambda row: row.work.zero_stage < 3,
    ),
    "jean_zay_v100_zero3": Recipe(
        ("gemm_efficiency", "network_efficiency", "overlap"),
        {"network_efficiency": 0.34},
        rows=lambda row: row.work.zero_stage == 3,
        group=by_layout,
    ),
    "dgx2_v100": Recipe(("gemm_efficiency", "nvlink_efficiency")),
    "fsdp_a100": Recipe(
        (*MATH, "gemm_depth", "memory_efficiency", *REST, "overlap", "contention"),
        {"attention_efficiency": 0.35, "overlap": 0.9},
    ),
    "fsdp_h100": Recipe(
        (*MATH, "memory_efficiency", "step_time", "overlap", "contention"),
        {"gemm_efficiency": 0.7, "attention_efficiency": 0.25, "overlap": 0.9},
        group=lambda row: f"{row.model} {row.work.recompute} {row.work.seq_len}",
    ),
    "torchtitan_h100": Recipe(
        (*MATH, "nvlink_efficiency", "float8_relative", "float8_rowwise", "fusion", "contention"),
        {"gemm_efficiency": 0.65, "attention_efficiency": 0.4, "fusion": 0.3},
        group=by_layout,
    ),
    "titan_h100": Recipe(  # the time of a launch is that of vtrain_a100_node, whose small models the host binds too
        (*MATH, "memory_efficiency", "operator_time", "step_time"),
        {"gemm_efficiency": 0.7, "attention_efficiency": 0.25, "operator_time": 3.6e-5, "step_time": 2e-3},
        group=lambda row: row.model,
    ),
    "megatron_lm_h100": Recipe(
        (*MATH, "network_efficiency", "contention"), {"gemm_efficiency": 0.75, "contention": 0.05}
    ),
    # Its rows are float8 and determine only the product of the first and the last constant. The efficiency of bf16
    # products is that of `megatron_lm_h100`.
    "megatron_bridge_h100": Recipe((*MATH, "network_efficiency", "float8_relative"), {"gemm_efficiency": 0.66}),
    "megatron_bridge_gb200": Recipe(NARROW_TYPES, {"gemm_efficiency": 0.75}),
    "megatron_bridge_gb300": Recipe(NARROW_TYPES, {"gemm_efficiency": 0.75}),
    "nemo_h100": Recipe((*MATH, "float8_relative"), {"gemm_efficiency": 0.75}),
    "megatron_bridge_experts_gb200_old": _experts(("GB200",), " old", "megatron_bridge_gb200"),
    "megatron_bridge_experts_gb200": _experts(("GB200",), " new", "megatron_bridge_gb200"),
    "megatron_bridge_experts_gb300_old": _experts(("GB300",), " old", "megatron_bridge_gb300"),
    "megatron_bridge_experts_gb300": _experts(("GB300",), " new", "megatron_bridge_gb300"),
    "megatron_bridge_experts_b200": _experts(("B200", "B300"), "", "megatron_bridge_gb200", BETWEEN_NODES),
    # Two rows: its grouped products begin where the fit to the B200 ends.
    "megatron_bridge_experts_h100": _experts(("H100",), "", "megatron_bridge_h100", BETWEEN_NODES, grouped=0.39),
}
