"""Converting a Hugging Face folder to a checkpoint that has only weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from titan_like.checkpoint.loader import first_failure
from titan_like.checkpoint.saver import DurableFiles
from titan_like.checkpoint.step_folders import RunState, checkpoint_path, write_run_state, written_aside
from titan_like.config.errors import RunError
from titan_like.config.schema import Data, JobConfig, Model
from titan_like.hugging_face.folder import HuggingFaceFolder, TensorSlices
from titan_like.hugging_face.origin import write_origin
from titan_like.hugging_face.tokenizer import GENERATION_FILE, TOKENIZER_FILE, copy_files, copy_tokenizer_files
from titan_like.models.hugging_face import Stored, fill_part

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
        copy_tokenizer_files(source.path, aside)
        copy_files(source.path, aside, [GENERATION_FILE])
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
        write_origin(source, aside)
        write_run_state(aside, _run_state(source, final))
    return final


def settings_to_train(source: HuggingFaceFolder, path: Path) -> str:
    """TOML lines for a run that starts from a converted checkpoint."""
    shape = source.model.model_dump(mode="json", exclude_none=True)
    lines = ["[model]", f'family = "{source.family}"', f'flavor = "{FLAVOR}"', "", f"[model.flavors.{FLAVOR}]"]
    lines += [f"{name} = {_toml(value)}" for name, value in shape.items()]
    tokenizer = _tokenizer_of(source.path, path)
    missing = "# The folder has no tokenizer.json. Set tokenizer to the model's: without it, every byte is a token."
    lines += ["", "[data]", missing if tokenizer is None else f"tokenizer = {_toml(tokenizer)}"]
    lines += ["", "[checkpoint]", f"initial_load_path = {_toml(str(path))}"]
    return "\n".join(lines)


def _tokenizer_of(source: Path, copied: Path) -> str | None:
    """The value of `data.tokenizer` for the tokenizer files in ``source``, which are copied to ``copied``."""
    if (source / TOKENIZER_FILE).is_file():
        return str(copied / TOKENIZER_FILE)
    files = [copied / name for name in ("vocab.json", "merges.txt") if (source / name).is_file()]
    return f"gpt2:{files[0]},{files[1]}" if len(files) == 2 else None


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # JSON and TOML write numbers, booleans and strings alike


def _run_state(source: HuggingFaceFolder, final: Path) -> RunState:
    shape = source.model.model_dump(mode="json")
    model = Model.model_validate({"family": source.family, "flavor": FLAVOR, "flavors": {FLAVOR: shape}})
    tokenizer = _tokenizer_of(source.path, final)
    data = Data() if tokenizer is None else Data(tokenizer=tokenizer)
    return RunState(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        skipped_steps=0,
        loss_scale=1.0,
        loss_scale_good_steps=0,
        model=shape,
        config=JobConfig(model=model, data=data).model_dump(mode="json"),
        versions={name: version(name) for name in ("torch", "safetensors")},
    )


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
