"""Mixers by name: with what the layers of a kind mix positions.

A mixer says how its module is built, split over tensor ranks and made small for the verifier. The module is a layer's
`attention`, and takes hidden states and a `Context`. A package adds mixers by entry points of the group
``titan_like.mixers``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import nn

from titan_like.config.entry_points import MIXERS
from titan_like.config.errors import ConfigError, first_line, require
from titan_like.models.decoder.config import DecoderConfig, LayerKind
from titan_like.models.layers.attention import ATTENTION_PLAN, AttentionCore, SelfAttention
from titan_like.models.layers.latent_attention import LATENT_PLAN, LatentAttention, latent_scale
from titan_like.models.layers.norms import make_norm


class Mixer(BaseModel):
    """Base class of mixers. Its fields are the ``options`` of a kind of layers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    supports_masks: ClassVar[bool] = False  # whether the module heeds the context's document mask
    # Whether the module works with fewer of the model's key-value heads than tensor ranks: it has none, or all of them
    # are in a `SelfAttention`.
    shares_kv_heads: ClassVar[bool] = False

    def build(self, config: DecoderConfig, kind: LayerKind) -> nn.Module:
        """The module of one layer, on the current default device.

        Under context parallelism only an `AttentionCore` in it may mix positions, or it has a method
        ``shard_context(group)``. That is called once, on the outermost module that has it, which from then on gets this
        rank's shard of each sequence. A part that multiplies each position by more than its matrices has
        ``products_per_position``.
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
    return AttentionCore(0.0, True, scale, config.attention_softcap, kind.window, num_sinks)


class SoftmaxMixer(Mixer):
    """`SelfAttention`."""

    supports_masks = True
    shares_kv_heads = True

    def build(self, config: DecoderConfig, kind: LayerKind) -> SelfAttention:
        """As in the base class."""
        return SelfAttention(
            config,
            _core(config, kind, config.attention_scale or None),
            bias=config.attention_bias != "none",
            proj_bias=config.attention_bias == "all",
            qk_norm=config.qk_norm,
            norm=partial(make_norm, kind=config.norm, offset=config.norm_offset),
        )

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        norms = {"none": [], "head": ["head_norm"], "all": ["split_norm"]}[config.qk_norm]
        return ATTENTION_PLAN | {f"{part}_norm": style for style in norms for part in "qk"}


class LatentMixer(Mixer):
    """`LatentAttention`."""

    supports_masks = True

    def build(self, config: DecoderConfig, kind: LayerKind) -> LatentAttention:
        """As in the base class."""
        scale = config.attention_scale or latent_scale(config.head_size, kind.rope_scaling)
        return LatentAttention(config, _core(config, kind, scale))

    def plan(self, config: DecoderConfig) -> Mapping[str, Any]:
        """As in the base class."""
        has_part = {"q_a": config.q_lora_rank, "q_norm": config.q_lora_rank}
        return {name: style for name, style in LATENT_PLAN.items() if has_part.get(name, True)}
