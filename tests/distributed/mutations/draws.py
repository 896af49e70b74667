"""Bugs in what is drawn for a sample: masked tokens, spans, prefixes and pairs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.distributed.mutations import bug, under
from titan_like.data.batch import Batch
from titan_like.data.loading.permutation import sample_generator
from titan_like.data.objectives import masked_tokens, masks, sentence_pairs, span_corruption
from titan_like.data.objectives.masked_tokens import MaskedTokens
from titan_like.data.source import IGNORED_LABEL


@contextmanager
def _drawn_by(generator: Callable[[bytes, int, int], np.random.Generator]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (masked_tokens, masks, sentence_pairs, span_corruption):
            stack.enter_context(patch.object(module, "sample_generator", generator))
        yield


def draws_ignore_the_sample() -> AbstractContextManager[None]:
    """All samples of a run draw the same."""
    return _drawn_by(lambda purpose, seed, index: sample_generator(purpose, seed, 0))


def draws_ignore_the_seed() -> AbstractContextManager[None]:
    """All runs draw the same."""
    return _drawn_by(lambda purpose, seed, index: sample_generator(purpose, 0, index))


@bug(MaskedTokens, "apply")
def loss_on_replaced_tokens_alone(original: Any, self: MaskedTokens, sample: Batch, seed: int, index: int) -> Batch:
    """A chosen token that stays as it is has no label."""
    made = original(self, sample, seed, index)
    return made._replace(labels=made.labels.masked_fill(made.tokens == sample.tokens, IGNORED_LABEL))


@under(lambda: patch.object(masked_tokens, "_MASKED", 1.0))
def every_chosen_token_is_masked() -> None:
    """None stays, and none becomes a random one."""


@under(lambda: patch.object(masked_tokens, "_RANDOM", 0.0))
def random_tokens_never_come() -> None:
    """Those that would become a random token stay."""


class Sorted:
    """What it draws first is sorted."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator, self.is_first = generator, True

    def random(self, size: int) -> np.ndarray:
        drawn, is_first = self.generator.random(size), self.is_first
        self.is_first = False
        return np.sort(drawn) if is_first else drawn


@bug(masked_tokens, "sample_generator")
def the_first_tokens_are_masked(original: Any, *arguments: Any) -> Sorted:
    """Words are tried in the order in which they come."""
    return Sorted(original(*arguments))


@bug(np, "isin")
def special_tokens_are_masked(_: Any, tokens: Any, known: Any) -> Any:
    """Any token with a label can be chosen."""
    return np.ones(np.shape(tokens), dtype=bool)


@bug(span_corruption, "noise_mask")
def spans_are_all_of_one_length(original: Any, raw: int, num_noise: int, num_spans: int, *draw: int) -> np.ndarray:
    """Spans and the texts between them are cut evenly."""

    class Even:
        def random(self, size: int) -> np.ndarray:
            cuts = np.linspace(0, size + 1, num_spans + 1).astype(int)[1:-1] - 1
            drawn = np.ones(size)
            drawn[cuts] = 0
            return drawn

    with patch.object(span_corruption, "sample_generator", lambda *_: Even()):
        return original(raw, num_noise, num_spans, *draw)


@bug(span_corruption, "noise_mask")
def spans_begin_a_token_early(original: Any, *arguments: Any) -> Any:
    """The first token can be taken out, and the last one stays."""
    return np.roll(original(*arguments), -1)


@bug(masks, "prefix_ends")
def prefixes_take_half_at_most(original: Any, first: Any, *others: Any) -> Any:
    """A prefix ends in the first half of its document."""
    return (first + original(first, *others)) // 2
