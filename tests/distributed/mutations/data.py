"""Bugs in the order of samples and in the reading of data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.distributed.mutations import bug, under
from titan_like.data import source
from titan_like.data.batch import Batch
from titan_like.data.chat import conversations
from titan_like.data.chat.conversations import ConversationSource
from titan_like.data.loading import open_source, stream, stream_reader
from titan_like.data.loading.blend import Blend, BlendedSource, Share
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.data.loading.permutation import Permutation
from titan_like.data.loading.stream_reader import Documents, Place, Reader, ReaderState
from titan_like.data.objectives import race
from titan_like.data.readers.indexed import IndexedDataset
from titan_like.data.text import packed
from titan_like.data.text.packed import PackedDataset
from titan_like.data.text.tokenizer import ByteTokenizer


def states_with(change: Callable[[ReaderState], ReaderState]) -> Any:
    """A bug: readers write down another place than that where they are."""
    original = Reader.state.fget
    return patch.object(Reader, "state", property(lambda self: change(original(self))))


@under(lambda: states_with(lambda mark: mark._replace(sample=max(0, mark.sample - 1))))
def a_sample_is_skipped_at_each_state() -> None:
    """A reader that begins at a state gives the sample there for the one before it."""


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


@under(lambda: states_with(lambda mark: mark._replace(offset=0)))
def states_forget_the_tokens_before() -> None:
    """A reader that begins at a state begins with the first token of the document there."""


@bug(Blend, "_places")
def a_blend_restarts_its_sources_in_each_block(_: Any, self: Any, reader: Any, end: Any, k: Any) -> Any:
    """Each block begins with the first sample of every source."""
    return 0


@contextmanager
def epochs_have_the_first_one_s_order() -> Iterator[None]:
    """The order of an epoch is not a function of its number."""

    def order(size: int, *key: Any) -> Permutation:
        return Permutation(size, *key[:-1], 0)

    with patch.object(source, "epoch_order", order), patch.object(stream, "Permutation", order):
        yield


@bug(PackedDataset, "__len__")
def an_epoch_lacks_its_last_sample(original: Any, self: Any) -> Any:
    """The last whole window of a split is never read."""
    return original(self) - 1


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


class Swapped(GlobalSampler):
    """Two by two in the wrong order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = super().__iter__()
        for first, second in zip(batches, batches, strict=False):
            yield from (second, first)


@bug(BackgroundLoader, "__init__")
def workers_change_the_order(
    original: Any, self: Any, dataset: Any, sampler: Any, workers: int, *others: Any, **named: Any
) -> None:
    """Two workers hand over their microbatches in the wrong order."""
    if workers > 1:
        sampler.__class__ = Swapped
    original(self, dataset, sampler, workers, *others, **named)


def requests_with(**changed: Any) -> Any:
    """A bug: every source of the run is opened with these fields of its request."""
    original = open_source.open_source

    def opened(request: source.DataRequest) -> source.Source:
        return original(replace(request, **changed))

    return patch.object(open_source, "open_source", opened)


@under(lambda: requests_with(split="train"))
def held_out_samples_are_those_of_training() -> None:
    """Validation reads the training split."""


@under(lambda: requests_with(seed=12345))
def the_run_has_another_seed() -> None:
    """Data is opened with a seed that is not the run's."""


@under(lambda: requests_with(seq_len=15))
def samples_are_a_token_shorter() -> None:
    """Data is opened with another length than the run's."""


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
def sources_without_weights_count_alike(original: Any, self: Any, request: Any, sources: Any, weights: Any) -> None:
    """Each has the same share of a blend, whatever its size."""
    original(self, request, sources, [weight or 1.0 for weight in weights])


@contextmanager
def a_held_out_blend_ends_early() -> Iterator[None]:
    """The last sample of a held-out blend has no labels."""
    original = BlendedSource._length_without_repetition.func  # type: ignore[attr-defined]
    with patch.object(BlendedSource, "_length_without_repetition", property(lambda self: original(self) - 1)):
        yield


@bug(IndexedDataset, "nearest_document_end")
def splits_cut_documents(_: Any, self: Any, token: Any) -> Any:
    """Splits end at their exact share of the tokens, inside of documents."""
    return token


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


@bug(race.PairTokens, "join")
def passages_come_first(original: Any, self: Any, one: Any, two: Any, seq_len: int) -> Any:
    """The samples of RACE have the passage before the question."""
    return original(self, two, one, seq_len)


@under(lambda: patch.object(ByteTokenizer, "sentinel_ids", ByteTokenizer.sentinel_ids[::-1]))
def sentinels_are_in_reverse() -> None:
    """The first span gets the last sentinel."""


@under(lambda: patch.object(ByteTokenizer, "mask_id", ByteTokenizer.eod_id))
def the_end_hides_tokens() -> None:
    """The end of a document stands in the place of masked tokens."""


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


@bug(GlobalSampler, "__iter__")
def a_resumed_run_repeats_a_batch(original: Any, self: GlobalSampler) -> Iterator[list[int]]:
    """A run that does not begin with sample 0 reads the last microbatch of every rank again."""
    for mine in original(self):
        yield [index - (self.first_sample > 0) * self.micro_batch_size * self.num_ranks for index in mine]


@bug(GlobalSampler, "__iter__")
def every_rank_reads_the_first_one_s_samples(original: Any, self: GlobalSampler) -> Iterator[list[int]]:
    """Samples are read once by each rank."""
    return original(replace(self, rank=0))
