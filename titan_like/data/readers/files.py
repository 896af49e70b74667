"""Resolves a path in a setting to files: the file, the matches of a glob pattern, or the files of a folder.

The files are of text or records, or the indexes of Megatron-LM's datasets.

A folder is read as by Hugging Face's `datasets`: with ``load_from_disk`` if ``save_to_disk`` wrote it, else with
``load_dataset(folder, split="train")``. If neither names nor README.md distinguish splits, files of all formats are
read, not only of the most frequent one. Of tables and other records, which may describe each other, only the more
frequent kind is read. All text files are read too if none of them belongs to train.
"""

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Collection
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError, blamed_on, require
from titan_like.config.paths import blaming, check_folder, parse_json, unreadable_reason, user_file
from titan_like.config.urls import RemotePath
from titan_like.data.readers import raw_text
from titan_like.data.readers.fetch import fetch, list_files
from titan_like.data.readers.indexed import prefix_of

_WORDS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
_SPLITS = {split: re.compile(rf"(.*[-._ 0-9])?({words})([-._ 0-9].*)?") for split, words in _WORDS.items()}
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}.*\..*")
_METADATA = re.compile(r"\..*|(config|dataset_infos?|dataset_dict|state)\.json|cache-[0-9a-f]+(_.*)?\.arrow")
_MOST_NAMED = 6  # files in a line of the log


def find_files(
    paths: list[str], key: str, no_text: str = "", split: str = "train", columns: raw_text.Key = ()
) -> list[Path]:
    """The files that paths name, each once; see `find_kinds`."""
    return list(find_kinds(paths, key, no_text, split, columns))


def find_kinds(
    paths: list[str], key: str, no_text: str = "", split: str = "train", columns: raw_text.Key = ()
) -> dict[Path, str]:
    """The files that paths name, with the kind of each; from folders with several splits, the files of ``split``.

    Raises a `ConfigError` about the setting ``key`` if a path names no file or an unreadable one, or a text file if
    there is a reason ``no_text`` to refuse it. ``columns`` are the columns to read, as for `kind_of`.
    """
    kinds = {}
    for path in _named_files(paths, key, raw_text.RECORD_ENDINGS if no_text else raw_text.KNOWN_ENDINGS, split):
        reason = unreadable_reason(path)
        require(reason is None, key, str(path), f"{reason}; name files of text or records")
        require(path.stat().st_size > 0, key, str(path), "the file is empty; remove it or give one with text")
        with blamed_on(key, str(path), raw_text.UnreadableError):
            kinds[path] = raw_text.kind_of(path, columns)
        require(not (no_text and kinds[path] == "text"), key, str(path), no_text)
    return kinds


def find_remote(url: str, key: str, split: str) -> dict[str, tuple[int | None, str]]:
    """The files of records that a URL names, with the size and version of each. Folders are read as here."""
    try:
        matches, files = list_files(url)
    except OSError as error:
        hint = "correct the URL, the credentials or the network"
        raise ConfigError(key, url, f"cannot be listed ({error.strerror}); {hint}") from None
    require(files, key, url, "no such file or folder, and no file matches it as a glob pattern")
    chosen = list[str]()
    for match in matches:
        names = [name.removeprefix(f"{match}/") for name in files if name.startswith(f"{match}/")]
        names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
        paths = _files_of_folder(RemotePath(match), key, raw_text.RECORD_ENDINGS, split, names) if names else [match]
        chosen += map(str, paths)
    require(chosen, key, url, f"no file in the folder ends with {', '.join(raw_text.RECORD_ENDINGS)}")
    return {name: files[name] for name in chosen}


