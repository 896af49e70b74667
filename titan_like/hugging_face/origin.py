"""What a run's Hugging Face source says besides weights: it goes from save to save, and out again with an export.

A checkpoint holds these files next to its tensors: `hugging_face.json` with the source's config.json, and
generation_config.json and the tokenizer's files under their own names.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_like.config.errors import ConfigError, RunError
from titan_like.config.schema import Data
from titan_like.data.special_tokens import GENERATION_FILE, ORIGIN_FILE, TOKENIZER_FILE, TOKENIZER_FILES, read_json
from titan_like.data.tokenizer import tokenizer_files
from titan_like.hugging_face.folder import CONFIG_FILE, DTYPES, is_hugging_face


@dataclass(frozen=True)
class Origin:
    """config.json and the types of the original tensors; empty for a run that began without a source."""

    fields: dict[str, Any] = field(default_factory=dict)  # config.json
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of each tensor, by its name in transformers' class


def read_origin(path: Path) -> Origin:
    """Read the origin from a checkpoint's folder.

    Raises:
        RunError: the file is damaged.
    """
    if not (path / ORIGIN_FILE).exists():
        return Origin()
    try:
        content = json.loads((path / ORIGIN_FILE).read_text(encoding="utf-8"))
        dtypes = {name: DTYPES[dtype] for name, dtype in content["dtypes"].items() if dtype in DTYPES}
        return Origin(dict(content["config"]), dtypes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path / ORIGIN_FILE} is damaged ({error})") from None


def origin_files(source: Path | None, section: Data) -> dict[str, bytes]:
    """The files that every checkpoint of a run holds, by name.

    Args:
        source: the checkpoint or Hugging Face folder from which the run goes on, or None.
        section: the run's [data], whose tokenizer replaces that of the source.

    Raises:
        OSError: a file cannot be read.
        ValueError: config.json is invalid.
    """
    files = dict[str, bytes]()
    if source is not None:
        files = _read(source, (*TOKENIZER_FILES, GENERATION_FILE, ORIGIN_FILE))
        if is_hugging_face(source):
            content = {"config": read_json(source / CONFIG_FILE), "dtypes": {}}
            files[ORIGIN_FILE] = json.dumps(content, indent=2).encode()
        elif ORIGIN_FILE in files:  # the run's own weights have no original types
            content = {"config": read_origin(source).fields, "dtypes": {}}
            files[ORIGIN_FILE] = json.dumps(content, indent=2).encode()
    with suppress(ConfigError):  # data that is tokenized already needs no tokenizer
        own = [path for path in tokenizer_files(section.tokenizer) if path.is_file()]
        if own:
            files = {name: content for name, content in files.items() if name not in TOKENIZER_FILES}
            files |= _read(own[0].parent, TOKENIZER_FILES) if own[0].name == TOKENIZER_FILE else {}
            names = (TOKENIZER_FILE,) if len(own) == 1 else ("vocab.json", "merges.txt")
            files |= {name: path.read_bytes() for name, path in zip(names, own, strict=True)}
    return files


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
