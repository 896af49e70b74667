"""Adapters in PEFT's folders, the weights that they were trained on, and both merged."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file

from titan_like.checkpoint.loader import CheckpointWeights, is_checkpoint
from titan_like.checkpoint.step_folders import flush, newest_in, write_durably, written_aside
from titan_like.config.errors import ConfigError, first_line, require, shortened
from titan_like.config.paths import unreadable_reason
from titan_like.config.schema import LoRA
from titan_like.config.urls import RemotePath, path_of
from titan_like.data.readers.fetch import with_small_files
from titan_like.data.text.special_tokens import CONFIG_FILE, read_json
from titan_like.data.text.tokenizer import is_on_hub
from titan_like.hugging_face.folder import DTYPES, local_folder, open_hugging_face, read_header, refusals_of
from titan_like.hugging_face.origin import read_origin
from titan_like.hugging_face.quantized import FileTensor
from titan_like.models.config import TransformerConfig, has_experts
from titan_like.models.hugging_face import Stored
from titan_like.models.layers.init import ADAPTER_NAMES, local_parts
from titan_like.models.parts import WithoutInit
from titan_like.parallel.lora import NUMBERED, Adapter, adapters_of, stored_linears
from titan_like.parallel.model import ParallelModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BASE = "base_model_name_or_path"
# Fields of adapter_config.json that are read, that the tensors' names settle, or that change nothing here. Any other
# must be null, false, or PEFT's default.
_READ = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", _BASE, "r", "lora_alpha", "lora_dropout"),
    *("init_lora_weights", "inference_mode", "fan_in_fan_out", "target_modules", "target_parameters"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config", "rank_pattern", "alpha_pattern"),
}
_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "bias": "none", "modules_to_save": [], "revision": "main"}
_DEFAULTS |= {"loftq_config": {}, "qalora_group_size": 16}
_DEFAULTS |= {"megatron_core": "megatron.core"}
_NAMES = {"rank": "r", "alpha": "lora_alpha"}  # ours and PEFT's
_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of a file of weights


class Block(NamedTuple):
    """The rows of one of an adapter's matrices in a module of transformers. A fused module has several blocks."""

    module: str
    shape: tuple[int, int]  # of the module's weight, [out, in]
    matrix: int  # its number among the adapter's
    ours: torch.Tensor  # rows of the matrix
    theirs: torch.Tensor  # the same rows in the module


class StoredAdapter(NamedTuple):
    """The adapter of the linear layer ``name``, and where transformers stores the layer."""

    name: str
    adapter: Adapter
    stored: Stored

    def blocks(self) -> Iterator[Block]:
        """Every block, by matrix and by module."""
        numbers = self.stored.order().view(-1, sum(self.adapter.rows)).split(list(self.adapter.rows), 1)
        for matrix, rows in enumerate(compress(numbers, self.adapter.is_adapted)):
            theirs = rows.flatten()
            for (source, shape), count in zip(self.stored.sources.items(), self.stored.rows, strict=True):
                is_there = (theirs >= 0) & (theirs < count)
                if is_there.any():
                    size = count, shape[0 if self.stored.is_transposed else 1]
                    ours = is_there.nonzero().flatten()
                    yield Block(source.removesuffix(".weight"), size, matrix, ours, theirs[ours])
                theirs = theirs - count

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The module, A and B of each block, of our A and B."""
        parts, matrices = a.split(self.adapter.rank), self.adapter.matrices(b)
        for module, (rows, _), matrix, ours, theirs in self.blocks():
            whole = b.new_zeros(rows, self.adapter.rank)
            yield module, parts[matrix], whole.index_copy_(0, theirs, matrices[matrix].flatten(0, 1)[ours])

    def from_peft(self, tensors: dict[str, torch.Tensor], numbers: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Our A and B from PEFT's tensors: float32. ``numbers``: of each block among those of its module.

        Blocks of a fused module have a part of its A and B each, or share its A.
        """
        parts, rows, rank = list[torch.Tensor](), list[torch.Tensor](), self.adapter.rank
        for block, size, number in zip(self.blocks(), self.adapter.adapted_rows, numbers, strict=True):
            a, b = (tensors[name].float() for name in names_of(block.module))
            own = columns_of(number, len(a), rank)
            parts.append(a[own])
            rows.append(b[block.theirs, own].view(-1, size, rank))
        return torch.cat(parts), torch.cat(rows, 1).flatten(0, 1)


