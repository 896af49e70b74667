"""GPT, BERT and T5 by definition, in the dtype of their weights: loops over layers and heads, masks of all pairs.

It imports nothing of the product. Weights have the product's names and order of rows; ``fields`` are all fields
of a flavor. Nothing is dropped.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

Fields = Mapping[str, Any]
Weights = Mapping[str, torch.Tensor]


def layer_norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scale = ((centered**2).mean(-1, keepdim=True) + eps).sqrt()
    return centered / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ weights[f"{name}.weight"].t()
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """One head: [batch, queries, width] and [batch, keys, width]; ``bias`` is added to scores that have their scale."""
    weights = torch.where(is_seen, (q @ k.transpose(1, 2) + bias).exp(), 0)
    return weights @ v / weights.sum(-1, keepdim=True)


def self_attention(
    fields: Fields,
    weights: Weights,
    name: str,
    x: torch.Tensor,
    is_seen: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of the projection are ordered by key-value head: its queries, its key, its value. ``bias`` [heads, q, k]."""
    heads, groups = fields["num_attention_heads"], fields["num_kv_heads"]
    rows = linear(weights, f"{name}.qkv", x).chunk(heads + 2 * groups, -1)
    scale, outputs = rows[0].shape[-1] ** -0.5 if bias is None else 1.0, []
    for head in range(heads):
        group, number = divmod(head, heads // groups)
        first = group * (heads // groups + 2)
        q, k, v = rows[first + number], rows[first + heads // groups], rows[first + heads // groups + 1]
        outputs.append(attend(scale * q, k, v, is_seen, torch.zeros(()) if bias is None else bias[head]))
    return linear(weights, f"{name}.proj", torch.cat(outputs, -1))


def gpt(fields: Fields, weights: Weights, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor):
    """Logits [batch, seq, vocab] of packed documents (Radford et al. 2019): a token sees its document up to itself."""
    order = torch.arange(tokens.shape[1])
    is_seen = (documents[:, :, None] == documents[:, None]) & (order[:, None] >= order)
    x = weights["embedding.weight"][tokens] + weights["position_embedding.weight"][positions]
    for i in range(fields["num_layers"]):
        x = _pre_norm_layer(fields, weights, f"layers.{i}", x, is_seen, gelu_tanh)
    return _tied_logits(fields, weights, layer_norm(weights, "norm", x, fields["norm_eps"]))


def _pre_norm_layer(
    fields: Fields, weights: Weights, name: str, x: torch.Tensor, is_seen: torch.Tensor, activation: Any
) -> torch.Tensor:
    eps = fields["norm_eps"]
    x = x + self_attention(
        fields, weights, f"{name}.attention", layer_norm(weights, f"{name}.attention_norm", x, eps), is_seen
    )
    inner = activation(linear(weights, f"{name}.mlp.fc1", layer_norm(weights, f"{name}.mlp_norm", x, eps)))
    return x + linear(weights, f"{name}.mlp.fc2", inner)


def _tied_logits(fields: Fields, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    table = weights["embedding.weight" if fields["tied_embeddings"] else "output.weight"]
    return x @ table[: fields["vocab_size"]].t()


def bert(
    fields: Fields, weights: Weights, tokens: torch.Tensor, token_types: torch.Tensor, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Each head's output (arXiv 1810.04805, or with norms first 1909.08053). Keys from ``lengths`` on are padding."""
    eps, is_post = fields["norm_eps"], fields["norm_placement"] == "post"
    order = torch.arange(tokens.shape[1])
    is_seen = (order < lengths[:, None])[:, None]
    x = weights["embedding.weight"][tokens] + weights["position_embedding.weight"][order]
    x = x + weights["token_type_embedding.weight"][token_types]
    x = layer_norm(weights, "embedding_norm", x, eps) if is_post else x
    for i in range(fields["num_layers"]):
        name = f"layers.{i}"
        if not is_post:
            x = _pre_norm_layer(fields, weights, name, x, is_seen, gelu)
            continue
        attended = self_attention(fields, weights, f"{name}.attention", x, is_seen)
        x = layer_norm(weights, f"{name}.attention_norm", x + attended, eps)
        inner = gelu(linear(weights, f"{name}.mlp.fc1", x))
        x = layer_norm(weights, f"{name}.mlp_norm", x + linear(weights, f"{name}.mlp.fc2", inner), eps)
    x = x if is_post else layer_norm(weights, "norm", x, eps)
    outputs, head = {}, fields["sentence_head"]
    if head != "choice":
        transformed = layer_norm(weights, "transform.norm", gelu(linear(weights, "transform.dense", x)), eps)
        outputs["tokens"] = (
            _tied_logits(fields, weights, transformed) + weights["output_bias.bias"][: fields["vocab_size"]]
        )
    if head != "none":
        outputs[head] = linear(weights, head, torch.tanh(linear(weights, "pooler", x[:, 0])))
    return outputs


def t5(fields: Fields, weights: Weights, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logits [batch, targets, vocab] (arXiv 1910.10683, section 2.1)."""
    eps, encoders = fields["norm_eps"], fields["num_layers"] - fields["num_decoder_layers"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(weights, name, x, eps)

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        up = linear(weights, f"{name}.up", x)
        gated = fields["mlp"] == "gated_gelu"
        return linear(
            weights, f"{name}.down", gelu_tanh(linear(weights, f"{name}.gate", x)) * up if gated else up.clamp(min=0)
        )

    memory, length = weights["embedding.weight"][inputs], inputs.shape[1]
    bias, everything = (
        _relative_bias(fields, weights, "encoder_bias", length),
        torch.ones(length, length, dtype=torch.bool),
    )
    for i in range(encoders):
        name = f"layers.{i}"
        attended = self_attention(
            fields, weights, f"{name}.attention", norm(f"{name}.attention_norm", memory), everything, bias
        )
        memory = memory + attended
        memory = memory + mlp(f"{name}.mlp", norm(f"{name}.mlp_norm", memory))
    memory = norm(f"layers.{encoders - 1}.final_norm", memory)
    x, length = weights["embedding.weight"][targets], targets.shape[1]
    causal, bias = (
        torch.ones(length, length, dtype=torch.bool).tril(),
        _relative_bias(fields, weights, "decoder_bias", length),
    )
    for i in range(encoders, fields["num_layers"]):
        name = f"layers.{i}"
        x = x + self_attention(fields, weights, f"{name}.attention", norm(f"{name}.attention_norm", x), causal, bias)
        x = x + _cross_attention(fields, weights, f"{name}.cross_attention", norm(f"{name}.cross_norm", x), memory)
        x = x + mlp(f"{name}.mlp", norm(f"{name}.mlp_norm", x))
    x = norm("norm", x)
    return _tied_logits(fields, weights, x * fields["hidden_size"] ** -0.5 if fields["tied_embeddings"] else x)


def _cross_attention(
    fields: Fields, weights: Weights, name: str, x: torch.Tensor, memory: torch.Tensor
) -> torch.Tensor:
    """Rows of the projection of keys and values are ordered by key-value head: its key, its value."""
    heads, groups = fields["num_attention_heads"], fields["num_kv_heads"]
    queries, rows = (
        linear(weights, f"{name}.q", x).chunk(heads, -1),
        linear(weights, f"{name}.kv", memory).chunk(2 * groups, -1),
    )
    everything, outputs = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool), []
    for head in range(heads):
        group = head // (heads // groups)
        outputs.append(attend(queries[head], rows[2 * group], rows[2 * group + 1], everything, torch.zeros(())))
    return linear(weights, f"{name}.proj", torch.cat(outputs, -1))


def _relative_bias(fields: Fields, weights: Weights, name: str, length: int) -> torch.Tensor:
    """[heads, queries, keys], one pair at a time."""
    table, both = weights[f"{name}.table.weight"], name == "encoder_bias"
    buckets, farthest = fields["num_position_buckets"], fields["max_position_distance"]
    rows = [[table[_bucket(key - query, buckets, farthest, both)] for key in range(length)] for query in range(length)]
    return torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)


def _bucket(distance: int, buckets: int, farthest: int, both: bool) -> int:
    """Half of the buckets of a direction have one distance each; the others grow logarithmically."""
    later = 0
    if both:
        buckets //= 2
        later = buckets if distance > 0 else 0
    elif distance > 0:
        return 0  # which a causal mask hides
    distance, single = abs(distance), buckets // 2
    if distance < single:
        return later + distance
    share = math.log(distance / single) / math.log(farthest / single)
    return later + min(single + int(share * (buckets - single) + 1e-6), buckets - 1)
