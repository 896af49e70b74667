"""The run's own data, read on several ranks with data workers and resumed on others, against its definition.

The definition shares the keyed permutation, the division of weights into whole shares, the tokenizer and the bounds of
splits of stored tokens with the product, and nothing else. It knows no index, no bookmark and no random access.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from itertools import accumulate, count, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from titan_like.config.errors import ConfigError, RunError, first_line
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data import blend, raw_text, shards, stream_reader
from titan_like.data.blend import BlendedSource, shares_of
from titan_like.data.indexed import StoredTokens
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.masks import MaskedSamples, masks_of
from titan_like.data.open_source import open_data
from titan_like.data.packed import PackedDataset, corpus_folder, corpus_job
from titan_like.data.permutation import Permutation
from titan_like.data.race import RaceSource
from titan_like.data.source import SPLITS, UNKNOWN_LENGTH, Source
from titan_like.data.stream import BlendedStream, StreamSource
from titan_like.models.config import NUM_OPTIONS
from titan_like.models.registry import model_config
from titan_like.verify.processes import Member
from titan_like.verify.samples import IGNORED

_RELAY = ((4, 0), (1, 2), (2, 1))  # ranks, and data workers of each
_PART = 16  # samples that each of them reads
_WINDOW = _PART * len(_RELAY)
_MOST_TEXT = 16 << 20  # bytes that are tokenized for this
_MOST_DRAWN = 100_000  # samples of a blend that are counted to find the end of an epoch
_BLOCK = 24  # samples of a blend
_SMALL = [
    *((blend, "BLOCK", _BLOCK), (stream_reader, "INTERVAL", 2), (stream_reader, "_BATCH", 256)),
    *((raw_text, "_PIECE", 1 << 14), (raw_text, "_CHUNK", 1 << 12), (raw_text, "_ROWS", 5), (shards, "_ROWS", 5)),
]

Sample = Callable[[int], torch.Tensor]  # by its number: int64 [2, seq]


class Found(NamedTuple):
    """What the check found."""

    covered: str = ""  # the samples that were read
    problem: str | None = None  # the first sample that is wrong, in words
    unchecked: str | None = None  # why nothing was read


def check_data(member: Member, config: JobConfig) -> Found:
    """Read some samples of a run's data, in blocks so short that many end within these samples."""
    multiprocessing.set_start_method(None, force=True)  # a run's own; processes of a group have that of their server
    try:
        if not _has_tokens(config):
            config = edit(config, {"job.dump_folder": str(member.folder)})
        with short_blocks():
            return compare_with_definition(config)
    except (ConfigError, RunError) as error:
        return Found(unchecked=str(error))


def _has_tokens(config: JobConfig) -> bool:
    """Whether the run's text has been tokenized into its cache.

    Raises:
        ConfigError: it has not, and there is much of it.
    """
    section, cache_folder = config.data, Path(config.job.dump_folder, "data_cache")
    if section.dataset not in ("stdlib", "text"):
        return False
    shares = shares_of(section.paths, one_source_each=False)
    jobs = [corpus_job(section.model_copy(update={"paths": share.paths})) for share in shares]
    if all(corpus_folder(job, cache_folder).exists() for job in jobs):
        return True
    if sum(file.stat().st_size for job in jobs for file in job.files) > _MOST_TEXT:
        raise ConfigError("data.paths", section.paths, f"more than {_MOST_TEXT >> 20} MiB, and not tokenized yet")
    return False


@contextmanager
def short_blocks() -> Iterator[None]:
    """Make blends' blocks, files' pieces and the ways between bookmarks short."""
    with ExitStack() as stack:
        for module, name, value in _SMALL:
            stack.enter_context(patch.object(module, name, value))
        yield


