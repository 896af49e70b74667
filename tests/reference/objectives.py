"""Samples by definition: spans and sentinels, masked tokens, pairs, positions, labels and key ranges, token by token.

The random numbers are the product's; the code that uses them shares nothing with it.
"""

import hashlib
from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import torch

from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.data.objectives.sentence_pairs import Samples
from titan_like.data.source import IGNORED_LABEL
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.registry import model_config
from titan_like.verify.samples import TokenIds


def sample_of(samples: Samples, config: JobConfig, ids: TokenIds, index: int) -> Batch:
    """Sample ``index`` of the run."""
    model = model_config(config.model)
    sample = _pair(samples, index, config, ids) if "pair" in model.predictions else samples[index]
    if model.objective == "span_corruption":
        return _without_spans(sample, index, config, ids)
    if model.objective == "mlm" and "tokens" in model.predictions:
        sample = _with_masked_tokens(sample, index, config, ids)
    if model.predictions[0] != "tokens" or "pair" in model.predictions:
        return _with_types(sample, ids.pair_ids[1])
    masked = _with_masks(sample, index, config, ids)
    return _with_next(masked, _documents(sample, ids)) if "mtp" in model.predictions else masked


def lists_of(sample: Batch) -> tuple[list[int], list[int]]:
    """Tokens and labels of a sample."""
    assert sample.labels is not None
    return sample.tokens.tolist(), sample.labels.tolist()


def _generator(purpose: bytes, seed: int, index: int) -> np.random.Generator:
    """Random numbers for one purpose in one sample."""
    digest = hashlib.blake2b(repr((seed, index)).encode(), digest_size=16, person=purpose).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def _by_rank(values: np.ndarray) -> list[int]:
    """Places in the order of their random numbers."""
    return sorted(range(len(values)), key=lambda place: values[place])


def _without_spans(sample: Batch, index: int, config: JobConfig, ids: TokenIds) -> Batch:
    """[raw] → [seq]. Texts and spans alternate, and both are cut at random places into as many pieces."""
    (tokens, given), section = lists_of(sample), config.data
    random = _generator(b"span corruption", config.job.seed, index)
    num_noise = max(1, round(len(tokens) * section.noise_density))
    num_spans = max(1, round(num_noise / section.mean_noise_span_length))

    def pieces(total: int) -> list[int]:
        cuts = sorted(place + 1 for place in _by_rank(random.random(total - 1))[: num_spans - 1])
        return [end - begin for begin, end in pairwise([0, *cuts, total])]

    spans, texts = pieces(num_noise), pieces(len(tokens) - num_noise)
    is_noise = [taken for text, span in zip(texts, spans, strict=True) for taken in [False] * text + [True] * span]
    inputs, targets, labels = list[int](), list[int](), list[int]()

    def write(token: int, label: int) -> None:
        targets.append(token)
        labels.append(IGNORED_LABEL if label == IGNORED_LABEL else token)

    sentinels = iter(ids.sentinel_ids)
    for t, token in enumerate(tokens):
        if is_noise[t] and not (t > 0 and is_noise[t - 1]):
            sentinel = next(sentinels)
            inputs.append(sentinel)
            write(sentinel, given[t])
        if is_noise[t]:
            write(token, given[t])
        else:
            inputs.append(token)
    inputs.append(ids.eod_id)
    write(ids.eod_id, given[-1])
    while len(targets) < config.training.decoder_seq_len:
        write(ids.pad_id, IGNORED_LABEL)
    decoder_inputs = [ids.pad_id, *targets[:-1]]
    both, all_labels = inputs + decoder_inputs, [IGNORED_LABEL] * len(inputs) + labels
    return Batch(torch.tensor(both), torch.tensor(all_labels), encoder_len=len(inputs))


def _with_masked_tokens(sample: Batch, index: int, config: JobConfig, ids: TokenIds) -> Batch:
    """The label of a chosen token is the token.

    Words are tried in random order. Of n-grams of a drawn length, the longest is taken that has no token which cannot
    be chosen or has been, and not more than are still to be chosen. If no word is short enough in the end, the first
    tokens of one are taken. Words that are too long from the beginning are cut into characters.
    """
    section, random = config.data, _generator(b"masked tokens", config.job.seed, index)
    (tokens, given), ordinary = lists_of(sample), sorted(set(range(ids.vocab_size)).difference(ids.special_ids))
    known = set(ordinary)
    free = {t for t, token in enumerate(tokens) if token in known and given[t] != IGNORED_LABEL}
    left, chosen = max(1, round(len(free) * section.mlm_probability)) if free else 0, set[int]()
    words, most = [[t] for t in range(len(tokens))], left
    if section.mlm_whole_words:
        begins, characters = ids.words(np.array(tokens))
        borders = [t for t in range(1, len(tokens)) if begins[t] or (t in free) != (t - 1 in free)]
        words = [list(range(*ends)) for ends in pairwise([0, *borders, len(tokens)])]
        borders += [t for word in words if len(word) > most for t in word[1:] if characters[t]]
        words = [list(range(*ends)) for ends in pairwise([0, *sorted(borders), len(tokens)])]
    weights = [1 / n for n in range(1, section.mlm_max_ngram + 1)]
    order, lengths = _by_rank(random.random(len(words))), random.random(len(words)) * sum(weights)
    for word in order:
        drawn = 1 + sum(lengths[word] >= sum(weights[:n]) for n in range(1, len(weights)))
        for n in range(drawn, 0, -1):
            span = {t for one in words[word : word + n] for t in one}
            if word + n <= len(words) and span <= free and len(span) <= left:
                chosen |= span
                free -= span
                left -= len(span)
                break
    chosen.update(next((words[word] for word in order if words[word][0] in free), [])[:left])
    labels = [token if t in chosen else IGNORED_LABEL for t, token in enumerate(tokens)]
    kinds, others = random.random(len(tokens)).tolist(), random.random(len(tokens)).tolist()
    for t in chosen:
        if kinds[t] < 0.9:
            tokens[t] = ids.mask_id if kinds[t] < 0.8 else ordinary[int(others[t] * len(ordinary))]
    return sample._replace(tokens=torch.tensor(tokens), labels=torch.tensor(labels))


