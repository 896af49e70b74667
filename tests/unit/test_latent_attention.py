"""Shapes of latent attention and of experts that do not fit, and labels of multi-token prediction."""

import re
from dataclasses import replace

import pytest
import torch

from tests.unit.hugging_face_cases import moe_config
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data, JobConfig, Model
from titan_like.data.batch import Batch
from titan_like.data.objectives.masks import Masks, masks_of
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.registry import model_config
from titan_like.verify.shrink import resolve


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
