"""The shape of a T5 model: an encoder and a decoder, relative position biases, RMSNorm, no biases, dropout."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from titan_like.models.config import WithHeadSize


class T5Config(WithHeadSize):
    """The shape of T5 (arXiv 1910.10683) and of T5 v1.1, which has gated MLPs and an output matrix of its own.

    Raises:
        pydantic.ValidationError: as for every shape, or one of the two stacks has no layer, or the
            distances do not fit their buckets.
    """

    objective: ClassVar = "span_corruption"
    not_in_weights: ClassVar = frozenset({"init_std", "dropout", "max_seq_len"})  # no table depends on the length

    num_layers: int = Field(gt=1, le=2048, description="layers of encoder and decoder together")
    num_decoder_layers: int = Field(0, ge=0, description="layers of the decoder; 0 means half of num_layers")
    mlp: Literal["gated_gelu", "relu"] = Field("gated_gelu", description="gated_gelu (T5 v1.1) or relu (the original)")
    num_position_buckets: int = Field(32, ge=4, le=2**20, description="relative position buckets")
    max_position_distance: int = Field(
        128, gt=1, le=2**27, description="distance from which all positions share a bucket, tokens"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of embeddings, attention and residual branches")
    norm_eps: float = Field(1e-6, gt=0, le=1e6, description="epsilon of the norms")
    init_std: float = Field(
        1.0, gt=0, le=1e6, description="standard deviation of initial embeddings; matrices have 1/√inputs of it"
    )
    tied_embeddings: bool = Field(False, description="the output matrix is the embedding table, times 1/√hidden_size")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        filled = super()._fill_defaults(values)  # type: ignore[operator]
        layers = filled.get("num_layers", 0)
        if not filled.get("num_decoder_layers"):
            filled["num_decoder_layers"] = layers // 2 if isinstance(layers, int) else 0
        return filled

    def broken_rules(self) -> Iterator[str]:
        """As in the base class."""
        yield from super().broken_rules()
        buckets, half = self.num_position_buckets, self.num_position_buckets // 2
        if self.max_position_distance <= half:
            reason = f"is within the first {half} distances, which have one of the {buckets} num_position_buckets each"
            yield f"max_position_distance {self.max_position_distance} {reason}; choose at least {half + 1}"
        if not 0 < self.num_decoder_layers < self.num_layers:
            layers = f"num_decoder_layers {self.num_decoder_layers} of num_layers {self.num_layers}"
            yield f"{layers} leave a stack without layers; choose a smaller number of at least 1"

    @property
    def num_encoder_layers(self) -> int:
        """Layers of the encoder, which come first."""
        return self.num_layers - self.num_decoder_layers

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Encoder layers, the last encoder layer, which normalises the output, and decoder layers."""
        return self.num_encoder_layers - 1, 1, self.num_decoder_layers

    def with_layers(self, num_layers: int) -> dict[str, int]:
        """Two layers in the encoder, if there are more, and the others in the decoder."""
        return {"num_layers": num_layers, "num_decoder_layers": max(num_layers - 2, 1)}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Initial weights follow from the sizes. Heads together stay wider or narrower than the hidden states."""
        return {"init_std": self.init_std, "head_size": 16 if self.attention_size > self.hidden_size else 8}