def find_indexed(paths: list[str], key: str) -> list[str]:
    """The indexed datasets that paths name, each once, as paths with or without .idx or .bin; see `find_files`."""
    names_by_prefix: dict[Path, str] = {}
    for name in paths:
        prefix = prefix_of(name)
        named = [name]
        if not any(os.path.lexists(f"{prefix}{ending}") for ending in (".idx", ".bin")):
            # A pattern may be of .bin files, or of names without either ending.
            patterns = [pattern for pattern in dict.fromkeys((f"{prefix}.idx", name)) if named_paths(pattern)]
            files = sorted(_named_files(patterns or [name], key, (".idx",)))
            named = [str(prefix_of(path)) for path in files if path.suffix == ".idx"] or [str(files[0])]
        for dataset in named:
            names_by_prefix.setdefault(prefix_of(dataset).resolve(), dataset)
    return list(names_by_prefix.values())


def _named_files(paths: list[str], key: str, endings: tuple[str, ...], split: str = "train") -> list[Path]:
    """The files that paths name, each once. ``endings``, without a compression's, select the files of folders."""
    files: dict[Path, Path] = {}  # by name in their real folder, which may have other spellings and links to it
    for name in paths:
        named = named_paths(name)
        require(named, key, name, "no such file or folder, and no file matches it as a glob pattern")
        # A pattern skips anything else, and folders without such files, unless it matches nothing else.
        usable = [path for path in named if os.path.isfile(path) or os.path.isdir(path)] or named[:1]
        inside = [_files_of_folder(path, key, endings, split) if os.path.isdir(path) else [path] for path in usable]
        matches = list(chain(*inside))
        reason = f"is a folder, not a file, and no file in the folder ends with {', '.join(endings)}"
        require(matches, key, str(usable[0]), reason)
        for path in matches:
            files.setdefault(path.parent.resolve() / path.name, path)
    return list(files.values())


def named_paths(text: str) -> list[Path]:
    """The paths that a path or glob pattern names, sorted. A path that cannot be checked counts as existing."""
    if os.path.lexists(text) or unreadable_reason(Path(text)) != "does not exist":
        return [Path(text)]
    return sorted(map(Path, glob.glob(text, recursive=True)))


def _files_of_folder(
    folder: Path, key: str, endings: tuple[str, ...], split: str, names: list[str] | None = None
) -> list[Path]:
    """The files of a folder to read, of those that ``names`` lists, or of all that are in it."""
    if names is None:
        below = sorted(map(Path, glob.glob("**/*", root_dir=folder, recursive=True)))  # follows links, not hidden files
        check_folder(key, (folder / path for path in below))
        names = [str(path) for path in below if (folder / path).is_file()]
    names = [name for name in names if "__" not in {part[:2] for part in Path(name).parts}]
    chosen = _saved(folder, key, split)
    if chosen is None:
        data = {name: raw_text.ending_of(Path(name)) for name in names if not _METADATA.fullmatch(Path(name).name)}
        chosen = _of_split(folder, key, {name: ending for name, ending in data.items() if ending in endings}, split)
    read = {*chosen, *(f"{prefix_of(name)}.bin" for name in chosen if ".idx" in endings)}
    if chosen and (rest := sorted({*names} - read)):
        shown = [part if len(part) <= _MOST_NAMED else [*part[:_MOST_NAMED], "…"] for part in (chosen, rest)]
        named, unread = map(", ".join, shown)
        say(f"{folder}: reads {len(chosen)} of {len(chosen) + len(rest)} files ({named}) and leaves {unread}")
    return [folder / name for name in chosen]


def _saved(folder: Path, key: str, wanted: str = "") -> list[str] | None:
    """The files that ``save_to_disk`` wrote, in the wanted split if there are several; None if it wrote none."""
    for name, entry in (("dataset_dict.json", "splits"), ("state.json", "_data_files")):
        if not (folder / name).is_file():
            continue
        path = folder / name
        with user_file(path, blaming(key, str(path), "save it again"), "is damaged"):
            content: Any = parse_json(path.read_bytes())[entry]
            if entry == "_data_files":
                return [str(file["filename"]) for file in content]
            content = [str(split) for split in content]
        split = _chosen_split(folder, key, content, wanted)
        return [f"{split}/{file}" for file in _saved(folder / split, key) or ()]
    return None


