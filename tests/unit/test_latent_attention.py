"""Latent attention, routers with groups and biases, and experts with biases, against transformers' modules."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import moe_config
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data, JobConfig, Model
from titan_like.data.batch import Batch
from titan_like.data.objectives.masks import Masks, masks_of
from titan_like.models.batch import Context
from titan_like.models.config import RopeScaling
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.layers.experts import SparseMLP
from titan_like.models.layers.latent_attention import LatentAttention, latent_scale
from titan_like.models.registry import model_config
from titan_like.verify.shrink import resolve

HIDDEN, SEQ = 64, 21
Same = list[tuple[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]]]
"""Name of a parameter of ours, and what it is of theirs, by name."""


def assert_alike(ours: nn.Module, theirs: nn.Module, same: Same, run: Any) -> None:
    """Their random weights in our module give the same results and gradients."""
    generator = torch.Generator().manual_seed(3)
    for tensor in theirs.parameters():
        tensor.data = 0.3 * torch.randn(tensor.shape, generator=generator)
    weights, named = {name: p.data for name, p in theirs.named_parameters()}, dict(ours.named_parameters())
    assert set(named) == {name for name, _ in same}
    for name, of_theirs in same:
        named[name].data.copy_(of_theirs(weights))
    x, upstream = torch.randn(2, 2, SEQ, HIDDEN, generator=generator)
    (result, gradient), (expected, wanted) = (
        (output := run(module, own := x.clone().requires_grad_()), torch.autograd.grad(output, own, upstream, True)[0])
        for module in (ours, theirs)
    )
    for output in (result, expected):
        output.backward(upstream)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    pairs = {name: (named[name].grad, of_theirs(gradients)) for name, of_theirs in same}
    for name, (one, other) in {"result": (result, expected), "x": (gradient, wanted), **pairs}.items():
        assert other.any() and (one - other).norm() < bound() * other.norm(), name


def halves(rows: torch.Tensor, nope: int, rope: int) -> torch.Tensor:
    """Rows [heads · (nope + rope), …] whose rotated dimensions are in pairs → the order of two halves."""
    plain, turned = rows.unflatten(0, (-1, nope + rope)).split([nope, rope], 1)
    return torch.cat((plain, turned[:, 0::2], turned[:, 1::2]), 1).flatten(0, 1)


@pytest.mark.parametrize("query_rank", [0, 24])
@in_float64()
def test_latent_attention_is_that_of_deepseek_v3(query_rank):
    """Interleaved rotation, biases, a scale with YaRN's factor, and values that are narrower than keys."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 500.0}
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=query_rank or None,
        kv_lora_rank=20, qk_rope_head_dim=6, qk_nope_head_dim=10, v_head_dim=9, attention_bias=True,
        rope_parameters=yarn | {"original_max_position_embeddings": 8}, max_position_embeddings=32, rms_norm_eps=1e-3,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = deepseek.DeepseekV3Attention(config, 0)
    scaling = RopeScaling(type="yarn", factor=4.0, original_max_seq_len=8, mscale=1.0, mscale_all_dim=1.0)
    core = AttentionCore(0.0, scale=latent_scale(16, scaling))
    sizes = {"nope_head_size": 10, "rope_head_size": 6, "value_head_size": 9}
    sizes |= {"hidden_size": HIDDEN, "num_attention_heads": 3, "q_lora_rank": query_rank, "kv_lora_rank": 20}
    others = {"num_layers": 1, "vocab_size": 8, "max_seq_len": 8, "attention_bias": "all"}
    ours = LatentAttention(DecoderConfig.model_validate(sizes | others), core)
    assert latent_scale(16, scaling) > 1.2 * latent_scale(16, None) == 1.2 / 4
    same: Same = [
        ("heads.q.weight", lambda w: halves(w["q_b_proj.weight" if query_rank else "q_proj.weight"], 10, 6)),
        ("kv_a.weight", lambda w: halves(w["kv_a_proj_with_mqa.weight"], 20, 6)),
        ("kv_a.bias", lambda w: halves(w["kv_a_proj_with_mqa.bias"], 20, 6)),
        ("kv_norm.weight", lambda w: w["kv_a_layernorm.weight"]),
        ("heads.kv.weight", lambda w: w["kv_b_proj.weight"]),
        ("heads.proj.weight", lambda w: w["o_proj.weight"]),
        ("heads.proj.bias", lambda w: w["o_proj.bias"]),
    ]
    if query_rank:
        same.append(("q_a.weight", lambda w: w["q_a_proj.weight"]))
        same.append(("q_a.bias", lambda w: w["q_a_proj.bias"]))
        same.append(("q_norm.weight", lambda w: w["q_a_layernorm.weight"]))
    cos, sin = deepseek.DeepseekV3RotaryEmbedding(config)(torch.empty(0), torch.arange(SEQ)[None])
    mask = torch.full((1, 1, SEQ, SEQ), -torch.inf).triu(1)

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (
            module(x, (cos, sin), mask)[0]
            if module is theirs
            else module(x, Context(rope=(cos[0, :, :3], sin[0, :, :3])))
        )

    assert_alike(ours, theirs, same, run)


