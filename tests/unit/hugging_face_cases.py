"""Random models, and the same models built by transformers: an independent description of its names and layouts."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from titan_like.checkpoint.loader import model_tensors
from titan_like.checkpoint.step_folders import RunState, checkpoint_path
from titan_like.config.schema import JobConfig
from titan_like.models.bert.config import BertConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.registry import build_model
from titan_like.models.t5.config import T5Config

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}


def gpt_config(**values: Any) -> GPTConfig:
    fields = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101, "max_seq_len": 64}
    return GPTConfig.model_validate(fields | values)


def llama_config(**values: Any) -> LlamaConfig:
    fields = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 88,
        "vocab_size": 101,
        "max_seq_len": 64,
        "norm_eps": 1e-5,
        "rope_theta": 500.0,
    }
    return LlamaConfig.model_validate(fields | values)


def bert_config(**values: Any) -> BertConfig:
    fields = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 101,
        "max_seq_len": 64,
        "norm_eps": 1e-12,
    }
    return BertConfig.model_validate(fields | values)


def t5_config(**values: Any) -> T5Config:
    """Three layers in the encoder and two in the decoder, whose heads together are wider than the hidden states."""
    fields = {
        "num_layers": 5,
        "num_decoder_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "head_size": 16,
        "ffn_hidden_size": 72,
        "vocab_size": 101,
        "max_seq_len": 64,
        "num_position_buckets": 8,
        "max_position_distance": 20,
    }
    return T5Config.model_validate(fields | values)


def family_of(config: GPTConfig | LlamaConfig | BertConfig | T5Config) -> str:
    return {GPTConfig: "gpt", LlamaConfig: "llama", BertConfig: "bert", T5Config: "t5"}[type(config)]


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


def split_qkv(fused, config):
    """Rows [kv_heads, queries per kv head + 2, head_dim] → query, key and value rows."""
    group = config.num_attention_heads // config.num_kv_heads
    rows = fused.view(config.num_kv_heads, group + 2, config.head_dim, *fused.shape[1:])
    return rows[:, :group].flatten(0, 2), rows[:, group].flatten(0, 1), rows[:, group + 1].flatten(0, 1)


def gpt2_state(ours, config):
    """GPT-2 keeps matrices as [in, out] and queries, keys and values as consecutive blocks."""
    vocab = config.vocab_size
    state = {
        "transformer.wte.weight": ours["embedding.weight"][:vocab],
        "transformer.wpe.weight": ours["position_embedding.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
        "lm_head.weight": ours["output.weight" if "output.weight" in ours else "embedding.weight"][:vocab],
    }
    for i in range(config.num_layers):
        layer, theirs = f"layers.{i}", f"transformer.h.{i}"
        for part in ("weight", "bias"):
            state[f"{theirs}.ln_1.{part}"] = ours[f"{layer}.attention_norm.{part}"]
            state[f"{theirs}.ln_2.{part}"] = ours[f"{layer}.mlp_norm.{part}"]
            qkv = torch.cat(split_qkv(ours[f"{layer}.attention.qkv.{part}"], config))
            state[f"{theirs}.attn.c_attn.{part}"] = qkv.t() if part == "weight" else qkv
            for name, module in (("attn.c_proj", "attention.proj"), ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2")):
                value = ours[f"{layer}.{module}.{part}"]
                state[f"{theirs}.{name}.{part}"] = value.t() if part == "weight" else value
    return state


def llama_state(ours, config):
    vocab = config.vocab_size
    state = {
        "model.embed_tokens.weight": ours["embedding.weight"][:vocab],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["embedding.weight" if config.tied_embeddings else "output.weight"][:vocab],
    }
    for i in range(config.num_layers):
        layer, theirs = f"layers.{i}", f"model.layers.{i}"
        query, key, value = split_qkv(ours[f"{layer}.attention.qkv.weight"], config)
        state |= {
            f"{theirs}.self_attn.q_proj.weight": query,
            f"{theirs}.self_attn.k_proj.weight": key,
            f"{theirs}.self_attn.v_proj.weight": value,
            f"{theirs}.self_attn.o_proj.weight": ours[f"{layer}.attention.proj.weight"],
            f"{theirs}.mlp.gate_proj.weight": ours[f"{layer}.mlp.gate.weight"],
            f"{theirs}.mlp.up_proj.weight": ours[f"{layer}.mlp.up.weight"],
            f"{theirs}.mlp.down_proj.weight": ours[f"{layer}.mlp.down.weight"],
            f"{theirs}.input_layernorm.weight": ours[f"{layer}.attention_norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": ours[f"{layer}.mlp_norm.weight"],
        }
    return state


def bert_state(ours, config):
    """BERT's queries, keys and values are tensors of their own; its norms follow what MegatronBert's stand before."""
    vocab, is_post, head = config.vocab_size, config.norm_placement == "post", config.sentence_head
    state = {
        "bert.embeddings.word_embeddings.weight": ours["embedding.weight"][:vocab],
        "bert.embeddings.position_embeddings.weight": ours["position_embedding.weight"],
        "bert.embeddings.token_type_embeddings.weight": ours["token_type_embedding.weight"],
    }
    if head != "choice":
        decoder = ours["embedding.weight" if config.tied_embeddings else "output.weight"][:vocab]
        state |= {"cls.predictions.decoder.weight": decoder, "cls.predictions.bias": ours["output_bias.bias"][:vocab]}
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    for part in ("weight", "bias"):
        outer = ("bert.embeddings.LayerNorm", "embedding_norm") if is_post else ("bert.encoder.ln", "norm")
        state[f"{outer[0]}.{part}"] = ours[f"{outer[1]}.{part}"]
        if head != "choice":
            state[f"cls.predictions.transform.dense.{part}"] = ours[f"transform.dense.{part}"]
            state[f"cls.predictions.transform.LayerNorm.{part}"] = ours[f"transform.norm.{part}"]
        if head != "none":
            state[f"bert.pooler.dense.{part}"] = ours[f"pooler.{part}"]
            theirs = {"pair": "cls.seq_relationship", "choice": "classifier"}[head]
            state[f"{theirs}.{part}"] = ours[f"{head}.{part}"]
        for i in range(config.num_layers):
            layer, theirs = f"layers.{i}", f"bert.encoder.layer.{i}"
            qkv = split_qkv(ours[f"{layer}.attention.qkv.{part}"], config)
            for name, value in zip(("query", "key", "value"), qkv, strict=True):
                state[f"{theirs}.attention.self.{name}.{part}"] = value
            for name, module in (
                ("attention.output.dense", "attention.proj"),
                ("intermediate.dense", "mlp.fc1"),
                ("output.dense", "mlp.fc2"),
                ("attention.output.LayerNorm" if is_post else "attention.ln", "attention_norm"),
                ("output.LayerNorm" if is_post else "ln", "mlp_norm"),
            ):
                state[f"{theirs}.{name}.{part}"] = ours[f"{layer}.{module}.{part}"]
    return state


def t5_state(ours, config):
    """T5 numbers the layers of each stack; keys and values of cross attention are tensors of their own."""
    vocab, first = config.vocab_size, config.num_layers - config.num_decoder_layers
    state = {
        "shared.weight": ours["embedding.weight"][:vocab],
        "encoder.embed_tokens.weight": ours["embedding.weight"][:vocab],
        "decoder.embed_tokens.weight": ours["embedding.weight"][:vocab],
        "lm_head.weight": ours["embedding.weight" if config.tied_embeddings else "output.weight"][:vocab],
        "encoder.final_layer_norm.weight": ours[f"layers.{first - 1}.final_norm.weight"],
        "decoder.final_layer_norm.weight": ours["norm.weight"],
    }
    for stack in ("encoder", "decoder"):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        state[bias] = ours[f"{stack}_bias.table.weight"]
    for i in range(config.num_layers):
        layer, mlp = f"layers.{i}", 1 if i < first else 2
        theirs = f"encoder.block.{i}.layer" if i < first else f"decoder.block.{i - first}.layer"
        for part, value in zip("qkv", split_qkv(ours[f"{layer}.attention.qkv.weight"], config), strict=True):
            state[f"{theirs}.0.SelfAttention.{part}.weight"] = value
        state[f"{theirs}.0.SelfAttention.o.weight"] = ours[f"{layer}.attention.proj.weight"]
        state[f"{theirs}.0.layer_norm.weight"] = ours[f"{layer}.attention_norm.weight"]
        state[f"{theirs}.{mlp}.layer_norm.weight"] = ours[f"{layer}.mlp_norm.weight"]
        names = {"up": "wi"} if config.mlp == "relu" else {"gate": "wi_0", "up": "wi_1"}
        for name, other in (names | {"down": "wo"}).items():
            state[f"{theirs}.{mlp}.DenseReluDense.{other}.weight"] = ours[f"{layer}.mlp.{name}.weight"]
        if i >= first:
            kv = ours[f"{layer}.cross_attention.kv.weight"].view(config.num_kv_heads, 2, config.head_dim, -1)
            state |= {
                f"{theirs}.1.layer_norm.weight": ours[f"{layer}.cross_norm.weight"],
                f"{theirs}.1.EncDecAttention.q.weight": ours[f"{layer}.cross_attention.q.weight"],
                f"{theirs}.1.EncDecAttention.k.weight": kv[:, 0].flatten(0, 1),
                f"{theirs}.1.EncDecAttention.v.weight": kv[:, 1].flatten(0, 1),
                f"{theirs}.1.EncDecAttention.o.weight": ours[f"{layer}.cross_attention.proj.weight"],
            }
    return state


def reference_model(config):
    """transformers' model of the same shape, with weights of its own."""
    import transformers

    if isinstance(config, T5Config):
        theirs = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=config.vocab_size,
                d_model=config.hidden_size,
                d_kv=config.head_dim,
                d_ff=config.ffn_hidden_size,
                num_layers=config.num_layers - config.num_decoder_layers,
                num_decoder_layers=config.num_decoder_layers,
                num_heads=config.num_attention_heads,
                relative_attention_num_buckets=config.num_position_buckets,
                relative_attention_max_distance=config.max_position_distance,
                layer_norm_epsilon=config.norm_eps,
                dropout_rate=config.dropout,
                feed_forward_proj="relu" if config.mlp == "relu" else "gated-gelu",
                tie_word_embeddings=config.tied_embeddings,
                decoder_start_token_id=0,
            )
        )
        if not config.tied_embeddings:  # transformers ties them in every new model
            theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
        return theirs
    if isinstance(config, BertConfig):
        is_post = config.norm_placement == "post"
        shape = transformers.BertConfig if is_post else transformers.MegatronBertConfig
        task = {"none": "ForMaskedLM", "pair": "ForPreTraining", "choice": "ForMultipleChoice"}[config.sentence_head]
        return getattr(transformers, f"{'Bert' if is_post else 'MegatronBert'}{task}")(
            shape(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_attention_heads,
                intermediate_size=config.ffn_hidden_size,
                max_position_embeddings=config.max_seq_len,
                type_vocab_size=config.num_token_types,
                layer_norm_eps=config.norm_eps,
                tie_word_embeddings=config.tied_embeddings,
            )
        )
    if isinstance(config, GPTConfig):
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.max_seq_len,
                n_embd=config.hidden_size,
                n_inner=config.ffn_hidden_size,
                n_layer=config.num_layers,
                n_head=config.num_attention_heads,
                layer_norm_epsilon=config.norm_eps,
                tie_word_embeddings=config.tied_embeddings,
                bos_token_id=0,
                eos_token_id=0,
                attn_implementation="sdpa",
            )
        )
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump()
        original = scaling.pop("original_max_seq_len")
        rope |= {**scaling, "rope_type": "llama3", "original_max_position_embeddings": original}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="sdpa",
        )
    )


def reference_state(model):
    """A model's weights by transformers' names."""
    to_state = {"gpt": gpt2_state, "llama": llama_state, "bert": bert_state, "t5": t5_state}
    return to_state[family_of(model.config)](model.state_dict(), model.config)


def reference_of(model):
    """transformers' model with the weights of one of ours."""
    theirs = reference_model(model.config).to(next(model.parameters()).dtype)
    theirs.load_state_dict(reference_state(model))
    return theirs.eval()


def save_checkpoint(folder: Path, model, step: int = 1, **config: Any) -> Path:
    """A model as the checkpoint of a run, as the trainer writes it."""
    path = checkpoint_path(folder, step)
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(model_tensors(model), storage_writer=FileSystemWriter(path), no_dist=True)
    tree = {"model": {"family": family_of(model.config)}} | config
    state = RunState(
        step=step,
        consumed_samples=0,
        consumed_tokens=0,
        skipped_steps=0,
        loss_scale=1.0,
        loss_scale_good_steps=0,
        model=model.config.model_dump(mode="json"),
        config=JobConfig.model_validate(tree).model_dump(mode="json"),
    )
    (path / "run.json").write_text(json.dumps(asdict(state)))
    return path
