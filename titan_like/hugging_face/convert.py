"""Converting a Hugging Face folder to a checkpoint that has only weights, and a checkpoint to such a folder."""

import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from titan_like.checkpoint import step_folders
from titan_like.checkpoint.loader import CheckpointWeights, first_failure
from titan_like.checkpoint.saver import TensorWriter
from titan_like.config.errors import RunError, blamed_on
from titan_like.config.schema import DEFAULT_TOKENS, JobConfig
from titan_like.config.urls import RemotePath
from titan_like.data.readers.fetch import with_small_files
from titan_like.data.readers.files import say
from titan_like.data.text.special_tokens import GENERATION_FILE, ORIGIN_FILE, end_ids, tokenizer_names
from titan_like.data.text.tokenizer import build_tokenizer, tokenizer_in
from titan_like.hugging_face.folder import (
    CONFIG_FILE,
    DTYPES,
    INDEX_FILE,
    HuggingFaceFolder,
    refusals_of,
    slice_reader,
    tensors_around,
)
from titan_like.hugging_face.origin import Origin, read_origin
from titan_like.hugging_face.start import FLAVOR
from titan_like.hugging_face.tokenizer import copy_files, name_class, write_tokenizer
from titan_like.models.hugging_face import RefusedError, Stored, architecture_of, family_of, to_tensors


def from_hugging_face(source: HuggingFaceFolder, output: Path) -> Path:
    """Write the checkpoint ``output``/step-0, completely or not at all; returns its path.

    Weights become float32. One of them is in memory at a time. Raises a `ConfigError` if the folder's
    generation_config.json is invalid, and a `RunError` if a file of the folder is damaged, or the checkpoint cannot be
    written.
    """
    final = step_folders.checkpoint_path(output, 0)
    with refusals_of(source.path, "--input"):
        end_ids(source.path)  # reads what is copied
    with step_folders.written_aside(final) as aside:
        copy_files(source.path, aside, (*tokenizer_names(source.path), GENERATION_FILE))
        planner = _ReadsOnDemand(source)
        # One file per weight, because torch keeps all weights of a file in memory until it is written.
        writer = TensorWriter(aside, uuid4().hex, single_file_per_rank=False)
        try:
            with warnings.catch_warnings():
                # A single process is intended.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(planner.shapes, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise RunError(f"{source.path} cannot be converted ({first_failure(error)})") from error
        dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        content = {"config": source.fields, "dtypes": dtypes, "source": str(source.path.absolute())}
        step_folders.write_durably(aside / ORIGIN_FILE, json.dumps(content, indent=2))
        step_folders.write_run_state(aside, _run_state(source, final))
    return final


def _run_state(source: HuggingFaceFolder, path: Path) -> step_folders.RunState:
    shape = source.model.model_dump(mode="json", exclude_none=True)
    tokenizer = tokenizer_in(source.path, None if isinstance(path, RemotePath) else path)
    settings = {"model": {"family": source.family, "flavor": FLAVOR, "flavors": {FLAVOR: shape}}}
    config = JobConfig.model_validate(settings).model_dump(mode="json")
    config["data"]["tokenizer"] = tokenizer
    if tokenizer is None:
        del config["data"]["tokenizer"]  # its tokens are not bytes
    versions = {name: version(name) for name in ("torch", "safetensors")}
    return step_folders.RunState(0, 0, 0, 0, 1.0, 0, source.model.model_dump(mode="json"), config, versions=versions)


class _ReadsOnDemand(DefaultSavePlanner):
    """Plans a save of weights that are not in memory: each is read just before it is written."""

    def __init__(self, source: HuggingFaceFolder) -> None:
        super().__init__()
        self._source = source
        self._stored = {stored.key: stored for stored in source.stored_parameters(source.model)}
        self.shapes = {name: torch.empty(stored.shape, device="meta") for name, stored in self._stored.items()}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Read a weight: float32."""
        return self._source.read(self._stored[index.fqn])


NO_TOKENIZER = "none"
# Newer names of fields that are written with their older names, and the way in which weights were quantised.
_NOT_KEPT = ("dtype", "rope_parameters", "quantization_config")
MOST_BYTES = 5 * 10**9  # of a weight file


def to_hugging_face(
    weights: CheckpointWeights, output: Path, dtype: torch.dtype | None, most_bytes: int, tokenizer: str | None
) -> list[Path]:
    """Write a folder, completely or not at all; returns the weight files. Arguments and errors are `write_folder`'s."""
    with step_folders.written_aside(output) as aside:
        return [output / file for file in write_folder(weights, aside, dtype, most_bytes, tokenizer)]


