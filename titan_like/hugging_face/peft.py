"""Adapters in PEFT's folders, the weights that they were trained on, and both merged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from titan_like.checkpoint.loader import CheckpointWeights, is_checkpoint
from titan_like.checkpoint.step_folders import flush, write_durably, written_aside
from titan_like.config.errors import ConfigError, first_line, require
from titan_like.config.paths import file_problem
from titan_like.config.schema import LoRA
from titan_like.config.urls import RemotePath, path_of
from titan_like.data.special_tokens import read_json
from titan_like.data.tokenizer import is_on_hub
from titan_like.hugging_face.folder import local_folder, open_hugging_face, slice_reader
from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import Stored, fill_part
from titan_like.models.layers.init import ADAPTER_NAMES, local_parts
from titan_like.models.parts import WithoutInit
from titan_like.parallel.lora import NUMBERED, Adapter, adapters_of, stored_linears
from titan_like.parallel.model import ParallelModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BASE = "base_model_name_or_path"
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "none")
# Fields of adapter_config.json that make another model of the base.
_UNREAD = (
    *("bias", "use_rslora", "use_dora", "use_qalora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "arrow_config"),
)
_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of a file of weights


class StoredAdapter(NamedTuple):
    """The adapter of the linear layer ``name``, and where PEFT keeps it."""

    name: str
    adapter: Adapter
    stored: Stored

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """The modules in transformers that have an adapter, and the shapes [out, in] of their weights."""
        pairs = zip(self.stored.sources.items(), self.adapter.is_adapted, strict=True)
        turned = -1 if self.stored.is_transposed else 1
        shapes = {
            source.removesuffix(".weight"): shape[::turned] for (source, shape), is_adapted in pairs if is_adapted
        }
        return {module: (rows, columns) for module, (rows, columns) in shapes.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of PEFT's tensors by their names."""
        rank, shapes = self.adapter.rank, dict[str, tuple[int, int]]()
        for module, (rows, columns) in self.modules.items():
            shapes |= zip(names_of(module), ((rank, columns), (rows, rank)), strict=True)
        return shapes

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that PEFT keeps of our A and B."""
        rows = b.new_zeros(sum(self.stored.rows), self.adapter.rank).index_copy_(0, self._order, b)
        adapted = compress(rows.split(self.stored.rows), self.adapter.is_adapted)
        for module, part_a, part_b in zip(self.modules, a.split(self.adapter.rank), adapted, strict=True):
            first, second = names_of(module)
            yield first, part_a
            yield second, part_b

    def from_peft(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Our A and B from PEFT's tensors: float32."""
        pairs = iter([[tensors[name].float() for name in names_of(module)] for module in self.modules])
        parts, rows = list[torch.Tensor](), list[torch.Tensor]()
        for count, is_adapted in zip(self.stored.rows, self.adapter.is_adapted, strict=True):
            first, second = next(pairs) if is_adapted else (None, torch.zeros(count, self.adapter.rank))
            parts += [] if first is None else [first]
            rows.append(second)
        return torch.cat(parts), torch.cat(rows)[self._order]

    @property
    def _order(self) -> torch.Tensor:
        """For each row of our B, its number among the rows of all of the layer's matrices in transformers."""
        order, sizes = self.stored.order(), self.adapter.rows
        if len(sizes) == 1:
            return order
        adapted = torch.tensor(self.adapter.is_adapted).repeat_interleave(torch.tensor(sizes))
        return order.view(-1, sum(sizes))[:, adapted].flatten()


def names_of(module: str) -> tuple[str, str]:
    """What PEFT calls the A and the B of a module of transformers."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _adapters(model: TransformerConfig, section: LoRA) -> dict[str, Adapter]:
    with torch.device("meta"), WithoutInit():
        return adapters_of(model.family_module("model").build(model), section)


def stored_adapters(model: TransformerConfig, section: LoRA) -> Iterator[StoredAdapter]:
    """Every adapter of a model.

    Raises:
        ConfigError: transformers has no module for one of them.
    """
    stored = stored_linears(model)
    for name, adapter in _adapters(model, section).items():
        weight = stored.get(name)
        is_whole = weight is not None and sum(weight.rows) == weight.shape[0]
        problem = f"PEFT has no adapter for {name}, which is not a module of transformers' class"
        require(weight is not None and is_whole, "lora.modules", section.modules, problem)
        assert weight is not None
        yield StoredAdapter(name, adapter, weight)


def is_peft(folder: Path) -> bool:
    """Whether a folder looks like one of PEFT's."""
    return file_problem(folder / ADAPTER_CONFIG) is None


def base_of(name: str, key: str, weights: bool = True) -> str:
    """The folder of weights, or the hub's name of one, that a setting names by itself or by a PEFT folder."""
    folder = local_folder(name, key, weights)
    if not is_peft(folder):
        return name if is_on_hub(name) or isinstance(folder, RemotePath) else os.path.abspath(folder)
    base = _fields(folder, key).get(_BASE)
    problem = f"its {ADAPTER_CONFIG} names no {_BASE}; add it"
    require(isinstance(base, str) and base and not is_peft(path_of(base)), key, name, problem)
    return str(base)


def _fields(folder: Path, key: str) -> dict[str, Any]:
    try:
        return read_json(folder / ADAPTER_CONFIG)
    except ValueError as error:
        raise ConfigError(key, str(folder), first_line(error)) from None


