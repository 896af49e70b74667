"""Random models, and the same models computed by transformers, an independent implementation."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from titan_like.checkpoint.loader import model_tensors
from titan_like.checkpoint.step_folders import RunState, checkpoint_path
from titan_like.config.schema import JobConfig
from titan_like.models import hugging_face
from titan_like.models.bert.config import BertConfig
from titan_like.models.config import TransformerConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.moe.config import MoEConfig
from titan_like.models.registry import build_model
from titan_like.models.t5.config import T5Config

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}


# No norm_eps is the default of transformers: a lost field shows.
COMMON = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101, "max_seq_len": 64}


def gpt_config(**values: Any) -> GPTConfig:
    return GPTConfig.model_validate(COMMON | {"norm_eps": 1e-4} | values)


def llama_config(**values: Any) -> LlamaConfig:
    own = {"hidden_size": 64, "num_kv_heads": 2, "ffn_hidden_size": 88, "norm_eps": 1e-5, "rope_theta": 500.0}
    return LlamaConfig.model_validate(COMMON | own | values)


def bert_config(**values: Any) -> BertConfig:
    return BertConfig.model_validate(COMMON | {"norm_eps": 1e-6} | values)


def t5_config(**values: Any) -> T5Config:
    """Three layers in the encoder and two in the decoder, whose heads together are wider than the hidden states."""
    own = {"num_layers": 5, "num_decoder_layers": 2, "head_size": 16, "ffn_hidden_size": 72, "norm_eps": 1e-5}
    own |= {"num_position_buckets": 8, "max_position_distance": 20}
    return T5Config.model_validate(COMMON | own | values)


def moe_config(**values: Any) -> MoEConfig:
    own = {"hidden_size": 64, "num_kv_heads": 2, "norm_eps": 1e-4, "rope_theta": 500.0}
    own |= {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
    return MoEConfig.model_validate(COMMON | own | values)


MOE = {
    "mixtral": moe_config(head_size=24),
    "qwen3_moe": moe_config(qk_norm="head", head_size=32, num_dense_layers=1, ffn_hidden_size=40, renormalize=False),
    "olmoe": moe_config(qk_norm="all", num_kv_heads=4, renormalize=False, experts_per_token=3),
}


def family_of(config: TransformerConfig) -> str:
    return type(config).__module__.split(".")[-2]


def random_model(config, size=0.15, seed=11):
    """A float64 model whose every weight, biases and norms included, is random and large enough to matter."""
    model = build_model(config, family_of(config)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + size * noise)
    return model


def reference_model(config):
    """transformers' model of the config.json that we write for this shape, with weights of its own."""
    fields = {"bos_token_id": None, "eos_token_id": None} | hugging_face.family_of(config).to_fields(config)
    kind = getattr(transformers, hugging_face.architecture_of(config, fields["model_type"]))
    theirs = kind(kind.config_class.from_dict(fields))
    if isinstance(config, T5Config) and not config.tied_embeddings:  # transformers ties them in every new model
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    return theirs


def reference_state(model):
    """A model's weights by the names under which we export them; transformers knows all of them and no others."""
    parameters = list(hugging_face.family_of(model.config).stored_parameters(model.config))
    copies = {next(iter(stored.sources)): stored.copies for stored in parameters}
    state = {}
    for name, tensor in hugging_face.to_tensors(parameters, model.state_dict().__getitem__):
        state |= dict.fromkeys((name, *copies.get(name, ())), tensor)
    return state


def reference_of(model):
    """transformers' model with the weights of one of ours.

    Names and layouts are our own mapping's. transformers is what judges them: it refuses a missing or unknown name,
    and computes other logits from a wrong layout, since every weight of `random_model` is another number.
    """
    theirs = reference_model(model.config).to(next(model.parameters()).dtype)
    if isinstance(model.config, MoEConfig):  # in memory it stacks experts, which only its reader of files does
        with TemporaryDirectory() as folder:
            theirs.config.save_pretrained(folder)
            state = {name: tensor.clone() for name, tensor in reference_state(model).items()}
            save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            options = {"dtype": theirs.dtype, "experts_implementation": "eager"}  # others know no float64
            theirs, found = type(theirs).from_pretrained(folder, output_loading_info=True, **options)
            assert not any(found.values()), found
        return theirs.eval()
    theirs.load_state_dict(reference_state(model))
    return theirs.eval()


def save_checkpoint(folder: Path, model, /, step: int = 1, **config: Any) -> Path:
    """A model as the checkpoint of a run, as the trainer writes it."""
    path = checkpoint_path(folder, step)
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(model_tensors(model), storage_writer=FileSystemWriter(path), no_dist=True)
    tree = {"model": {"family": family_of(model.config)}} | config
    stored = JobConfig.model_validate(tree).model_dump(mode="json")
    state = RunState(step, 0, 0, 0, 1.0, 0, model.config.model_dump(mode="json"), stored)
    (path / "run.json").write_text(json.dumps(asdict(state)))
    return path
