"""Files of a run's Hugging Face source besides weights: every checkpoint has them, and an export writes them again.

A checkpoint has these files next to its tensors: `hugging_face.json` with the source's config.json, and
generation_config.json and the tokenizer's files under their own names.
"""

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_like.config.errors import ConfigError, RunError
from titan_like.config.paths import parse_json, user_file
from titan_like.config.schema import Data
from titan_like.data.readers.fetch import with_small_files
from titan_like.data.text.special_tokens import (
    ABOUT_FILE,
    GENERATION_FILE,
    ORIGIN_FILE,
    TOKENIZER_FILE,
    end_ids,
    read_json,
    tokenizer_names,
)
from titan_like.data.text.tokenizer import HuggingFaceTokenizer, tokenizer_files, tokenizer_of
from titan_like.hugging_face.folder import CONFIG_FILE, DTYPES, without


@dataclass(frozen=True)
class Origin:
    """The source's config.json, tensors and folder; empty for a run that began without a source."""

    fields: dict[str, Any] = field(default_factory=dict)  # config.json
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of each tensor, by its name in transformers' class
    source: str = ""  # the folder, which may be gone


def read_origin(path: Path) -> Origin:
    """Read the origin from a checkpoint's folder; a `RunError` if the file is damaged."""
    if not (path / ORIGIN_FILE).exists():
        return Origin()
    file = path / ORIGIN_FILE
    with user_file(file, lambda reason: RunError(f"{file} {reason}"), "is damaged"):
        content = parse_json(file.read_text(encoding="utf-8"))
        dtypes = {name: DTYPES[dtype] for name, dtype in content["dtypes"].items() if dtype in DTYPES}
        return Origin(dict(content["config"]), dtypes, str(content.get("source", "")))


def origin_files(source: Path | None, section: Data, ignore: Collection[str] = ()) -> dict[str, bytes]:
    """The files that every checkpoint of a run holds, by name. An invalid config.json raises a `ValueError`.

    Args:
        source: the checkpoint or Hugging Face folder that the run continues from, or None.
        section: the run's [data], whose tokenizer replaces the source's. What ends a text by its folder, or
            documents of the run, then ends a text by these files, too.
        ignore: `model.ignore_fields`, which an export leaves out too.
    """
    files, tokenizer = dict[str, bytes](), dict[str, bytes]()
    if source is not None:
        source = with_small_files(source)
        files, tokenizer = _read(source, (GENERATION_FILE,)), _read(source, tokenizer_names(source))
        fields, earlier = read_json(source / CONFIG_FILE), read_origin(source)
        fields = fields and without(fields, ignore)
        if fields or earlier.fields:  # the run's own weights have no original types
            first = str(source.absolute()) if fields else earlier.source
            content = {"config": fields or earlier.fields, "dtypes": {}, "source": first}
            files[ORIGIN_FILE] = json.dumps(content, indent=2).encode()
    if section.learns_bytes:
        return {name: content for name, content in files.items() if name == ORIGIN_FILE}
    with suppress(ConfigError):  # data that is tokenized already needs no tokenizer
        paths = [path for path in tokenizer_files(section.tokenizer) if path.is_file()]
        if paths:
            theirs, tokenizer = tokenizer, _read_tokenizer(paths)
            ours = tokenizer_of(section)
            assert isinstance(ours, HuggingFaceTokenizer)  # it has files
            names = {TOKENIZER_FILE, ABOUT_FILE, *(path.name for path in paths)}
            is_changed = section.eod_token or any(theirs.get(name) != tokenizer.get(name) for name in names)
            if is_changed and TOKENIZER_FILE in tokenizer and not ours.names_eos:
                eos = {"eos_token": ours.tokenizer.id_to_token(ours.eod_id)}
                about = json.loads(tokenizer.get(ABOUT_FILE, b"{}")) | eos
                tokenizer[ABOUT_FILE] = json.dumps(about, indent=2, ensure_ascii=False).encode()
            ends = [*([ours.eod_id] if is_changed else []), *ours.end_ids]
            _add_ends(files, [] if source is None else end_ids(source), ends)
    return files | tokenizer


def _read_tokenizer(paths: list[Path]) -> dict[str, bytes]:
    files = _read(paths[0].parent, tokenizer_names(paths[0].parent)) if paths[0].name == TOKENIZER_FILE else {}
    names = (TOKENIZER_FILE,) if len(paths) == 1 else ("vocab.json", "merges.txt")
    return files | {name: path.read_bytes() for name, path in zip(names, paths, strict=True)}


def _add_ends(files: dict[str, bytes], ends: list[int], more: list[int]) -> None:
    """Let the files, which name ``ends`` as the tokens that end a text, name ``more``."""
    missing = [number for number in dict.fromkeys(more) if number not in ends]
    if not missing:
        return
    if len(missing) > 1 and not files.keys() & {GENERATION_FILE, ORIGIN_FILE}:  # the tokenizer names the first itself
        files[GENERATION_FILE] = b"{}"
    for name in files.keys() & {GENERATION_FILE, ORIGIN_FILE}:
        content = json.loads(files[name])
        (content["config"] if name == ORIGIN_FILE else content)["eos_token_id"] = [*ends, *missing]
        files[name] = json.dumps(content, indent=2).encode()


def _read(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
