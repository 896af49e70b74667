"""Where transformers' classes store the parameters of decoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from titan_like.models.decoder.classes import CLASSES, LLAMA_NAMES, Class
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.hugging_face import Stored, fused, linear, whole

_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
_COPIES = ("embed_tokens", "shared_head.head")  # of the two tables, in layers of multi-token prediction


def stored_parameters(config: DecoderConfig, row: Class = CLASSES[0]) -> Iterator[Stored]:
    """Where each parameter of the model is stored. Names and shapes of parameters are the same in all classes."""
    names = LLAMA_NAMES | dict(row.names)
    table, head = (config.padded_vocab_size, config.hidden_size), f"{names['output']}.weight"
    numbers = range(config.num_layers, config.num_layers + config.mtp_layers)  # which have copies of both tables
    of_table, of_head = ([f"{names['layers']}.{i}.{name}.weight" for i in numbers] for name in _COPIES)
    copies = [*of_table, *([head, *of_head] if config.tied_embeddings else [])]
    yield whole("embedding.weight", f"{names['embedding']}.weight", table, config.vocab_size, copy=tuple(copies))
    for layer in range(numbers.stop):
        ours, theirs = f"layers.{layer}.", f"{names['layers']}.{layer}."
        for name in _NORMS if config.block == "sandwich" else _NORMS[::2]:
            yield from _norm(config, ours + name, theirs + names.get(name, name))
        yield from (_latents if config.kv_lora_rank else _attention)(config, row, ours, theirs, names)
        if config.num_experts and layer >= config.num_dense_layers:
            yield from _experts(config, row, ours, theirs, names)
        else:
            for name in ("gate", "up", "down") if config.gated else ("up", "down"):
                yield from _mlp(config, f"{ours}mlp.{name}", theirs + names[f"mlp.{name}"], config.ffn_hidden_size)
        if layer in numbers:
            for name in ("enorm", "hnorm"):
                yield from _norm(config, ours + name, theirs + name)
            yield from _norm(config, f"{ours}norm", f"{theirs}shared_head.norm")
            yield from linear(f"{ours}eh_proj", f"{theirs}eh_proj", (config.hidden_size, 2 * config.hidden_size), False)
    yield from _norm(config, "norm", names["norm"])
    if not config.tied_embeddings:
        yield whole("output.weight", head, table, config.vocab_size, copy=tuple(of_head))


def _norm(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Stored]:
    return linear(ours, theirs, (config.hidden_size,), config.norm == "layer")


def _attention(config: DecoderConfig, row: Class, ours: str, theirs: str, names: dict[str, str]) -> Iterator[Stored]:
    hidden, width, head = config.hidden_size, config.attention_size, config.head_dim
    pairs = (head, 0, config.rotary_size) if row.is_interleaved else None
    qkv = names["attention.qkv"]
    sources = tuple(theirs + qkv.format(part) for part in "qkv") if "{}" in qkv else (theirs + qkv,)
    for part, columns in (("weight", (hidden,)), ("bias", ()))[: 1 if config.attention_bias == "none" else 2]:
        tensors = tuple(f"{source}.{part}" for source in sources)
        if qkv == "attention.query_key_value":  # ordered as ours
            rows = (width + 2 * config.num_kv_heads * head, *columns)
            yield whole(f"{ours}attention.qkv.{part}", tensors[0], rows)
        else:
            yield fused(config, f"{ours}attention.qkv.{part}", columns, tensors, pairs=pairs)
    has_bias = config.attention_bias == "all"
    yield from linear(f"{ours}attention.proj", theirs + names["attention.proj"], (hidden, width), has_bias)
    if config.attention_sinks:
        yield whole(f"{ours}attention.core.sinks", f"{theirs}self_attn.sinks", (config.num_attention_heads,))
    norms = {"head": (head,) * 2, "all": (width, config.num_kv_heads * head)}.get(config.qk_norm, ())
    for part, size in zip("qk", norms, strict=False):
        yield from linear(f"{ours}attention.{part}_norm", f"{theirs}self_attn.{part}_norm", (size,), False, pairs=pairs)


def _latents(config: DecoderConfig, row: Class, ours: str, theirs: str, names: dict[str, str]) -> Iterator[Stored]:
    ours, theirs = f"{ours}attention.", f"{theirs}self_attn."
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.nope_head_size, config.rope_head_size, config.value_head_size
    queries, keys, has_bias = config.q_lora_rank, config.kv_lora_rank, config.attention_bias == "all"
    of_head = (nope + rope, nope, rope)
    if queries:
        yield from linear(f"{ours}q_a", f"{theirs}q_a_proj", (queries, hidden), has_bias)
        yield whole(f"{ours}q_norm.weight", f"{theirs}q_a_layernorm.weight", (queries,))
    q = "q_b_proj" if queries else "q_proj"
    yield from linear(f"{ours}heads.q", theirs + q, (heads * (nope + rope), queries or hidden), False, pairs=of_head)
    latent = (keys + rope, keys, rope)
    yield from linear(f"{ours}kv_a", f"{theirs}kv_a_proj_with_mqa", (keys + rope, hidden), has_bias, pairs=latent)
    yield whole(f"{ours}kv_norm.weight", f"{theirs}kv_a_layernorm.weight", (keys,))
    yield from linear(f"{ours}heads.kv", f"{theirs}kv_b_proj", (heads * (nope + value), keys), False)
    yield from linear(f"{ours}heads.proj", f"{theirs}o_proj", (hidden, heads * value), has_bias)


def _mlp(config: DecoderConfig, ours: str, theirs: str, ffn: int) -> Iterator[Stored]:
    is_down = ours.endswith("down")
    shape = (config.hidden_size, ffn) if is_down else (ffn, config.hidden_size)
    for part, size in (("weight", shape), ("bias", shape[:1]))[: 2 if config.mlp_bias else 1]:
        if theirs.endswith("gate_up_proj"):  # gate above up
            taken = (ffn,) if ours.endswith("gate") else (ffn, None)
            yield Stored(f"{ours}.{part}", size, {f"{theirs}.{part}": (2 * ffn, *size[1:])}, taken=taken)
        else:
            yield whole(f"{ours}.{part}", f"{theirs}.{part}", size)


def _experts(config: DecoderConfig, row: Class, ours: str, theirs: str, names: dict[str, str]) -> Iterator[Stored]:
    experts, hidden, ffn = config.num_experts, config.hidden_size, config.expert_ffn_hidden_size
    router, prefix = theirs + names["mlp.router"], theirs + names["mlp.experts"]
    yield whole(f"{ours}mlp.router.weight", f"{router}.weight", (experts, hidden))
    if config.router_bias:
        yield whole(f"{ours}mlp.router.logit_bias", f"{router}.bias", (experts,))
    if config.balance == "bias":
        bias = whole(f"{ours}mlp.router.bias", f"{router}.e_score_correction_bias", (experts,))
        yield replace(bias, is_buffer=True)
    matrices = row.experts.matrices if row.experts is not None else ("gate_proj", "up_proj", "down_proj")
    is_joined = row.experts is not None and row.experts.is_joined  # gate and up in turn, each matrix transposed
    for name, matrix in zip(("gate", "up", "down"), matrices, strict=True):
        rows, columns = (hidden, ffn) if name == "down" else (ffn, hidden)
        sizes: dict[str, tuple[int, ...]] = {"weight": (rows, columns), "bias": (rows,)}
        for part in ("weight", "bias") if config.expert_bias else ("weight",):
            size = sizes[part]
            label, shape = f"{ours}mlp.experts.{name}.{part}", (experts * rows, *size[1:])
            if is_joined:
                taken, times = {"gate": ((0, None, 2), 2), "up": ((1, None, 2), 2), "down": ((), 1)}[name]
                joined = "down" if name == "down" else "gate_up"
                sources = {
                    f"{prefix}.{joined}_proj{'_bias' if part == 'bias' else ''}": (experts, *size[1:], times * rows)
                }
                yield Stored(label, shape, sources, is_transposed=part == "weight", is_stacked=True, taken=taken)
            else:
                names_there = (f"{prefix}.{expert}.{matrix}.{part}" for expert in range(experts))
                yield Stored(label, shape, dict.fromkeys(names_there, size))
    if config.num_shared_experts:
        for name in ("gate", "up", "down"):
            source = f"{theirs}mlp.shared_experts.{name}_proj"
            yield from _mlp(config, f"{ours}mlp.shared.{name}", source, config.num_shared_experts * ffn)
