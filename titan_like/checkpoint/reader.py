"""Reads untrusted sharded checkpoints: only objects of tensor metadata are ever constructed."""

import gc
import io
import pickle
from dataclasses import fields, is_dataclass
from enum import Enum
from math import prod
from typing import IO, Any, ClassVar
from zipfile import ZIP_STORED, ZipFile

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from titan_like.torch_private import storage_info

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _MetadataUnpickler(pickle._Unpickler):
    """Allows only the classes of tensor metadata, and sets only the fields of their instances.

    It derives from the unpickler written in Python to replace BUILD, which can also change classes of this process.
    """

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """A class or function of tensor metadata. Raises an `UnpicklingError` for any other name."""
        module = module.replace("pathlib._local", "pathlib")  # the name in Python 3.13
        if module == "pathlib" and name in _PATHS:
            return lambda *parts: "/".join(parts)  # plain text, whatever system wrote it
        # Python 3.11.0 to 3.11.3 pickle members of enums so; old protocols have the module's name in Python 2.
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"checkpoint metadata names {module}.{name}, which is not tensor metadata")

    def load_build(self) -> None:
        """Set the fields of an instance of tensor metadata. Raises an `UnpicklingError` for any other target."""
        state, instance = self.stack.pop(), self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(instance, TensorProperties) and isinstance(state, tuple):
            instance.__setstate__(state)  # sets only its own fields
            return
        allowed = {field.name for field in fields(instance)} if is_dataclass(instance) else set()
        if isinstance(instance, type) or not allowed or not isinstance(state, dict) or not state.keys() <= allowed:
            raise pickle.UnpicklingError("checkpoint metadata changes something that is not tensor metadata")
        for name, value in state.items():
            object.__setattr__(instance, name, value)

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def _member(kind: Any, name: Any) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError("checkpoint metadata reads an attribute, which is not tensor metadata")
    return kind[name]


class TensorReader(FileSystemReader):
    """torch's file reader, with the metadata file (a pickle) restricted to the classes of tensor metadata.

    Each tensor is stored by torch.save as a zip archive. This reader verifies the archive's checksums, which torch.load
    ignores.
    """

    _mark = b""
    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and places of the stored tensors. The file is read only once.

        Raises a `pickle.UnpicklingError` if the file holds anything else, places a tensor outside the checkpoint's
        folder, or lacks parts of a tensor.
        """
        if self._metadata is not None:
            return self._metadata
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            content, is_collecting = io.BytesIO(file.read()), gc.isenabled()
        gc.disable()  # the metadata of many ranks is millions of objects, none of them garbage
        try:
            metadata = _MetadataUnpickler(content).load()
        finally:
            if is_collecting:
                gc.enable()
        _check(metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._mark = str(metadata.storage_meta.save_id or "").encode()
        self._metadata = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors. Raises an `UnpicklingError` for anything else, and `_slice_file`'s errors."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:  # torch's message tells the user how to run the pickle anyway
            raise pickle.UnpicklingError("a file of the checkpoint holds something that is not a tensor") from error

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """The bytes of one stored tensor. Raises a `RuntimeError` if its checksums or the file's mark do not match."""
        file.seek(0)
        first = file.read(len(self._mark))
        if first != self._mark and not first.startswith(b"PK"):  # files written by torch alone begin with a tensor
            raise RuntimeError(f"{sinfo.relative_path} is not this checkpoint's file")
        file.seek(sinfo.offset)
        stored = io.BytesIO(file.read(sinfo.length))
        if not _is_as_written(stored):
            raise RuntimeError(f"{sinfo.relative_path} does not match its checksum")
        stored.seek(0)
        return stored


def _is_as_written(archive: io.BytesIO) -> bool:
    """Whether every record of a zip archive is stored uncompressed and matches its checksum."""
    try:
        with ZipFile(archive) as directory:
            records = directory.infolist()
            is_stored = all(record.compress_type == ZIP_STORED for record in records)
            return bool(records) and is_stored and directory.testzip() is None
    except Exception:  # whatever zipfile raises for damaged bytes
        return False


def _check(metadata: Metadata) -> None:
    """Check that each tensor is in a file of the folder and has all its pieces, or a part would stay uninitialised."""
    for place in metadata.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(place, storage_info()) or not isinstance(name, str) or not is_file_name(name):
            raise pickle.UnpicklingError(f"checkpoint metadata names {name!r}, which is not a file in its folder")
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            pieces = {(tuple(piece.offsets), tuple(piece.sizes)) for piece in tensor.chunks}
            if sum(prod(sizes) for _, sizes in pieces) != prod(tensor.size):
                raise pickle.UnpicklingError(f"checkpoint metadata leaves out parts of {name!r}")


def is_file_name(name: str) -> bool:
    """Whether a name is a file name without a folder."""
    return name not in ("", ".", "..") and "/" not in name
