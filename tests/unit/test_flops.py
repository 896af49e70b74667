import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from tests.losses import summed_loss
from titan_like.config.schema import ActivationCheckpoint
from titan_like.metrics.flops import (
    ThroughputMeter,
    hardware_flops_per_token,
    layer_flops,
    megatron_flops_per_token,
    model_flops_per_token,
    visible_pairs,
)
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.registry import build_model, config_class, flavors
from titan_like.parallel.apply import apply_activation_checkpoint
from titan_like.planner.trace.program import Attention

NONE, FULL, SELECTIVE = (ActivationCheckpoint(mode=mode) for mode in ("none", "full", "selective"))


def flavor(family, name, **changes):
    return config_class(family).model_validate(flavors(family)[name] | changes)


def paper_flops_per_token(layers, hidden, vocab, seq, factor):
    """arXiv 2104.04473, equation 3, divided by the tokens of the batch."""
    return factor * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


@pytest.mark.parametrize("name", flavors("gpt"))
@pytest.mark.parametrize("seq", [512, 1024])
def test_paper_s_formula_is_hardware_flops_with_full_recompute(name, seq):
    model = flavor("gpt", name)
    paper = paper_flops_per_token(model.num_layers, model.hidden_size, model.padded_vocab_size, seq, 96)
    assert hardware_flops_per_token(model, seq, FULL) == pytest.approx(paper, rel=1e-12)
    assert megatron_flops_per_token(model, seq, FULL) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("recompute", [NONE, SELECTIVE])
def test_megatron_s_factor_is_72_without_full_recompute(recompute):
    model = flavor("gpt", "gpt3_175b")
    paper = paper_flops_per_token(96, 12288, model.padded_vocab_size, 2048, 72)
    assert megatron_flops_per_token(model, 2048, recompute) == pytest.approx(paper, rel=1e-12)


def test_causal_count_leaves_out_half_of_the_attention_matrix():
    model = flavor("llama", "llama3.1_8b")
    full, causal = model_flops_per_token(model, 8192), model_flops_per_token(model, 8192, causal=True)
    # forward and backward of QKᵀ and PV: 3 · 2 · 2 · s · h a layer
    assert full - causal == 32 * 12 * 8192 * 4096 / 2
    t5 = flavor("t5", "220m")  # half of the decoder's own attention, and all of the encoder's and between the two
    full, causal = (model_flops_per_token(t5, 512, causal, decoder_seq_len=114) for causal in (False, True))
    assert full - causal == pytest.approx(12 * 12 * 114 * 114 * 768 / 2 / 512)
    bert = flavor("bert", "336m")
    assert model_flops_per_token(bert, 512, causal=True) == model_flops_per_token(bert, 512)


