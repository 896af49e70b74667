"""The shape of a transformer, which a flavor describes. Pure numbers; only counting parameters imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titan_like.config.errors import ConfigError
from titan_like.models.packages import module_beside

if TYPE_CHECKING:
    from titan_like.models.parts import Parts

NUM_OPTIONS = 4  # of a multiple-choice question: as many samples, one after the other


class TransformerConfig(BaseModel):
    """The fields that every family has. A family's own class is in its package's `config` module.

    Raises a `pydantic.ValidationError` if a field is unknown or has the wrong type, or sizes do not divide.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # What is predicted: the next token, masked tokens from both sides, or by a decoder the spans that an encoder lacks.
    objective: ClassVar[Literal["causal", "mlm", "span_corruption"]] = "causal"
    supports_masks: ClassVar[bool] = False  # whether the model supports document masks and positions
    not_in_weights: ClassVar[frozenset[str]] = frozenset({"init_std"})  # fields that may differ from the weights'

    # Limits are far above any real model. Up to them the size of each matrix in bytes fits into 63 bits, and the layers
    # can be built and counted one by one.
    num_layers: int = Field(gt=0, le=2048, description="transformer layers")
    hidden_size: int = Field(gt=0, le=2**20, description="hidden size (width of the residual stream)")
    num_attention_heads: int = Field(gt=0, le=2**20, description="query heads")
    num_kv_heads: int = Field(0, ge=0, le=2**20, description="key and value heads; 0 means one per query head")
    ffn_hidden_size: int = Field(0, ge=0, le=2**23, description="width of the MLP; 0 means 4 × hidden_size")
    vocab_size: int = Field(gt=0, le=2**27, description="tokens the tokenizer can produce")
    vocab_multiple: int = Field(128, gt=0, le=2**20, description="the embedding table is padded to a multiple of this")
    max_seq_len: int = Field(gt=0, le=2**27, description="longest sequence, tokens")
    norm_eps: float = Field(1e-5, gt=0, le=1e6, description="epsilon of the norms")
    init_std: float = Field(0.02, gt=0, le=1e6, description="standard deviation of initial weights")
    tied_embeddings: bool = Field(True, description="the output matrix is the embedding table")

    def __hash__(self) -> int:  # a search needs it a million times, and these two fields tell most shapes apart
        return hash((self.num_layers, self.hidden_size))

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        filled = dict(values)
        if not filled.get("num_kv_heads"):
            filled["num_kv_heads"] = filled.get("num_attention_heads", 0)
        hidden = filled.get("hidden_size", 0)
        if not filled.get("ffn_hidden_size"):
            filled["ffn_hidden_size"] = 4 * hidden if isinstance(hidden, int) else 0
        return filled

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for message in self.broken_rules():
            raise ValueError(message)
        return self

    def broken_rules(self) -> Iterator[str]:
        """Yield a message for each rule that the fields break together. The first one is reported."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        if hidden % heads and not getattr(self, "head_size", 0):
            hint = "choose a divisor" + (", or set head_size" if "head_size" in type(self).model_fields else "")
            yield f"num_attention_heads {heads} does not divide hidden_size {hidden}; {hint}"
        if heads % self.num_kv_heads:
            yield f"num_kv_heads {self.num_kv_heads} does not divide num_attention_heads {heads}; choose a divisor"

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.objective == "causal"

    @property
    def has_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder, which share the positions of a sample."""
        return self.objective == "span_corruption"

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each kind, whose layers are alike. `layer_kinds` has their order."""
        return (self.num_layers,)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each layer, as a number in `layer_counts`. By default layers of a kind follow each other."""
        return tuple(kind for kind, count in enumerate(self.layer_counts) for _ in range(count))

    def with_layers(self, num_layers: int) -> dict[str, int]:
        """The fields that give the model another depth."""
        return {"num_layers": num_layers}

    def one_of_each(self) -> TransformerConfig:
        """The shape with one layer of each kind, in the order of their numbers."""
        return self.model_copy(update=self.with_layers(len(self.layer_counts)))

    @property
    def predictions(self) -> tuple[str, ...]:
        """The names of the heads. For each the model returns a tensor, and a term of the loss.

        "tokens": logits over the vocabulary at every position; "pair": logits of the two classes of a pair of
        sentences; "choice": the score of one of several options; "mtp": for the loss alone, the token after the next.
        """
        return ("tokens",)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Factor of each prediction's mean loss in the loss."""
        return (1.0,) * len(self.predictions)

    @property
    def uses_table_last(self) -> bool:
        """Whether the last pipeline stage uses the embedding table too."""
        return self.tied_embeddings or "mtp" in self.predictions

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def split_widths(self) -> dict[str, int]:
        """Widths, by name, that tensor parallelism splits, besides heads and vocabulary."""
        return {"ffn_hidden_size": self.ffn_hidden_size}

    @property
    def owner_of_kv_heads(self) -> str:
        """What does not support several tensor ranks per key-value head; empty if they can share each of them."""
        return f"{type(self).__name__}'s attention"

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table. They depend only on the model, never on the layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @classmethod
    def family_module(cls, name: str) -> Any:
        """Import a module of the family's package, or of the family that it extends: model or hugging_face.

        Raises a `ConfigError` if neither package has a module of that name.
        """
        module = module_beside(cls, TransformerConfig, name)
        if module is None:
            reason = f"the package has no module {name}, which is needed here; add it"
            raise ConfigError("model.family", cls.__module__.rpartition(".")[0], reason)
        return module

    def check_tensor_parallel(self) -> None:
        """Raise a `ConfigError` if tensor parallelism cannot split a part of the model, in any degree."""

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Family-specific fields to change in a small copy of the model with sequences of ``seq_len``."""
        return {}

    @property
    def num_blocks(self) -> int:
        """Number of blocks that write to the residual stream."""
        return 2 * self.num_layers

    @property
    def named_classes(self) -> tuple[type, ...]:
        """Classes that fields name, of other packages, perhaps; what the model computes depends on their code."""
        return ()

    @property
    def parts(self) -> Parts:
        """Sizes of the layers and of the two ends, counted in the family's own modules."""
        from titan_like.models.parts import parts_of

        return parts_of(self)

    @property
    def active_parameters(self) -> int:
        """Trainable parameters, without the experts that a token is not sent to."""
        return self.num_parameters()

    @property
    def layer_parameters(self) -> int:
        """Trainable parameters of one layer, of the largest kind."""
        return max(kind.parameters for kind in self.parts.kinds)

    def num_parameters(self, padded: bool = True) -> int:
        """Exact number of trainable parameters. ``padded=False`` leaves out the padding of the vocabulary."""
        parts = self.parts
        padding = 0 if padded else (self.padded_vocab_size - self.vocab_size) * parts.token
        layers = sum(count * kind.parameters for count, kind in zip(self.layer_counts, parts.kinds, strict=True))
        return parts.entry + parts.shared + layers + parts.head - padding


