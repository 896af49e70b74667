"""T5's initial weights, its sizes and what it cannot do."""

import importlib

import pytest
import torch

from tests.reference.masks import take_definitions
from tests.unit.hugging_face_cases import t5_config
from titan_like.config import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.batch import Batch
from titan_like.models.layers.positions import RelativeBias, bucket_of
from titan_like.models.registry import build_model


@pytest.mark.parametrize("mlp", ["gated_gelu", "relu"])
def test_initial_activations_keep_their_size(mlp: str) -> None:
    model = build_model(t5_config(mlp=mlp, hidden_size=256, head_size=64, ffn_hidden_size=512), "t5").eval()
    model.init_weights(3)
    assert model.layers["0"].attention.qkv.weight.view(4, 3, 64, 256)[:, 0].std().item() == pytest.approx(
        (256 * 64) ** -0.5, rel=0.03
    )
    for name, inputs in (("layers.0.mlp.down", 512), ("layers.4.cross_attention.proj", 256), ("output", 256)):
        assert model.get_submodule(name).weight.std().item() == pytest.approx(inputs**-0.5, rel=0.03)
    logits = model(Batch(torch.arange(40)[None], encoder_len=30))[..., :101]
    assert 0.8 < logits.std() < 1.2  # so that the first loss is about that of a uniform guess


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_bias_are_added_up_in_more_than_half_precision(dtype: torch.dtype) -> None:
    seq_len = 64
    gradient = torch.randn(1, 4, seq_len, seq_len, generator=torch.Generator().manual_seed(0)).to(dtype)

    def gradient_of_table(dtype: torch.dtype, by_definition: bool = False) -> torch.Tensor:
        bias = RelativeBias(8, 20, 4, is_causal=False).to(dtype)
        if by_definition:
            take_definitions(bias, JobConfig.model_validate({}))
        bias(torch.arange(seq_len), seq_len).backward(gradient.to(dtype))
        return bias.table.weight.grad.double()

    # Each element is rounded once, after a sum of up to 2,000 numbers of about 1 in float32, which is off by less than
    # 2000 * 2^-24 times their partial sums of about 45.
    limits = {"rtol": torch.finfo(dtype).eps / 2, "atol": 2000 * 2.0**-24 * 45}
    torch.testing.assert_close(gradient_of_table(dtype), gradient_of_table(torch.float64), **limits)
    # So does the definition with which a layout is verified, so both may be compared in a half type.
    torch.testing.assert_close(gradient_of_table(dtype, True), gradient_of_table(torch.float64), **limits)


def test_the_least_distance_has_a_bucket_everywhere() -> None:
    distance = torch.arange(-300, 301)
    for buckets in (4, 5, 7, 32, 33):
        for is_causal in (False, True):
            found = bucket_of(distance, buckets, buckets // 2 + 1, is_causal)
            assert found.min() == 0 and found.max() < buckets


@pytest.mark.parametrize(("script", "family"), [("evaluate", "t5"), ("evaluate", "bert"), ("generate", "bert")])
def test_what_needs_the_next_token_is_refused_in_one_sentence(script: str, family: str) -> None:
    main = importlib.import_module(f"titan_like.commands.{script}").main
    with pytest.raises(ConfigError, match=f'model.family = "{family}": .* not the next token; choose a causal'):
        main([f"--model.family={family}", "--training.steps=1", *["--task=text=README.md"] * (script == "evaluate")])
