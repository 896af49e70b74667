"""The samples of a run's own data by definition, from its configuration and its files.

Shared with the product are the keyed permutation, the division of weights into whole shares, the encoding of text,
lists of files, and what reads an index, parquet or arrow. A dataset of the user's own defines its samples itself.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import ipc

from tests.reference.objectives import lists_of
from titan_like.config.entry_points import find_dataset, load_entry
from titan_like.config.schema import Data, JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading import blend
from titan_like.data.loading.lengths import sample_length
from titan_like.data.loading.permutation import Permutation
from titan_like.data.readers import raw_text, shards
from titan_like.data.readers.indexed import IndexedDataset
from titan_like.data.source import IGNORED_LABEL, SPLITS, UNKNOWN_LENGTH, DataRequest, Source
from titan_like.data.text.packed import corpus_folder, corpus_job
from titan_like.data.text.tokenizer import ByteTokenizer, tokenizer_of
from titan_like.models.registry import model_config
from titan_like.verify.samples import TokenIds

Sample = Callable[[int], Batch]  # by its number
_SQRT_2 = 0x6A09E667F3BCC909  # times 2⁻⁶⁴


def ids_of_tokenizer(section: Data) -> TokenIds:
    """Special tokens, and where words begin, of the tokenizer that [data] names."""
    tokenizer = tokenizer_of(section)
    known = TokenIds(256, 257, 258, (258, 259, 260), range(259, 359), {256}, 257)
    if not isinstance(tokenizer, ByteTokenizer):
        known = TokenIds(*(getattr(tokenizer, name) for name in TokenIds._fields[:-1]))
    return known._replace(words=lambda tokens: tokenizer.words(tokens))


class Defined:
    """The samples of a split by their number in the run."""

    def __init__(self, sample: Sample, length: int, epoch_end: int | None = None) -> None:
        """``epoch_end``: where the first epoch ends, if not at the length."""
        self._sample, self._length = cache(sample), length
        self.epoch_end = length % UNKNOWN_LENGTH if epoch_end is None else epoch_end

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._sample(index)


def define(config: JobConfig, split: str) -> Defined:
    """A split of the run's data: one source, or a blend of those whose weights and paths come in turn."""
    section, model = config.data, model_config(config.model)
    folder, seq_len = Path(config.job.dump_folder, "data_cache"), sample_length(config, model).raw
    weights = [weight for weight in section.paths if not isinstance(weight, str)]
    paths = [[path] for path in section.paths if isinstance(path, str)]
    paths = paths if weights or section.dataset == "indexed" else [section.paths]
    makers = {"text": _windows, "stdlib": _windows, "indexed": _windows, "hf": _stream, "race": _race}
    makers |= {"conversations": _conversations}
    common = (split, seq_len, config.job.seed, model.vocab_size, folder)
    requests = [DataRequest(section.model_copy(update={"paths": own}), *common, n) for n, own in enumerate(paths)]
    parts = list(map(makers.get(section.dataset, partial(_own, is_alone=len(paths) == 1)), requests))
    kept = [number for number, part in enumerate(parts) if len(part)]  # a source may have nothing held out
    weights = [weights[number] if weights else len(parts[number]) for number in kept]
    return _blend(requests[0], [parts[number] for number in kept], weights) if len(parts) > 1 and kept else parts[0]