@pytest.mark.parametrize("field", ["window", "chunk"])
def test_pairs_within_documents_and_windows(field):
    kinds = {"layer_pattern": ["near", "full", "near"], "kinds": {"near": {field: 10}}}
    model = flavor("llama", "debug", **kinds)  # 4 layers, of which one sees everything
    starts = torch.tensor([0, 5, 40]).repeat_interleave(torch.tensor([5, 35, 24]))[None]
    order = torch.arange(64)[None]
    dense = (starts[..., None] <= order) & (order <= order.mT)
    near = dense & ((order.mT - order < 10) if field == "window" else (order.mT // 10 == order // 10))
    pairs = visible_pairs(model, KeyRanges(starts, order + 1))
    assert pairs == dense.sum() + 3 * near.sum()
    peak = 1e6
    rates = ThroughputMeter(model, 64, NONE, 1, peak).measure(64, 1.0, float(pairs))
    matrices = sum(model.parts.kinds[kind].matrices[0] for kind in model.layer_kinds) + model.parts.head_matrices
    assert rates.mfu_causal * peak * 1e12 == pytest.approx(6 * 64 * matrices + 12 * model.attention_size * int(pairs))


@pytest.mark.parametrize("chunk", [16, 24, 64, 100])
def test_chunks_count_as_windows_and_their_causal_half_as_chunks(chunk):
    model = flavor("llama", "debug", layer_pattern=["near"], kinds={"near": {"chunk": chunk}})
    full, causal = (layer_flops(model, 64, causal=is_causal) for is_causal in (False, True))
    matrices = 2 * 64 * sum(model.parts.kinds[kind].matrices[0] for kind in model.layer_kinds)
    lengths = [min(chunk, 64 - start) for start in range(0, 64, chunk)]
    per_pair = 4 * model.attention_size * model.num_layers
    assert full - matrices == per_pair * 64 * lengths[0]
    assert causal - matrices == per_pair * sum(length**2 for length in lengths) / 2
    if 64 % lengths[0] == 0:
        heads = model.num_attention_heads
        kernel = Attention(1, heads, 64, 64, model.head_dim, True, False, False, -chunk if chunk < 64 else 0)
        assert model.num_layers * kernel.flops() == full - matrices
        assert model.num_layers * kernel.flops(causal=True) == causal - matrices


DECODER = 48  # positions of T5's decoder


def counted_flops_per_token(family, model_config, seq, recompute=NONE, early_stop=True):
    """What torch counts in one forward and backward pass, attention as the matrix products that it is."""
    model = build_model(model_config, family)
    model.init_weights(1)
    apply_activation_checkpoint(model, recompute)
    tokens = torch.arange(2 * seq).view(2, seq) % 257
    inputs, labels, encoder_len = tokens, tokens, None
    if model_config.has_decoder:
        inputs = labels = torch.cat((tokens, tokens[:, :DECODER]), 1)
        encoder_len = seq
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(early_stop), counter:
        summed_loss(model, inputs, labels, encoder_len=encoder_len).backward()
    return counter.get_total_flops() / tokens.numel()


def decoder_of(model):
    return {"decoder_seq_len": DECODER} if model.has_decoder else {}


@register_flop_formula([torch.ops.titan_like.expert_product, torch.ops.titan_like.expert_weight_gradient])
def _(rows, other, *_, **__):
    """Each row is multiplied with a matrix [out, in], or with another row into one."""
    return 2 * rows[0] * rows[1] * other[1]


@register_flop_formula(torch.ops.aten.linalg_solve_triangular)
def _(a, b, *_, **__):
    """A product with a whole matrix, as attention's is counted without a mask."""
    return 2 * math.prod(b) * a[-1]


GATED = {"num_shared_experts": 2, "shared_expert_gate": True, "ffn_hidden_size": 96, "layer_pattern": ["dense", "full"]}
GATED |= {"kinds": {"dense": {"dense": True}}}
DELTA_OF_ROWS = {"mixer": "kimi_delta", "rope_theta": 0.0, "options": {"heads": 4, "head_size": 16}}
KIMI = {"kinds": {"linear": DELTA_OF_ROWS}}
FLAVORS = [(family, "debug") for family in ("gpt", "llama", "bert", "t5", "moe")] + [
    ("decoder", f"debug_{name}") for name in ("linear", "mamba")
]


@pytest.mark.parametrize(
    ("family", "name", "more"),
    [*((*names, {}) for names in FLAVORS), ("moe", "debug", GATED), ("decoder", "debug_linear", KIMI)],
)
@pytest.mark.parametrize("seq", [64, 192])
def test_model_flops_equal_what_torch_counts(family, name, more, seq):
    model = flavor(family, name)
    model = type(model).model_validate(model.model_dump() | more)
    assert model_flops_per_token(model, seq, **decoder_of(model)) == counted_flops_per_token(family, model, seq)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), FLAVORS)
@pytest.mark.parametrize(("mode", "every_n_layers"), [("full", 1), ("full", 3), ("selective", 1), ("selective", 3)])
def test_hardware_flops_equal_what_torch_counts(family, name, mode, every_n_layers):
    model = flavor(family, name)
    recompute = ActivationCheckpoint(mode=mode, every_n_layers=every_n_layers)
    counted = counted_flops_per_token(family, model, 128, recompute, early_stop=False)
    assert hardware_flops_per_token(model, 128, recompute, **decoder_of(model)) == counted
