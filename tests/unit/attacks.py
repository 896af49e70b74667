"""What an attacker writes into a checkpoint, and into any other file that a user may name."""

import gzip
import os
import pickle
import socket
import struct
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


def _json(value: bytes) -> bytes:
    return b'{"text": ' + value + b"}\n"


DEEP, LONG = b"[" * 100_000, b"9" * 5_000  # nesting, and digits of an integer
JSON = {
    "deep": _json(DEEP + b"]" * len(DEEP)),
    "long": _json(LONG),
    "latin-1": _json(b'"\xe9"'),
    "utf-16": '{"text": "é"}'.encode("utf-16"),
    "null bytes": bytes(100),
    "cut": b'{"text": "x',
}
TOML = {
    "deep": b"a = " + DEEP + b"]" * len(DEEP),
    "dotted": b"a" + b".a" * 5_000 + b" = 1",
    "long": b"job.seed = " + LONG,
    "hexadecimal": b"job.seed = 0x" + LONG,
    "latin-1": b'a = "\xe9"',
    "utf-16": "a = 1".encode("utf-16"),
    "null bytes": bytes(100),
    "twice": b"a = 1\na = 2",
}
TEXT = {name: JSON[name] for name in ("latin-1", "null bytes")}
SAFETENSORS = {
    "cut": b"\x08\0\0\0\0\0\0\0{",
    "header of 10¹⁸ bytes": (10**18).to_bytes(8, "little") + b"{}",
    "deep": len(JSON["deep"]).to_bytes(8, "little") + JSON["deep"],
}
PARQUET = {"cut": b"PAR1" + bytes(50), "footer of 4 GiB": b"PAR1" + bytes(50) + b"\xff\xff\xff\xffPAR1"}
GZIP = {"cut": b"\x1f\x8b\x08\0", "null bytes": bytes(100), "deep": gzip.compress(JSON["deep"])}
INDEX = {"cut": b"MMIDIDX", "2⁶² sequences": struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1 << 62, 1 << 62)}
SPECIAL = ("pipe", "device", "socket", "loop")


def put(path: Path, content: str | bytes) -> None:
    """Let a file hold what an attacker would write, or be no file but one of `SPECIAL`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match content:
        case bytes():
            path.write_bytes(content)
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.relpath(path))  # a whole path may be too long for a socket
