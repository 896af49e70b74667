"""The parts of benchmarks/peers.py that only compute."""

import math

import pytest
import torch

from benchmarks import peers
from benchmarks.plain_models import PlainTransformer
from titan_like.config import load_config
from titan_like.models.registry import build_model, model_config
from titan_like.train.rules import resolve_settings


def test_rate_is_that_of_the_median_step_of_the_second_half() -> None:
    assert peers.rate_of([30.0, 9.0, 0.5, 0.25, 7.0], tokens=100) == 200


def test_mfu_counts_the_full_attention_matrix_and_no_recomputation() -> None:
    settings = peers.settings_of(peers.MODELS["124m"], "ours", tiny=False)
    layers, hidden, seq, vocab = 12, 768, 1024, 50304
    flops = 3 * (layers * (24 * hidden**2 + 4 * seq * hidden) + 2 * hidden * vocab)  # arXiv 2104.04473, one token
    assert peers.mfu_of(settings, 400_000, 989.0) == pytest.approx(flops * 400_000 / 989e12)
    assert peers.mfu_of(settings, 400_000, None) is None


@pytest.mark.parametrize("name", peers.MODELS)
def test_settings_are_valid(name: str) -> None:
    settings = peers.settings_of(peers.MODELS[name], "ours", tiny=False)
    config = resolve_settings(load_config(settings)).config
    assert config.compile.enable and not config.checkpoint.enable and config.training.dtype == "bfloat16"


def test_every_case_has_a_model_and_models_of_the_same_name_differ_in_batch() -> None:
    assert {name for name, _, _ in peers.CASES} == set(peers.MODELS)
    assert {name for name, _, _ in peers.TINY_CASES} == set(peers.TINY_MODELS)
    shown = [(model.title, model.batch, model.seq_len) for model in peers.MODELS.values()]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize(("family", "tied"), [("gpt", "true"), ("llama", "false"), ("llama", "true")])
def test_plain_models_compute_what_ours_do(family: str, tied: str) -> None:
    settings = [f"--model.family={family}", f"--model.overrides.tied_embeddings={tied}"]
    shape = model_config(load_config([*settings, "--model.overrides.vocab_size=512"]).model)
    torch.manual_seed(0)
    plain, ours = PlainTransformer(shape, 32), build_model(shape, family)
    assert sum(p.numel() for p in plain.parameters()) == shape.num_parameters()
    copy_weights(plain, ours, shape)
    tokens = torch.randint(512, (2, 32))
    logits = plain(tokens)
    torch.testing.assert_close(logits, ours(tokens), atol=1e-5, rtol=1e-4)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 0).flatten())
    assert abs(loss.item() - math.log(512)) < 0.3


@torch.no_grad()
def copy_weights(plain: PlainTransformer, ours: torch.nn.Module, shape: object) -> None:
    """Give our model the plain one's weights."""
    names = {"norm1": "attention_norm", "norm2": "mlp_norm", "attention.out": "attention.proj"}
    is_llama = plain.positions is None
    state = {}
    for name, value in plain.named_parameters():
        if not name.startswith("blocks."):
            name = name.replace("positions", "position_embedding").replace("head", "output")
            state[name] = value
            continue
        _, number, rest = name.split(".", 2)
        module, _, part = rest.rpartition(".")
        prefix = f"layers.{number}"
        if module == "attention.qkv":
            state[f"{prefix}.attention.qkv.{part}"] = grouped(value, shape)
        elif is_llama and module == "up":
            for half, own in zip(value.chunk(2), ("gate", "up"), strict=True):
                state[f"{prefix}.mlp.{own}.{part}"] = half
        elif module in ("up", "down"):
            own = module if is_llama else {"up": "fc1", "down": "fc2"}[module]
            state[f"{prefix}.mlp.{own}.{part}"] = value
        else:
            state[f"{prefix}.{names[module]}.{part}"] = value
    ours.load_state_dict(state)


def grouped(qkv: torch.Tensor, shape) -> torch.Tensor:
    """Rows in the order of our fused projection: by key-value head."""
    heads, kv_heads = shape.num_attention_heads, shape.num_kv_heads
    q, k, v = qkv.unflatten(0, (-1, shape.head_dim)).split([heads, kv_heads, kv_heads])
    q = q.unflatten(0, (kv_heads, -1))
    return torch.cat((q, k[:, None], v[:, None]), dim=1).flatten(0, 2)
