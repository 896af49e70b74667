"""The family's tensor-parallel plan. It leaves experts to `titan_like.parallel.experts`."""

from __future__ import annotations

from titan_like.models.llama.sharding import TENSOR_PARALLEL_PLAN as _LLAMA
from titan_like.models.moe.config import MoEConfig

_OF_MLP = "layers.*.mlp"


def _plan(config: MoEConfig) -> dict[str, str]:
    """Module name → name of a style. Shared experts and the MLPs of dense layers are split as Llama's MLPs are."""
    is_of_mlp = {name: name == _OF_MLP or name.startswith(f"{_OF_MLP}.") for name in _LLAMA}
    plan = {name: style for name, style in _LLAMA.items() if not is_of_mlp[name]}
    plan[f"{_OF_MLP}.router"] = "router"
    if config.qk_norm == "head":
        plan |= {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}
    dense = [f"layers.{number}.mlp" for number in range(config.num_dense_layers)]
    for prefix in (*dense, *([f"{_OF_MLP}.shared"] if config.num_shared_experts else [])):
        plan |= {prefix + name.removeprefix(_OF_MLP): _LLAMA[name] for name in _LLAMA if is_of_mlp[name]}
    return plan


TENSOR_PARALLEL_PLAN = _plan
