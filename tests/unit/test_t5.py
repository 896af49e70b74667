"""What T5's encoder and decoder see, its initial weights and its sizes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.hugging_face_cases import random_model, t5_config
from titan_like.models.registry import build_model, flavors
from titan_like.models.t5.config import T5Config

ENCODER = 14  # positions


def test_decoders_see_all_of_the_encoder_and_their_own_past() -> None:
    model = random_model(t5_config()).eval()
    tokens = torch.arange(24)[None]

    def changes(position: int) -> torch.Tensor:
        """Which of the decoder's ten logits change with the token at a position."""
        other = tokens.clone()
        other[0, position] = 77
        found = (model(tokens, encoder_len=ENCODER) - model(other, encoder_len=ENCODER))[..., :101]
        return found.abs().amax(-1)[0] > 1e-9

    assert changes(0).all() and changes(ENCODER - 1).all()
    for position in range(10):
        assert changes(ENCODER + position).tolist() == [later >= position for later in range(10)]


def test_logits_do_not_depend_on_the_length_of_what_is_not_seen() -> None:
    model = random_model(t5_config()).eval()
    tokens = torch.arange(40)[None] % 101
    whole, part = (model(tokens[:, :length], encoder_len=ENCODER) for length in (40, 20))
    torch.testing.assert_close(whole[:, :6, :101], part[..., :101])


@pytest.mark.parametrize("mlp", ["gated_gelu", "relu"])
def test_initial_activations_keep_their_size(mlp: str) -> None:
    model = build_model(t5_config(mlp=mlp, hidden_size=256, head_size=64, ffn_hidden_size=512), "t5").eval()
    model.init_weights(3)
    assert model.layers["0"].attention.qkv.weight.view(4, 3, 64, 256)[:, 0].std().item() == pytest.approx(
        (256 * 64) ** -0.5, rel=0.03
    )
    for name, inputs in (("layers.0.mlp.down", 512), ("layers.4.cross_attention.proj", 256), ("output", 256)):
        assert model.get_submodule(name).weight.std().item() == pytest.approx(inputs**-0.5, rel=0.03)
    logits = model(torch.arange(40)[None], encoder_len=30)[..., :101]
    assert 0.8 < logits.std() < 1.2  # so that the first loss is about that of a uniform guess


ORIGINAL = {"60m": 60.5, "220m": 222.9, "770m": 737.7, "3b": 2851.6, "11b": 11307.3}
V1_1 = {"v1.1_77m": 77.0, "v1.1_250m": 247.6, "v1.1_780m": 783.2, "v1.1_3b": 2849.8, "v1.1_11b": 11135.3}


@pytest.mark.parametrize(("name", "millions"), [*ORIGINAL.items(), *V1_1.items()])
def test_flavors_have_the_sizes_of_the_released_models(name: str, millions: float) -> None:
    config = T5Config.model_validate(flavors("t5")[name])
    assert config.num_parameters() / 1e6 == pytest.approx(millions, abs=0.05)
    assert config.num_decoder_layers == config.num_encoder_layers