class WithHeadSize(TransformerConfig):
    """A shape whose heads together may be wider or narrower than the hidden states."""

    head_size: int = Field(0, ge=0, le=2**20, description="width of a head; 0 means hidden_size / num_attention_heads")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        filled = super()._fill_defaults(values)  # type: ignore[operator]
        hidden, heads = filled.get("hidden_size", 0), filled.get("num_attention_heads", 0)
        if not filled.get("head_size"):
            is_divisible = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0
            filled["head_size"] = hidden // heads if is_divisible else 0
        return filled

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_size


class WithExperts(TransformerConfig):
    """A shape whose layers have experts: `SparseMLP`, after the first ``num_dense_layers``.

    Raises a `pydantic.ValidationError` if the numbers of experts or of layers do not fit.
    """

    not_in_weights: ClassVar = TransformerConfig.not_in_weights | {
        "balance", "balance_coefficient", "bias_update_rate", "z_loss_coefficient"
    }  # fmt: skip

    num_experts: int = Field(gt=1, le=2**14, description="experts per layer")
    experts_per_token: int = Field(gt=0, description="experts that each token is routed to (top-k)")
    expert_ffn_hidden_size: int = Field(0, ge=0, le=2**23, description="width of one expert; 0 means ffn_hidden_size")
    num_shared_experts: int = Field(0, ge=0, le=2**10, description="number of shared experts (fused into one MLP)")
    shared_ffn_hidden_size: int = Field(0, ge=0, le=2**23, description="their width; 0 means that of as many experts")
    shared_expert_gate: bool = Field(False, description="multiply shared experts' output by a sigmoid of the token")
    num_dense_layers: int = Field(0, ge=0, description="first layers with a dense MLP of ffn_hidden_size")
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu", "clamped_swiglu"] = Field(
        "silu", description="activation of MLPs and experts; gelu is exact, relu2 the square of relu, xielu Apertus's"
    )
    router_bias: bool = Field(False, description="whether the router's logits have biases")
    router_groups: int = Field(1, gt=0, description="groups of consecutive experts")
    router_top_groups: int = Field(1, gt=0, description="groups that a token's experts are in")
    router_group_score: Literal["top2", "max"] = Field(
        "top2", description="score of a group: the sum of its two best scores, or its best one"
    )
    expert_bias: bool = Field(False, description="whether the experts' three matrices have biases")
    router_score: Literal["softmax", "sigmoid", "sparsemixer"] = Field(
        "softmax", description="softmax over all experts, the sigmoid of each logit, or SparseMixer's as at inference"
    )
    router_margin: float = Field(0.02, ge=0, le=1e6, description="sparsemixer: share by which other logits may be less")
    renormalize: bool = Field(True, description="normalise the weights of a token's experts to sum to 1")
    routed_scaling: float = Field(1.0, gt=0, le=1e6, description="factor on the experts' weights, after renormalize")
    scale_expert_inputs: bool = Field(False, description="the weights multiply experts' inputs, not results (Llama 4)")
    balance: Literal["none", "auxiliary", "bias"] = Field(
        "auxiliary", description="load balancing: an auxiliary loss, a bias on the scores for the choice alone, or none"
    )
    balance_coefficient: float = Field(0.01, ge=0, le=1e6, description="auxiliary loss coefficient")
    bias_update_rate: float = Field(0.001, ge=0, le=1e6, description="step of the biases after each update")
    z_loss_coefficient: float = Field(0.0, ge=0, le=1e6, description="router z-loss coefficient")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        filled = super()._fill_defaults(values)  # type: ignore[operator]
        if not filled.get("num_experts"):
            return filled
        filled["expert_ffn_hidden_size"] = filled.get("expert_ffn_hidden_size") or filled["ffn_hidden_size"]
        if not cls._names_dense_layers(filled):  # no MLP has the width of dense ones
            filled["ffn_hidden_size"] = filled["expert_ffn_hidden_size"]
        return filled

    @classmethod
    def _names_dense_layers(cls, values: dict) -> bool:
        return bool(values.get("num_dense_layers"))

    def broken_rules(self) -> Iterator[str]:
        """As in the base class."""
        yield from super().broken_rules()
        if self.activation == "xielu" and getattr(self, "gated", True):
            yield "activation xielu needs an MLP without a gate; set gated to false"
        experts, top = self.num_experts, self.experts_per_token
        groups, top_groups = self.router_groups, self.router_top_groups
        if not experts:
            dense = {*TransformerConfig.model_fields, "num_experts", "activation"}
            for name in (name for name in WithExperts.model_fields if name not in dense):
                value, default = map(json.dumps, (getattr(self, name), type(self).model_fields[name].default))
                if value not in (default, '"none"'):
                    yield f"{name} {value} needs experts; set num_experts, or {name} = {default}"
            return
        if not top:
            yield f"num_experts {experts} needs experts_per_token; set it to at least 1"
        if top > experts:
            yield f"experts_per_token {top} is more than num_experts {experts}; choose less"
        if top == 1 and self.renormalize:
            reason = "gives every expert the weight 1, from which the router learns nothing"
            yield f"experts_per_token 1 with renormalize {reason}; set renormalize to false"
        size, rest = divmod(experts, groups)
        if groups > 1 and (rest or size < 2):
            yield f"router_groups {groups} must divide num_experts {experts} in groups of 2 or more"
        if top_groups > groups or top > top_groups * size:
            yield f"router_top_groups {top_groups} of {groups} must have experts_per_token ({top}) experts"
        for name in ("shared_expert_gate", "shared_ffn_hidden_size"):
            if getattr(self, name) and not self.num_shared_experts:
                yield f"{name} needs shared experts; set num_shared_experts, or leave {name} out"
        if self.router_score == "sparsemixer" and (self.renormalize or self.balance == "bias" or groups > 1):
            yield 'router_score "sparsemixer" needs renormalize = false, no router_groups, and no balance "bias"'
        if self.num_dense_layers >= self.num_layers:
            layers = f"num_dense_layers {self.num_dense_layers} of num_layers {self.num_layers}"
            yield f"{layers} leave no layer with experts; choose less"

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a dense MLP, if there are experts."""
        return tuple(range(self.num_dense_layers))

    @property
    def shared_width(self) -> int:
        """Width of the shared experts together; 0 without them."""
        return self.shared_ffn_hidden_size or self.num_shared_experts * self.expert_ffn_hidden_size

    @property
    def split_widths(self) -> dict[str, int]:
        """Tensor parallelism splits the MLPs of dense layers, and shared experts."""
        if not self.num_experts:
            return super().split_widths
        widths = {"ffn_hidden_size": self.ffn_hidden_size} if self.dense_layers else {}
        return widths | {"width of shared experts": self.shared_width}

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Dense layers, if there are any, and layers with experts."""
        counts = self.num_dense_layers, self.num_layers - self.num_dense_layers
        return counts if counts[0] else counts[1:]

    @property
    def active_parameters(self) -> int:
        """Trainable parameters, without the experts that a token is not sent to."""
        hidden, ffn = self.hidden_size, self.expert_ffn_hidden_size
        expert = 3 * hidden * ffn + (2 * ffn + hidden if self.expert_bias else 0)
        unused = (sum(self.layer_counts) - len(self.dense_layers)) * (self.num_experts - self.experts_per_token)
        return self.num_parameters() - unused * expert

    def with_layers(self, num_layers: int) -> dict[str, int]:
        """One dense layer, if there are any, and the others with experts."""
        return {"num_layers": num_layers, "num_dense_layers": min(self.num_dense_layers, 1)}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Few, small experts, in up to 3 groups."""
        if not self.num_experts:
            return super().shrunk(seq_len)
        groups = min(self.router_groups, 3)
        leaves_out_groups = self.router_top_groups < self.router_groups
        return super().shrunk(seq_len) | {
            # Odd, so that a wrong order of experts is detected.
            "num_experts": 3 * groups if groups > 1 else min(self.num_experts, 5),
            "router_groups": groups,
            "router_top_groups": min(self.router_top_groups, groups - 1 if leaves_out_groups else groups),
            "experts_per_token": min(self.experts_per_token, 2),
            "expert_ffn_hidden_size": 48,  # of whole 16, which float8 products need
            **({} if self.dense_layers else {"ffn_hidden_size": 48}),
            # One MLP of 192, of whole 16 on up to 4 ranks.
            "num_shared_experts": 4 if self.num_shared_experts else 0,
            "shared_ffn_hidden_size": 0,
        }


def has_experts(config: TransformerConfig) -> TypeGuard[WithExperts]:
    """Whether any layer of the model has experts."""
    return isinstance(config, WithExperts) and config.num_experts > 0
