"""Converting a Hugging Face folder to a checkpoint that has only weights, and a checkpoint to such a folder."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from titan_like.checkpoint.loader import CheckpointWeights, first_failure
from titan_like.checkpoint.saver import DurableFiles
from titan_like.checkpoint.step_folders import RunState, checkpoint_path, write_durably, write_run_state, written_aside
from titan_like.config.errors import ConfigError, RunError
from titan_like.config.paths import to_toml
from titan_like.config.schema import DEFAULT_TOKENS, Data, JobConfig, Model
from titan_like.data.special_tokens import (
    GENERATION_FILE,
    ORIGIN_FILE,
    tokenizer_names,
)
from titan_like.data.tokenizer import build_tokenizer, tokenizer_in
from titan_like.hugging_face.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    HuggingFaceFolder,
    TensorSlices,
)
from titan_like.hugging_face.origin import Origin, read_origin
from titan_like.hugging_face.tokenizer import copy_files, name_class, write_tokenizer
from titan_like.models.hugging_face import RefusedError, Stored, architecture_of, family_module, fill_part, to_tensors

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(specs: list[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    """Divide tensors, in order, into files of at most ``most_bytes``; a larger tensor gets its own file."""
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


def write_safetensors(path: Path, specs: list[TensorSpec], values: Iterator[torch.Tensor]) -> None:
    """Write a file and flush it to disk. ``values`` yields one tensor for each spec, in order.

    The format (github.com/huggingface/safetensors): the length of the header (8 bytes, little-endian), the header
    (JSON), then the tensors without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):  # widest types first, so every tensor is aligned
        offsets[spec.name] = end
        end += spec.num_bytes
        place = [offsets[spec.name], end]
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            value = next(values)
            assert tuple(value.shape) == spec.shape and value.dtype == spec.dtype, spec.name
            file.seek(8 + len(text) + offsets[spec.name])
            file.write(value.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


FLAVOR = "imported"  # name of the shape in run.json and in the TOML lines
_MOST_CHUNK_BYTES = 256 << 20


def from_hugging_face(source: HuggingFaceFolder, output: Path, most_chunk_bytes: int = _MOST_CHUNK_BYTES) -> Path:
    """Write the checkpoint ``output``/step-0, completely or not at all; returns its path.

    Weights become float32, in pieces of whole rows of at most ``most_chunk_bytes``.

    Raises:
        RunError: a file of the folder is damaged, or the checkpoint cannot be written.
    """
    final = checkpoint_path(output, 0)
    with written_aside(final) as aside:
        copy_files(source.path, aside, (*tokenizer_names(source.path), GENERATION_FILE))
        planner = _Planner(source, most_chunk_bytes)
        # One file per piece, because torch keeps all pieces of a file in memory until it is written.
        writer = FileSystemWriter(aside, single_file_per_rank=False, sync_files=False)
        writer.fs = DurableFiles(writer.save_id)
        try:
            with warnings.catch_warnings():
                # A single process is intended.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise RunError(f"{source.path} cannot be converted ({first_failure(error)})") from error
        finally:
            planner.close()
        dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        write_durably(aside / ORIGIN_FILE, json.dumps({"config": source.fields, "dtypes": dtypes}, indent=2))
        write_run_state(aside, _run_state(source, final))
    return final


def settings_to_train(source: HuggingFaceFolder, path: Path) -> str:
    """TOML lines for a run that starts from a converted checkpoint."""
    shape, tokenizer = source.model.model_dump(mode="json", exclude_none=True), tokenizer_in(source.path, path)
    missing = [
        "The folder has no tokenizer.json. Set data.tokenizer to the model's: without it, every byte is a token."
    ]
    tree: dict[str, dict[str, Any]] = {
        "model": {"family": source.family, "flavor": FLAVOR, "flavors": {FLAVOR: shape}},
        "data": {} if tokenizer is None else {"tokenizer": tokenizer},
        "checkpoint": {"initial_load_path": str(path)},
    }
    return to_toml(tree, missing if tokenizer is None else []).strip()


def _run_state(source: HuggingFaceFolder, final: Path) -> RunState:
    shape = source.model.model_dump(mode="json")
    model = Model.model_validate({"family": source.family, "flavor": FLAVOR, "flavors": {FLAVOR: shape}})
    tokenizer = tokenizer_in(source.path, final)
    data = Data() if tokenizer is None else Data(tokenizer=tokenizer)
    config = JobConfig(model=model, data=data).model_dump(mode="json")
    versions = {name: version(name) for name in ("torch", "safetensors")}
    return RunState(0, 0, 0, 0, 1.0, 0, shape, config, versions=versions)


class _Planner(DefaultSavePlanner):
    """Plans a save of tensors that are not in memory: each piece is read just before it is written."""

    def __init__(self, source: HuggingFaceFolder, most_chunk_bytes: int) -> None:
        super().__init__()
        self._parameters = {f"model.{stored.name}": stored for stored in source.stored_parameters(source.model)}
        self._read = TensorSlices(source.tensors)
        self._most_chunk_bytes = most_chunk_bytes

    def create_local_plan(self) -> SavePlan:
        """A plan with all pieces, in the order of the parameters."""
        items = [item for name, stored in self._parameters.items() for item in self._items(name, stored)]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read one piece: float32, of the chunk's shape."""
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        piece = torch.empty(chunk.sizes, dtype=torch.float32)
        fill_part(piece, tuple(chunk.offsets), self._parameters[write_item.index.fqn], self._read)
        return piece

    def close(self) -> None:
        """Close the open file."""
        self._read.close()

    def _items(self, name: str, stored: Stored) -> Iterator[WriteItem]:
        shape = torch.Size(stored.shape)
        at_once = max(1, self._most_chunk_bytes // (4 * shape[1:].numel()))  # rows
        for first in range(0, shape[0], at_once):
            offsets = torch.Size((first, *(0 for _ in shape[1:])))
            sizes = torch.Size((min(at_once, shape[0] - first), *shape[1:]))
            chunk = ChunkStorageMetadata(offsets, sizes)
            data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), shape)
            yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


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
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]  # as transformers' are
    names = names if count > 1 else [WEIGHTS_FILE]
    with written_aside(output) as aside:
        tokens = _write_tokens(weights, origin, tokenizer, aside)
        config = _config(origin, fields, tokens, specs[0].dtype, architecture_of(weights.model, fields["model_type"]))
        write_durably(aside / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        values = _values(weights, specs)
        for name, shard in zip(names, shards, strict=True):
            write_safetensors(aside / name, shard, values)
        if count > 1:
            write_durably(aside / INDEX_FILE, _index(names, shards))
    return [output / name for name in names]


def _write_tokens(weights: CheckpointWeights, origin: Origin, tokenizer: str | None, folder: Path) -> dict[str, Any]:
    """Write the tokenizer and generation_config.json; returns what config.json says of special tokens in their place.

    What a source says of special tokens stays, except where the run's [data] says something else.
    """
    options = weights.data.token_options
    if tokenizer == NO_TOKENIZER:
        return {}
    stored, is_trained = tokenizer_in(weights.path), weights.run.step > 0
    if tokenizer is not None or not origin.fields or (is_trained and weights.data.learns_bytes):
        return write_tokenizer(tokenizer or stored or weights.data.tokenizer, options, weights.model, folder)
    copy_files(weights.path, folder, (*tokenizer_names(weights.path), GENERATION_FILE))
    if stored is not None and options != DEFAULT_TOKENS:
        write_tokenizer(stored, options, weights.model, folder)
    if stored is not None and is_trained:
        name_class(build_tokenizer(stored, options=options), folder)
    return {}


def _values(weights: CheckpointWeights, specs: list[TensorSpec]) -> Iterator[torch.Tensor]:
    """The tensors of all specs, in order."""
    remaining = iter(specs)
    for stored in family_module(weights.family).stored_parameters(weights.model):
        for name, tensor in to_tensors(stored, weights.read(stored.name)):
            spec = next(remaining)
            assert spec.name == name
            yield tensor.to(spec.dtype)


def _config(
    origin: Origin, fields: dict[str, Any], tokens: dict[str, Any], dtype: torch.dtype, architecture: str
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
