"""Mixers by name: with what the layers of a kind mix positions.

A mixer says how its module is built, split over tensor ranks and made small for the verifier. The module is a layer's
`attention`, and takes hidden states and a `Context`. A package adds mixers by entry points of the group
``titan_like.mixers``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from titan_like.config.entry_points import MIXERS
from titan_like.config.errors import ConfigError, first_line, require
from titan_like.models.decoder.config import DecoderConfig, LayerKind
from titan_like.models.layers.attention import ATTENTION_PLAN, AttentionCore, SelfAttention
from titan_like.models.layers.delta_net import DELTA_PLAN, DeltaCore, GatedDeltaNet
from titan_like.models.layers.delta_rule import CHUNK
from titan_like.models.layers.kimi_delta import KIMI_DELTA_PLAN, KimiDeltaAttention, KimiDeltaCore
from titan_like.models.layers.latent_attention import LATENT_PLAN, LatentAttention, latent_scale
from titan_like.models.layers.norms import NormOfHeads, make_norm
from titan_like.models.layers.state_space import Mamba2, StateSpaceCore, mamba_plan


class Mixer(BaseModel):
    """Base class of mixers. Its fields are the ``options`` of a kind of layers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    not_in_weights: ClassVar[frozenset[str]] = frozenset()  # options that may differ from the weights'
    supports_masks: ClassVar[bool] = False  # whether the module heeds the context's document mask
    supports_prefixes: ClassVar[bool] = True  # whether it does so too where positions of a prefix see each other
    # Whether the module works with fewer of the model's key-value heads than tensor ranks: it has none, or all of them
    # are in a `SelfAttention`.
    shares_kv_heads: ClassVar[bool] = False

    def build(self, config: DecoderConfig, kind: LayerKind) -> nn.Module:
        """The module of one layer, on the current default device.

        Under context parallelism only an `AttentionCore` in it may mix positions, or it has a method
        ``shard_context(group)``. That is called once, on the outermost module that has it, which from then on gets this
        rank's shard of each sequence. A part that multiplies each position by more than its matrices has
        ``products_per_position``, or a method ``products(seq_len)`` for a whole sequence. One whose initial weights are
        not those of `Transformer.init_weights` has ``initial_values``, name of a parameter → function of N(0, 1).
        """
        raise NotImplementedError

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """The tensor-parallel plan: name below the module, or "" for the module itself → style.

        Without it, tensor parallelism is refused.
        """
        raise NotImplementedError

    @property
    def has_plan(self) -> bool:
        """Whether tensor parallelism can split the module."""
        return type(self).plan is not Mixer.plan

    @property
    def split_widths(self) -> dict[str, int]:
        """Numbers, by name, that the degree of tensor parallelism has to divide, besides those of attention."""
        return {}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Options to change in a small copy of the model with sequences of ``seq_len``."""
        return {}


def build_mixer(config: DecoderConfig, kind: str) -> nn.Module:
    """The module of a layer of the kind of this name.

    Raises a `ConfigError` if a package's mixer raises an error, in `plan` too, or builds no module.
    """
    layers, mixer = config.kind(kind), config.mixer_of(kind)
    try:
        if mixer.has_plan:
            mixer.plan(config)  # here, because tensor parallelism reads it only after the process group is there
        module: Any = mixer.build(config, layers)
    except Exception as error:
        if layers.mixer in ("", *MIXERS):
            raise
        message = f"{type(error).__name__} ({first_line(error)})"
        reason = f"{type(mixer).__name__} raises {message}; correct the package or its options"
        raise ConfigError(f"kinds.{kind}.mixer", layers.mixer, reason) from error
    reason = f"{type(mixer).__name__} builds a {type(module).__name__}, not a torch.nn.Module; correct the package"
    require(isinstance(module, nn.Module), f"kinds.{kind}.mixer", layers.mixer, reason)
    return module


def _core(config: DecoderConfig, kind: LayerKind, scale: float | None) -> AttentionCore:
    num_sinks = config.num_attention_heads if config.attention_sinks else 0
    return AttentionCore(0.0, True, scale, config.attention_softcap, kind.window, num_sinks, kind.chunk)


class SoftmaxMixer(Mixer):
    """Softmax attention, multi-head or grouped-query."""

    supports_masks = True
    shares_kv_heads = True
    attention_class: ClassVar[type[SelfAttention]] = SelfAttention

    gate: bool = Field(False, description="the sigmoid of a gate, projected as queries are, multiplies the result")

    def build(self, config: DecoderConfig, kind: LayerKind) -> SelfAttention:
        """As in the base class."""
        norm: Any = partial(make_norm, kind=config.norm, offset=config.norm_offset)
        qk_norm, is_l2 = config.qk_norm, config.qk_norm == "l2"
        if qk_norm == "l2":
            norm, qk_norm = partial(nn.RMSNorm, elementwise_affine=False), "head" if kind.rope_theta else "none"
        elif qk_norm == "heads":
            norm = partial(NormOfHeads, config.head_dim, config.norm != "rms")
        return self.attention_class(
            config,
            _core(config, kind, config.attention_scale or None),
            bias=config.attention_bias != "none",
            proj_bias=config.attention_bias == "all",
            qk_norm=qk_norm,
            norm_after_rope=config.norm_after_rope or is_l2,
            norm=norm,
            has_gate=self.gate,
            clip=config.clip_qkv,
        )

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        styles = {"head": "head_norm", "heads": "norm_of_heads", "all": "split_norm"}  # others have no weights
        norms = {f"{part}_norm": styles[config.qk_norm] for part in "qk" if config.qk_norm in styles}
        return ATTENTION_PLAN | norms


class LatentMixer(Mixer):
    """Multi-head latent attention (arXiv 2405.04434)."""

    supports_masks = True

    def build(self, config: DecoderConfig, kind: LayerKind) -> LatentAttention:
        """As in the base class."""
        scale = config.attention_scale or latent_scale(config.head_size, kind.rope_scaling)
        return LatentAttention(config, _core(config, kind, scale))

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        has_part = {"q_a": config.q_lora_rank, "q_norm": config.q_lora_rank}
        return {name: style for name, style in LATENT_PLAN.items() if has_part.get(name, True)}


class Recurrence(Mixer):
    """Base class of mixers with a convolution and a state, which goes from chunk to chunk of a sequence."""

    not_in_weights = frozenset({"chunk_size"})
    supports_masks = True
    supports_prefixes = False
    shares_kv_heads = True  # it has none

    conv_size: int = Field(4, gt=0, le=64, description="positions that the convolution sees")
    chunk_size: int = Field(CHUNK, gt=0, le=2**16, description="positions that are computed together")

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """As in the base class."""
        return {"chunk_size": max(1, seq_len // 4)}


class DeltaMixer(Recurrence):
    """The gated delta net (arXiv 2412.06464)."""

    key_heads: int = Field(gt=0, le=2**20, description="heads of queries and keys")
    value_heads: int = Field(gt=0, le=2**20, description="heads of values, a multiple of key_heads")
    key_head_size: int = Field(gt=0, le=2**20, description="width of a head's queries and keys")
    value_head_size: int = Field(gt=0, le=2**20, description="width of a head's values")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"key_heads {self.key_heads} does not divide value_heads {self.value_heads}; use a divisor"
            )
        return self

    def build(self, config: DecoderConfig, kind: LayerKind) -> GatedDeltaNet:
        """As in the base class."""
        sizes = self.key_heads, self.value_heads, self.key_head_size, self.value_head_size
        core = DeltaCore(*sizes, self.conv_size, self.chunk_size)
        return GatedDeltaNet(config.hidden_size, core, config.norm_eps)

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        return DELTA_PLAN

    @property
    def split_widths(self) -> dict[str, int]:
        """As in the base class."""
        return {"key_heads": self.key_heads}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """As in the base class."""
        return super().shrunk(seq_len) | {"key_head_size": 8, "value_head_size": 8}


class KimiDeltaMixer(Recurrence):
    """Kimi's delta attention (arXiv 2510.26692)."""

    heads: int = Field(gt=0, le=2**20, description="heads, each of which has a state")
    head_size: int = Field(gt=0, le=2**20, description="width of a head's queries, keys and values, and of the latents")
    chunk_size: int = Field(16, gt=0, le=2**16, description="positions that are computed together")

    def build(self, config: DecoderConfig, kind: LayerKind) -> KimiDeltaAttention:
        """As in the base class."""
        core = KimiDeltaCore(self.heads, self.head_size, self.conv_size, self.chunk_size)
        return KimiDeltaAttention(config.hidden_size, core, config.norm_eps)

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        return KIMI_DELTA_PLAN

    @property
    def split_widths(self) -> dict[str, int]:
        """As in the base class."""
        return {"heads": self.heads}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """As in the base class."""
        return super().shrunk(seq_len) | {"head_size": 8}


