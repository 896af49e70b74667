"""`model.from`: settings that follow from the folder that a run starts from, and reading that folder's weights."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan_like.checkpoint.checks import saved_state
from titan_like.checkpoint.loader import is_checkpoint, model_tensors, unreadable
from titan_like.checkpoint.step_folders import RUN_FILE, RunState, checkpoint_folder, checkpoint_path, read_run_state
from titan_like.config.entry_points import format_of
from titan_like.config.errors import ConfigError, all_of, require
from titan_like.config.load import edit, setting
from titan_like.config.paths import unreadable_reason
from titan_like.config.schema import JobConfig, TokenOptions
from titan_like.data.text.tokenizer import build_tokenizer, tokenizer_files, tokenizer_in
from titan_like.hugging_face.folder import is_hugging_face, local_folder, open_hugging_face, read_model
from titan_like.hugging_face.peft import base_of, is_peft, own_modules, peft_settings
from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import fill_part
from titan_like.models.layers.init import local_parts
from titan_like.models.registry import config_class, filled_shape, model_config
from titan_like.models.transformer import Transformer
from titan_like.parallel.model import ParallelModel

FLAVOR = "imported"  # name of the folder's shape
SAYS_TOKENS = ("tokenizer", *TokenOptions._fields)
_KEY, _ROPE = "model.from", ("rope_theta", "rope_scaling")


class Start(NamedTuple):
    """Settings that follow from a folder."""

    family: str
    shape: dict[str, Any]
    data: dict[str, Any]  # keys of [data] that decide how text is tokenized
    free: frozenset[str] = frozenset({"vocab_multiple"})  # fields of the shape that the folder leaves open
    lora: dict[str, Any] = {}  # rank, alpha and modules, if it is a PEFT folder  # noqa: RUF012


def read_start(name: str, key: str, ignore: Collection[str] = ()) -> Start:
    """Read the settings that follow from a Hugging Face folder or a checkpoint, which the setting ``key`` names.

    ``ignore`` is `model.ignore_fields`. Raises a `ConfigError` if it is neither, or its files are inconsistent.
    """
    base, named = base_of(name, key, weights=False), local_folder(name, key, weights=False)
    path, lora = local_folder(base, key, weights=False), peft_settings(named, key) if is_peft(named) else {}
    if is_checkpoint(path):
        reason = unreadable(path)
        require(not reason, key, str(path), f"cannot be loaded ({reason}); name another checkpoint")
        reason = f"{path} is a checkpoint, which has no config.json to leave fields out of; leave it out"
        require(not ignore, "model.ignore_fields", ignore, reason)
        state = read_run_state(path)
        family = state.config["model"]["family"]
        shape = filled_shape(family, state.model)
        if lora:
            lora["modules"] = own_modules(config_class(family).model_validate(shape), path, lora["modules"])
        return _of_run(state, shape, tokenizer_in(path))._replace(free=frozenset(), lora=lora)
    if is_hugging_face(path):
        _, family, model = read_model(path, key, ignore)
        if lora:
            lora["modules"] = own_modules(model, path, lora["modules"])
        tokenizer = tokenizer_in(path)
        data = {} if tokenizer is None else {"tokenizer": tokenizer}
        return Start(family, plain(model.model_dump(mode="json")), data, lora=lora)
    reason = unreadable_reason(path / RUN_FILE)
    is_readable = reason in (None, "does not exist")
    require(is_readable, key, name, f"{path / RUN_FILE} {reason}; name a folder that you may read")
    hint = "name one with run.json or with config.json, or a run's dump folder"
    reason = "neither a checkpoint's step-N folder, nor a folder of them, nor a Hugging Face folder"
    if lora:
        reason, hint = f"its base {base} is {reason}", "correct base_model_name_or_path in adapter_config.json"
    raise ConfigError(key, name, f"{reason}; {hint}")


def _of_run(state: RunState, shape: dict[str, Any], tokenizer: str | None) -> Start:
    data = {key: state.config["data"][key] for key in SAYS_TOKENS if key in state.config["data"]}
    data |= {} if tokenizer is None else {"tokenizer": tokenizer}
    return Start(state.config["model"]["family"], plain(shape), data)


def plain(value: Any) -> Any:
    """A setting without what TOML and arguments leave out of tables: nulls, and empty tables."""
    if not isinstance(value, dict):
        return value
    tables = {name: plain(item) for name, item in value.items()}
    return {name: item for name, item in tables.items() if item is not None and item != {}}


def with_start(config: JobConfig) -> JobConfig:
    """A configuration in which `model.from` has become the family, shape, tokenizer and initial weights of its folder.

    A run that resumes reads them from its own checkpoint, and does not need the folder. Raises a `ConfigError` if the
    folder cannot be used, or settings contradict it: a line for each of them.
    """
    source = config.model.from_
    assert source is not None
    start = _saved_start(config) or read_start(source, _KEY, config.model.ignore_fields)
    unset = {f"data.{key}": value for key, value in start.data.items() if key not in config.data.model_fields_set}
    unset |= {f"lora.{key}": value for key, value in start.lora.items() if key not in config.lora.model_fields_set}
    wanted = {
        "model.family": (start.family, start.family),
        "model.flavor": (FLAVOR, "its own shape"),
        "model.flavors": ({FLAVOR: start.shape}, "its own shape"),
        "checkpoint.initial_load_path": (source, "the weights"),
    }
    wanted |= {f"lora.{key}": (value, value) for key, value in start.lora.items() if key != "modules"}
    filled = edit(config, {key: value for key, (value, _) in wanted.items()} | unset)
    errors = list[ConfigError]()
    for key, (value, what) in wanted.items():
        section, _, name = key.partition(".")
        if name in getattr(config, section).model_fields_set and plain(given := setting(config, key)) != plain(value):
            errors.append(ConfigError(key, given, f"{source} gives {what}; leave it out"))
    for name in ("model", "data", "lora", "checkpoint"):  # what is written out as TOML is what the user has set
        getattr(filled, name).model_fields_set.intersection_update(getattr(config, name).model_fields_set)
    for check in (_check_overrides, _check_tokenizer):
        try:
            errors += check(filled, start, source)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise all_of(errors)
    return filled


def _check_overrides(config: JobConfig, start: Start, source: str) -> Iterator[ConfigError]:
    """An error for each override of a field that belongs to the weights."""
    model, overrides = model_config(config.model), config.model.overrides
    values, free = plain(model.model_dump(mode="json")), free_fields(config, model, start)
    for field, given in overrides.items():
        if field not in free and values.get(field) != (theirs := start.shape.get(field)):
            hint = f"; for rotary positions set {field} of model.overrides.kinds" if field in _ROPE else ""
            if field == "max_seq_len":
                hint = ", and training.seq_len within it: that many positions are learned"
            yield ConfigError(f"model.overrides.{field}", given, f"{source} gives {theirs}; leave it out{hint}")


def _check_tokenizer(config: JobConfig, start: Start, source: str) -> Iterator[ConfigError]:
    """An error if the run's tokenizer makes other tokens than the folder's, or if neither names one."""
    section, theirs = config.data, start.data.get("tokenizer")
    if theirs is None and "tokenizer" not in section.model_fields_set and not format_of(section.dataset).is_tokenized:
        reason = f"{source} has no tokenizer, and without one every byte is a token; set it to the model's"
        yield ConfigError("data.tokenizer", None, reason)
    specs = (section.tokenizer, theirs) if theirs not in (None, section.tokenizer) else ()
    if len({build_tokenizer(spec, options=section.token_options).digest for spec in specs}) > 1:
        reason = f"{source} gives {theirs}, which makes other tokens; leave it out"
        yield ConfigError("data.tokenizer", section.tokenizer, reason)


def _saved_start(config: JobConfig) -> Start | None:
    """The `Start` with which the run began, from the checkpoint that it resumes from; None without one."""
    state = saved_state(config)
    if state is None or state.config["model"].get("from") != config.model.from_:
        return None
    is_gone = any(map(unreadable_reason, tokenizer_files(state.config["data"]["tokenizer"])))
    saved = tokenizer_in(checkpoint_path(checkpoint_folder(config), state.step)) if is_gone else None
    start = _of_run(state, state.config["model"]["flavors"][FLAVOR], saved)
    lora = {key: state.config["lora"][key] for key in ("rank", "alpha", "modules") if "adapters" in state.base}
    return start._replace(lora=lora)


def free_fields(config: JobConfig, model: TransformerConfig, start: Start) -> frozenset[str]:
    """The fields in which a run's model may differ from its source: rotary positions too, if overrides set them."""
    free, kinds = set(_ROPE), start.shape.get("kinds")
    if kinds:  # each has its own
        both = plain(model.model_dump(mode="json")).get("kinds", {}), kinds
        ours, theirs = ({name: kind | dict.fromkeys(_ROPE) for name, kind in table.items()} for table in both)
        free = {"kinds"} if ours == theirs else set()
    of_head = frozenset() if "tokens" in model.predictions else {"tied_embeddings"}
    return model.not_in_weights | of_head | start.free | (free & config.model.overrides.keys())


@torch.no_grad()
def read_weights(
    path: Path, model: ParallelModel | Transformer, may_lack: tuple[str, ...] = (), ignore: Collection[str] = ()
) -> None:
    """Read this process's part of a Hugging Face folder's weights into a model in any layout.

    Weights of the modules ``may_lack`` stay as they are if the files do not have them. ``ignore`` is
    `model.ignore_fields`. Raises an exception of any type if a file is damaged.
    """
    source, tensors = open_hugging_face(path, _KEY, ignore), model_tensors(model, base=True)
    shape = (model.stages[0].module if isinstance(model, ParallelModel) else model).config
    new = tuple(f"{name}." for name in may_lack)
    for stored in source.stored_parameters(shape):
        tensor = tensors.get(stored.key)
        is_new = stored.name.startswith(new) and not stored.sources.keys() <= source.tensors.keys()
        if tensor is not None and not is_new:  # otherwise another pipeline stage holds it
            for part, offset in local_parts(tensor):
                fill_part(part, offset, stored, source.read_slice)
    if isinstance(model, ParallelModel):
        model.update_copies()
