"""Reading a Hugging Face folder without trusting it: config.json, the index, headers and tensors of safetensors files.

No code in the folder is executed, and its texts cannot name files outside it. Symbolic links are followed, because the
caches of transformers consist of them. A folder that is inconsistent is refused before any tensor is read.
"""

import glob
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from titan_like.checkpoint.reader import is_file_name
from titan_like.checkpoint.step_folders import newest_in
from titan_like.config.errors import ConfigError, first_line, printable, shortened
from titan_like.config.paths import unreadable_reason, user_file
from titan_like.config.urls import RemotePath, path_of
from titan_like.data.readers.fetch import fetch, with_small_files
from titan_like.data.readers.files import say
from titan_like.data.text.special_tokens import COMPANIONS, CONFIG_FILE, TEMPLATES, TOKENIZER_FILES, read_json
from titan_like.data.text.tokenizer import from_hub, is_on_hub
from titan_like.hugging_face.quantized import FileTensor, check_quantization, read_quantized, with_scales
from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import (
    Fields,
    ReadSlice,
    RefusedError,
    Stored,
    architecture_of,
    families_by_model_type,
    family_module,
    family_of,
    fill_part,
)

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt"]
_SMALL = [*COMPANIONS, *TOKENIZER_FILES, TEMPLATES]  # without the index of the weights


def local_folder(name: str, key: str, weights: bool = True) -> Path:
    """The folder of a path, or of org/name on the hub or a URL, which is downloaded once.

    A path that exists comes first. A run's folder means its newest checkpoint. Errors name the setting ``key``. Without
    ``weights`` only small files are downloaded. Raises a `ConfigError` if there is no such folder, and the hub does not
    have the repository or cannot be reached.
    """
    if isinstance(path := path_of(name), RemotePath) and is_hugging_face(path):
        if not weights:
            return with_small_files(path)
        copies = fetch([f"{glob.escape(str(path))}/{pattern}" for pattern in _PATTERNS], key)
        return copies[0].parent
    if (newest := newest_in(path)) != path or not is_on_hub(name):  # outputs/best is a run's best checkpoint
        return newest
    reason = "no such folder, nor can the Hugging Face hub give it"
    patterns, needed = (_PATTERNS, (WEIGHTS_FILE, INDEX_FILE)) if weights else (_SMALL, (CONFIG_FILE,))
    return from_hub(name, patterns, needed, key, reason, "name a folder that is there")


INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # types that float32 represents exactly

_MOST_SHOWN, _CAUSAL = 400, "ForCausalLM"  # characters; how names of language models' classes end
# That older versions of transformers saved, and that can be computed.
_BUFFER = re.compile(r"(\.rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias|\.embeddings\.position_ids)$")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # as TensorFlow called them


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder whose configuration, index and headers are consistent."""

    path: Path
    family: str
    model: TransformerConfig
    fields: dict[str, Any]  # config.json
    tensors: dict[str, FileTensor]  # by their names in transformers' class

    def stored_parameters(self, model: TransformerConfig) -> Iterator[Stored]:
        """Every parameter of ``model``, which may pad the vocabulary differently, with its place in this folder."""
        for stored in family_of(self.model, self.fields["model_type"]).stored_parameters(model):
            yield stored.among(self.tensors)

    @cached_property
    def read_slice(self) -> ReadSlice:
        """The function with which `fill_part` reads from this folder."""
        return slice_reader(self.tensors)

    def read(self, stored: Stored) -> torch.Tensor:
        """A full parameter: float32."""
        weight = torch.empty(stored.shape)
        fill_part(weight, (0,) * weight.ndim, stored, self.read_slice)
        return weight


def open_hugging_face(path: Path, key: str, ignore: Collection[str] = ()) -> HuggingFaceFolder:
    """Check a folder, which the setting ``key`` names, without reading its tensors.

    ``ignore`` names fields of config.json, such as rope_scaling.factor, without which it is read. Raises a
    `ConfigError` if it does not contain a model of a known family, or its files are inconsistent.
    """
    fields, family, model = read_model(path, key, ignore)
    with refusals_of(path, key):
        module = family_of(model, fields["model_type"])
        tensors = with_scales(_tensors(path, module), check_quantization(Fields(fields)))
        left_out = _check_tensors(model, module, tensors, architecture_of(model, fields["model_type"]))
    if left_out:
        roots = ", ".join(sorted({name.removeprefix(module.PREFIX).partition(".")[0] for name in left_out}))
        say(f"{path}: {len(left_out)} of {len(tensors)} tensors ({roots}) are not of this model and are not trained")
    return HuggingFaceFolder(path, family, model, fields, tensors)


def read_model(path: Path, key: str, ignore: Collection[str] = ()) -> tuple[dict[str, Any], str, TransformerConfig]:
    """A folder's config.json without what is ignored, its family and its shape; all else as in `open_hugging_face`."""
    with refusals_of(path, key):
        fields = read_json(path / CONFIG_FILE)
        if not fields:
            raise RefusedError(f"it has no {CONFIG_FILE}")
        fields = without(fields, ignore)
        family, model, notes = _model_of(fields)
        notes = [f"{', '.join(ignore)} (ignore_fields)", *notes] if ignore else notes
        if notes:
            say(f"{path / CONFIG_FILE}: ignored {'; '.join(notes)}")
        if getattr(model, "mtp_layers", 0):
            with suppress(RefusedError):  # the tensors may be elsewhere, and transformers does not save such layers
                if not any(tensor.name.endswith(".eh_proj.weight") for tensor in _file_tensors(path)):
                    model = model.model_copy(update={"mtp_layers": 0})
        return fields, family, model


