"""A small model that computes what a large one does, in kind."""

import math
from typing import Any

from titan_like.models.config import TransformerConfig

FLEX_HEAD_DIM = 16  # the smallest that FlexAttention supports on GPUs


def small_fields(
    model: TransformerConfig, original_tensor: int, tensor: int, groups: int, on_gpus: bool, float8: bool
) -> dict[str, Any]:
    """Fields of the small model.

    Every tensor-parallel process gets twice ``groups`` groups of heads, whose order within a process can be wrong. If
    several share a key-value head, they still do. The initial weights grow by √(ratio of the hidden sizes), which keeps
    the scale of the activations. With ``float8`` all sides of matrices are multiples of 16, which float8 products need.
    """
    queries = model.num_attention_heads // model.num_kv_heads
    kv_heads = 1 if model.num_kv_heads == 1 else 2 * groups * tensor
    heads = kv_heads * min(queries, 2 if kv_heads > 1 else 4)
    head_dim = 8 if heads <= 8 else 4
    if on_gpus and not model.has_decoder:  # attention with a position bias never uses FlexAttention
        head_dim = FLEX_HEAD_DIM
    ranks = original_tensor // model.num_kv_heads  # that share a key-value head, if there are several
    if ranks > 1 and tensor > 1:
        kv_heads, heads = max(1, tensor // ranks), tensor * min(2, model.num_attention_heads // original_tensor)
        multiple = 8 * ranks if float8 else 2 * ranks
        head_dim = -(-head_dim // multiple) * multiple
    hidden = heads * head_dim
    unit = 16 * tensor if float8 else tensor
    ffn = max(1, round(model.ffn_hidden_size / model.hidden_size * hidden / unit)) * unit
    # Padded, divided evenly among tensor-parallel processes, and with a last shard of padding alone, if the model's is.
    is_padded = model.padded_vocab_size != model.vocab_size
    last_shard = model.padded_vocab_size // original_tensor
    only_padding = original_tensor > 1 and model.padded_vocab_size - last_shard >= model.vocab_size
    if model.padded_vocab_size % (2 * original_tensor):
        vocab, multiple = 61, 7 if is_padded else 1  # 63 or 61 rows
    else:
        padded = 64 - 64 // tensor - 1 if only_padding else 57
        vocab, multiple = padded if is_padded else 64, 64
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "vocab_multiple": multiple,
        "init_std": model.init_std * math.sqrt(model.hidden_size / hidden),
    }