class MambaMixer(Recurrence):
    """Mamba-2 (arXiv 2405.21060)."""

    heads: int = Field(gt=0, le=2**20, description="heads, each of which has a state")
    head_size: int = Field(gt=0, le=2**20, description="width of a head")
    groups: int = Field(1, gt=0, le=2**20, description="groups of heads, which share b and c and have a norm each")
    state_size: int = Field(gt=0, le=2**20, description="width of b and c")
    conv_bias: bool = Field(True, description="whether the convolution has biases")
    bias: bool = Field(False, description="whether the projections have biases")
    min_step: float = Field(0.0, ge=0, le=1e6, description="steps are at least this")

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"groups {self.groups} does not divide heads {self.heads}; use a divisor")
        return self

    def build(self, config: DecoderConfig, kind: LayerKind) -> Mamba2:
        """As in the base class."""
        sizes = self.heads, self.groups, self.head_size, self.state_size
        core = StateSpaceCore(*sizes, self.min_step, self.chunk_size)
        return Mamba2(config.hidden_size, core, self.conv_size, config.norm_eps, self.bias, self.conv_bias)

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        return mamba_plan(self.groups)

    @property
    def split_widths(self) -> dict[str, int]:
        """As in the base class: groups, or the heads of the only one."""
        return {"heads": self.heads} if self.groups == 1 else {"groups": self.groups}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """As in the base class."""
        heads = self.groups * min(self.heads // self.groups, 8)
        return super().shrunk(seq_len) | {"heads": heads, "head_size": 8, "state_size": 8}
