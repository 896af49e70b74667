"""The decoder's tensor-parallel plan: module name → name of a style in `titan_like.parallel.tensor_styles.STYLES`."""

from __future__ import annotations

from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.layers.latent_attention import LATENT_PLAN

_ATTENTION, _MLP = "layers.*.attention", "layers.*.mlp"
_DENSE = {
    _MLP: "region",
    f"{_MLP}.gate": "column_linear",
    f"{_MLP}.up": "column_linear",
    f"{_MLP}.down": "row_linear",
}
_AROUND_MLPS = {
    "embedding": "vocabulary_embedding",
    "next_embedding": "vocabulary_embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "region",
    "layers.*.attention.qkv": "column_linear",  # its rows are ordered by head groups, so each rank gets whole groups
    "layers.*.attention.core": "split_heads",
    "layers.*.attention.proj": "row_linear",
    "layers.*.mlp_norm": "norm",
    "norm": "norm",
    "output": "vocabulary_output",
    "mask_padding": "vocabulary_mask",
    "token_loss": "vocabulary_loss",
}
LLAMA = _AROUND_MLPS | _DENSE


def _plan(config: DecoderConfig) -> dict[str, str]:
    """Experts are left to `titan_like.parallel.experts`. Shared ones are split as dense MLPs are."""
    plan = dict(_AROUND_MLPS)
    if config.block == "sandwich":
        plan |= {f"layers.*.{block}_post_norm": "norm" for block in ("attention", "mlp")}
    if config.qk_norm != "none":
        style = "head_norm" if config.qk_norm == "head" else "split_norm"
        plan |= {f"layers.*.attention.{part}_norm": style for part in "qk"}
    if config.kv_lora_rank:
        plan = {name: style for name, style in plan.items() if not name.startswith(f"{_ATTENTION}.")}
        del plan[_ATTENTION]
        is_there = {"q_a": config.q_lora_rank, "q_norm": config.q_lora_rank}
        plan |= {f"{_ATTENTION}.{name}": style for name, style in LATENT_PLAN.items() if is_there.get(name, True)}
    if config.mtp_layers:
        mtp = f"layers.{config.num_layers}"
        plan |= {f"{mtp}.eh_proj": "replicated_linear", **{f"{mtp}.{name}norm": "norm" for name in ("e", "h", "")}}
    dense = [_MLP]
    if config.num_experts:
        plan[f"{_MLP}.router"] = "router"
        dense = [f"layers.{number}.mlp" for number in range(config.num_dense_layers)]
        dense += [f"{_MLP}.shared"] if config.num_shared_experts else []
    for prefix in dense:
        plan |= {prefix + name.removeprefix(_MLP): style for name, style in _DENSE.items()}
        if not config.gated:
            del plan[f"{prefix}.gate"]
    return plan


TENSOR_PARALLEL_PLAN = _plan
