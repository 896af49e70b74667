"""Mixers of other packages: their names, initial weights and traces."""

import sys
from pathlib import Path

import pytest

from tests.e2e.scripts import install
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.model import Decoder
from titan_like.planner.trace import key as keys
from titan_like.planner.trace.key import TraceKey

PACKAGE = """
from torch import nn
from titan_like.models.decoder.mixers import Mixer

class Projection(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size, bias=False)

    def forward(self, x, context):
        return self.proj(x)

class Projecting(Mixer):
    def build(self, config, kind):
        return Projection(config.hidden_size)

class Other:
    pass
"""
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "max_seq_len": 64}
SMALL |= {"layer_pattern": ["own", "full"], "kinds": {"own": {"mixer": "projecting"}}}
LATENT = {"kv_lora_rank": 16, "nope_head_size": 16, "rope_head_size": 8, "value_head_size": 16}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an installed package, which is a single module."""
    entries = "projecting = own_mixers:Projecting\nother = own_mixers:Other\nfunction = own_mixers:Projection.forward"
    install(tmp_path, "own_mixers", "titan_like.mixers", entries)
    file = tmp_path / "own_mixers.py"
    file.write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_mixers", raising=False)
    return file


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("fields", [{}, LATENT], ids=["attention", "latent"])
def test_its_output_matrix_begins_as_those_of_attention_do(fields: dict) -> None:
    model = Decoder(DecoderConfig.model_validate(SMALL | fields))
    outputs = [name for name, _ in model.named_parameters() if name.endswith(".proj.weight")]
    assert len(outputs) == 2
    for name in outputs:
        assert model.initial_std(name, model.get_parameter(name)) == pytest.approx(0.02 / 2)
    assert model.initial_std("embedding.weight", model.embedding.weight) == 0.02


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["other", "function"])
def test_what_is_no_mixer_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'mixer = "{name}": own_mixers:.* is not a subclass of .*Mixer'):
        DecoderConfig.model_validate(SMALL | {"kinds": {"own": {"mixer": name}}})


def test_a_trace_depends_on_its_code(package: Path) -> None:
    key = TraceKey(DecoderConfig.model_validate(SMALL), 64, 0, 1, "bfloat16", "none")
    before = key.file_name
    assert key.file_name == before
    package.write_text(PACKAGE.replace("bias=False", "bias=True"))
    keys._code.cache_clear()
    assert key.file_name != before
