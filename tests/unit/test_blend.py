"""Blends: which source a sample is from is computed, not stored."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count as number_from
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from titan_like.checkpoint.step_folders import RunState
from titan_like.config.schema import Data
from titan_like.data.loading.blend import BLOCK, Blend, Phase
from titan_like.data.loading.open_source import continue_after, open_source, phases_of
from titan_like.data.readers.indexed import IndexedWriter
from titan_like.data.source import DataRequest, Source
from titan_like.data.text.tokenizer import ByteTokenizer

PERIOD = 4096 * BLOCK
WEIGHTS = {"halves": [1, 1], "thirds": [1, 1, 1], "uneven": [0.5, 0.3, 0.2], "tiny": [1.0, 1e-5, 3e-7], "one": [2.5]}
WEIGHTS |= {"many": [1 / number for number in range(1, 30)]}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_every_block_has_each_source_s_share_to_within_one_sample(weights: list[float]) -> None:
    blend, shares = Blend(weights, seed=3), [weight / sum(weights) for weight in weights]
    before = blend.counts(0)
    for block in [*range(1, 200), 4096, 4097, 8192, 10_001]:
        before = blend.counts((block - 1) * BLOCK)
        after = blend.counts(block * BLOCK)
        assert sum(after) == block * BLOCK
        for taken, share, total in zip((b - a for a, b in zip(before, after, strict=True)), shares, after, strict=True):
            assert abs(taken - share * BLOCK) < 1 + 1e-3  # weights are multiples of 2^-24
            # A van der Corput sequence of base 16 with three digits is never further from the weights than this.
            assert abs(total - share * block * BLOCK) < 3 * 16 / 4 + block * BLOCK / PERIOD


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("first", [0, 4095, 4096 * 3 + 17, 10**9])
def test_each_source_s_samples_come_once_each(weights: list[float], first: int) -> None:
    """In three blocks: the samples of a source are those from its count before them to its count after them."""
    blend, begin, end = Blend(weights, seed=1), first * BLOCK, (first + 3) * BLOCK
    found: list[list[int]] = [[] for _ in weights]
    for index in range(begin, end):
        source, number = blend.locate(index)
        found[source].append(number)
    for numbers, before, after in zip(found, blend.counts(begin), blend.counts(end), strict=True):
        assert sorted(numbers) == list(range(before, after))


@pytest.mark.slow
@pytest.mark.parametrize("readers", [1, 3, 64, 4097])
def test_counts_far_away_are_sums_of_what_is_near(readers: int) -> None:
    blend, num = Blend([0.6, 0.25, 0.15], 7, readers), readers
    slots = -(-BLOCK // num)
    for block in (0, 1, 4094, 4095, 4096, 3 * 4096 + 17):
        for reader in (0, num - 1, int(0.6 * num)):  # the last may have the place at which a source ends
            start = block * slots
            counts = blend.counts(start, reader)
            for number in range(start, start + slots + 3):
                source, within = blend.locate_in_order(number, reader)
                assert within == counts[source]
                assert readers > 1 or source == blend.locate(number)[0]
                counts[source] += 1
            assert blend.counts(start + slots + 3, reader) == counts
    whole = [0, 0, 0]
    for reader in range(num):
        whole = [a + b for a, b in zip(whole, blend.counts(4096 * slots, reader), strict=True)]
    length = slots * num * 4096
    assert all(abs(count - length * share) <= 1 for count, share in zip(whole, (0.6, 0.25, 0.15), strict=True))


LETTERS = {"a": 97, "b": 1, "c": 40}  # sources, and the byte with which the tokens of each begin
# The paths of a run's phases, and the samples with which they begin. Sources come, go, move and come again.
CHANGES: dict[str, list[tuple[int, list[str | float]]]] = {
    "other weights": [(0, [0.7, "a", 0.3, "b"]), (1000, [0.2, "a", 0.8, "b"])],
    "another source": [(0, [0.7, "a", 0.3, "b"]), (777, [0.1, "c", 0.4, "b", 0.5, "a"])],
    "none is left": [(0, [1.0, "a", 1.0, "b"]), (1000, ["c"]), (1100, [1.0, "b", 1.0, "c"])],
    "from one to a blend": [(0, ["a"]), (300, [0.5, "b", 0.5, "a"]), (300, [0.5, "b", 0.9, "a"]), (900, ["a"])],
    "away and back": [(0, [0.6, "b", 0.4, "a"]), (4096, [1.0, "c", 1.0, "a"]), (4301, [0.5, "a", 0.5, "b"])],
}


def written(folder: Path) -> None:
    """Three corpora, as indexed datasets and as files of records."""
    random = np.random.default_rng(0)
    for name, first in LETTERS.items():
        documents = [first + random.integers(0, 25, random.integers(5, 60)) for _ in range(400)]
        with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
            for document in documents:
                writer.add(np.append(document, ByteTokenizer.eod_id))
        records = [json.dumps({"text": bytes(document.tolist()).decode("latin-1")}) for document in documents]
        (folder / f"{name}.jsonl").write_text("\n".join(records))


def opened(folder: Path, paths: list[str | float], dataset: str) -> Source:
    ending = "" if dataset == "indexed" else ".jsonl"
    named = [path if isinstance(path, float) else str(folder / f"{path}{ending}") for path in paths]
    section = Data(dataset=dataset, paths=named, num_readers=6, split="1,0,0")
    return open_source(DataRequest(section, "train", 16, 5, 257, folder / "cache"))


def tokens_of(source: Source, index: int) -> list[int]:
    return source[index].tokens.tolist()


def letter_of(tokens: list[int]) -> str:
    token = next(token for token in tokens if token != ByteTokenizer.eod_id)
    return next(name for name, first in LETTERS.items() if first <= token < first + 25)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("dataset", ["indexed", "hf"])
def test_a_source_that_stays_goes_on_where_it_was(dataset: str, case: str, tmp_path: Path) -> None:
    """What each phase reads is popped from the sequence that each source gives to a run that never changes."""
    written(tmp_path)
    readers, phases = 6 if dataset == "hf" else 1, CHANGES[case]
    never, began = opened(tmp_path, phases[0][1], dataset), [path for path in phases[0][1] if isinstance(path, str)]
    of_never = cache(partial(tokens_of, never))

    def unchanged(name: str, reader: int) -> Iterator[list[int]]:
        for index in number_from(reader, readers):
            if letter_of(tokens := of_never(index)) == name:
                yield tokens

    def alone(name: str, reader: int, part: int) -> Iterator[list[int]]:
        source = opened(tmp_path, [name], dataset)
        source = type(source)(replace(source.request, part=part))  # the order of the part-th source that the run met
        return (tokens_of(source, index) for index in number_from(reader, readers))

    met = list(dict.fromkeys(path for _, paths in phases for path in paths if isinstance(path, str)))
    left = {(name, reader): unchanged(name, reader) for name in began for reader in range(readers)}
    left |= {(n, r): alone(n, r, met.index(n)) for n in met if n not in began for r in range(readers)}
    history, drawn, seen = list[Phase](), Counter[str](), dict[int, list[int]]()
    for number, (first, paths) in enumerate(phases):
        source = opened(tmp_path, paths, dataset)
        now = phases_of(source)[-1]._replace(first=first)
        history = [*(phase for phase in history if phase.first < first), now]
        stored = RunState(1, first, 1, 0, 1.0, 0, {}, {}, phases=history)  # as a checkpoint holds it
        numbers = json.loads(json.dumps(TypeAdapter(RunState).dump_python(stored)))
        history = [Phase(*phase) for phase in TypeAdapter(RunState).validate_python(numbers).phases]
        if number:
            source = continue_after(source, history)
            assert phases_of(source) == history
        weights = [path for path in paths if isinstance(path, float)] or [1.0]
        names = [path for path in paths if isinstance(path, str)]
        last = phases[number + 1][0] if number + 1 < len(phases) else first + 900
        before = Counter(drawn)
        for index in range(first, last):
            tokens = seen[index] = tokens_of(source, index)
            name = letter_of(tokens)
            drawn[name] += 1
            assert tokens == next(left[name, index % readers]), (index, name)
        for name, weight in zip(names, weights, strict=True):  # in a block the order is random
            share, size = weight / sum(weights), last - first
            assert abs(drawn[name] - before[name] - size * share) <= 5 * (size * share) ** 0.5
        if number:
            told = source.drawn(last)
            assert [value for key, value in told.items() if key.startswith("samples/")] == [
                drawn[name] for name in names
            ]
            epochs = [told.get(f"epochs/{name}") for name in source.names]  # none of a stream
            lengths = [
                len(part) if epoch is not None else None for part, epoch in zip(source.sources, epochs, strict=True)
            ]
            assert epochs == [size and drawn[name] / size for name, size in zip(names, lengths, strict=True)]
        for index in dict.fromkeys((last - 1, first, last - 2)) if last > first else ():  # as after another stop
            assert tokens_of(source, index) == seen[index]
