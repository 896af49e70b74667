"""The shape of a decoder. The defaults are Llama's: pre-RMSNorm, rotary positions, SwiGLU, no biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from titan_like.config.entry_points import find_entry, load_entry
from titan_like.config.errors import require
from titan_like.models.config import WithExperts, WithHeadSize
from titan_like.models.rope_scaling import RopeScaling, Scaling

if TYPE_CHECKING:
    from titan_like.models.decoder.mixers import Mixer

FULL = "full"  # the kind of all layers, unless layer_pattern names others


class LayerKind(BaseModel):
    """The mixer of a layer, its window, its rotary positions, and whether it has experts, or lacks a block."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    window: int = Field(0, ge=0, le=2**27, description="keys that a query sees, its own included; 0: all before it")
    chunk: int = Field(0, ge=0, le=2**27, description="positions of a sequence that see only each other; 0: no chunks")
    rope_theta: float = Field(ge=0, le=1e30, description="base of the rotary frequencies; 0: no rotation")
    rope_scaling: Scaling = Field(None, description="scaling of the rotary frequencies")
    mixer: str = Field("", description="attention, latent or a package's own; empty: latent if kv_lora_rank is set")
    options: dict[str, Any] = Field({}, description="fields of the mixer")
    dense: bool = Field(False, description="whether the MLP is dense where others have experts")
    parts: Literal["both", "mixer", "mlp"] = Field("both", description="blocks of the layer: mixer, MLP, or both")


