"""Conversations for fine-tuning, whole and packed into samples: `data.dataset` "conversations".

The conversations of a run are tokenized once (see `titan_like.data.chat`). Best-fit decreasing packs those of a split
into samples: each, the longest first, goes to the fullest sample that has room for it. An epoch is all samples in an
order that depends on the seed. A sample says where each token's conversation begins, so that attention and positions
stay within it. Only the tokens of answers are labels. A conversation longer than a sample is cut at its end.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from functools import cached_property

import numpy as np
import torch

from titan_like.data.packed import BY_RECORD, WHOLE, open_corpus, split_range, split_weights, token_fingerprint
from titan_like.data.source import IGNORED_LABEL, DataRequest, Source
from titan_like.data.tokenizer import check_vocabulary, tokenizer_of


class ConversationSource(Source):
    """One split of the conversations."""

    def __init__(self, request: DataRequest) -> None:
        """Open the conversations, or tokenize them into the cache, and pack them.

        Raises:
            ConfigError: a file is missing or unreadable, a line is no conversation with an answer, or the tokenizer
                does not fit the model.
        """
        super().__init__(request)
        section, size = request.section, request.seq_len
        wanted = split_range(split_weights(section.split), request.split)
        tokenizer = tokenizer_of(section)
        check_vocabulary(section.tokenizer, tokenizer, request.vocab_size)
        self._eod_id = tokenizer.eod_id
        self._stored = open_corpus(section, request.cache_folder)
        own = [number for number in range(len(self._stored)) if number * BY_RECORD % WHOLE in wanted]
        long = {number for number in own if self._stored.lengths[number] > size + 1}
        self._kept = [n for n in own if n not in long or (self._tokens(n)[1:] >= 0).any()]
        self._num_long, self._num_left_out = len(long), len(own) - len(self._kept)
        self._packs = pack([min(int(self._stored.lengths[number]) - 1, size) for number in self._kept], size)
        # The first samples have the longest conversations, and validation may look at the first ones alone.
        self._packs.sort(key=lambda inside: min(self._kept[number] for number in inside) * BY_RECORD % WHOLE)

    def __len__(self) -> int:
        return len(self._packs)

    def sample(self, position: int) -> torch.Tensor:
        """int64 [3, seq]: inputs, labels, and where each token's conversation begins."""
        size, at = self.request.seq_len, 0
        rows = np.stack((np.full(size, self._eod_id), np.full(size, IGNORED_LABEL), np.zeros(size, dtype=np.int64)))
        for number in self._packs[position]:
            marked = self._tokens(self._kept[number])
            end = at + len(marked) - 1
            rows[0, at:end] = np.where(marked < 0, ~marked, marked)[:-1]
            rows[1, at:end] = np.where(marked < 0, IGNORED_LABEL, marked)[1:]
            rows[2, at:end], at = at, end
        rows[2, at:] = at  # what fills the sample up is a document of its own, so that no token sees it
        return torch.from_numpy(rows)

    def _tokens(self, number: int) -> np.ndarray:
        """What a sample takes of a conversation, as `Chat.encode` marks it."""
        return self._stored[number][: self.request.seq_len + 1]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all conversations and of the split."""
        parts = token_fingerprint(self._stored.tokens), self.request.section.split, self.request.split
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def described(self, micro_batch_size: int, num_ranks: int) -> str:
        """Numbers of conversations and tokens."""
        tokens = sum(len(self._tokens(number)) for number in self._kept)
        answers = sum(int((self._tokens(number)[1:] >= 0).sum()) for number in self._kept)
        line = f"{len(self._kept):,} conversations in {len(self):,} samples | {tokens:,} tokens, {answers:,} of answers"
        if self._num_long:
            line += f" | {self._num_long:,} longer than training.seq_len: {self._num_long - self._num_left_out:,} cut, "
            line += f"{self._num_left_out:,} left out that would have no answer"
        return line


def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Best-fit decreasing: the numbers of the items in each bin of ``size``, for items of these lengths.

    Among equal items the first comes first, and so does the first of equally full bins.
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room in a bin, and its number; sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect_left(left, (lengths[number], 0))
        if at == len(left):
            bins.append([])
            left.append((size, len(bins) - 1))
        room, chosen = left.pop(at)
        bins[chosen].append(number)
        if room > lengths[number]:
            insort(left, (room - lengths[number], chosen))
    return bins