def check_peft(folder: Path, key: str, model: TransformerConfig, section: LoRA) -> None:
    """Refuse a PEFT folder that holds other adapters than [lora] describes. Reads no tensors."""
    fields = _fields(folder, key)
    kind, start = fields.get("peft_type"), fields.get("init_lora_weights", True)
    require(kind == "LORA", key, str(folder), f"its peft_type is {json.dumps(kind)}; only LORA can be read")
    for name in _UNREAD:
        problem = f"its {name} = {json.dumps(fields.get(name))} cannot be read; merge it with PEFT instead"
        require(fields.get(name) in _NOTHING, key, str(folder), problem)
    problem = f"its init_lora_weights = {json.dumps(start)} changes the base; merge it with PEFT instead"
    require(isinstance(start, bool) or start == "gaussian", key, str(folder), problem)
    for name, value, theirs in (("rank", section.rank, "r"), ("alpha", section.alpha, "lora_alpha")):
        problem = f"{folder} has {theirs} = {fields.get(theirs)}; set it to that"
        require(value == fields.get(theirs), f"lora.{name}", value, problem)
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # whatever the library raises for an invalid file
        raise ConfigError(key, str(folder), f"its {ADAPTER_WEIGHTS} cannot be read ({first_line(error)})") from None
    wanted = {name: shape for adapter in stored_adapters(model, section) for name, shape in adapter.shapes.items()}
    for name in sorted(shapes.keys() ^ wanted.keys()):
        problem = f"{folder} has {'no' if name in wanted else 'a'} {name}; name the modules that it has"
        raise ConfigError("lora.modules", section.modules, problem)
    for name, shape in wanted.items():
        problem = f"its {name} has the shape {list(shapes[name])}, but the model and [lora] give {list(shape)}"
        require(shapes[name] == shape, key, str(folder), problem)


@torch.no_grad()
def read_peft(folder: Path, model: ParallelModel, section: LoRA) -> None:
    """Read this process's part of a PEFT folder's adapters, which have been checked, into a model in any layout."""
    parameters = dict(model.named_parameters())
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        for adapter in stored_adapters(model.stages[0].module.config, section):
            ours = [parameters.get(f"{adapter.name}.{name}") for name in ADAPTER_NAMES]
            if ours[0] is None:  # of another pipeline stage
                continue
            tensors = {name: file.get_tensor(name) for name in adapter.shapes}
            for parameter, value in zip(ours, adapter.from_peft(tensors), strict=True):
                assert parameter is not None
                for part, offset in local_parts(parameter):
                    where = zip(offset, part.shape, strict=True)
                    part.copy_(value[tuple(slice(start, start + size) for start, size in where)])


def write_peft(weights: CheckpointWeights, output: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's adapters as a PEFT folder, completely or not at all."""
    section, model = lora_of(weights), weights.model
    adapters, tensors = list(stored_adapters(model, section)), dict[str, torch.Tensor]()
    for adapter in adapters:
        a, b = (weights.read(f"{adapter.name}.{name}") for name in ADAPTER_NAMES)
        tensors |= {name: tensor.to(dtype).contiguous() for name, tensor in adapter.to_peft(a, b)}
    # Without the layers' numbers, names fit the same module in each layer.
    ends = {NUMBERED.sub("", module) for adapter in adapters for module in adapter.modules}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.is_causal else "SEQ_2_SEQ_LM" if model.has_decoder else None,
        _BASE: weights.run.base.get("folder"),
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "target_modules": sorted(ends),
        "fan_in_fan_out": any(adapter.stored.is_transposed for adapter in adapters),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with written_aside(output) as aside:
        write_durably(aside / ADAPTER_CONFIG, json.dumps(fields, indent=2) + "\n")
        save_file(tensors, aside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        flush(aside / ADAPTER_WEIGHTS)


def lora_of(weights: CheckpointWeights) -> LoRA:
    """The [lora] section of the run that wrote a checkpoint."""
    return LoRA.model_validate(weights.run.config.get("lora", {}))


class MergedWeights(CheckpointWeights):
    """The weights of a checkpoint of adapters, added to those that they were trained on.

    Raises:
        ConfigError: these are not there any more, or have changed.
    """

    @cached_property
    def base(self) -> Path:
        """The folder of the weights that the adapters were trained on."""
        folder = local_folder(self.run.base.get("folder", ""), "--checkpoint")
        problem = f"its adapters were trained on {folder}, which is not there, or has changed; restore it"
        is_same = folder.is_dir() and fingerprint(folder) == self.run.base.get("fingerprint")
        require(is_same, "--checkpoint", str(self.path), problem)
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
        source = open_hugging_face(self.base, "--checkpoint")
        stored = {weight.name: weight for weight in source.stored_parameters(self.model)}
        read = slice_reader(source.tensors)

        def read_one(name: str) -> torch.Tensor:
            weight = torch.empty(stored[name].shape)
            fill_part(weight, (0,) * weight.ndim, stored[name], read)
            return weight

        return read_one

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """One full weight by its name in the model: float32."""
        weight = self._base_reader(name)
        return weight + self.update(name) if name in self.adapters else weight


def fingerprint(folder: Path) -> str:
    """A hash of the files of weights in a folder: their names, sizes and samples of their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.name == ".metadata" or path.suffix in (".safetensors", ".distcp"):
            with path.open("rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{path.name} {size} ".encode())
                for number in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