class DecoderConfig(WithHeadSize, WithExperts):
    """The shape of a decoder with dense MLPs or, if there are experts, with experts after the first dense layers.

    Raises:
        pydantic.ValidationError: as for every `TransformerConfig`, or fields do not go together.
    """

    # No position table depends on the length.
    not_in_weights: ClassVar = WithExperts.not_in_weights | {
        "max_seq_len", "mtp_coefficient", "round_embedding_scale", "stores_rope_in_halves"
    }  # fmt: skip

    tied_embeddings: bool = Field(False, description="the output matrix is the embedding table")
    num_experts: int = Field(0, ge=0, le=2**14, description="experts per layer; 0: all MLPs are dense")
    experts_per_token: int = Field(0, ge=0, description="experts that each token is routed to (top-k)")
    rope_theta: float = Field(10_000.0, gt=0, le=1e30, description="base of the rotary frequencies")
    rope_scaling: Scaling = Field(None, description="scaling of the rotary frequencies")
    rotary_fraction: float = Field(1.0, gt=0, le=1, description="part of each head, its first, that is rotated")
    layer_pattern: list[str] = Field([], description="kinds of the layers, repeated; empty: all are full")
    kinds: dict[str, LayerKind] = Field({}, description="by name; rope_theta and rope_scaling default to the model's")
    attention_bias: Literal["none", "qkv", "all"] = Field("none", description="which attention projections have biases")
    qk_norm: Literal["none", "head", "heads", "all", "l2"] = Field(
        "none",
        description="norm of queries and keys: of each head (Qwen3), with a weight for each (Command R+), of all heads "
        "together (OLMo 2), or without weights of each head that has been rotated (Llama 4)",
    )
    clip_qkv: float = Field(0.0, ge=0, le=1e6, description="limit of queries, keys and values before the rotation")
    attention_scale: float = Field(0.0, ge=0, le=1e6, description="factor on the scores; 0: 1 / √head_size")
    query_temperature: float = Field(
        0.0, ge=0, le=1e6, description="queries are multiplied by 1 + this · log(1 + ⌊position / period⌋) (Ministral 3)"
    )
    query_temperature_period: int = Field(0, ge=0, le=2**27, description="the period; 0 without query_temperature")
    query_temperature_offset: Literal[0, 1] = Field(0, description="number added to the position (Llama 4: 1)")
    query_temperature_of: Literal["all", "unrotated"] = Field("all", description="layers that query_temperature is of")
    attention_softcap: float = Field(0.0, ge=0, le=1e6, description="scores become cap · tanh(score / cap); 0: none")
    attention_sinks: bool = Field(False, description="a learned logit for each head, as one more key in the softmax")
    norm_after_rope: bool = Field(False, description="qk_norm comes after the rotation, not before it (Hunyuan)")
    norm: Literal["rms", "layer", "layer_no_bias", "layer_no_weight"] = Field(
        "rms",
        description="RMSNorm, or LayerNorm with weight and bias, with a weight alone (Cohere), with neither (OLMo)",
    )
    norm_offset: bool = Field(False, description="norms multiply by 1 + weight, which begins at 0 (Gemma)")
    block: Literal["pre", "post", "sandwich", "parallel", "parallel_one_norm"] = Field(
        "pre",
        description="norms before a block, after it, both; or attention and MLP of the same hidden states, with a norm "
        "each or one for both",
    )
    mlp_bias: bool = Field(False, description="whether dense MLPs have biases")
    gated: bool = Field(True, description="down(activation(gate) · up), or down(activation(up))")
    embedding_scale: float = Field(1.0, gt=0, le=1e6, description="factor on the embeddings")
    round_embedding_scale: bool = Field(False, description="round embedding_scale to the compute dtype (Gemma)")
    residual_scale: float = Field(1.0, gt=0, le=1e6, description="factor on what a block adds to the hidden states")
    logit_scale: float = Field(1.0, gt=0, le=1e6, description="factor on the logits")
    output_bias: bool = Field(False, description="whether logits have a bias, which logit_scale does not multiply")
    final_softcap: float = Field(0.0, ge=0, le=1e6, description="logits become cap · tanh(logit / cap); 0: none")
    q_lora_rank: int = Field(0, ge=0, le=2**20, description="latent attention: width of the queries' latent; 0: none")
    kv_lora_rank: int = Field(0, ge=0, le=2**20, description="latent attention: width of keys' and values' latent")
    nope_head_size: int = Field(0, ge=0, le=2**20, description="latent attention: part of a head without positions")
    rope_head_size: int = Field(
        0, ge=0, le=2**20, description="latent attention: rotated part; all heads share its key"
    )
    value_head_size: int = Field(0, ge=0, le=2**20, description="latent attention: width of a head's values")
    stores_rope_in_halves: bool = Field(False, description="as DeepSeek's files with rope_interleave = false")
    mtp_layers: int = Field(0, ge=0, le=1, description="layers that predict the token after the next (DeepSeek-V3)")
    mtp_coefficient: float = Field(0.3, gt=0, le=1e6, description="factor of their loss in the loss (DeepSeek-V3's λ)")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        if values.get("kv_lora_rank") and not values.get("head_size"):
            parts = (values.get(name) for name in ("nope_head_size", "rope_head_size"))
            values = values | {"head_size": sum(part for part in parts if isinstance(part, int))}
        filled = super()._fill_defaults(values)  # type: ignore[operator]
        pattern, kinds = filled.get("layer_pattern"), filled.get("kinds")
        if isinstance(kinds or {}, dict) and isinstance(pattern or [], list) and (kinds or pattern):
            given = {name: filled[name] for name in ("rope_theta", "rope_scaling") if name in filled}
            rope = {"rope_theta": cls.model_fields["rope_theta"].default} | given
            tables = ({FULL: {}} if FULL in (pattern or [FULL]) else {}) | (kinds or {})
            filled["kinds"] = {name: rope | kind if isinstance(kind, dict) else kind for name, kind in tables.items()}
        return filled

    @classmethod
    def _names_dense_layers(cls, values: dict) -> bool:
        kinds = values.get("kinds")
        tables = kinds.values() if isinstance(kinds, dict) else ()
        is_dense = [kind.get("dense") if isinstance(kind, dict) else getattr(kind, "dense", False) for kind in tables]
        return super()._names_dense_layers(values) or any(is_dense)

    def broken_rules(self) -> Iterator[str]:
        """As in the base class."""
        yield from super().broken_rules()
        if self.rotary_size % 2 or not self.rotary_size:
            size = f"head_size {self.head_size} · rotary_fraction {self.rotary_fraction:g} = {self.rotary_size}"
            yield f"{size} is odd or 0, but rotary positions need pairs of dimensions; make it even"
        yield from self._broken_rules_of_latents()
        yield from self._broken_rules_of_kinds()
        lengths = {len(factors) for factors in self._factors() if factors}
        pairs = self.rotary_size // 2
        if self.num_experts and not self.gated:
            yield "experts are gated; set gated to true"
        if self.activation == "clamped_swiglu" and not self.gated:
            yield "activation clamped_swiglu needs a gated MLP; set gated to true"
        if self.qk_norm == "all" and self.norm != "rms":
            yield 'qk_norm "all" is an RMSNorm; set norm to rms, or qk_norm to "head" or "none"'
        if self.qk_norm == "heads" and (self.norm_offset or self.norm == "layer_no_weight"):
            yield 'qk_norm "heads" has plain weights; set norm_offset = false and another norm, or use "head"'
        if self.norm_after_rope and self.qk_norm in ("none", "l2"):
            yield 'norm_after_rope needs a norm that may come before; set qk_norm to "head" or "all"'
        if (self.query_temperature > 0) != (self.query_temperature_period > 0):
            yield "query_temperature and query_temperature_period go together; set both, or leave both at 0"
        if not self.query_temperature and (self.query_temperature_offset or self.query_temperature_of != "all"):
            yield "query_temperature_offset and query_temperature_of need query_temperature; leave them out, or set it"
        if self.norm_offset and self.norm == "layer_no_weight":
            yield "norm_offset is added to a weight, which norm layer_no_weight lacks; leave it out"
        if pairs == 1 and any(kind.rope_scaling and kind.rope_scaling.type == "dynamic" for kind in self._kinds()):
            yield f"dynamic scaling needs more than {self.rotary_size} rotated dimensions; rotate more"
        if lengths - {pairs}:
            needed = f"a factor for each of the {pairs} pairs of rotated dimensions"
            yield f"longrope needs {needed}; set as many short_factors and long_factors"

    def _broken_rules_of_latents(self) -> Iterator[str]:
        sizes = {name: getattr(self, f"{name}_head_size") for name in ("nope", "rope", "value")}
        if not self.kv_lora_rank:
            for name in (name for name in ("q_lora_rank", *map("{}_head_size".format, sizes)) if getattr(self, name)):
                yield f"{name} {getattr(self, name)} needs latent attention; set kv_lora_rank, or {name} = 0"
            return
        if not all(sizes.values()) or self.head_size != sizes["nope"] + sizes["rope"]:
            needed = f"nope_head_size, rope_head_size and value_head_size ({list(sizes.values())})"
            yield f"latent attention needs {needed}, and the first two make up head_size ({self.head_size}); set them"
        fixed = {"num_kv_heads": self.num_attention_heads, "qk_norm": "none", "rotary_fraction": 1.0}
        fixed |= {"query_temperature": 0.0, "clip_qkv": 0.0}
        for name in (name for name, value in fixed.items() if getattr(self, name) != value):
            yield f"latent attention has no {name} {getattr(self, name)}; leave it at {fixed[name]}"
        if self.attention_bias == "qkv":
            yield 'latent attention has no attention_bias "qkv"; use "none" or "all"'

    def _broken_rules_of_kinds(self) -> Iterator[str]:
        if unused := self.kinds.keys() - set(self.layer_pattern or [FULL]):
            yield f"layer_pattern has no layer of kind {min(unused)}; add it there, or leave the kind out"
        for name in (name for name in self.kind_names if name not in (FULL, *self.kinds)):
            yield f"layer_pattern has the kind {name}; say what it is in kinds.{name}, such as its window"
        if dense := [name for name, kind in self.kinds.items() if kind.dense]:
            if not self.num_experts:
                yield f"kinds.{dense[0]}.dense true needs experts; set num_experts, or leave it out"
            elif self.num_dense_layers:
                yield f"kinds.{dense[0]}.dense true replaces num_dense_layers; set num_dense_layers = 0"
            elif len(self.dense_layers) == self.num_layers:
                yield f"all {self.num_layers} layers are of dense kinds; give layer_pattern a kind with experts"
        for name, kind in self.kinds.items():
            if kind.parts != "both" and self.block.startswith("parallel"):
                yield f'kinds.{name}.parts "{kind.parts}" does not fit block "{self.block}"; use "pre"'
            if kind.parts == "mlp" and (kind.mixer or kind.options or kind.window):
                yield f'kinds.{name}.parts "mlp" leaves out the mixer; leave out mixer, options and window'
            if kind.mixer not in ("", self.softmax_mixer):
                if kind.mixer in ("attention", "latent"):
                    yield f'kinds.{name}.mixer "{kind.mixer}" does not fit kv_lora_rank {self.kv_lora_rank}'
                for part in (part for part in ("window", "chunk") if getattr(kind, part)):
                    yield f"kinds.{name}.{part} {getattr(kind, part)} is one of attention; leave it out"
            if kind.window and kind.chunk:
                yield f"kinds.{name} has a window of {kind.window} and chunks of {kind.chunk}; leave one of them out"
            try:
                self.mixer_of(name) if kind.mixer or kind.options else None
            except ValidationError as error:
                field = error.errors()[0]
                where = ".".join(map(str, ("kinds", name, "options", *field["loc"])))
                yield f"{where}: {field['msg']}"

    @property
    def rotary_size(self) -> int:
        """Dimensions of each head that are rotated: the first ones, or the last ones in latent attention."""
        return self.rope_head_size or int(self.head_dim * self.rotary_fraction)

    @property
    def score_scale(self) -> float:
        """The factor on the scores of attention, without yarn's in latent attention."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def attention_size(self) -> int:
        """Width of all query heads together, of which FLOPs are counted: in latent attention the mean with values."""
        if not self.kv_lora_rank:
            return super().attention_size
        return self.num_attention_heads * (self.head_size + self.value_head_size) // 2

    @property
    def predictions(self) -> tuple[str, ...]:
        """The next token, and maybe the one after it."""
        return ("tokens", "mtp") if self.mtp_layers else ("tokens",)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Factor of each prediction's mean loss in the loss."""
        return (1.0, self.mtp_coefficient) if self.mtp_layers else (1.0,)

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The names of the kinds of layers, in the order in which they begin."""
        return tuple(dict.fromkeys(self.layer_pattern or [FULL]))

    def kind_of(self, layer: int) -> str:
        """The name of the kind of the layer with this number. That for multi-token prediction is of the first kind."""
        return self._layers(layer + 1)[layer][1] if layer < self.num_layers else self.kind_names[0]

    def kind(self, name: str) -> LayerKind:
        """The kind of this name."""
        return self.kinds.get(name) or LayerKind(rope_theta=self.rope_theta, rope_scaling=self.rope_scaling)

    @property
    def softmax_mixer(self) -> str:
        """The mixer of the kinds that name none."""
        return "latent" if self.kv_lora_rank else "attention"

    def mixer_of(self, kind: str) -> Mixer:
        """The mixer of the kind of this name."""
        layers = self.kind(kind)
        name = layers.mixer or self.softmax_mixer
        entry = find_entry("mixer", name)
        mixer = load_entry("mixer", entry)
        from titan_like.models.decoder.mixers import Mixer  # which imports torch

        is_mixer = isinstance(mixer, type) and issubclass(mixer, Mixer)
        key, base = f"kinds.{kind}.mixer", "titan_like.models.decoder.mixers.Mixer"
        require(is_mixer, key, name, f"{entry.value} is not a subclass of {base}")
        require(mixer.build is not Mixer.build, key, name, f"{entry.value} has no method build; add it")
        return mixer.model_validate(layers.options)

    def check_tensor_parallel(self) -> None:
        """Raise a `ConfigError` for a mixer without a plan."""
        for name, kind in self.kinds.items():
            mixer = self.mixer_of(name) if kind.mixer else None
            reason = f"{type(mixer).__name__} has no method plan, which tensor parallelism needs; add it"
            require(mixer is None or mixer.has_plan, f"kinds.{name}.mixer", kind.mixer, reason)

    @property
    def owner_of_kv_heads(self) -> str:
        """As in the base class: a norm over all heads, or a mixer that does not say otherwise."""
        if self.qk_norm in ("heads", "all"):
            return f'qk_norm "{self.qk_norm}"'
        kinds = (name for name in self.kind_names if not self.mixer_of(name).shares_kv_heads)
        return next((f"the mixer of kinds.{name}" for name in kinds), "")

    @property
    def num_blocks(self) -> int:
        """As in the base class; layers may have only one."""
        kinds = (self.kind(name) for _, name in self._layers(self.num_layers))
        return sum(2 if kind.parts == "both" else 1 for kind in kinds)

    @property
    def named_classes(self) -> tuple[type, ...]:
        """The mixers."""
        return tuple(type(self.mixer_of(name)) for name, kind in self.kinds.items() if kind.mixer)

    @property
    def supports_masks(self) -> bool:  # type: ignore[override]
        """Whether all mixers heed document masks."""
        return all(self.mixer_of(name).supports_masks for name, kind in self.kinds.items() if kind.mixer)

    @property
    def supports_prefixes(self) -> bool:
        """Whether in all mixers the positions of a prefix can see each other."""
        return all(self.mixer_of(name).supports_prefixes for name, kind in self.kinds.items() if kind.mixer)

    @property
    def split_widths(self) -> dict[str, int]:
        """As in the base class, and what the mixers split."""
        widths = super().split_widths
        for name in (name for name, kind in self.kinds.items() if kind.mixer):
            of_mixer = self.mixer_of(name).split_widths
            widths |= {f"kinds.{name}.options.{option}": width for option, width in of_mixer.items()}
        return widths

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Layers differ in their kind, and in whether they have experts; kinds are numbered as they first appear.

        The layer for multi-token prediction is the last layer, and a separate kind.
        """
        layers = self._layers(self.num_layers)
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
        return *(numbers[layer] for layer in layers), *[len(numbers)] * self.mtp_layers

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each kind, numbered as in `layer_kinds`."""
        return *Counter(self._layers(self.num_layers)).values(), *[1] * self.mtp_layers

    def _layers(self, count: int) -> list[tuple[bool, str]]:
        """(whether the MLP is dense beside experts, or left out; name of the kind) of the first ``count`` layers."""
        pattern = self.layer_pattern or [FULL]
        names = [pattern[number % len(pattern)] for number in range(count)]
        kinds = [self.kind(name) for name in names]
        lack = [i < self.num_dense_layers or kind.dense or kind.parts == "mixer" for i, kind in enumerate(kinds)]
        return list(zip(lack, names, strict=True))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """As in the base class."""
        return tuple(number for number, (is_dense, _) in enumerate(self._layers(self.num_layers)) if is_dense)

    def with_layers(self, num_layers: int) -> dict[str, Any]:
        """One layer of each kind, and then the kinds of the pattern in turn, with MLPs that are not dense.

        The layer for multi-token prediction is one of the ``num_layers``.
        """
        num_layers -= self.mtp_layers
        if not self.layer_pattern:
            return super().with_layers(num_layers)
        layers = list(dict.fromkeys(self._layers(self.num_layers)))
        kinds = dict.fromkeys(kind for _, kind in layers)
        layers += [(False, kind) for kind in islice(cycle(kinds), max(0, num_layers - len(layers)))]
        num_dense = sum(is_dense for is_dense, _ in layers) if self.num_dense_layers else 0
        return {"num_layers": num_layers, "num_dense_layers": num_dense, "layer_pattern": [kind for _, kind in layers]}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Heads together stay wider than the hidden states, and windows, caps and scaled frequencies in effect."""
        has_own_head = self.rotary_fraction != 1 or self.attention_scale or any(self._factors())
        head = 32 if self.attention_size > self.hidden_size else 16 if has_own_head else 0
        rotary = 2 * max(1, round(head * self.rotary_fraction / 2))

        def small(scaling: RopeScaling | None) -> dict[str, Any] | None:
            if scaling is None:
                return None
            fields = scaling.model_dump()
            for name in ("short_factors", "long_factors"):
                factors, pairs = fields[name], rotary // 2
                fields[name] = [factors[pair * len(factors) // pairs] for pair in range(pairs if factors else 0)]
            return fields | {"original_max_seq_len": seq_len // 2}

        windows = sorted({kind.window or kind.chunk for kind in self.kinds.values()} - {0})
        sizes = {0: 0} | {window: seq_len // 3 + number for number, window in enumerate(windows)}
        latent: dict[str, Any] = {}
        if self.kv_lora_rank:
            latent = {"kv_lora_rank": 48, "nope_head_size": 32, "rope_head_size": 16, "value_head_size": 16}
            latent |= {"head_size": 48, "rotary_fraction": 1.0, "q_lora_rank": 32 if self.q_lora_rank else 0}
            head, rotary = 48, 16
        kinds = {
            name: kind.model_dump()
            | {"window": sizes[kind.window], "chunk": sizes[kind.chunk], "rope_scaling": small(kind.rope_scaling)}
            | {"options": kind.options | (self.mixer_of(name).shrunk(seq_len) if kind.mixer else {})}
            for name, kind in self.kinds.items()
        }
        return super().shrunk(seq_len) | {
            "head_size": head,
            "rotary_fraction": rotary / head if has_own_head else 1.0,
            "attention_scale": self.attention_scale * (self.head_dim / (head or 1)) ** 0.5,
            "query_temperature_period": min(self.query_temperature_period, seq_len // 4),
            "attention_softcap": min(self.attention_softcap, 1.0),
            "final_softcap": min(self.final_softcap, 1.0),
            "rope_scaling": small(self.rope_scaling),
            "kinds": kinds,
            **latent,
        }

    def _kinds(self) -> list[LayerKind]:
        return [self.kind(name) for name in self.kind_names]

    def _factors(self) -> list[list[float]]:
        scalings = [kind.rope_scaling for kind in self._kinds()]
        return [factors for item in scalings if item is not None for factors in (item.short_factors, item.long_factors)]