def columns_of(number: int, width: int, rank: int) -> slice:
    """The part of a module's ``width`` low dimensions that its block with this number has; all, if blocks share A."""
    return slice(number * rank, (number + 1) * rank) if width > rank else slice(None)


def _numbered(adapters: Iterable[StoredAdapter]) -> Iterator[tuple[StoredAdapter, list[tuple[Block, int]]]]:
    """Each adapter with its blocks, and the number of each among the blocks of its module."""
    counts = Counter[str]()
    for adapter in adapters:
        blocks = list[tuple[Block, int]]()
        for block in adapter.blocks():
            blocks.append((block, counts[block.module]))
            counts[block.module] += 1
        yield adapter, blocks


def names_of(module: str) -> tuple[str, str]:
    """PEFT's names of the A and the B of a module of transformers."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _adapters(model: TransformerConfig, section: LoRA) -> dict[str, Adapter]:
    with torch.device("meta"), WithoutInit():
        return adapters_of(model.family_module("model").build(model), section)


def stored_adapters(model: TransformerConfig, section: LoRA, model_type: Any) -> Iterator[StoredAdapter]:
    """Every adapter of a model whose base is of the class with ``model_type``.

    Raises a `ConfigError` if transformers has no module for one of them.
    """
    stored = stored_linears(model, model_type)
    for name, adapter in _adapters(model, section).items():
        weight = stored.get(name)
        reason = f"PEFT has no adapter for {name}, which is not a module of transformers' class"
        require(weight is not None, "lora.modules", section.modules, reason)
        assert weight is not None
        yield StoredAdapter(name, adapter, weight)


def _model_type(base: Path) -> Any:
    """The model_type of a Hugging Face folder, or of the one that a checkpoint's weights came from."""
    return (read_json(base / CONFIG_FILE) or read_origin(with_small_files(base)).fields).get("model_type")


def is_peft(folder: Path) -> bool:
    """Whether a folder looks like one of PEFT's."""
    return unreadable_reason(folder / ADAPTER_CONFIG) is None


def base_of(name: str, key: str, weights: bool = True) -> str:
    """The folder of weights, or the hub's name of one, that a setting names by itself or by a PEFT folder."""
    folder = local_folder(name, key, weights)
    if is_peft(folder):
        base = _fields(folder, key).get(_BASE)
        reason = f"its {ADAPTER_CONFIG} names no {_BASE}; add it"
        require(isinstance(base, str) and base and not is_peft(path_of(base)), key, name, reason)
        name = str(base)
    name = name if (newest := newest_in(path_of(name))) == path_of(name) else str(newest)
    return name if is_on_hub(name) or isinstance(newest, RemotePath) else os.path.abspath(name)


def _fields(folder: Path, key: str) -> dict[str, Any]:
    with refusals_of(folder, key):
        return read_json(folder / ADAPTER_CONFIG)


def _tensors(folder: Path, key: str) -> dict[str, FileTensor]:
    with refusals_of(folder, key):
        return {tensor.name: tensor for tensor in read_header(folder / ADAPTER_WEIGHTS)}