def _pair(samples: Samples, index: int, config: JobConfig, ids: TokenIds) -> Batch:
    """A pair of sentences, and its class, from the draws of `SentencePairs`."""
    random, objective = _generator(b"sentence pairs", config.job.seed, index), config.data.sentence_objective
    given, size = samples[index], len(samples[index].tokens)
    text = _text_of(given, size - 3, random, ids)
    cut = 1 + int(random.random() * (len(text) - 1))
    one, two, is_other = text[:cut], text[cut:], random.random() < 0.5
    if is_other and objective == "sentence_order":
        one, two = two, one
    elif is_other:
        drawn = int(random.random() * len(samples))
        others = [samples[(drawn + more) % len(samples)] for more in (0, 1)]
        other = _text_of(others[torch.equal(others[0].tokens, given.tokens)], size - 3, random, ids)
        two = other[max(len(other) - len(two), int(len(other) > 1)) :]  # never a whole text of several tokens
    first, separator, padding = ((token, False) for token in ids.pair_ids)
    row = [first, *one, separator, *two, separator]
    row += [padding] * (size - len(row))
    is_held_out = set(lists_of(given)[1]) == {IGNORED_LABEL}
    labels = [token if has_label and not is_held_out else IGNORED_LABEL for token, has_label in row]
    kind = torch.tensor(IGNORED_LABEL if len(text) < 2 or is_held_out else int(is_other))
    return Batch(torch.tensor([token for token, _ in row]), torch.tensor(labels), sample_labels=kind)


def _text_of(sample: Batch, most: int, random: np.random.Generator, ids: TokenIds) -> list[tuple[int, bool]]:
    """Tokens around a random one of a sample, up to the ends of its document, and who has a label."""
    inputs, labels = lists_of(sample)
    ends = [at for at, token in enumerate(inputs) if token in (ids.eod_id, *ids.pair_ids[:2])]
    places = [at for at in range(len(inputs)) if at not in ends]
    if not places:
        return []
    token = places[int(random.random() * len(places))]
    begin = max((at + 1 for at in ends if at < token), default=0)
    end = min((at for at in ends if at > token), default=len(inputs))
    begin += int(random.random() * (max(0, end - begin - most) + 1))
    return [(inputs[at], labels[at] != IGNORED_LABEL) for at in range(begin, min(end, begin + most))]


def _with_types(sample: Batch, separator: int) -> Batch:
    """A pair of sentences with the types of its tokens, and with masks that hide what follows it."""
    positions = list(range(len(sample.tokens)))
    first, last = (at for at in positions if sample.tokens[at] == separator)
    return sample._replace(
        document_mask=KeyRanges(torch.tensor([0 for _ in positions]), torch.tensor([last + 1 for _ in positions])),
        token_types=torch.tensor([int(first < at <= last) for at in positions]),
        padding_mask=torch.tensor([at > last for at in positions]),
    )


def _with_masks(sample: Batch, index: int, config: JobConfig, ids: TokenIds) -> Batch:
    """Positions, labels, and of each query the first key and the keys' end, where [data] asks for them.

    Tokens of a segment see each other: those of its prefix all of them, and all of them earlier ones.
    """
    (inputs, labels), section, order = lists_of(sample), config.data, range(len(sample.tokens))
    documents = _documents(sample, ids)
    segments = documents if section.reset_attention_mask else [0 for _ in order]
    prefix_ends = {begin: begin for begin in segments}
    drawn = _generator(b"prefixes", config.job.seed, index).random(len(prefix_ends))
    for share, (begin, size) in zip(drawn, Counter(segments).items(), strict=True) if section.prefix_lm else ():
        prefix_ends[begin] += int(share * size)
    for t in order:
        crosses = section.eod_mask_loss and inputs[t] == ids.eod_id
        if crosses or (section.prefix_lm_loss == "targets" and t + 1 < prefix_ends[segments[t]]):
            labels[t] = IGNORED_LABEL
    ends, has_ranges = [max(t + 1, prefix_ends[segments[t]]) for t in order], section.prefix_lm or segments is documents
    return sample._replace(
        labels=torch.tensor(labels),
        positions=torch.tensor([t - documents[t] for t in order]) if section.reset_position_ids else None,
        document_mask=KeyRanges(torch.tensor(segments), torch.tensor(ends)) if has_ranges else None,
        document_starts=None,
    )


def _documents(sample: Batch, ids: TokenIds) -> list[int]:
    """Where each token's document begins."""
    inputs, _ = lists_of(sample)
    begins = [t * (t > 0 and inputs[t - 1] == ids.eod_id) for t in range(len(inputs))]
    return list(accumulate(begins, max)) if sample.document_starts is None else sample.document_starts.tolist()


def _with_next(sample: Batch, documents: list[int]) -> Batch:
    """Next tokens, and the labels of next positions in the same document."""
    inputs, labels = lists_of(sample)
    pairs = zip(pairwise(documents), labels[1:], strict=True)
    next_labels = [label if one == other else IGNORED_LABEL for (one, other), label in pairs]
    return sample._replace(
        next_tokens=torch.tensor([*inputs[1:], inputs[-1]]), next_labels=torch.tensor([*next_labels, IGNORED_LABEL])
    )
