"""Flavors have the parameters of the models that they are called after, and those of their classes in transformers."""

import pytest
import torch
import transformers

from titan_like.config.schema import Model
from titan_like.models import hugging_face
from titan_like.models.registry import flavors, model_config

BILLIONS = {  # of parameters, with the digits that are published; test_flops.py has those of arXiv 2104.04473, Table 1
    "gpt": {
        "gpt2_124m": "0.124439808", "gpt2_355m": "0.354823168", "gpt2_774m": "0.774030080", "gpt2_1558m": "1.557611200",
        "megatron_eval_355m": "0.355", "megatron_eval_2.5b": "2.5", "megatron_eval_8.3b": "8.3",
        "gpt3_125m": "0.125", "gpt3_760m": "0.76",
        **{f"megatron_{size}b": size for size in ("1.2", "2.5", "4.2", "8.3")},
        **{f"gpt3_{size}b": size for size in ("1.3", "2.7", "6.7", "13", "175")},
    },
    "bert": {"110m": "0.109514298"},
    "t5": {
        "60m": "0.0605", "220m": "0.2229", "770m": "0.7377", "3b": "2.8516", "11b": "11.3073", "v1.1_77m": "0.0770",
        "v1.1_250m": "0.2476", "v1.1_780m": "0.7832", "v1.1_3b": "2.8498", "v1.1_11b": "11.1353",
    },
    "llama": {
        "llama2_7b": "6.738415616", "llama2_13b": "13.015864320", "llama2_70b": "68.976648192",
        "llama3.1_8b": "8.030261248", "llama3.1_70b": "70.553706496", "llama3.1_405b": "405.853388800",
        "llama3.2_1b": "1.235814400", "llama3.2_3b": "3.212749824",
    },
    "moe": {
        "mixtral_8x7b": "46.7", "mixtral_8x22b": "140.6", "qwen3_30b_a3b": "30.5", "qwen3_235b_a22b": "235.1",
        "olmoe_1b_7b": "6.9", "deepseek_moe_16b": "16.4",
    },
    "decoder": {
        "mistral_7b_v0.1": "7.241732096", "mistral_7b": "7.248023552", "qwen2.5_0.5b": "0.494032768",
        "qwen2.5_7b": "7.615616512", "qwen3_0.6b": "0.596049920", "qwen3_8b": "8.190735360",
        "qwen3_32b": "32.762123264", "olmo2_7b": "7.298617344", "smollm3_3b": "3.075098624",
        "gemma2_9b": "9.241705984", "gemma3_4b": "3.880263168", "gemma3_27b": "27.009346304",
        "phi3_mini": "3.821079552", "pythia_1.4b": "1.414647808", "pythia_12b": "11.846072320",
        "gpt_oss_20b": "20.914757184", "gpt_oss_120b": "116.829156672", "deepseek_v3": "671.026404352",
        "qwen3_next_80b_a3b": "80", "nemotron_h_8b": "8.1", "granite4_h_small": "32", "glm4.5_air": "107",
        "minimax_m2": "229", "kimi_linear_48b_a3b": "49", "olmo3_7b": "7.298011136", "olmo3_32b": "32.233522176",
    },
}  # fmt: skip
CLASSES = {
    "mistral": "Mistral", "qwen2.5": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2", "smollm3": "SmolLM3",
    "gemma2": "Gemma2", "gemma3": "Gemma3", "pythia": "GPTNeoX", "gpt": "GptOss", "deepseek": "DeepseekV3",
    "phi3": "Mistral",  # Phi-3 is a Mistral whose matrices are stored in other tensors
    "llama2": "Llama", "llama3.1": "Llama", "llama3.2": "Llama", "qwen3 moe": "Qwen3Moe", "mixtral": "Mixtral",
    "olmoe": "Olmoe", "nemotron": "NemotronH", "granite4": "GraniteMoeHybrid", "glm4.5": "Glm4Moe",
    "minimax": "MiniMaxM2", "kimi": "KimiLinear", "olmo3": "Olmo3",
}  # fmt: skip
IN_TRANSFORMERS = [(f, name) for f in ("llama", "moe", "decoder") for name in BILLIONS[f] if name != "deepseek_moe_16b"]


@pytest.mark.parametrize("family", ["t5", "llama", "moe", "decoder"])
def test_all_flavors_are_named(family: str) -> None:
    assert set(BILLIONS[family]) == {name for name in flavors(family) if not name.startswith("debug")}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in BILLIONS for name in BILLIONS[family]])
def test_parameters_round_to_the_published_number(family: str, name: str) -> None:
    printed = BILLIONS[family][name]
    billions = model_config(Model(family=family, flavor=name)).num_parameters(padded=False) / 1e9
    assert f"{billions:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(("family", "name"), IN_TRANSFORMERS)
def test_parameters_are_those_of_transformers(family: str, name: str) -> None:
    config = model_config(Model(family=family, flavor=name))
    found = hugging_face.family_of(config)
    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | found.to_fields(config)
    kind = getattr(transformers, hugging_face.architecture_of(config, fields["model_type"]))
    stem = name.partition("_")[0]
    wanted = CLASSES["qwen3 moe" if family == "moe" and stem == "qwen3" else stem]
    wanted = "Mistral" if name == "mistral_7b_v0.1" else "Llama" if name == "mistral_7b" else wanted
    wanted = "Qwen3Next" if name == "qwen3_next_80b_a3b" else wanted
    assert kind.__name__ == f"{wanted}ForCausalLM"
    with torch.device("meta"):
        theirs = kind(kind.config_class.from_dict(fields))
    assert config.num_parameters(padded=False) == theirs.num_parameters()