def _modules(names: Iterable[str], fields: dict[str, Any]) -> list[str]:
    """The modules that PEFT's tensors adapt, without the layers' numbers: as target_modules names them, if it does."""
    ends = {NUMBERED.sub("", name.removeprefix(_PREFIX).partition(".lora_")[0]) for name in names if ".lora_" in name}
    targets = fields.get("target_modules") if not fields.get("exclude_modules") else None
    targets = [str(target) for target in targets] if isinstance(targets, list) else []
    return sorted({next((t for t in targets if f".{end}".endswith(f".{t}")), end) for end in ends})


def peft_settings(folder: Path, key: str) -> dict[str, Any]:
    """[lora] as a PEFT folder describes it: rank, alpha and modules. A `ConfigError` if it does not."""
    fields = _fields(folder, key)
    values: dict[str, Any] = {name: fields.get(theirs, _DEFAULTS[theirs]) for name, theirs in _NAMES.items()}
    values["modules"] = _modules(_tensors(folder, key), fields)
    try:
        section = LoRA.model_validate(values)
    except ValidationError as error:
        raise ConfigError(key, str(folder), f"its {ADAPTER_CONFIG} is invalid ({first_line(error)})") from None
    return {name: getattr(section, name) for name in values}


def own_modules(model: TransformerConfig, base: Path, modules: list[str]) -> list[str]:
    """The same modules, by our names where [lora] does not know those of the class of ``base``, which fuses them."""
    known = {source for stored in stored_linears(model).values() for source in stored.sources}
    own = dict[str, set[str]]()
    for name, stored in stored_linears(model, _model_type(base)).items():
        for source in stored.sources.keys() - known:
            own.setdefault(f".{source.removesuffix('.weight')}", set()).add(NUMBERED.sub("", name))
    named = [[name for end in own if end.endswith(f".{module}") for name in own[end]] or [module] for module in modules]
    return sorted({name for names in named for name in names})


def check_peft(folder: Path, base: Path, key: str, model: TransformerConfig, section: LoRA) -> None:
    """Refuse a PEFT folder whose adapters of ``base`` are not those that [lora] describes.

    Reads no tensors, except of modules that are adapted in parts.
    """
    fields = _fields(folder, key)
    kind, start = fields.get("peft_type"), fields.get("init_lora_weights", True)
    require(kind == "LORA", key, str(folder), f"its peft_type is {json.dumps(kind)}; only LORA can be read")
    for name in sorted(fields.keys() - _READ):
        reason = f"its {name} = {shortened(json.dumps(fields[name]), 80)} cannot be read; merge it with PEFT instead"
        require(fields[name] in (None, False, _DEFAULTS.get(name)), key, str(folder), reason)
    reason = f"its init_lora_weights = {json.dumps(start)} changes the base; merge it with PEFT instead"
    require(isinstance(start, bool) or start == "gaussian", key, str(folder), reason)
    for name, theirs in _NAMES.items():
        value, reason = getattr(section, name), f"{folder} has {theirs} = {fields.get(theirs, _DEFAULTS[theirs])}"
        require(value == fields.get(theirs, _DEFAULTS[theirs]), f"lora.{name}", value, f"{reason}; set it to that")
    tensors = _tensors(folder, key)
    blocks = [pair for _, of in _numbered(stored_adapters(model, section, _model_type(base))) for pair in of]
    wanted, fused = dict[str, tuple[int, int]](), Counter(block.module for block, _ in blocks)
    ranks = _ranks(folder, key, fields, fused, section)
    for (module, (rows, columns), *_), _ in blocks:
        wanted |= zip(names_of(module), ((ranks[module], columns), (rows, ranks[module])), strict=True)
    modules = _modules(tensors, fields)
    hint = "merge it with PEFT instead" if modules == section.modules else "name these, or leave it out"
    reason = f"{folder} has adapters of {', '.join(modules)}; {hint}"
    require(modules == _modules(wanted, fields), "lora.modules", section.modules, reason)
    for name in sorted(tensors.keys() ^ wanted.keys()):
        reason = f"has {'no' if name in wanted else 'a'} {name}, {'as other layers do' if name in wanted else 'too'}"
        raise ConfigError(key, str(folder), f"{reason}; merge it with PEFT instead")
    for name, shape in wanted.items():
        tensor = tensors[name]
        reason = f"its {name} has the shape {list(tensor.shape)}, but the model and [lora] give {list(shape)}"
        require(tensor.shape == shape, key, str(folder), reason)
        reason = f"its {name} is of type {tensor.dtype}, but only {', '.join(DTYPES)} can be read"
        require(tensor.dtype in DTYPES, key, str(folder), reason)
    remaining, covered = dict[str, torch.Tensor](), Counter[str]()
    for block, _ in blocks:
        covered[block.module] += len(block.theirs)
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        for block, number in blocks:
            if fused[block.module] > 1 or covered[block.module] < block.shape[0]:
                b = remaining.setdefault(block.module, file.get_tensor(names_of(block.module)[1]))
                b[block.theirs, columns_of(number, b.shape[1], section.rank)] = 0
    for module, b in remaining.items():
        reason = f"its {module} adapts rows that lora.modules leaves out, or all by each part of its A"
        require(not b.any(), key, str(folder), f"{reason}; merge it with PEFT instead")