@contextmanager
def refusals_of(path: Path, key: str) -> Iterator[None]:
    """Turn any error about a folder, which the setting ``key`` names, into a `ConfigError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # a field may be of any type
        clauses = error.args if isinstance(error, RefusedError) else [str(error)]
        if not isinstance(error, ValueError):
            clauses = [f"its {CONFIG_FILE} is invalid ({first_line(error)})"]
        reason = "; ".join(shortened(printable(clause), _MOST_SHOWN) for clause in clauses)
        raise ConfigError(key, str(path), reason) from None


def is_hugging_face(path: Path) -> bool:
    """Whether a folder looks like a Hugging Face folder."""
    return unreadable_reason(path / CONFIG_FILE) is None


def slice_reader(tensors: dict[str, FileTensor]) -> ReadSlice:
    """A function that reads a slice of a tensor, in the dtype of its file, or float32 if it is quantised.

    It raises errors of any type if the file has changed since it was checked.
    """
    opened = lru_cache(maxsize=2)(partial(safe_open, framework="pt"))  # a tensor and its scales

    def stored(tensor: FileTensor, index: tuple[slice, ...]) -> torch.Tensor:
        if not tensor.shape:  # a number, of which no slice can be read
            return opened(tensor.file).get_tensor(tensor.name)[None][index]
        return opened(tensor.file).get_slice(tensor.name)[index]

    def read(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor = tensors[name]
        return stored(tensor, index) if tensor.scales is None else read_quantized(tensor, index, stored)

    return read


def without(fields: dict[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """A config.json without the fields that `model.ignore_fields` names; a `RefusedError` if there is no such field."""
    fields = deepcopy(fields)
    for name in ignore:
        if not _remove(fields, name):
            raise RefusedError(f"config.json has no {name}, which ignore_fields names; leave it out")
    return fields


def _model_of(values: dict[str, Any]) -> tuple[str, TransformerConfig, list[str]]:
    """Family, shape, and notes about what is ignored; the refusal names all that is wrong with the fields."""
    values, reasons = deepcopy(values), dict[str, str]()
    while True:
        fields = Fields(values)
        try:
            family, model = _read_fields(fields)
            break
        except RefusedError as refusal:
            reasons.setdefault(refusal.field, str(refusal))
            table, _, name = refusal.field.rpartition(".")  # whose other fields mean nothing without its type
            taken = (table,) if name in ("rope_type", "type") else (refusal.field, table)
            if not any(_remove(values, field) for field in taken):
                break  # the file can be read no further
    if reasons:
        first, *further = reasons.values()
        raise RefusedError(first, *(text.replace("config.json", "it", 1) for text in further))
    return family, model, fields.notes


def _remove(values: dict[str, Any], field: str) -> bool:
    """Take a field, such as rope_scaling.factor, out of config.json; whether it was there."""
    if field in values:
        del values[field]
        return True
    table, _, rest = field.partition(".")
    return isinstance(values.get(table), dict) and _remove(values[table], rest)


def _read_fields(fields: Fields) -> tuple[str, TransformerConfig]:
    model_type = fields.values.get("model_type")
    known = families_by_model_type()
    family = known.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        fields.refuse("model_type", f"but only {', '.join(known)} can be read")
    check_quantization(Fields(fields.values))
    model = family_module(family).from_fields(fields)
    wanted, named = architecture_of(model, str(model_type)), fields.values.get("architectures")
    if named and named != [wanted]:
        if not (wanted.endswith(_CAUSAL) and isinstance(named, list) and all(str(n).endswith(_CAUSAL) for n in named)):
            fields.refuse("architectures", f"but only {wanted} can be read")
        fields.notes.append(f"{fields.shown('architectures')} (transformers goes by model_type)")
    return family, model


def _tensors(path: Path, module: Any) -> dict[str, FileTensor]:
    """Every tensor in the files, by its name in transformers' class."""
    tensors: dict[str, FileTensor] = {}
    for tensor in _file_tensors(path):
        name = tensor.name
        for old, new in _OLD_NAMES.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        for old, new in getattr(module, "RENAMED", {}).items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if not name.startswith(module.PREFIX) and not name.startswith(getattr(module, "HEAD", "lm_head.")):
            name = module.PREFIX + name
        tensors[name] = tensor
    return tensors


