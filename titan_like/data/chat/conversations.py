"""Conversations for fine-tuning, whole and packed into samples: `data.dataset` "conversations".

The conversations of a run are tokenized once (see `titan_like.data.chat.template`). Best-fit decreasing packs a split
into samples: each conversation, the longest first, is put in the fullest sample with room for it. An epoch is
all samples in an order that depends on the seed. A sample has the start of each token's conversation, so that attention
and positions stay within it. Only the tokens of answers are labels. A conversation longer than a sample is truncated.
"""

from bisect import bisect_left, insort
from functools import cached_property

import numpy as np
import torch

from titan_like.data.batch import Batch
from titan_like.data.source import IGNORED_LABEL, DataRequest, Source, digest_of
from titan_like.data.text.packed import BY_RECORD, WHOLE, open_corpus, split_range, split_weights, token_fingerprint
from titan_like.data.text.tokenizer import tokenizer_of


class ConversationSource(Source):
    """One split of the conversations."""

    def __init__(self, request: DataRequest) -> None:
        """Open the conversations, or tokenize them into the cache, and pack them."""
        super().__init__(request)
        section, size = request.section, request.seq_len
        split = split_range(split_weights(section.split), request.split)
        self._eod_id = tokenizer_of(section, request.vocab_size).eod_id
        self._stored = open_corpus(section, request.cache_folder)
        self._lengths = self._stored.lengths[::2]
        in_split = [number for number in range(len(self._lengths)) if number * BY_RECORD % WHOLE in split]
        long = {number for number in in_split if self._lengths[number] > size + 1}
        self._kept = [n for n in in_split if n not in long or self._read(n)[1][1:].any()]
        self._num_long, self._num_left_out = len(long), len(in_split) - len(self._kept)
        self._packs = pack([min(int(self._lengths[number]) - 1, size) for number in self._kept], size)
        # Packing puts the longest conversations first, but validation may read only the first samples.
        self._packs.sort(key=lambda inside: min(self._kept[number] for number in inside) * BY_RECORD % WHOLE)

    def __len__(self) -> int:
        return len(self._packs)

    def sample(self, position: int) -> Batch:
        """Conversations one after the other, and padding."""
        size, at = self.request.seq_len, 0
        tokens = torch.full((size,), self._eod_id)
        labels = torch.full((size,), IGNORED_LABEL)
        starts = torch.zeros(size, dtype=torch.int64)
        for number in self._packs[position]:
            conversation, is_answer = self._read(self._kept[number])
            end = at + len(conversation) - 1
            tokens[at:end] = conversation[:-1]
            labels[at:end] = torch.where(is_answer, conversation, IGNORED_LABEL)[1:]
            starts[at:end], at = at, end
        starts[at:] = at  # padding is a document of its own, so that no token attends to it
        return Batch(tokens, labels, document_starts=starts, padding_mask=torch.arange(size) >= at)

    def _read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of a conversation that fits a sample: tokens, int64, and whether each belongs to an answer."""
        tokens, borders = self._stored[2 * number][: self.request.seq_len + 1], self._stored[2 * number + 1]
        is_answer = np.searchsorted(borders, np.arange(len(tokens)), side="right") % 2 == 1
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(is_answer)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all conversations and of the split."""
        return digest_of(token_fingerprint(self._stored.tokens), self.request.section.split, self.request.split)

    def described(self, micro_batch_size: int, num_ranks: int) -> str:
        """A line with the numbers of conversations and tokens."""
        pairs = list(map(self._read, self._kept))
        tokens, answers = sum(len(ids) for ids, _ in pairs), sum(int(is_answer[1:].sum()) for _, is_answer in pairs)
        line = f"{len(self._kept):,} conversations in {len(self):,} samples | {tokens:,} tokens, {answers:,} of answers"
        if self._num_long:
            line += f" | {self._num_long:,} longer than training.seq_len were cut"
            line += f", {self._num_left_out:,} of which had no answer left and are left out"
        return line


def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: the numbers of the items in each bin. Ties go to the first item or bin."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # room in a bin, and its number; sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect_left(open_bins, (lengths[number], 0))
        if at == len(open_bins):
            bins.append([])
            open_bins.append((size, len(bins) - 1))
        room, chosen = open_bins.pop(at)
        bins[chosen].append(number)
        if room > lengths[number]:
            insort(open_bins, (room - lengths[number], chosen))
    return bins
