"""The decoder's tensor-parallel plan: module name → name of a style in `titan_like.parallel.tensor_styles.STYLES`."""

from collections.abc import Mapping
from typing import Any

from titan_like.models.decoder.config import DecoderConfig

_MLP = "layers.*.mlp"
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
    "layers.*.mlp_norm": "norm",
    "norm": "norm",
    "output": "vocabulary_output",
    "mask_padding": "vocabulary_mask",
    "token_loss": "vocabulary_loss",
}


def _below(name: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of parts of the module ``name``, which is "" in it, as one of the model."""
    return {f"{name}.{part}".removesuffix("."): style for part, style in plan.items()}


def _plan(config: DecoderConfig) -> dict[str, Any]:
    """Experts are left to `titan_like.parallel.experts`. Shared ones are split as dense MLPs are."""
    plan: dict[str, Any] = dict(_AROUND_MLPS)
    parts = {name: config.kind(name).parts for name in config.kind_names}
    mixers = {name: config.mixer_of(name).plan(config) for name in parts if parts[name] != "mlp"}
    if all(mixer == next(iter(mixers.values())) for mixer in mixers.values()):
        plan |= _below("layers.*.attention", next(iter(mixers.values()), {}))
    else:
        for number in range(len(config.layer_kinds)):
            plan |= _below(f"layers.{number}.attention", mixers.get(config.kind_of(number), {}))
    if config.block == "sandwich":
        plan |= {f"layers.*.{block}_post_norm": "norm" for block in ("attention", "mlp")}
    if config.block == "parallel_one_norm":
        del plan["layers.*.mlp_norm"]
    if config.output_bias:
        plan["output_bias"] = "vocabulary_bias"
    if config.mtp_layers:
        mtp = f"layers.{config.num_layers}"
        plan |= {f"{mtp}.eh_proj": "replicated_linear", **{f"{mtp}.{name}norm": "norm" for name in ("e", "h", "")}}
    dense = [_MLP]
    if config.num_experts:
        plan[f"{_MLP}.router"] = "router"
        dense = [f"layers.{number}.mlp" for number in config.dense_layers if parts[config.kind_of(number)] != "mixer"]
        dense += [f"{_MLP}.shared"] if config.num_shared_experts else []
    if config.shared_expert_gate:
        plan[f"{_MLP}.shared_gate"] = "replicated_linear"
    for prefix in dense:
        plan |= {prefix + name.removeprefix(_MLP): style for name, style in _DENSE.items()}
        if not config.gated:
            del plan[f"{prefix}.gate"]
        if config.activation == "xielu":
            plan[f"{prefix}.activation"] = "shared_channels"
    for only, lacking in (("mixer", _MLP), ("mlp", "layers.*.attention")):
        if set(parts.values()) == {only}:
            plan = {name: style for name, style in plan.items() if not name.startswith(lacking)}
    return plan


TENSOR_PARALLEL_PLAN = _plan
