"""The part of a Hugging Face folder that a converted checkpoint keeps, so that exporting it restores the original."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_like.checkpoint.step_folders import write_durably
from titan_like.config.errors import RunError
from titan_like.hugging_face.folder import DTYPES, HuggingFaceFolder

ORIGIN_FILE = "hugging_face.json"


@dataclass(frozen=True)
class Origin:
    """config.json and the types of the original tensors; empty for a checkpoint that a run saved."""

    fields: dict[str, Any] = field(default_factory=dict)  # config.json
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of each tensor, by its name in transformers' class


def write_origin(folder: HuggingFaceFolder, path: Path) -> None:
    """Write the origin into a checkpoint's folder."""
    dtypes = {name: tensor.dtype for name, tensor in folder.tensors.items()}
    write_durably(path / ORIGIN_FILE, json.dumps({"config": folder.fields, "dtypes": dtypes}, indent=2))


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
