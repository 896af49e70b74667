"""Published config.json files are read as transformers reads them, or refused once with all that is wrong."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers

from tests.unit.published_configs import READ, REFUSED
from titan_like.config.errors import ConfigError
from titan_like.hugging_face.folder import read_model
from titan_like.models.registry import build_model


@pytest.mark.parametrize("name", READ)
def test_a_published_shape_has_as_many_parameters_as_in_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fields, ignored = READ[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    _, family, model = read_model(tmp_path, "--input")
    said = capsys.readouterr().err
    assert said.count("\n") == bool(ignored), said
    assert all(f"{path} = " in said for path in ignored.split())
    text = deepcopy(fields.get("text_config", fields)) | {
        "model_type": fields["model_type"].replace("kimi_k2", "deepseek_v3")
    }
    text.pop("quantization_config", None)
    if "text_config" in fields:
        text["model_type"] = fields["text_config"]["model_type"]
    for key in ("architectures", "auto_map"):
        text.pop(key, None)
    with torch.device("meta"):
        ours = build_model(model, family)
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**text))
    tables = 1 if model.tied_embeddings else 2
    per_token = model.hidden_size * tables + getattr(model, "output_bias", False)
    padding = (model.padded_vocab_size - model.vocab_size) * per_token
    assert sum(parameter.numel() for parameter in ours.parameters()) - padding == theirs.num_parameters(
        only_trainable=True
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_config_is_said_at_once(name: str, tmp_path: Path) -> None:
    fields, wrong = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as error:
        read_model(tmp_path, "--input")
    reasons = str(error.value).partition("config.json has ")[2].split("; it has ")
    assert sorted(reason.partition(" = ")[0] for reason in reasons) == sorted(wrong.split())
    assert "\n" not in str(error.value)
