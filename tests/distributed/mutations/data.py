"""Bugs in the order of samples and in the reading of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.distributed.mutations import bug
from titan_like.data import conversations, open_source, packed, race, source, stream, stream_reader
from titan_like.data.batch import Batch
from titan_like.data.blend import Blend, BlendedSource, Share
from titan_like.data.conversations import ConversationSource
from titan_like.data.indexed import IndexedDataset
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.packed import PackedDataset
from titan_like.data.permutation import Permutation
from titan_like.data.sentence_pairs import PairTokens
from titan_like.data.stream_reader import Documents, Place, Reader, ReaderState
from titan_like.data.tokenizer import ByteTokenizer


def states_with(change: Callable[[ReaderState], ReaderState]) -> Any:
    """A bug: readers write down another place than that where they are."""
    original = Reader.state.fget
    return patch.object(Reader, "state", property(lambda self: change(original(self))))


@contextmanager
def a_sample_is_skipped_at_each_state() -> Iterator[None]:
    """A reader that begins at a state gives the sample there for the one before it."""
    with states_with(lambda mark: mark._replace(sample=max(0, mark.sample - 1))):
        yield


@bug(stream_reader, "documents_of")
def the_last_record_of_a_piece_is_lost(original: Any, *arguments: Any) -> Iterator[Any]:
    """A reader leaves out the last record before it reads on."""
    yield from list(original(*arguments))[:-1]


@bug(Documents, "from_place")
def states_are_a_document_late(original: Any, self: Documents, place: Place) -> Iterator[Any]:
    """A reader that begins at a state leaves out the document there."""
    documents = original(self, place)
    if place != Place():
        next(documents)
    return documents


@contextmanager
def states_forget_the_tokens_before() -> Iterator[None]:
    """A reader that begins at a state begins with the first token of the document there."""
    with states_with(lambda mark: mark._replace(offset=0)):
        yield


@contextmanager
def a_blend_restarts_its_sources_in_each_block() -> Iterator[None]:
    """Each block begins with the first sample of every source."""
    with patch.object(Blend, "_places", lambda self, reader, end, k: 0):
        yield


@contextmanager
def epochs_have_the_first_one_s_order() -> Iterator[None]:
    """The order of an epoch is not a function of its number."""

    def order(size: int, *key: Any) -> Permutation:
        return Permutation(size, *key[:-1], 0)

    with patch.object(source, "epoch_order", order), patch.object(stream, "Permutation", order):
        yield


@contextmanager
def an_epoch_lacks_its_last_sample() -> Iterator[None]:
    """The last whole window of a split is never read."""
    original = PackedDataset.__len__
    with patch.object(PackedDataset, "__len__", lambda self: original(self) - 1):
        yield


@bug(PackedDataset, "sample")
def windows_overlap_by_a_token(_: Any, self: PackedDataset, position: int) -> Batch:
    """Windows begin with the last label's predecessor."""
    first = position * (self.request.seq_len - 1)
    return packed.next_tokens(self.tokens[first : first + self.request.seq_len + 1])


@bug(GlobalSampler, "__iter__")
def ranks_share_a_sample(original: Any, self: GlobalSampler) -> Iterator[list[int]]:
    """Every rank but the first begins with the last sample of the one before it."""
    for mine in original(self):
        yield [index - (self.rank > 0) for index in mine]


@bug(GlobalSampler, "__iter__")
def a_resumed_run_repeats_a_sample(original: Any, self: GlobalSampler) -> Iterator[list[int]]:
    """A run that does not begin with sample 0 begins with the last one before."""
    for mine in original(self):
        yield [index - (self.first_sample > 0) for index in mine]


@contextmanager
def workers_change_the_order() -> Iterator[None]:
    """Two workers hand over their microbatches in the wrong order."""
    original = BackgroundLoader.__init__

    class Swapped(GlobalSampler):
        def __iter__(self) -> Iterator[list[int]]:
            batches = super().__iter__()
            for first, second in zip(batches, batches, strict=False):
                yield from (second, first)

    def init(self: BackgroundLoader, dataset: Any, sampler: GlobalSampler, num_workers: int, *others: Any) -> None:
        if num_workers > 1:
            sampler.__class__ = Swapped
        original(self, dataset, sampler, num_workers, *others)

    with patch.object(BackgroundLoader, "__init__", init):
        yield


def requests_with(**changed: Any) -> Any:
    """A bug: every source of the run is opened with these fields of its request."""
    original = open_source.open_source

    def opened(request: source.DataRequest) -> source.Source:
        return original(replace(request, **changed))

    return patch.object(open_source, "open_source", opened)


