"""Fields of config.json that only decoders with experts have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_like.models.decoder.config import FULL, DecoderConfig
from titan_like.models.fields import Field, Values, converted, renamed
from titan_like.models.hugging_face import Fields


def experts(
    number: str, count: Any, per_token: Any, width: str, size: int, per_token_name: str = "num_experts_per_tok"
) -> tuple[Field, ...]:
    """The number of experts, which has several names in files; how many a token goes to; the width of one.

    A type as a default: the class has none, so that files must have the field.
    """
    aliases = [name for name in ("num_local_experts", "num_experts") if name != number]
    others = [name for name in ("num_experts_per_tok",) if name != per_token_name]
    return (
        renamed("num_experts", number, count, *aliases),
        renamed("experts_per_token", per_token_name, per_token, *others),
        renamed("expert_ffn_hidden_size", width, size),
    )


def _read_margin(fields: Fields, shape: Values) -> Values:
    if noise := fields.number("input_jitter_noise", 0.0):
        fields.notes.append(f"input_jitter_noise = {noise} (the models here are trained without noise)")
    return {"router_margin": 2 * fields.number("router_jitter_noise", 0.01)}


# Phi-MoE's.
MARGIN = Field(_read_margin, lambda config: {"router_jitter_noise": config.router_margin / 2})


def of_each_layer(ours: str, theirs: str, default: int, *aliases: str) -> Field:
    """A positive whole number, or a list that has the same one for each layer."""

    def parse(fields: Fields, name: str) -> int:
        value = fields.get(name)
        if isinstance(value, list) and value:
            if any(number != value[0] for number in value):
                fields.refuse(name, "of which all layers here must have the same")
            return Fields({name: value[0]}).integer(name)
        return fields.integer(name, default)

    return converted(ours, (*aliases, theirs), parse)


def shared_width(theirs: str, default: int) -> Field:
    """The width of the shared experts together: as many as are as wide, or one of another width. 0: none."""

    def read(fields: Fields, shape: Values) -> Values:
        width = fields.count(theirs, default)
        number, rest = divmod(width, shape["expert_ffn_hidden_size"])
        return {"num_shared_experts": 1, "shared_ffn_hidden_size": width} if rest else {"num_shared_experts": number}

    return Field(read, lambda config: {theirs: config.shared_width})


def _read_limit(fields: Fields, shape: Values) -> Values:
    fields.must_be("topk_method", "greedy", "group_limited_greedy")
    if fields.get("topk_method", "greedy") != "group_limited_greedy":
        return {}
    groups, best = fields.integer("n_group"), fields.integer("topk_group")
    return {"router_groups": groups, "router_top_groups": best, "router_group_score": "max"}


def _write_limit(config: DecoderConfig) -> Values:
    if config.router_groups == 1:
        return {"topk_method": "greedy"}
    groups, best = config.router_groups, config.router_top_groups
    return {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": best}


# DeepSeek-V2's choice among all experts, or among those of the groups with the best experts.
GROUP_LIMIT = Field(_read_limit, _write_limit)


@dataclass(frozen=True)
class DenseLayers:
    """How config.json says which layers have a dense MLP where the others have experts, by their numbers."""

    read: Callable[[Fields, int], Sequence[int]]  # of as many layers
    write: Callable[[DecoderConfig], Values]

    @property
    def field(self) -> Field:
        """The field, to be read after the layers' kinds."""
        return Field(self._read, self.write)

    def _read(self, fields: Fields, shape: Values) -> Values:
        count = shape["num_layers"]
        dense = list(self.read(fields, count))
        if dense == list(range(len(dense))):
            return {"num_dense_layers": len(dense)}
        full = {FULL: {name: shape[name] for name in ("rope_theta", "rope_scaling") if name in shape}}
        pattern, kinds = shape.get("layer_pattern") or [FULL], shape.get("kinds") or full
        layers = [
            f"dense_{pattern[i % len(pattern)]}" if i in dense else pattern[i % len(pattern)] for i in range(count)
        ]
        length = next(n for n in range(1, count + 1) if all(layers[i] == layers[i % n] for i in range(count)))
        every = kinds | {f"dense_{name}": kind | {"dense": True} for name, kind in kinds.items()}
        used = {name: every[name] for name in dict.fromkeys(layers)}
        return {"rope_scaling": None, "layer_pattern": layers[:length], "kinds": used}