def compare_with_definition(config: JobConfig) -> Found:
    """Compare the beginning of both splits, and the samples around the end of an epoch, with their definition.

    One rank reads all of them. Then `_RELAY` does, in which other ranks resume after each part.

    Raises:
        ConfigError: the data is missing or unusable.
        RunError: it cannot be read.
    """
    model, covered = model_config(config.model), list[str]()
    masks, micro_batch = masks_of(config, model), min(2, config.training.micro_batch_size)
    for split, source in open_data(config, model).items():
        try:
            stored, defined = pickle.dumps(source), MaskedSamples(_Defined(source), masks)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError("data.dataset", config.data.dataset, f"cannot be copied ({first_line(error)})") from None
        for start in sorted({0, max(0, _epoch_end(source) - _WINDOW // 2)}) if len(source) else ():
            covered.append(f"{start}–{start + _WINDOW - 1} of {split}")
            parts = [(start + _PART * number, _PART, *ranks) for number, ranks in enumerate(_RELAY)]
            for first, size, ranks, workers in [(start, _WINDOW, 1, 0), *parts]:
                copies = [MaskedSamples(pickle.loads(stored), masks) for _ in range(ranks)]
                found = dict(enumerate(read(copies, first, size, micro_batch, workers), start=first))
                due = range(first, first + size)
                wrong = [i for i in sorted({*due, *found}) if not (i in found and torch.equal(found[i], defined[i]))]
                if wrong or len(found) > size:
                    where = f"{split}, read by {ranks} ranks with {workers} workers each from sample {first} on"
                    return Found(problem=f"{where}: samples {wrong[:4]} of {size} are wrong")
    return Found(f"samples {', '.join(covered)}")


def read(copies: list[MaskedSamples], first: int, size: int, micro_batch: int, workers: int) -> list[torch.Tensor]:
    """The samples, int64 [rows, seq], that ranks with a copy of the data each take, in the order of the stream."""
    taken = list[list[torch.Tensor]]()
    for rank, samples in enumerate(copies):  # one after the other: a fork beside running threads may hang
        sampler = GlobalSampler(first, micro_batch, rank, len(copies), first + size)
        with closing(BackgroundLoader(samples, sampler, workers, torch.device("cpu"))) as loader:
            taken.append(list(loader))
    return [sample for turn in zip_longest(*taken) for batch in turn if batch is not None for sample in batch]


class _Defined:
    """A source's samples by their definition."""

    def __init__(self, source: Source) -> None:
        self._length, self._sample = len(source), cache(_definition(source))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._sample(index)


def _definition(source: Source) -> Sample:
    if isinstance(source, BlendedSource):
        return _blend(source)
    if isinstance(source, StreamSource):
        return _stream(source)
    if isinstance(source, PackedDataset):
        return _windows(source)
    has_own_order = type(source).__getitem__ is not Source.__getitem__ and not isinstance(source, RaceSource)
    return source.__getitem__ if has_own_order else _ordered(source, source.sample, len(source))


def _ordered(source: Source, sample: Sample, length: int) -> Sample:
    """Each position once an epoch, in the order that the seed, the part of a blend and the epoch choose.

    The options of one of RACE's questions stay together. Held-out samples are in order, and the others have no labels.
    """
    request, together = source.request, NUM_OPTIONS if isinstance(source, RaceSource) else 1

    def get(index: int) -> torch.Tensor:
        if request.split == "train":
            (epoch, place), option = divmod(index // together, length // together), index % together
            order = Permutation(length // together, request.seed, request.part, epoch)
            return sample(order(place) * together + option)
        return sample(index) if index < length else _without_labels(sample(0))

    return get


def _without_labels(sample: torch.Tensor) -> torch.Tensor:
    return torch.stack((sample[0], torch.full_like(sample[1], IGNORED)))


def _windows(source: PackedDataset) -> Sample:
    """Window i of the tokens in a file."""
    stored, size = source.tokens, source.request.seq_len
    assert isinstance(stored, StoredTokens)
    tokens = np.memmap(stored.path, stored.dtype, "r")[stored.start : stored.stop]
    return _ordered(source, lambda i: _window(tokens[i * size : (i + 1) * size + 1]), (len(tokens) - 1) // size)


def _window(tokens: Any) -> torch.Tensor:
    """Inputs, and the same a token later."""
    return torch.from_numpy(np.array([tokens[:-1], tokens[1:]], dtype=np.int64))


def _blend(source: BlendedSource) -> Sample:
    """The next sample of the source whose turn it is; of streams, the next of the same reader."""
    request, is_stream = source.request, isinstance(source, BlendedStream)
    readers, parts = request.section.num_readers if is_stream else 1, [_definition(part) for part in source.sources]
    slots = -(-_BLOCK // readers)
    shares = blend.apportion(source.blend.shares, slots * readers * blend.PERIOD)

    def places(reader: int, block: int) -> list[int]:
        key = ("stream", request.seed, block, reader) if is_stream else ("blend", request.seed, block)
        return [reader + readers * place for place in map(Permutation(slots, *key), range(slots))]

    in_order = is_stream or request.split != "train"
    draws = [_draws(shares, partial(places, reader), in_order) for reader in range(readers)]
    drawn: list[list[tuple[int, int]]] = [[] for _ in draws]

    def get(index: int) -> torch.Tensor:
        if request.split != "train" and index >= len(source):
            return _without_labels(get(0))
        number, reader = divmod(index, readers)
        drawn[reader] += islice(draws[reader], max(0, number + 1 - len(drawn[reader])))
        part, before = drawn[reader][number]
        return parts[part](before * readers + reader)

    return get


def _draws(shares: list[int], places: Callable[[int], list[int]], in_order: bool) -> Iterator[tuple[int, int]]:
    """Source of each sample, and how many of the source's come before it.

    Sources divide the places of each block. Their ends are rounded down after adding the block's number with its three
    hexadecimal digits reversed. A source's samples in a block come in order, or else their places are.
    """
    taken = Counter[int]()
    for block in count():
        offset = int(f"{block % blend.PERIOD:03x}"[::-1], 16)
        ends = [(end + offset) // blend.PERIOD for end in accumulate(shares)]
        numbers, turns = dict[int, tuple[int, int]](), places(block)
        for place in turns if in_order else sorted(turns):
            part = bisect_right(ends, place)
            numbers[place] = part, taken[part]
            taken[part] += 1
        yield from (numbers[place] for place in turns)


def _stream(source: StreamSource) -> Sample:
    """Windows over all documents of a reader, one after the other."""
    seq_len, readers = source.request.seq_len, source.request.section.num_readers
    documents, held = [_documents(source, reader) for reader in range(readers)], dict[int, list[int]]()

    def get(index: int) -> torch.Tensor:
        number, reader = divmod(index, readers)
        tokens, begin = held.setdefault(reader, []), number * seq_len
        while len(tokens) <= begin + seq_len:
            document = next(documents[reader], None)
            if document is None:
                return _without_labels(_window([source.tokenizer.eod_id] * (seq_len + 1)))
            tokens += document
        return _window(tokens[begin : begin + seq_len + 1])

    return get


def _documents(source: StreamSource, reader: int) -> Iterator[list[int]]:
    """A reader's documents. It has every R-th shard, and takes turns with others in those that are then left."""
    request, num_shards, readers = source.request, len(source.shards), source.request.section.num_readers
    rest = num_shards % readers
    groups, dealt = math.gcd(rest, readers), num_shards - rest
    shared = range(dealt + reader % groups, num_shards, groups)
    mine = [(shard, 1, 0) for shard in range(reader, dealt, readers)]
    mine += [(shard, readers // groups, reader // groups) for shard in shared]
    weights, split = list(map(float, request.section.split.split(","))), SPLITS.index(request.split)
    low, high = (sum(weights[:end]) / sum(weights) for end in (split, split + 1))
    for epoch in count() if request.split == "train" else range(1):
        order = Permutation(len(mine), "stream", request.seed, request.part, reader, epoch)
        for place in range(len(mine)):
            shard, modulus, turn = mine[order(place) if request.split == "train" else place]
            name = source.shards[shard].name
            for record, text in _records(source.shards[shard], request.section.text_key):
                among_splits = (record * 0x9E3779B97F4A7C15 + shard * 0x6A09E667F3BCC909) % 2**64 / 2**64
                if record % modulus == turn and low <= among_splits < high:
                    text = json.loads(text)[request.section.text_key] if name.endswith(".jsonl") else text
                    yield [*source.tokenizer.encode(text).tolist(), source.tokenizer.eod_id]


def _records(shard: shards.Shard, key: str) -> Iterator[tuple[int, str]]:
    """The number of each record that is not an empty line, from 0, and its text or line."""
    if shard.name.endswith(".jsonl"):
        with open(shard.name, encoding="utf-8-sig", newline="\n") as lines:
            yield from ((number, line) for number, line in enumerate(lines) if line.strip())
    else:
        for piece in shard.pieces(key, 0, 1):
            yield from ((number - 1, str(text)) for number, text in raw_text.texts_of(piece, key))


def _epoch_end(source: Source) -> int:
    """Where the first epoch ends, or in a blend that of the first source to end; 0 if that is not known or far."""
    if len(source) == UNKNOWN_LENGTH:
        return 0
    if not isinstance(source, BlendedSource) or source.request.split != "train":
        return len(source)
    parts = zip(source.sources, source.blend.shares, strict=True)
    nearest = min(len(part) * sum(source.blend.shares) // share for part, share in parts)
    return nearest if nearest < _MOST_DRAWN else 0