@contextmanager
def held_out_samples_are_those_of_training() -> Iterator[None]:
    """Validation reads the training split."""
    with requests_with(split="train"):
        yield


@contextmanager
def the_run_has_another_seed() -> Iterator[None]:
    """Data is opened with a seed that is not the run's."""
    with requests_with(seed=12345):
        yield


@contextmanager
def samples_are_a_token_shorter() -> Iterator[None]:
    """Data is opened with another length than the run's."""
    with requests_with(seq_len=15):
        yield


@bug(open_source, "replace")
def every_source_of_a_blend_is_its_first(_: Any, request: source.DataRequest, **fields: Any) -> source.DataRequest:
    """All sources of a blend have the order of part 0."""
    return replace(request, **{**fields, "part": 0})


@bug(open_source, "shares_of")
def a_blend_swaps_its_weights(original: Any, *arguments: Any, **named: Any) -> list[Share]:
    """The first source has the weight of the last, and so on."""
    shares = original(*arguments, **named)
    return [Share(other.weight, share.paths) for share, other in zip(shares, shares[::-1], strict=True)]


@bug(BlendedSource, "__init__")
def sources_without_weights_count_alike(
    original: Any, self: BlendedSource, request: source.DataRequest, sources: Any, weights: Any
) -> None:
    """Each has the same share of a blend, whatever its size."""
    original(self, request, sources, [weight or 1.0 for weight in weights])


@contextmanager
def a_held_out_blend_ends_early() -> Iterator[None]:
    """The last sample of a held-out blend has no labels."""
    original = BlendedSource._length_without_repetition.func  # type: ignore[attr-defined]
    with patch.object(BlendedSource, "_length_without_repetition", property(lambda self: original(self) - 1)):
        yield


@contextmanager
def splits_cut_documents() -> Iterator[None]:
    """Splits end at their exact share of the tokens, inside of documents."""
    with patch.object(IndexedDataset, "nearest_document_end", lambda self, token: token):
        yield


@bug(packed, "split_weights")
def validation_has_the_test_split_s_weight(original: Any, text: str) -> tuple[float, float, float]:
    """The weights of the held-out splits are swapped."""
    train, validation, test = original(text)
    return train, test, validation


@bug(race, "read_questions")
def answers_are_those_of_other_questions(original: Any, *arguments: Any) -> list[race.Question]:
    """Each question of RACE has the answer of the one before it."""
    questions = original(*arguments)
    return [
        replace(one, answer=other.answer) for one, other in zip(questions, [questions[-1], *questions], strict=False)
    ]


@contextmanager
def passages_come_first() -> Iterator[None]:
    """The samples of RACE have the passage before the question."""
    original = PairTokens.join

    def join(self: PairTokens, one: np.ndarray, two: np.ndarray, seq_len: int) -> np.ndarray:
        return original(self, two, one, seq_len)

    with patch.object(race.PairTokens, "join", join):
        yield


@contextmanager
def sentinels_are_in_reverse() -> Iterator[None]:
    """The first span gets the last sentinel."""
    with patch.object(ByteTokenizer, "sentinel_ids", ByteTokenizer.sentinel_ids[::-1]):
        yield


@contextmanager
def the_end_hides_tokens() -> Iterator[None]:
    """The end of a document stands in the place of masked tokens."""
    with patch.object(ByteTokenizer, "mask_id", ByteTokenizer.eod_id):
        yield


@bug(ConversationSource, "_read")
def questions_are_learned_too(original: Any, self: ConversationSource, number: int) -> tuple[torch.Tensor, ...]:
    """Every token of a conversation is a label."""
    tokens, is_answer = original(self, number)
    return tokens, torch.ones_like(is_answer)


@bug(ConversationSource, "sample")
def conversations_are_one_document(original: Any, self: ConversationSource, position: int) -> Batch:
    """The conversations of a sample see each other."""
    sample = original(self, position)
    return sample._replace(document_starts=torch.zeros_like(sample.document_starts))


@bug(conversations, "pack")
def the_last_of_equally_long_conversations_comes_first(original: Any, lengths: list[int], size: int) -> list[list[int]]:
    """Conversations of the same length are packed in the reverse order."""
    last = len(lengths) - 1
    return [[last - number for number in numbers] for numbers in original(lengths[::-1], size)]


@bug(ConversationSource, "_read")
def long_conversations_are_dropped(original: Any, self: ConversationSource, number: int) -> tuple[torch.Tensor, ...]:
    """A conversation that is longer than a sample counts as one without an answer."""
    is_long = self._lengths[number] > self.request.seq_len + 1
    return (torch.zeros(2), torch.zeros(2)) if is_long else original(self, number)
