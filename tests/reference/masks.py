"""Attention masks, relative biases and positions by definition, one pair of tokens or one position at a time."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.float64 import bound
from titan_like.config.schema import JobConfig
from titan_like.models.batch import Batch
from titan_like.models.decoder.config import LayerKind
from titan_like.models.decoder.model import Decoder
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.positions import RelativeBias, rope_frequencies
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.registry import model_config
from titan_like.models.transformer import Transformer


def take_definitions(model: Transformer, config: JobConfig, in_pairs: bool = False) -> None:
    """Let a model mask its attention, bias it and find positions by definition, with code that is not its own.

    ``in_pairs`` gives causal attention a mask of all pairs too, which a kernel rounds in another way.
    """
    has_masks = config.data.separates_documents or config.data.prefix_lm
    takes_pairs = has_masks or model_config(config.model).predictions != ("tokens",)
    if isinstance(model, Decoder):
        model.rotary_tables = partial(_rotary, model)  # type: ignore[method-assign]
    model.masks = lambda *_: {}  # type: ignore[method-assign]  # windows are those of `_attend_to_pairs`
    for name, module in model.named_modules():
        if isinstance(module, RelativeBias):
            module.forward = partial(_bias_by_distance, module)
        if isinstance(module, AttentionCore) and (takes_pairs or in_pairs or module.needs_ranges):
            module.forward = partial(_attend_to_pairs, module)
        if name == "position_embedding":
            module.forward = partial(_rows_of, module)


def _rows_of(table: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """The rows of positions [batch, seq]; of [seq], which the model finds itself, the first row and so on."""
    assert isinstance(table.weight, torch.Tensor)
    return table.weight[: len(positions)] if positions.ndim == 1 else table.weight[positions]


def _rotary(model: Decoder, batch: Batch) -> dict[str, Any]:
    """(cos, sin) of each kind, one position at a time, and as precise as the model's own."""
    assert batch.positions is not None
    return {name: _table(model.config, model.config.kind(name), batch.positions) for name in model.config.kind_names}


def _table(config: LlamaConfig, kind: LayerKind, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turns = rope_frequencies(config.rotary_size, kind.rope_theta, kind.rope_scaling, positions.device)
    defined = turns.new_tensor([_turn(config.rotary_size, kind, pair) for pair in range(config.rotary_size // 2)])
    if not torch.allclose(turns, defined, rtol=bound(64, torch.float32), atol=0.0):  # else the model's own rounding
        turns = defined
    angles = torch.stack([at * turns for at in positions.flatten().tolist()]).unflatten(0, positions.shape)
    return angles.double().cos().float(), angles.double().sin().float()


def _turn(size: int, kind: LayerKind, pair: int) -> float:
    """The angle by which a position turns a pair of dimensions, with the scaling of Decoder 3.1."""
    angle, scaling = kind.rope_theta ** (-2 * pair / size), kind.rope_scaling
    if scaling is None:
        return angle
    context, wave = scaling.original_max_seq_len, 2 * math.pi / angle
    if wave < context / scaling.high_freq_factor:
        return angle
    if wave > context / scaling.low_freq_factor:
        return angle / scaling.factor
    smooth = (context / wave - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * angle / scaling.factor + smooth * angle


def _attend_to_pairs(
    core: AttentionCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: KeyRanges | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention with a mask of all pairs in place of key ranges, or a bias."""
    rate, is_grouped = core.dropout if core.training else 0.0, q.shape[1] != k.shape[1]
    mask, order, keys = bias, torch.arange(q.shape[2]), torch.arange(k.shape[2])
    if ranges is not None:
        mask = ((ranges.first[..., None] <= keys) & (keys < ranges.end[..., None]))[:, None]
    elif bias is None and core.is_causal:
        mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    if core.window:
        assert mask is not None
        mask = mask & (order[:, None] - keys < core.window)
    if core.softcap or core.sinks is not None:
        return _capped_and_drained(core, q, k, v, mask)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=rate, scale=core.scale, enable_gqa=is_grouped
    )


def _capped_and_drained(
    core: AttentionCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Scores that a soft cap bounds, and a sink that takes probability, in at least float32 as kernels do."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(dtype) for x in (k, v))
    scores = q.to(dtype) @ k.transpose(2, 3) * core.scale_of(q)
    scores = core.softcap * torch.tanh(scores / core.softcap) if core.softcap else scores
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    if core.sinks is not None:
        scores = torch.cat((core.sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1), scores), 3)
    return (scores.softmax(3)[..., -k.shape[2] :] @ v).to(q.dtype)


def _bias_by_distance(module: RelativeBias, _queries: torch.Tensor, seq_len: int) -> torch.Tensor:
    """[1, heads, queries, keys], one distance at a time; in float32 at least, as gradients of many pairs are summed.

    Here queries are in order and as many as keys, whatever positions the model finds.
    """
    weight, sees_later = module.table.weight, not module.is_causal
    table = weight.to(torch.promote_types(weight.dtype, torch.float32))

    def bias(distance: int) -> torch.Tensor:
        if distance > 0 and not sees_later:
            return table.new_full(table.shape[1:], -math.inf)
        return table[_bucket(distance, len(table), module.max_distance, sees_later)]

    at_distance = torch.stack([bias(distance) for distance in range(1 - seq_len, seq_len)], 1)
    rows = [at_distance[:, seq_len - 1 - query : 2 * seq_len - 1 - query] for query in range(seq_len)]
    return torch.stack(rows, 1)[None].to(weight.dtype)


def _bucket(distance: int, buckets: int, farthest: int, sees_later: bool) -> int:
    """The row of T5's table for a key that is ``distance`` positions after the query."""
    later = 0
    if sees_later:
        buckets //= 2
        later = buckets if distance > 0 else 0
    distance, single = abs(distance), buckets // 2
    if distance < single:
        return later + distance
    # Of the other ranges, range b begins at single · (farthest / single)^(b / others).
    others = buckets - single
    begun = [b for b in range(others) if distance >= (1 - 1e-9) * single * (farthest / single) ** (b / others)]
    return later + single + begun[-1]
