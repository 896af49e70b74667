"""Converting a checkpoint to a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titan_like.checkpoint.step_folders import write_durably, written_aside
from titan_like.checkpoint.weight_reader import CheckpointWeights
from titan_like.config.errors import ConfigError
from titan_like.hugging_face.folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from titan_like.hugging_face.origin import Origin, read_origin
from titan_like.hugging_face.safetensors_file import TensorSpec, plan_shards, write_safetensors
from titan_like.hugging_face.tokenizer import GENERATION_FILE, copy_files, copy_tokenizer_files, write_tokenizer
from titan_like.models.hugging_face import RefusedError, architecture_of, family_module, to_tensors

NO_TOKENIZER = "none"


def to_hugging_face(
    weights: CheckpointWeights, output: Path, dtype: torch.dtype | None, most_bytes: int, tokenizer: str | None
) -> list[Path]:
    """Write a folder, completely or not at all, with one weight in memory at a time. Returns the weight files.

    Args:
        weights: the checkpoint.
        output: the folder, which must not exist.
        dtype: type of the weights; None is the original type for an imported checkpoint and float32 for any other.
        most_bytes: maximum size of a weight file.
        tokenizer: a value of `data.tokenizer`, or "none"; None is the tokenizer of the run or of the imported folder.

    Raises:
        ConfigError: transformers cannot represent the model, or tokenizer files are missing.
        RunError: the checkpoint is damaged.
    """
    origin = read_origin(weights.path)
    module = family_module(weights.family)
    try:
        fields = module.to_fields(weights.model)
    except RefusedError as refusal:
        raise ConfigError("--checkpoint", str(weights.path), str(refusal)) from None
    specs = [
        TensorSpec(name, shape, dtype or origin.dtypes.get(name, torch.float32))
        for stored in module.stored_parameters(weights.model)
        for name, shape in stored.sources.items()
    ]
    shards = plan_shards(specs, most_bytes)
    names = shard_names(len(shards))
    with written_aside(output) as aside:
        tokens: dict[str, int] = {}
        if tokenizer is None and origin.fields:
            copy_tokenizer_files(weights.path, aside)
            copy_files(weights.path, aside, [GENERATION_FILE])
        elif tokenizer != NO_TOKENIZER:
            eod_id = write_tokenizer(tokenizer or weights.tokenizer, weights.model, aside)
            tokens = {"bos_token_id": eod_id, "eos_token_id": eod_id}
        config = _config(origin, fields, tokens, specs[0].dtype, architecture_of(weights.model, fields["model_type"]))
        write_durably(aside / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        values = _values(weights, specs)
        for name, shard in zip(names, shards, strict=True):
            write_safetensors(aside / name, shard, values)
        if len(shards) > 1:
            write_durably(aside / INDEX_FILE, _index(names, shards))
    return [output / name for name in names]


def shard_names(count: int) -> list[str]:
    """The names that transformers gives to ``count`` weight files."""
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _values(weights: CheckpointWeights, specs: list[TensorSpec]) -> Iterator[torch.Tensor]:
    """The tensors of all specs, in order."""
    remaining = iter(specs)
    for stored in family_module(weights.family).stored_parameters(weights.model):
        for name, tensor in to_tensors(stored, weights.read(stored.name)):
            spec = next(remaining)
            assert spec.name == name
            yield tensor.to(spec.dtype)


def _config(
    origin: Origin, fields: dict[str, Any], tokens: dict[str, int], dtype: torch.dtype, architecture: str
) -> dict[str, Any]:
    """config.json: fields that describe the model, and any others that an imported checkpoint came with."""
    others = {"bos_token_id": None, "eos_token_id": None, **origin.fields}
    for name in ("dtype", "rope_parameters"):  # newer names of fields that are written with their older names
        others.pop(name, None)
    return {
        **others,
        "architectures": [architecture],
        **fields,
        **tokens,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _index(names: list[str], shards: list[list[TensorSpec]]) -> str:
    weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
    total = sum(spec.num_bytes for shard in shards for spec in shard)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