def _ordered(request: DataRequest, sample: Sample, length: int, together: int = 1) -> Defined:
    """``together`` positions at a time, each once an epoch; of held-out data in order, and then without labels."""

    def get(index: int) -> Batch:
        if request.split == "train":
            (epoch, place), option = divmod(index // together, length // together), index % together
            order = Permutation(length // together, request.seed, request.part, epoch)
            return sample(order(place) * together + option)
        return sample(index) if index < length else _without_labels(sample(0))

    return Defined(get, length)


def _without_labels(sample: Batch) -> Batch:
    of_tokens, of_sample = (None if x is None else x * 0 + IGNORED_LABEL for x in (sample.labels, sample.sample_labels))
    return sample._replace(labels=of_tokens, sample_labels=of_sample)


def _own(request: DataRequest, is_alone: bool) -> Defined:
    """A dataset of the user's own. It may have its own order, which a blend of held-out samples does not follow."""
    kind = load_entry("data.dataset", find_dataset(request.section))
    source: Source = kind(request)
    has_order = kind.__getitem__ is not Source.__getitem__ and (is_alone or request.split == "train")
    return Defined(source.__getitem__, len(source)) if has_order else _ordered(request, source.sample, len(source))


def _windows(request: DataRequest) -> Defined:
    """Window i of the split's tokens in a file."""
    section, size, split = request.section, request.seq_len, SPLITS.index(request.split)
    is_indexed = section.dataset == "indexed"
    path = section.paths[0] if is_indexed else corpus_folder(corpus_job(section), request.cache_folder) / "tokens"
    dataset = IndexedDataset(path)
    begin, end = _bounds(dataset, [float(weight) for weight in section.split.split(",")])[split : split + 2]
    tokens = np.memmap(dataset.tokens.path, dataset.dtype, "r")[begin:end]
    return _ordered(request, lambda i: _window(tokens[i * size : (i + 1) * size + 1]), max(0, len(tokens) - 1) // size)


def _window(tokens: Any) -> Batch:
    """Tokens, and the same a token later."""
    inputs, labels = torch.from_numpy(np.array([tokens[:-1], tokens[1:]], dtype=np.int64))
    return Batch(inputs, labels)


def _bounds(dataset: IndexedDataset, weights: list[float]) -> list[int]:
    """Where splits begin and end: the end of a document nearest to their share, or that if one would have no token."""
    total, shares, bounds = len(dataset.tokens), [weight / sum(weights) for weight in weights], [0]
    for split in (1, 2):
        exact = round(sum(shares[:split]) * total)
        after = bisect_right(range(dataset.num_documents), exact, key=dataset.document_end)
        ends = [dataset.document_end(number) for number in (after - 1, min(after, dataset.num_documents - 1))]
        nearest = min(ends, key=lambda end: abs(end - exact))
        is_empty = weights[split - 1] > 0 and nearest <= bounds[-1]
        takes_all = any(weights[split:]) and nearest >= total
        bounds.append(max(bounds[-1], exact if is_empty or takes_all else nearest))
    return [*bounds, total]


def _race(request: DataRequest) -> Defined:
    """[CLS] question with an option [SEP] passage [SEP], padded, for each of four options."""
    section, size = request.section, request.seq_len
    (first, separator, padding), tokenizer = ids_of_tokenizer(section).pair_ids, tokenizer_of(section)
    rows = list[tuple[str, str, int]]()  # question with an option, passage, and of the first option the answer
    for file in sorted(Path(section.paths[0], "train" if request.split == "train" else "dev").rglob("*.txt")):
        for record in map(json.loads, filter(str.strip, file.read_text(encoding="utf-8").split("\n"))):
            asked = zip(record["questions"], record["options"], record["answers"], strict=True)
            for question, options, answer in asked:
                blank = question if "_" in question else f"{question} _"
                labels = ["ABCD".index(answer), IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL]
                rows += [(blank.replace("_", options[n]), record["article"], labels[n]) for n in range(4)]

    def sample(position: int) -> Batch:
        *texts, label = rows[position]
        one, two = (tokenizer.encode(" ".join(text.split())).tolist() for text in texts)
        one = one[: min(128, (size - 3) // 2)]
        row = [first, *one, separator, *two[: size - 3 - len(one)], separator]
        return Batch(torch.tensor(row + [padding] * (size - len(row))), sample_labels=torch.tensor(label))

    return _ordered(request, sample, len(rows), together=4)


def _conversations(request: DataRequest) -> Defined:
    """Stored conversations, the longest first, each in the fullest sample with room for it.

    Samples are in the order of the numbers that split the files' conversations, each by that of its first conversation.
    """
    section, size, split = request.section, request.seq_len, SPLITS.index(request.split)
    dataset = IndexedDataset(corpus_folder(corpus_job(section), request.cache_folder) / "tokens")
    weights, filling = [*map(float, section.split.split(","))], ids_of_tokenizer(section).eod_id
    low, high = (sum(weights[:end]) / sum(weights) for end in (split, split + 1))
    samples, room = list[list[tuple[int, list[tuple[int, int]]]]](), np.full(len(dataset) // 2, size)
    drawn = [n * 0x9E3779B97F4A7C15 % 2**64 / 2**64 for n in range(len(dataset) // 2)]
    own = [(n, _conversation(dataset, n)[:size]) for n, at in enumerate(drawn) if low <= at < high]
    learned = (one for one in own if any(label != IGNORED_LABEL for _, label in one[1]))
    for n, pairs in sorted(learned, key=lambda one: -len(one[1])):
        needed = len(pairs)
        chosen = int(np.where(room >= needed, room, size + 1)[: len(samples) + 1].argmin())
        samples += [[]] * (chosen == len(samples))
        samples[chosen] = [*samples[chosen], (n, pairs)]
        room[chosen] -= needed
    samples.sort(key=lambda inside: drawn[min(inside)[0]])

    def sample(position: int) -> Batch:
        columns = list[tuple[int, int, int]]()
        for _, pairs in samples[position]:
            columns += [(*pair, begin) for begin in [len(columns)] for pair in pairs]
        padding = torch.arange(size) >= len(columns)
        columns += [(filling, IGNORED_LABEL, len(columns))] * (size - len(columns))
        tokens, labels, starts = torch.tensor(columns).T
        return Batch(tokens, labels, document_starts=starts, padding_mask=padding)

    return _ordered(request, sample, len(samples))


def _conversation(dataset: IndexedDataset, number: int) -> list[tuple[int, int]]:
    """Tokens of a stored conversation with their labels: the next ones, within the stored borders of answers."""
    tokens, borders = dataset[2 * number].tolist(), dataset[2 * number + 1].tolist()
    answers = {at for begin, end in zip(borders[::2], borders[1::2], strict=True) for at in range(begin, end)}
    return [
        (now, after if at in answers else IGNORED_LABEL) for at, (now, after) in enumerate(pairwise(tokens), start=1)
    ]


def _blend(request: DataRequest, parts: list[Defined], weights: list[float]) -> Defined:
    """The next sample of the source whose turn it is; of streams, the next of the same reader.

    Sources divide the places of each block. Their ends are rounded down after adding the block's number with its three
    hexadecimal digits reversed. A source's samples in a block come in order, or else their places are.
    """
    is_stream, is_train = len(parts[0]) == UNKNOWN_LENGTH, request.split == "train"
    readers, period, lengths = request.section.num_readers if is_stream else 1, blend.PERIOD, [*map(len, parts)]
    slots = -(-blend.BLOCK // readers)
    shares = np.array(blend.apportion(weights, slots * readers * period))
    ends = (shares.cumsum() + [[int(f"{block:03x}"[::-1], 16)] for block in range(period)]) // period

    @cache
    def taken(reader: int) -> np.ndarray:
        """How many samples of each source a reader takes before each block, up to a period: [blocks + 1, sources]."""
        places = np.diff(np.maximum(0, -((reader - ends) // readers)), prepend=0)
        return np.pad(places.cumsum(0), ((1, 0), (0, 0)))

    @cache
    def drawn(reader: int, block: int) -> list[tuple[int, int]]:
        """The source of each of a reader's samples in a block, and how many of the source's come before it."""
        order = Permutation(slots, "blend", request.seed, block, reader)
        turns = [reader + readers * place for place in map(order, range(slots))]
        before = (block // period * taken(reader)[-1] + taken(reader)[block % period]).tolist()
        own_ends, numbers = ends[block % period].tolist(), dict[int, tuple[int, int]]()
        for place in sorted(turns) if is_train and not is_stream else turns:
            source = bisect_right(own_ends, place)
            numbers[place] = source, before[source]
            before[source] += 1
        return [numbers[place] for place in turns]

    def get(index: int) -> Batch:
        if not (is_train or is_stream) and index >= end:
            return _without_labels(get(0))
        number, reader = divmod(index, readers)
        source, before = drawn(reader, number // slots)[number % slots]
        return parts[source][before * readers + reader]

    if is_stream:
        return Defined(get, UNKNOWN_LENGTH)
    periods = int((lengths // shares).min())
    block = periods * period + int((periods * shares + taken(0) > lengths).any(1).argmax()) - 1
    repeats = [before >= lengths[source] for source, before in drawn(0, block)]
    end = block * slots + repeats.index(True)  # up to the first sample that repeats one of its source's
    return Defined(get, sum(lengths) if is_train else end, end)


def _stream(request: DataRequest) -> Defined:
    """Windows over all documents of a reader, one after the other."""
    section, seq_len, readers = request.section, request.seq_len, request.section.num_readers
    end, tokenizer = ids_of_tokenizer(section).eod_id, tokenizer_of(section)
    found, held = shards.find_shards(section.paths)[0], dict[int, list[int]]()
    documents = [_documents(request, found, reader) for reader in range(readers)]

    def get(index: int) -> Batch:
        number, reader = divmod(index, readers)
        tokens, begin = held.setdefault(reader, []), number * seq_len
        while len(tokens) <= begin + seq_len:
            document = next(documents[reader], None)
            if document is None:
                return _without_labels(_window([end] * (seq_len + 1)))
            tokens += [*tokenizer.first_ids, *tokenizer.encode(document).tolist(), end]
        return _window(tokens[begin : begin + seq_len + 1])

    has_weight = float(section.split.split(",")[SPLITS.index(request.split)]) > 0
    has_any = request.split == "train" or (
        has_weight and any(set(lists_of(get(i))[1]) != {IGNORED_LABEL} for i in range(readers))
    )
    return Defined(get, UNKNOWN_LENGTH if has_any else 0)


def _documents(request: DataRequest, found: list[shards.Shard], reader: int) -> Iterator[str]:
    """A reader's documents: those whose places lie in its part of all shards, end to end in the order of the epoch."""
    section, is_train, split = request.section, request.split == "train", SPLITS.index(request.split)
    readers, sizes = section.num_readers, [Path(shard.name).stat().st_size for shard in found]
    weights = [float(weight) for weight in section.split.split(",")]
    low, high = (sum(weights[:end]) / sum(weights) for end in (split, split + 1))
    records = [_placed(shard, section.text_key, -(-sum(sizes) // readers)) for shard in found]
    for epoch in count() if is_train else range(1):
        order = Permutation(len(found), "stream", request.seed, request.part, epoch)
        part, begin = (reader + epoch) % readers, 0
        first, end = (number * sum(sizes) // readers for number in (part, part + 1))
        for shard in map(order, range(len(found))) if is_train else range(len(found)):
            for place, number, text in records[shard]:
                among_splits = (number * 0x9E3779B97F4A7C15 + shard * _SQRT_2) % 2**64 / 2**64
                if first <= begin + place < end and low <= among_splits < high:
                    yield text
            begin += sizes[shard]


def _placed(shard: shards.Shard, key: str, share: int) -> list[tuple[Fraction, int, str]]:
    """The place in bytes, a number for the splits, and the text of each record; ``share`` is a part's size in bytes."""
    path, records = Path(shard.name), list(_records(shard, key))
    size, content = path.stat().st_size, path.read_bytes()
    if path.suffix == ".jsonl" and raw_text.kind_of(path) == "jsonl":
        ends = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
        return [(Fraction(ends[n]), ends[n] * _SQRT_2 % 2**64 >> 32, text) for n, text in records]
    if path.suffix not in (".parquet", ".arrow"):
        return [(Fraction(n * _SQRT_2 % 2**64 * size, 2**64), n, text) for n, text in records]
    ends = [0, *accumulate(_groups(path))]
    placed = []
    for n, text in records:
        group = bisect_right(ends, n) - 1
        is_whole = Fraction((ends[group + 1] - ends[group]) * size, ends[-1]) <= share
        placed.append((Fraction((ends[group] if is_whole else n) * size, ends[-1]), n, text))
    return placed


def _groups(path: Path) -> list[int]:
    """The sizes of a table's groups of rows."""
    if path.suffix == ".parquet":
        metadata = pq.read_metadata(path)
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    with suppress(pa.ArrowInvalid):
        return [len(batch) for batch in ipc.open_file(path).read_all().to_batches()]
    return [len(batch) for batch in ipc.open_stream(path).read_all().to_batches()]


def _records(shard: shards.Shard, key: str) -> Iterator[tuple[int, str]]:
    """The number of each record that has a text, from 0, and the text."""
    if shard.name.endswith(".jsonl") and raw_text.kind_of(Path(shard.name)) == "jsonl":
        with open(shard.name, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
            for number, line in enumerate(lines):
                with suppress(ValueError, LookupError, TypeError, RecursionError):
                    text = json.loads(line)[key]
                    (line + text).encode()
                    yield number, text
    else:
        for piece, _ in raw_text.read_pieces(Path(shard.name), key):
            yield from ((n - 1, text) for n, text in raw_text.texts_of(piece, key) if isinstance(text, str))
