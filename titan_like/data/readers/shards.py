"""Shards of a stream: local files of records, or files of a dataset on the Hugging Face hub."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.errors import ConfigError, first_line, require
from titan_like.config.urls import is_url, path_of
from titan_like.data.readers.files import find_kinds, find_remote, named_paths
from titan_like.data.readers.partition import SQRT_2, Part
from titan_like.data.readers.raw_text import (
    RECORD_ENDINGS,
    Piece,
    ReadFailure,
    UnreadableError,
    cut_of,
    ending_of,
    read_pieces,
)

# The fingerprint of a stream samples this many files, pieces of each, and bytes of a piece.
_FILES = 64
_PIECES = 3
_PIECE = 4096
_ROWS = 256  # rows of a dataset on the hub in a piece
_KINDS = {ending: ending[1:] for ending in (".jsonl", ".parquet", ".arrow", ".csv", ".tsv")}  # of files at URLs
_KINDS |= {".ndjson": "jsonl", ".jsonlines": "jsonl"}
_UNKNOWN_SIZE = 1 << 32
_NOTHING = "no such file or folder, and no file matches it as a glob pattern; a name of the Hugging Face hub would be "
_NOTHING += "like org/name, org/name:config or org/name@revision"
_NO_TEXT = 'contains text; a stream reads JSON, tables, parquet and arrow; set data.dataset = "text"'
# A dataset of the hub, perhaps with a configuration of it and a revision: allenai/c4:en@1588ec4
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class FileShard:
    """A file of JSON, a table, parquet or arrow."""

    path: Path
    size: int | None  # in bytes; None if it is unknown
    kind: str  # see `kind_of`; of a URL by its ending alone, and empty if that does not decide

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    @property
    def cut(self) -> str:
        """How it is cut; see `cut_of`. Lines of a file of unknown size have no parts, so it is read through."""
        cut = cut_of(self.path, self.kind)
        return "records" if cut == "lines" and self.size is None else cut

    def pieces(self, key: str, part: Part, start: int, first_record: int) -> Iterator[Piece]:
        """The pieces of a part from ``start`` on; see `read_pieces`."""
        cut_part = None if self.cut == "records" else part  # the content may have another kind than the ending tells
        for piece, _ in read_pieces(self.path, key, start, first_record, part=cut_part, kind=self.kind or None):
            if piece.kind == "text":
                raise UnreadableError(_NO_TEXT)
            yield piece


@dataclass(frozen=True)
class HubShard:
    """One of the files of a dataset on the hub."""

    name: str
    dataset: Any  # datasets.IterableDataset
    number: int
    size = None
    cut = "records"

    def pieces(self, key: str, part: Part, start: int, first_record: int) -> Iterator[Piece]:
        """Pieces as in `FileShard.pieces`. Errors other than known damage count as network failures."""
        try:
            rows = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.number).skip(start)
            for batch in rows.iter(batch_size=_ROWS):
                if key not in batch:
                    raise UnreadableError(f'has no column "{key}"; it has {", ".join(batch)}')
                texts = [{key: text} for text in batch[key]]
                yield Piece("rows", texts, start + 1, len(texts), start := start + len(texts))
        except UnreadableError:
            raise
        except Exception as error:  # the libraries may raise anything
            raise ReadFailure(f"cannot be read ({first_line(error)})") from None


Shard = FileShard | HubShard


def sizes_of(shards: Sequence[Shard]) -> np.ndarray:
    """The sizes by which readers divide the shards, int64 [shards]. One of unknown size counts as the largest does."""
    largest = max(shard.size or 0 for shard in shards)
    sizes = [largest if shard.size is None else shard.size for shard in shards]
    return np.array(sizes if largest else [_UNKNOWN_SIZE] * len(shards), np.int64)


def numbers_of(piece: Piece, cut: str) -> np.ndarray:
    """A number for each record of a piece, uint64 [records], that depends on its place in the shard alone.

    It is the record's number, from 0. In a shard cut by lines it is a hash of the byte at which the line begins.
    """
    if cut == "lines":
        content = np.frombuffer(bytes(piece.content), np.uint8)
        begins = np.concatenate([[0], np.flatnonzero(content == ord("\n")) + 1]) + (piece.end - len(content))
        return (begins[: piece.num_records].astype(np.uint64) * np.uint64(SQRT_2)) >> np.uint64(32)
    return np.arange(piece.first_record - 1, piece.first_record - 1 + piece.num_records, dtype=np.uint64)


def find_shards(paths: list[str], split: str = "train", column: str = "text") -> tuple[list[Shard], str]:
    """The shards that paths name in a fixed order, of ``split`` if there are several, and a digest of their content."""
    require(paths, "data.paths", None, 'dataset "hf" needs files, folders, patterns or names of the hub')
    shards: dict[str, Shard] = {}
    identity: list[object] = []
    for path in paths:
        has_ending = ending_of(Path(path)) in RECORD_ENDINGS
        if is_url(path):
            remote = find_remote(path, "data.paths", split)
            shards |= {url: _remote_shard(url, size or None) for url, (size, _) in remote.items()}  # 0 may be unknown
            identity.append(list(remote.items()))
        elif _HUB_NAME.fullmatch(path) and not has_ending and not named_paths(path):
            hub_shards, revision = _shards_of_hub(path, split)
            identity.append((path, revision, len(hub_shards)))
            shards |= {shard.name: shard for shard in hub_shards}
        else:
            require(named_paths(path), "data.paths", path, _NOTHING)
            kinds = find_kinds([path], "data.paths", _NO_TEXT, split, column)
            for file, kind in kinds.items():  # each once, also where paths spell its folder in other ways
                shards[str(file.parent.resolve() / file.name)] = FileShard(file, file.stat().st_size, kind)
    local = [file for shard in shards.values() if isinstance(shard, FileShard) and not is_url(str(file := shard.path))]
    identity += [(file.name, file.stat().st_size) for file in local]
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=16)
    for number in sorted({*np.linspace(0, len(local) - 1, _FILES).astype(int)} if local else ()):
        with open(local[number], "rb") as content:
            for start in np.linspace(0, max(0, local[number].stat().st_size - _PIECE), _PIECES).astype(int):
                content.seek(int(start))
                digest.update(content.read(_PIECE))
    return list(shards.values()), digest.hexdigest()


def _remote_shard(url: str, size: int | None) -> FileShard:
    return FileShard(path_of(url), size, _KINDS.get(ending_of(Path(url)), ""))


def _shards_of_hub(path: str, split: str) -> tuple[Sequence[Shard], str]:
    """The shards of a split of a dataset on the hub, and its current revision."""
    try:
        from datasets import disable_progress_bars, load_dataset, load_dataset_builder
        from huggingface_hub import HfApi
    except ImportError:
        reason = "no such file or folder, and a name of the Hugging Face hub needs the package datasets"
        raise ConfigError("data.paths", path, f"{reason}; install titan_like[stream]") from None
    name, config, revision = _HUB_NAME.fullmatch(path).group("name", "config", "revision")  # type: ignore[union-attr]
    disable_progress_bars()
    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=30, files_metadata=True)
        revision = str(info.sha)
        files = (load_dataset_builder(name, config, revision=revision).config.data_files or {}).get(split, ())
        if files and all(_KINDS.get(ending_of(Path(url))) in ("parquet", "jsonl") for url in files):
            sizes = {file.rfilename: file.size for file in info.siblings or ()}
            return [_remote_shard(url, sizes.get(url.partition("@")[2].partition("/")[2])) for url in files], revision
        dataset = load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # from the network, the hub, or the dataset's own format
        reason = f"no such file or folder, nor can the Hugging Face hub give it ({first_line(error)})"
        hint = "correct the name, or download it and name the folder"
        raise ConfigError("data.paths", path, f"{reason}; {hint}") from None
    shards = [HubShard(f"{path} shard {number}", dataset, number) for number in range(dataset.num_shards)]
    return shards, revision