def _ranks(folder: Path, key: str, fields: dict[str, Any], fused: Mapping[str, int], section: LoRA) -> dict[str, int]:
    """The rank of each module's adapter: the run's, or as many times it as the module has matrices, with alpha too."""
    ranks = dict.fromkeys(fused, section.rank)
    given = {name: fields.get(f"{name}_pattern") or {} for name in _NAMES}
    for name, table in given.items():
        require(isinstance(table, dict), key, str(folder), f"its {name}_pattern is no table; correct it")
    for module in sorted({*given["rank"], *given["alpha"]}):
        count = fused.get(module, 1)
        for name in _NAMES:
            value, wanted = given[name].get(module), count * getattr(section, name)
            reason = f"its {name}_pattern gives {module} {value}, but only {wanted:g} can be read, of a fused module"
            require(count > 1 and value == wanted, key, str(folder), f"{reason}; merge it with PEFT instead")
        ranks[module] = count * section.rank
    return ranks


@torch.no_grad()
def read_peft(folder: Path, base: Path, model: ParallelModel, section: LoRA) -> None:
    """Read this process's part of a PEFT folder's adapters, which have been checked, into a model in any layout."""
    parameters = dict(model.named_parameters())
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        shape = model.stages[0].module.config
        for adapter, blocks in _numbered(stored_adapters(shape, section, _model_type(base))):
            ours = [parameters.get(f"{adapter.name}.{name}") for name in ADAPTER_NAMES]
            if ours[0] is None:  # of another pipeline stage
                continue
            names = {name for block, _ in blocks for name in names_of(block.module)}
            tensors = {name: file.get_tensor(name) for name in names}
            values = adapter.from_peft(tensors, [number for _, number in blocks])
            for parameter, value in zip(ours, values, strict=True):
                assert parameter is not None
                for part, offset in local_parts(parameter):
                    where = zip(offset, part.shape, strict=True)
                    part.copy_(value[tuple(slice(start, start + size) for start, size in where)])


