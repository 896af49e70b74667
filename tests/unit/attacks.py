"""What an attacker writes into a checkpoint."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Call:
    """Pickles to a call, as an attacker's object does."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


def edit_places(path: Path, change: Callable[[Any], object]) -> None:
    """Change where the metadata of a checkpoint says that each tensor lies."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        change(place)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def place_at(path: Path, name: Any) -> None:
    """Let every tensor lie in a file of this name."""
    edit_places(path, lambda place: setattr(place, "relative_path", name))


def hide_pickle(path: Path, mark: Path) -> None:
    """Let a tensor file hold a pickle that makes the file ``mark``, in the form that torch.save writes."""
    torch.save(Call(os.system, f"touch {mark}"), path / "evil")
    content = (path / "evil").read_bytes()
    (path / "evil").unlink()
    (path / "__0_0.distcp").write_bytes(content)

    def change(place: Any) -> None:
        if place.relative_path == "__0_0.distcp":
            place.offset, place.length = 0, len(content)

    edit_places(path, change)