def _chosen_split(folder: Path, key: str, splits: Collection[str], wanted: str) -> str:
    if len(splits) == 1 and wanted != "train":  # held-out data may have any name
        return next(iter(splits))
    reason = f"has no split named {wanted}, but {', '.join(sorted(splits))}; name the files or the folder of one"
    require(wanted in splits, key, str(folder), reason)
    return wanted


def _of_split(folder: Path, key: str, endings: dict[str, str], wanted: str) -> list[str]:
    """The files of the wanted split according to ``load_dataset``, given files with their endings."""
    has_records = not set(raw_text.RECORD_ENDINGS).isdisjoint(endings.values())
    names = [name for name in endings if not has_records or endings[name] != ".md"]  # it only describes the records
    by_split = _splits_of_readme(folder, key, names) or _splits_of_names(names)
    tables = {name for name in names if endings[name] in raw_text.TABLE_ENDINGS}
    records = {name for name in names if endings[name] in raw_text.RECORD_ENDINGS} - tables
    if not by_split and tables and records:
        return [name for name in names if name not in min(tables, records, key=len)]
    if not by_split or (not has_records and not {wanted, "train"} & {*by_split}):
        return names
    split = _chosen_split(folder, key, by_split, wanted)
    # Several formats may contain the same rows, so the most frequent one is read.
    counts = Counter(endings[name] for name in by_split[split])
    order = [".parquet", ".arrow", *raw_text.JSON_ENDINGS, *raw_text.TABLE_ENDINGS, *endings.values()]
    most_frequent = max(counts, key=lambda ending: (counts[ending], -order.index(ending)), default="")
    chosen_endings = raw_text.JSON_ENDINGS if most_frequent in raw_text.JSON_ENDINGS else (most_frequent,)
    return [name for name in by_split[split] if endings[name] in chosen_endings]


def _splits_of_names(names: list[str]) -> dict[str, list[str]]:
    """Files by the split in their names, else in the names of their folders; empty if these name none."""
    shards = [(match[1], name) for name in names if (match := _SHARD.fullmatch(name))]
    for part in (slice(-1), slice(-1, None)) if not shards else ():
        parts = {name: Path(name).parts[part] for name in names}
        shards = [(s, name) for s, words in _SPLITS.items() for name in names if any(map(words.fullmatch, parts[name]))]
        if shards:
            break
    return {split: [name for shard_split, name in shards if shard_split == split] for split, _ in shards}


def _splits_of_readme(folder: Path, key: str, names: list[str]) -> dict[str, list[str]] | None:
    """Files by split, according to the metadata of README.md; None if it lists no splits."""
    from fsspec.utils import glob_translate
    from huggingface_hub import metadata_load  # installed with the package tokenizers

    try:
        readme = folder / "README.md"
        if isinstance(readme, RemotePath) and readme.is_file():
            (readme,) = fetch([str(readme)], key)
        configs = (metadata_load(readme) or {})["configs"]
        chosen = [c for c in configs if len(configs) == 1 or c["config_name"] == "default" or c.get("default")]
        names_of = ", ".join(config.get("config_name", "") for config in configs)
        reason = f"has several configurations ({names_of}); name the files or the folder of one"
        require(len(chosen) == 1, key, str(folder), reason)
        inside = chosen[0].get("data_dir") or "."
        if "data_files" not in chosen[0]:
            below = [name for name in names if Path(name).is_relative_to(inside)]
            return _splits_of_names(below) or (None if below == names else {"train": below})
        stated = chosen[0]["data_files"]
        if not (isinstance(stated, list) and isinstance(stated[0], dict)):
            stated = [{"split": "train", "path": stated}]
        by_split = {}
        for entry in stated:
            patterns = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
            matching = [re.compile(glob_translate(os.path.normpath(os.path.join(inside, x)))) for x in patterns]
            by_split[entry["split"]] = [name for name in names if any(pattern.match(name) for pattern in matching)]
        return by_split
    except ConfigError:
        raise
    except Exception:  # the metadata may have any form
        return None


@cache
def say(line: str) -> None:
    """Print a line once, on the first process."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