def tensors_around(path: Path, module: Any) -> tuple[dict[str, str], dict[str, FileTensor]]:
    """Names of tensors, class → files, and by the latter the tensors of modules around the model.

    Both are empty if the folder is gone or damaged.
    """
    try:
        tensors = _tensors(path, module)
    except ValueError:
        return {}, {}
    around = [part for name, part in tensors.items() if name.startswith(module.IGNORED) and part.dtype in DTYPES]
    return {name: tensor.name for name, tensor in tensors.items()}, {tensor.name: tensor for tensor in around}


def _file_tensors(path: Path) -> Iterator[FileTensor]:
    if (path / WEIGHTS_FILE).is_file():  # like transformers, prefer a single file to an index
        yield from read_header(path / WEIGHTS_FILE)
        return
    if not (path / INDEX_FILE).is_file():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        if pickles:
            hint = "save it with transformers' save_pretrained, which writes safetensors"
            raise RefusedError(f"it holds {pickles[0]}, a pickle, which could run code and is never opened; {hint}")
        raise RefusedError(f"it holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise RefusedError(f"its {INDEX_FILE} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not is_file_name(name) or not name.endswith(".safetensors"):
            reason = f"names {json.dumps(name)[:200]}, which is not a safetensors file in the folder"
            raise RefusedError(f"its {INDEX_FILE} {reason}")
    for name in sorted(set(weight_map.values())):
        yield from read_header(path / name)


def read_header(file: Path) -> list[FileTensor]:
    """The tensors that a safetensors file declares; the library checks the header against the file's length."""
    what = "is not a valid safetensors file"
    with (
        user_file(file, lambda reason: RefusedError(f"its {file.name} {reason}"), what),
        safe_open(file, framework="pt") as opened,
    ):
        slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 (not a mapping)
        return [FileTensor(file, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices]


def _check_tensors(
    model: TransformerConfig, module: Any, tensors: dict[str, FileTensor], architecture: str
) -> list[str]:
    """Check that the tensors have the model's shapes and known types; returns further ones, which are ignored."""
    known: set[str] = set()
    for stored in (stored.among(tensors) for stored in module.stored_parameters(model)):
        wanted = dict(stored.sources)
        wanted |= dict.fromkeys(stored.copies, next(iter(stored.sources.values())))
        for name, shape in wanted.items():
            if name not in tensors:
                raise RefusedError(f"the tensor {name} is missing")
            tensor = tensors[name]
            if tensor.shape != shape:
                reason = f"the tensor {name} has the shape {list(tensor.shape)}, but config.json gives {list(shape)}"
                raise RefusedError(reason)
            if tensor.dtype not in DTYPES:
                reason = f"the tensor {name} is of type {tensor.dtype}, but only {', '.join(DTYPES)} can be read"
                raise RefusedError(reason)
        known |= wanted.keys()
    unknown = [name for name in sorted(tensors.keys() - known) if _BUFFER.search(name) is None]
    left_out = [name for name in unknown if 0 not in tensors[name].shape]  # files have empty tensors for no experts
    for name in left_out:
        if not name.startswith(getattr(module, "IGNORED", ())):
            raise RefusedError(f"the tensor {name} does not belong to {architecture} with this config.json")
    return left_out