def write_folder(
    weights: CheckpointWeights,
    folder: Path,
    dtype: torch.dtype | None,
    most_bytes: int = MOST_BYTES,
    tokenizer: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[str]:
    """Write files into a folder, with one parameter in memory at a time. Returns the names of the weight files.

    Args:
        weights: the checkpoint.
        folder: the folder, which exists.
        dtype: type of the weights; None is the original type for an imported checkpoint and float32 for any other.
        most_bytes: maximum size of a weight file.
        tokenizer: a value of `data.tokenizer`, or "none"; None is the tokenizer of the run or of the imported folder.
        share: the number of this process among those that write the folder, and how many these are. The first one also
            writes what is not weights.

    Raises:
        ConfigError: transformers cannot represent the model, or tokenizer files are missing.
        RunError: the checkpoint is damaged.
    """
    source = with_small_files(weights.path)
    origin, number = read_origin(source), share[0]
    with blamed_on("--checkpoint", str(weights.path), RefusedError):
        module = family_of(weights.model, origin.fields.get("model_type"))
        fields = module.to_fields(weights.model)
    # Tied tables go out again under the names that they came with, and so does what is around a text's model.
    has_more = isinstance(origin.fields.get("text_config") or origin.fields.get("vision_config"), dict)
    names, around = tensors_around(Path(origin.source), module) if has_more else ({}, {})
    if has_more and not around:
        say(f"{origin.source or 'the source'} has no tensors around the text's model, which is written alone")
    parameters = [stored.among(origin.dtypes).renamed(names) for stored in module.stored_parameters(weights.model)]
    parameters += [Stored(name, part.shape, {name: part.shape}, is_buffer=True) for name, part in around.items()]
    dtypes = {names.get(name, name): dtype for name, dtype in origin.dtypes.items()}
    dtypes |= {name: DTYPES[part.dtype] for name, part in around.items()}
    empty = {  # rounding a router's biases would choose other experts
        name: torch.empty(
            shape, dtype=(not stored.is_buffer and dtype) or dtypes.get(name, torch.float32), device="meta"
        )
        for stored in parameters
        for source_name, shape in stored.sources.items()
        for name in (source_name, *stored.copies)
    }
    split = split_torch_state_dict_into_shards(empty, max_shard_size=most_bytes)
    if number == 0:
        tokens = _write_tokens(weights, source, origin, tokenizer, folder)
        architecture = architecture_of(weights.model, fields["model_type"])
        if weights.model.is_causal and not origin.fields:  # their classes' defaults may be outside of the vocabulary
            tokens = {"pad_token_id": None} | tokens
        first = next(iter(empty.values())).dtype
        config = _config(origin.fields, fields, tokens, first, architecture)
        if around:
            architecture = architecture_of(weights.model, origin.fields["model_type"])
            outer, text = origin.fields | {"text_config": None}, origin.fields.get("text_config", origin.fields)
            tables = (text.get(name) for name in ("rope_scaling", "rope_parameters"))
            axes = {name: value for table in tables for name, value in (table or {}).items() if name[:6] == "mrope_"}
            if axes:
                config["rope_scaling"] = {"rope_type": "default"} | (config.get("rope_scaling") or {}) | axes
            config["model_type"] = text.get("model_type", config["model_type"])
            if text is origin.fields:
                config["architectures"] = [architecture]
            else:
                config = _config(outer, {"text_config": config}, tokens, first, architecture)
        step_folders.write_durably(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            step_folders.write_durably(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n")
    files = list(split.filename_to_tensors)
    places: dict[str, tuple[Path, int]] = {}
    for file in files[number :: share[1]]:
        places |= _begin_file(folder / file, {name: empty[name] for name in split.filename_to_tensors[file]})
    needed = (stored for stored in parameters if places.keys() & {*stored.sources, *stored.copies})
    read_slice = slice_reader(around)

    def read(name: str) -> torch.Tensor:
        return read_slice(name, (slice(None),) * len(around[name].shape)) if name in around else weights.read(name)

    for name, tensor in to_tensors(needed, read):
        if name in places:
            path, offset = places[name]
            with path.open("r+b") as opened:
                opened.seek(offset)
                opened.write(tensor.to(empty[name].dtype).contiguous().flatten().view(torch.uint8).numpy().data)
    for path in {path for path, _ in places.values()}:
        step_folders.flush(path)
    return files


def _begin_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[Path, int]]:
    """Write the header of a safetensors file for empty ``tensors``; returns the file and offset of each one's data.

    Wider elements come first, as the library writes them, so that all are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds, end = {dtype: name for name, dtype in DTYPES.items()}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: (path, 8 + len(text) + header[name]["data_offsets"][0]) for name in tensors}


def _write_tokens(
    weights: CheckpointWeights, source: Path, origin: Origin, tokenizer: str | None, folder: Path
) -> dict[str, Any]:
    """Write the tokenizer and generation_config.json; returns fields of config.json for special tokens.

    Special tokens of a source are kept, unless the run's [data] sets others.
    """
    options = weights.data.token_options
    copy_files(source, folder, (GENERATION_FILE,))
    if tokenizer == NO_TOKENIZER:
        return {}
    stored, is_trained = tokenizer_in(source), weights.run.step > 0
    if tokenizer is not None or not origin.fields or (is_trained and weights.data.learns_bytes):
        return write_tokenizer(tokenizer or stored or weights.data.tokenizer, options, weights.model, folder)
    copy_files(source, folder, tokenizer_names(source))
    if stored is not None and options != DEFAULT_TOKENS:
        write_tokenizer(stored, options, weights.model, folder)
    if stored is not None and is_trained:
        name_class(build_tokenizer(stored, options=options), folder)
    return {}


def _config(
    source: dict[str, Any], fields: dict[str, Any], tokens: dict[str, Any], dtype: torch.dtype, architecture: str
) -> dict[str, Any]:
    """config.json: fields that describe the model, and any others that an imported checkpoint came with."""
    # Against defaults of language models' classes.
    kept = ({} if "text_config" in source else {"bos_token_id": None, "eos_token_id": None}) | source
    text = kept.get("text_config")
    if isinstance(text, dict):  # what is around the text's model stays behind
        kept = text | {name: value for name, value in kept.items() if name.endswith("token_id") and value is not None}
    for name in _NOT_KEPT:
        kept.pop(name, None)
    if fields.get("rope_scaling") is not None:
        kept.pop("original_max_position_embeddings", None)  # which transformers prefers to rope_scaling's
    return {
        **kept,
        "architectures": [architecture],
        **fields,
        **tokens,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
