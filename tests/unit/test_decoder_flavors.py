"""Flavors of decoders have the parameters of the models that they are called after."""

import pytest
import torch
import transformers

from titan_like.config.schema import Model
from titan_like.models import hugging_face
from titan_like.models.registry import flavors, model_config

# As transformers' classes have them, the vocabulary not padded.
PARAMETERS = {
    "mistral_7b_v0.1": 7_241_732_096, "mistral_7b": 7_248_023_552, "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_7b": 7_615_616_512, "qwen3_0.6b": 596_049_920, "qwen3_8b": 8_190_735_360, "qwen3_32b": 32_762_123_264,
    "olmo2_7b": 7_298_617_344, "smollm3_3b": 3_075_098_624, "gemma2_9b": 9_241_705_984, "gemma3_4b": 3_880_263_168,
    "gemma3_27b": 27_009_346_304, "phi3_mini": 3_821_079_552, "pythia_1.4b": 1_414_647_808,
    "pythia_12b": 11_846_072_320, "gpt_oss_20b": 20_914_757_184, "gpt_oss_120b": 116_829_156_672,
    "deepseek_v3": 671_026_404_352,
}  # fmt: skip
CLASSES = {
    "mistral": "Mistral", "qwen2.5": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2", "smollm3": "SmolLM3",
    "gemma2": "Gemma2", "gemma3": "Gemma3", "pythia": "GPTNeoX", "gpt": "GptOss", "deepseek": "DeepseekV3",
    "phi3": "Mistral",  # Phi-3 is a Mistral whose matrices are stored in other tensors
    "llama2": "Llama", "llama3.1": "Llama", "llama3.2": "Llama", "qwen3 moe": "Qwen3Moe", "mixtral": "Mixtral",
    "olmoe": "Olmoe",
}  # fmt: skip
OTHERS = [("llama", name) for name in flavors("llama")] + [("moe", name) for name in flavors("moe")]
OTHERS = [(family, name) for family, name in OTHERS if name not in ("debug", "deepseek_moe_16b")]


def test_all_flavors_are_named() -> None:
    assert set(PARAMETERS) == {name for name in flavors("decoder") if not name.startswith("debug")}


@pytest.mark.parametrize(("family", "name"), [*(("decoder", name) for name in PARAMETERS), *OTHERS])
def test_parameters_are_those_of_transformers(family: str, name: str) -> None:
    config = model_config(Model(family=family, flavor=name))
    found = hugging_face.family_of(config)
    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | found.to_fields(config)
    kind = getattr(transformers, hugging_face.architecture_of(config, fields["model_type"]))
    stem = name.partition("_")[0]
    wanted = CLASSES["qwen3 moe" if family == "moe" and stem == "qwen3" else stem]
    wanted = "Mistral" if name == "mistral_7b_v0.1" else "Llama" if name == "mistral_7b" else wanted
    assert kind.__name__ == f"{wanted}ForCausalLM"
    with torch.device("meta"):
        theirs = kind(kind.config_class.from_dict(fields))
    assert (
        config.num_parameters(padded=False) == theirs.num_parameters() == PARAMETERS.get(name, theirs.num_parameters())
    )