@in_float64()
def test_a_router_with_groups_is_that_of_deepseek_v3():
    """A token's experts are in the best 2 of 4 groups, by scores with a bias, which is not part of the weights."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=24, n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=2,
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = deepseek.DeepseekV3MoE(config)
    groups = {"router_groups": 4, "router_top_groups": 2, "num_experts": 12, "experts_per_token": 3}
    scores = {"router_score": "sigmoid", "balance": "bias", "routed_scaling": 2.5, "num_shared_experts": 2}
    ours = SparseMLP(moe_config(**groups, **scores))
    assert ours.router.bias is not None
    ours.router.bias.copy_(torch.randn(12, generator=torch.Generator().manual_seed(1)))
    theirs.gate.e_score_correction_bias.copy_(ours.router.bias)
    same: Same = [
        ("router.weight", lambda w: w["gate.weight"]),
        ("experts.gate.weight", lambda w: w["experts.gate_up_proj"].chunk(2, 1)[0].flatten(0, 1)),
        ("experts.up.weight", lambda w: w["experts.gate_up_proj"].chunk(2, 1)[1].flatten(0, 1)),
        ("experts.down.weight", lambda w: w["experts.down_proj"].flatten(0, 1)),
        *[(f"shared.{n}.weight", lambda w, n=n: w[f"shared_experts.{n}_proj.weight"]) for n in ("gate", "up", "down")],
    ]
    assert_alike(ours, theirs, same, lambda module, x: module(x))


@in_float64()
def test_experts_with_biases_and_a_clamp_are_those_of_gpt_oss():
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=7.0
    )
    config._experts_implementation = "eager"
    theirs = gpt_oss.GptOssMLP(config)
    biased = {"router_bias": True, "expert_bias": True, "activation": "clamped_swiglu"}
    ours = SparseMLP(moe_config(**biased, experts_per_token=2, balance="none"))
    same: Same = [("router.weight", lambda w: w["router.weight"]), ("router.logit_bias", lambda w: w["router.bias"])]
    for first, name in enumerate(("gate", "up")):
        same += [
            (f"experts.{name}.weight", lambda w, i=first: w["experts.gate_up_proj"][..., i::2].mT.flatten(0, 1)),
            (f"experts.{name}.bias", lambda w, i=first: w["experts.gate_up_proj_bias"][..., i::2].flatten()),
        ]
    same.append(("experts.down.weight", lambda w: w["experts.down_proj"].mT.flatten(0, 1)))
    same.append(("experts.down.bias", lambda w: w["experts.down_proj_bias"].flatten()))

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(4 * x)[0] if module is theirs else module(4 * x)  # many are clamped

    assert_alike(ours, theirs, same, run)


def test_next_tokens_of_other_documents_carry_no_loss():
    """A document ends with token 0. The last label of the sample has no next one."""
    config = model_config(Model(family="decoder", flavor="debug_latent"))
    tokens = torch.tensor([5, 6, 0, 7, 8, 0, 9])
    sample = Batch(tokens, torch.tensor([6, 0, 7, 8, 0, 9, 4]))
    plain = replace(masks_of(JobConfig(), config), samples=[sample])[0]
    assert plain.next_tokens is not None and plain.next_tokens[:-1].tolist() == tokens[1:].tolist()
    assert plain.next_labels is not None and plain.next_labels.tolist() == [0, 7, 8, 0, 9, 4, IGNORED_LABEL]
    masks = Masks(Data(reset_attention_mask=True, eod_mask_loss=True), 0, 0, has_next=True, samples=[sample])
    ignored = [0, IGNORED_LABEL, IGNORED_LABEL, 0, IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL]
    assert masks[0].next_labels is not None and masks[0].next_labels.tolist() == ignored
    assert masks_of(JobConfig(), moe_config()).over([sample])[0].next_labels is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_lora_rank": 0}, "q_lora_rank 48 needs latent attention; set kv_lora_rank, or q_lora_rank = 0"),
        ({"rope_head_size": 0}, "needs nope_head_size, rope_head_size and value_head_size ([16, 0, 16])"),
        ({"head_size": 32}, "the first two make up head_size (32)"),
        ({"value_head_size": 25}, "value_head_size 25 is more than head_size 24"),
        ({"num_kv_heads": 2}, "latent attention has no num_kv_heads 2; leave it at 4"),
        ({"rotary_fraction": 0.5}, "latent attention has no rotary_fraction 0.5"),
        ({"attention_bias": "qkv"}, 'latent attention has no attention_bias "qkv"; use "none" or "all"'),
        ({"router_groups": 3}, "router_groups 3 must divide num_experts 8"),
        ({"router_groups": 8, "router_top_groups": 8}, "router_groups 8 must divide num_experts 8 in groups of 2"),
        ({"experts_per_token": 5}, "must have experts_per_token (5) experts"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        model_config(Model(family="decoder", flavor="debug_latent", overrides=fields))


def test_expert_biases_that_tensor_ranks_cannot_share_are_refused():
    degrees = {"tensor_parallel_degree": 3, "expert_tensor_parallel_degree": 3, "sequence_parallel": "true"}
    heads = {"num_attention_heads": 6, "num_kv_heads": 3, "head_size": 16, "expert_ffn_hidden_size": 48}
    settings = ["--job.config_file=debug_moe", "--model.family=decoder", "--model.flavor=debug_biases"]
    settings += [f"--parallelism.{name}={value}" for name, value in degrees.items()] + ["--training.seq_len=48"]
    settings += [f"--model.overrides.{name}={value}" for name, value in heads.items()]
    config = load_config(settings)
    with pytest.raises(ConfigError, match=re.escape("does not divide the model's hidden_size (128)")):
        resolve(config, 3)