def _numbers_by_step(fields: Fields, count: int) -> list[int]:
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(number) is not int for number in named):
        fields.refuse("mlp_only_layers", "which must be a list of layers' numbers")
    return [number for number in range(count) if number in named or (number + 1) % step]


# Qwen's: a list, and all layers but every n-th.
BY_STEP = DenseLayers(
    _numbers_by_step, lambda config: {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
)


def _numbers_by_interval(fields: Fields, count: int) -> list[int]:
    first, last = fields.count("moe_layer_start_index", 1), fields.get("moe_layer_end_index", -1)
    step = fields.integer("moe_layer_interval", 1)
    if type(last) is not int:
        fields.refuse("moe_layer_end_index", "which must be the number of a layer")
    last = count - 1 if last == -1 else last
    return [number for number in range(count) if not first <= number <= last or (number + 1) % step]


def _interval_of(config: DecoderConfig) -> Values:
    sparse = [number for number in range(config.num_layers) if number not in config.dense_layers]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1], "moe_layer_interval": step}


# Ernie's: the layers with experts are every n-th from one to another.
BY_INTERVAL = DenseLayers(_numbers_by_interval, _interval_of)


def _numbers_by_type(fields: Fields, count: int, first: int = 1) -> list[int]:
    types = fields.get("mlp_layer_types") or [("dense", "sparse")[i >= first] for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not {*types} <= {"dense", "sparse"}:
        fields.refuse("mlp_layer_types", f"which must say dense or sparse of each of the {count} layers")
    return [number for number, name in enumerate(types) if name == "dense"]


def _types_of(config: DecoderConfig) -> Values:
    return {"mlp_layer_types": ["dense" if i in config.dense_layers else "sparse" for i in range(config.num_layers)]}


BY_TYPE = DenseLayers(_numbers_by_type, _types_of)


def _numbers_by_type_or_first(fields: Fields, count: int) -> list[int]:
    return _numbers_by_type(fields, count, fields.count("first_k_dense_replace", 1))


BY_TYPE_OR_FIRST = DenseLayers(_numbers_by_type_or_first, _types_of)


def _numbers_by_list(fields: Fields, count: int) -> list[int]:
    step, sparse = fields.integer("interleave_moe_layer_step", 1), fields.get("moe_layers")
    sparse = list(range(step - 1, count, step)) if sparse is None else sparse
    if not isinstance(sparse, list) or any(type(number) is not int for number in sparse):
        fields.refuse("moe_layers", "which must be a list of layers' numbers")
    return [number for number in range(count) if number not in sparse]


def _list_of(config: DecoderConfig) -> Values:
    return {"moe_layers": [number for number in range(config.num_layers) if number not in config.dense_layers]}


# Llama 4's: the layers with experts, by default every n-th.
BY_LIST = DenseLayers(_numbers_by_list, _list_of)


def auxiliary_loss(default: float = 0.001, dense: DenseLayers | None = None) -> Field:
    """The load balancing loss.

    transformers' pools the tokens of all layers, with loads that sum to k. Ours is a sum over layers, with loads that
    sum to 1. If layers route alike, it is layers / k times as large.
    """

    def read(fields: Fields, shape: Values) -> Values:
        coefficient = fields.number("router_aux_loss_coef", default)
        layers = shape["num_layers"] - len(dense.read(fields, shape["num_layers"]) if dense else ())
        per_layer = coefficient * shape["experts_per_token"] / max(1, layers)
        is_active = coefficient and fields.flag("output_router_logits", False)  # else transformers leaves the loss out
        return {"balance": "auxiliary" if is_active else "none", "balance_coefficient": per_layer}

    def write(config: DecoderConfig) -> Values:
        if config.balance != "auxiliary":
            return {"output_router_logits": False}  # the source's coefficient stays
        layers = config.num_layers - len(config.dense_layers)
        coefficient = config.balance_coefficient * layers / max(1, config.experts_per_token)
        # Without the rounding of both conversions.
        return {"output_router_logits": True, "router_aux_loss_coef": float(f"{coefficient:.12g}")}

    return Field(read, write)
