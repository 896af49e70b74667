"""Bugs in models with an encoder and a decoder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.distributed.mutations import bug, under
from titan_like.models.layers import positions
from titan_like.models.layers.positions import RelativeBias
from titan_like.models.t5.model import T5, EncoderLayer, T5Context
from titan_like.parallel import tensor_styles


@bug(positions, "bucket_of")
def causal_buckets_in_the_encoder(original: Any, distance: torch.Tensor, num: int, most: int, is_causal: bool) -> Any:
    """Keys after a query share the bucket of the query itself."""
    return original(distance, num, most, True)


@bug(RelativeBias, "forward")
def decoder_sees_the_future(original: Any, self: RelativeBias, queries: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The decoder's bias hides no key."""
    bias = original(self, queries, num_keys)
    return bias.masked_fill(bias.isneginf(), 0.0)


@contextmanager
def _last_encoder_layer(end: Callable[[torch.Tensor, nn.Module, int], torch.Tensor]) -> Iterator[None]:
    """In a pipeline, ``end`` ends the encoder: it gets what comes before the norm, the norm, and the encoder's part."""
    original, original_contexts, is_pipeline = EncoderLayer.forward, T5.contexts, [False]

    def contexts(self: T5, batch: Any) -> Any:
        is_pipeline[0] = not (self.is_first and self.is_last)
        return original_contexts(self, batch)

    def forward(self: EncoderLayer, x: torch.Tensor, context: T5Context) -> torch.Tensor:
        norm = self.final_norm
        if norm is None or not is_pipeline[0]:
            return original(self, x, context)
        self.final_norm = None
        before = original(self, x, context)
        self.final_norm = norm
        return end(before, norm, context.encoder_part)

    with patch.object(T5, "contexts", contexts), patch.object(EncoderLayer, "forward", forward):
        yield


@under(lambda: _last_encoder_layer(lambda x, norm, part: norm(x)))
def encoder_s_norm_touches_the_decoder() -> None:
    """The norm at the encoder's end also normalises the decoder's positions."""


@under(
    lambda: _last_encoder_layer(lambda x, norm, part: torch.cat((x[:, :part] + 0 * norm(x[:, :part]), x[:, part:]), 1))
)
def cross_attention_reads_what_is_not_normalised() -> None:
    """The encoder's output is what its norm takes. The norm keeps a gradient, which is 0."""


@bug(T5, "embed")
def parts_not_shared_out_alike(original: Any, self: T5, *inputs: Any) -> torch.Tensor:
    """Under sequence parallelism a process takes a contiguous piece of both parts together."""
    with patch.object(self, "sequence_shards", 1):
        return original(self, *inputs)


@under(lambda: patch.object(tensor_styles.CrossRegion, "forward", tensor_styles.Region.forward))
def gradient_of_the_encoder_s_output_not_summed() -> None:
    """Each tensor-parallel process passes the gradient of its own heads' keys and values to the encoder."""


@bug(tensor_styles.HeadTable, "forward")
def biases_of_other_heads(original: Any, self: Any, rows: torch.Tensor) -> torch.Tensor:
    """Each tensor-parallel process takes the biases of its heads in reverse."""
    return original(self, rows).flip(-1)


@bug(T5, "contexts")
def encoder_s_bias_in_the_first_stage_alone(original: Any, self: T5, batch: Any) -> Any:
    """Encoder layers of later stages get no relative positions."""
    contexts = original(self, batch)
    return {n: x if self.is_first else x._replace(encoder_bias=None) for n, x in contexts.items()}
