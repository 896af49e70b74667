"""Span corruption (arXiv 1910.10683, sections 3.1.4 and 3.3.4): a model writes the spans that are missing from a text.

The encoder reads the text with a sentinel in place of each span, then the end token. The decoder writes each span after
its sentinel, then the end token. As in T5's code there is no sentinel after the last span, the first token is never
removed and the last one always is. All samples have the same lengths (`titan_like.data.loading.lengths`).
"""

import re
from dataclasses import dataclass

import numpy as np
import torch

from titan_like.config.errors import require
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, arrays_of
from titan_like.data.loading.lengths import SampleLength, sample_length, span_counts
from titan_like.data.loading.permutation import sample_generator
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import ByteTokenizer, Tokenizer, check_ids, check_token
from titan_like.models.config import TransformerConfig


@dataclass(frozen=True)
class SpanCorruption:
    """Removes spans from samples, as a function of the seed and the sample's number in the run."""

    length: SampleLength
    num_noise: int  # tokens that are removed
    sentinel_ids: tuple[int, ...]  # one for each span
    end_id: int  # ends the encoder's input and the targets
    pad_id: int  # begins the decoder's input, and fills it up

    def apply(self, sample: Batch, seed: int, index: int) -> Batch:
        """A window of [raw] tokens and their labels → a sample of [encoder + decoder].

        The decoder's input is the targets shifted by one. The encoder's part has no labels, nor have targets whose
        token lacks one in the dataset. A sentinel counts as the token after it, and the end as the window's last token.
        """
        tokens, given_labels = arrays_of(sample)
        is_noise = noise_mask(len(tokens), self.num_noise, len(self.sentinel_ids), seed, index)
        begins = is_noise.copy()
        begins[1:] &= ~is_noise[:-1]
        marked = tokens.copy()
        marked[begins] = self.sentinel_ids
        inputs = np.append(marked[begins | ~is_noise], self.end_id)

        noise_positions = np.flatnonzero(is_noise)
        places = np.flatnonzero(begins[noise_positions])  # where each span begins among the removed tokens
        targets = np.append(np.insert(tokens[noise_positions], places, self.sentinel_ids), self.end_id)
        sources = np.append(np.insert(noise_positions, places, noise_positions[places]), len(tokens) - 1)
        labels = np.where(given_labels[sources] != IGNORED_LABEL, targets, IGNORED_LABEL)

        padding = np.full(self.length.decoder - len(targets), self.pad_id)
        no_labels = [np.full(size, IGNORED_LABEL) for size in (len(inputs), len(padding))]
        decoder_inputs = np.concatenate(([self.pad_id], targets, padding))[:-1]
        model_inputs = torch.from_numpy(np.append(inputs, decoder_inputs))
        labels = np.concatenate((no_labels[0], labels, no_labels[1]))
        return Batch(model_inputs, torch.from_numpy(labels), encoder_len=self.length.encoder)


def noise_mask(raw: int, num_noise: int, num_spans: int, seed: int, index: int) -> np.ndarray:
    """Whether each token is removed: bool [raw], with ``num_noise`` true in ``num_spans`` runs, one of them at the end.

    The lengths of the spans, and of the pieces between them, are drawn uniformly from all lengths of at least 1.
    """
    random = sample_generator(b"span corruption", seed, index)

    def lengths(total: int) -> np.ndarray:
        first = random.random(total - 1).argsort(kind="stable")[: num_spans - 1] + 1  # where parts begin
        return np.diff(np.sort(first), prepend=0, append=total)

    noise, gaps = lengths(num_noise), lengths(raw - num_noise)
    return np.repeat(np.tile([False, True], num_spans), np.stack((gaps, noise), 1).flatten())


def span_corruption_of(config: JobConfig, model: TransformerConfig, tokenizer: Tokenizer) -> SpanCorruption:
    """The span corruption of a run. Raises a `ConfigError` if a token is missing, or the lengths do not fit."""
    spec, length = config.data.tokenizer, sample_length(config, model)
    num_noise, num_spans = span_counts(length.raw, config.data)
    sentinels = tokenizer.sentinel_ids[:num_spans]
    reason = f"has {len(sentinels)} sentinels (<extra_id_0>, …), but each of a sample's {num_spans} spans needs one"
    hint = "use a tokenizer with more, lower training.seq_len or raise data.mean_noise_span_length"
    require(len(sentinels) == num_spans, "data.tokenizer", spec, f"{reason}; {hint}")
    pad_id = padding_of(spec, tokenizer)
    largest = max(pad_id, *sentinels)
    check_ids(spec, f"its padding and sentinels go up to {largest}", largest, model.vocab_size)
    return SpanCorruption(length, num_noise, tuple(sentinels), tokenizer.eod_id, pad_id)


def padding_of(spec: str, tokenizer: Tokenizer) -> int:
    """The padding token of the tokenizer ``spec``, which begins the decoder's input. Raises a `ConfigError` without."""
    return check_token(spec, "padding", tokenizer.pad_id, "<pad> or [PAD]")


def encode_with_sentinels(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text with sentinels written as ``<extra_id_0>``, ``<extra_id_1>`` and so on."""
    if not isinstance(tokenizer, ByteTokenizer):
        return tokenizer.encode(text, parses_special=True).tolist()  # its sentinels are among its own special tokens
    ids = list[int]()
    for part in re.split(r"(<extra_id_\d+>)", text):
        number = int(part[10:-1]) if re.fullmatch(r"<extra_id_\d{1,9}>", part) else -1
        is_sentinel = 0 <= number < len(tokenizer.sentinel_ids)
        ids += [tokenizer.sentinel_ids[number]] if is_sentinel else tokenizer.encode(part).tolist()
    return ids


def decode_with_sentinels(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of token ids, with ``<extra_id_0>`` and so on for sentinels."""
    names = {token: f"<extra_id_{number}>" for number, token in enumerate(tokenizer.sentinel_ids)}
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.decode([byte for i in ids for byte in (names[i].encode() if i in names else [i])])
    # All at once: decoded alone, a span would lose the space that it begins with.
    written = [token for token in ids if token in names or token not in tokenizer.special_ids]
    return tokenizer.tokenizer.decode(written, skip_special_tokens=False)