def write_peft(weights: CheckpointWeights, output: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's adapters as a PEFT folder, completely or not at all."""
    has_images = not {"text_config", "vision_config"}.isdisjoint(read_origin(with_small_files(weights.path)).fields)
    reason = "its base has images, so that PEFT's names would be others; add --merge"
    require(not has_images, "--checkpoint", str(weights.path), reason)
    section, model = lora_of(weights), weights.model
    adapters = list(stored_adapters(model, section, _model_type(weights.path)))
    blocks: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # A and B, by module
    tensors: dict[str, torch.Tensor] = {}
    for adapter in adapters:
        a, b = (weights.read(f"{adapter.name}.{name}") for name in ADAPTER_NAMES)
        for module, *pair in adapter.to_peft(a, b):
            blocks.setdefault(module, []).append((pair[0], pair[1]))
    for module, pairs in blocks.items():  # a fused module's rank is the sum of its matrices' ranks
        for name, parts, dimension in zip(names_of(module), zip(*pairs, strict=True), (0, 1), strict=True):
            tensors[name] = torch.cat(parts, dimension).to(dtype).contiguous()
    fused = {module: len(pairs) for module, pairs in blocks.items() if len(pairs) > 1}
    # Without the layers' numbers, names fit the same module in each layer.
    ends = {NUMBERED.sub("", module) for module in blocks}
    # In models with experts PEFT matches modules of these names with the experts' matrices, but parameters by name.
    dense = {end for end in ends if has_experts(model) and end.endswith(("gate_proj", "up_proj", "down_proj"))}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.is_causal else "SEQ_2_SEQ_LM" if model.has_decoder else None,
        _BASE: weights.run.base.get("folder"),
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0 if dense else section.dropout,  # PEFT has none for parameters
        "target_modules": sorted(ends - dense),
        "fan_in_fan_out": any(adapter.stored.is_transposed for adapter in adapters),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "rank_pattern": {module: count * section.rank for module, count in fused.items()},
        "alpha_pattern": {module: count * section.alpha for module, count in fused.items()},
    }
    fields |= {"target_parameters": sorted(f"{end}.weight" for end in dense)} if dense else {}
    with written_aside(output) as aside:
        write_durably(aside / ADAPTER_CONFIG, json.dumps(fields, indent=2) + "\n")
        save_file(tensors, aside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        flush(aside / ADAPTER_WEIGHTS)


def lora_of(weights: CheckpointWeights) -> LoRA:
    """The [lora] section of the run that wrote a checkpoint."""
    return LoRA.model_validate(weights.run.config.get("lora", {}))


class MergedWeights(CheckpointWeights):
    """The weights of a checkpoint of adapters, added to those that they were trained on.

    Raises a `ConfigError` if these are not there any more, or have changed.
    """

    @cached_property
    def base(self) -> Path:
        """The folder of the weights that the adapters were trained on."""
        folder = local_folder(self.run.base.get("folder", ""), "--checkpoint")
        reason = f"its adapters were trained on {folder}, which is not there, or has changed; restore it"
        is_same = folder.is_dir() and fingerprint(folder) == self.run.base.get("fingerprint")
        require(is_same, "--checkpoint", str(self.path), reason)
        return folder

    @cached_property
    def adapters(self) -> dict[str, Adapter]:
        """By the names of the weights that they belong to."""
        adapters = _adapters(self.model, lora_of(self))
        return {f"{name}.weight": adapter for name, adapter in adapters.items()}

    @torch.no_grad()
    def update(self, name: str) -> torch.Tensor:
        """alpha / rank · B · A of the weight ``name``, which has an adapter: float32, [out, in]."""
        a, b = (super(MergedWeights, self).read(f"{name.removesuffix('weight')}{part}") for part in ADAPTER_NAMES)
        return self.adapters[name].up(a.t(), b).t()

    @cached_property
    def _base_reader(self) -> Any:
        if is_checkpoint(self.base):
            return CheckpointWeights(self.base).read
        source = open_hugging_face(self.base, "--checkpoint", self.run.config["model"].get("ignore_fields", ()))
        stored = {weight.name: weight for weight in source.stored_parameters(self.model)}
        return lambda name: source.read(stored[name])

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """One full weight by its name in the model: float32."""
        weight = self._base_reader(name)
        return weight + self.update(name) if name in self.adapters else weight


def fingerprint(folder: Path) -> str:
    """A hash of the files of weights in a folder: their names, sizes and samples of their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.name == ".metadata" or path.suffix in (".safetensors", ".distcp")):
            with path.open("rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{path.name} {size} ".encode())
                for number in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
