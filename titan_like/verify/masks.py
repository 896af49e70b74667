"""Samples by definition: spans and sentinels, masked tokens, positions, loss mask and attention mask, one token or pair
at a time, from the same random numbers as the product's but with code that shares nothing with it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from titan_like.config.schema import JobConfig
from titan_like.data.sentence_pairs import Samples
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.positions import RelativeBias, rope_frequencies
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.llama.model import Llama
from titan_like.models.registry import model_config
from titan_like.models.transformer import Transformer, replace_forward
from titan_like.verify.samples import IGNORED, has_masks
from titan_like.verify.token_ids import TokenIds, ids_of_samples

_Mask = torch.Tensor | None


def described(samples: Samples, indices: Iterable[int], config: JobConfig) -> torch.Tensor:
    """Small samples as int64 [n, 2, seq]: inputs and labels, of the model's objective.

    Of span corruption, [n, 3, seq]: inputs, labels, and 1 at the encoder's positions. If [data] asks for masks,
    [n, 3 + seq, seq]: inputs, labels, positions, and for each query the keys that it sees. If samples are pairs of
    sentences, [n, 4 + seq, seq]: with the types of the tokens after the positions. If samples tell documents,
    [n, 5 + seq, seq]: with each token's first key and 1 for padding after the positions.
    """
    model = model_config(config.model)
    ids = ids_of_samples(model.vocab_size)

    def describe(index: int) -> torch.Tensor:
        sample = _of_objective(samples, config, ids, index)
        if model.predictions != ("tokens",):
            return _with_types(sample, ids.separator)
        if not has_masks(config.data):
            return sample
        inputs, labels, positions, first, end, *padding = _with_masks(sample, index, config, ids)
        rows, keys = [inputs, labels, positions, *([first, *padding] if padding else [])], torch.arange(len(end))
        return torch.cat((torch.stack(rows), (first[:, None] <= keys) & (keys < end[:, None])))

    return torch.stack([describe(index) for index in indices])


def rows_of(samples: Samples, config: JobConfig, ids: TokenIds, index: int) -> torch.Tensor:
    """Sample ``index`` of the run in the rows that the trainer reads, int64 [2 to 6, seq]."""
    sample, section = _of_objective(samples, config, ids, index), config.data
    if not has_masks(section):
        return sample[:2]
    has_intervals = section.reset_attention_mask or section.prefix_lm
    rows = [0, 1, *[2] * section.reset_position_ids, *[3, 4] * has_intervals, *[5] * (len(sample) == 3)]
    return _with_masks(sample, index, config, ids)[rows]


def _of_objective(samples: Samples, config: JobConfig, ids: TokenIds, index: int) -> torch.Tensor:
    """int64 [2, seq], or of span corruption [3, seq], whose last row is 1 at the encoder's positions."""
    model = model_config(config.model)
    is_pair = "pair" in model.predictions
    sample = _pair(samples, index, config, ids) if is_pair else samples[index]
    if model.objective == "span_corruption":
        return _without_spans(sample, index, config, ids)
    if model.objective == "mlm" and "tokens" in model.predictions:
        return _with_masked_tokens(sample, index, config, ids, keeps_class=is_pair)
    return sample


def model_arguments(batch: torch.Tensor) -> tuple[torch.Tensor | int | None, ...]:
    """What a model takes of samples from `described`.

    Tokens; or tokens, positions, bool [n, 1, seq, seq] and for pairs None and types, or four times None and bool [n,
    seq], the padding; or tokens, two times None and the encoder's length.
    """
    rows, seq_len = batch.shape[1:]
    if rows == 2:
        return (batch[:, 0],)
    if rows == 3:
        return batch[:, 0], None, None, int(batch[0, 2].sum())
    types = (None, batch[:, 3]) if rows == 4 + seq_len else ()
    padding = (None, None, None, None, batch[:, 4].bool()) if rows == 5 + seq_len else ()
    return batch[:, 0], batch[:, 2], batch[:, None, -seq_len:].bool(), *types, *padding


def num_tokens(batch: torch.Tensor) -> int:
    """The tokens of samples from `described` that are not padding."""
    samples, rows, seq_len = batch.shape
    return samples * seq_len - (int(batch[:, 4].sum()) if rows == 5 + seq_len else 0)


def take_definitions(model: Transformer, config: JobConfig, in_pairs: bool = False) -> None:
    """Let a model mask its attention, bias it and find positions by definition, with code that is not its own.

    ``in_pairs`` gives causal attention a mask of all pairs too, which a kernel rounds in another way.
    """
    takes_pairs = has_masks(config.data) or model_config(config.model).predictions != ("tokens",)
    if isinstance(model, Llama):
        model.layer_inputs = partial(_rotary, model)  # type: ignore[method-assign]
    for name, module in model.named_modules():
        if isinstance(module, RelativeBias):
            replace_forward(module, partial(_bias_by_distance, module))
        if isinstance(module, AttentionCore) and (takes_pairs or in_pairs):
            replace_forward(module, partial(_attend_to_pairs, module))
        if name == "position_embedding" and not takes_pairs:
            replace_forward(module, partial(_rows_in_order, module))


def _rows_in_order(table: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """[seq, hidden]: the first row for the first position, and so on, whatever ``positions`` [seq] the model finds."""
    assert isinstance(table.weight, torch.Tensor)
    return table.weight[: len(positions)]


def _rotary(model: Llama, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [*positions.shape, head_dim / 2], one position at a time, and as precise as the model's own."""
    config = model.config
    turns = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, positions.device)
    defined = turns.new_tensor([_turn(config, pair) for pair in range(config.head_dim // 2)])
    if not torch.allclose(turns, defined, rtol=1e-5, atol=0.0):  # else the model's own, which float32 rounds
        turns = defined
    angles = torch.stack([at * turns for at in positions.flatten().tolist()]).unflatten(0, positions.shape)
    return angles.cos(), angles.sin()


def _turn(config: LlamaConfig, pair: int) -> float:
    """The angle by which a position turns a pair of dimensions, with the scaling of Llama 3.1."""
    angle, scaling = config.rope_theta ** (-2 * pair / config.head_dim), config.rope_scaling
    if scaling is None:
        return angle
    context, wave = scaling.original_max_seq_len, 2 * math.pi / angle
    if wave < context / scaling.high_freq_factor:
        return angle
    if wave > context / scaling.low_freq_factor:
        return angle / scaling.factor
    smooth = (context / wave - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * angle / scaling.factor + smooth * angle


def _attend_to_pairs(
    core: AttentionCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: _Mask = None, bias: _Mask = None
) -> torch.Tensor:
    """Attention with a mask of all pairs in place of intervals, or a bias."""
    rate, is_grouped = core.dropout if core.training else 0.0, q.shape[1] != k.shape[1]
    if mask is None and bias is None and core.is_causal:
        mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    mask = mask if bias is None else bias
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=rate, scale=core.scale, enable_gqa=is_grouped
    )


def _bias_by_distance(module: RelativeBias, _queries: torch.Tensor, seq_len: int) -> torch.Tensor:
    """[1, heads, queries, keys], one distance at a time; in float32 at least, as gradients of many pairs are summed.

    Here queries are in order and as many as keys, whatever positions the model finds.
    """
    weight, sees_later = module.table.weight, not module.is_causal
    table = weight.to(torch.promote_types(weight.dtype, torch.float32))

    def bias(distance: int) -> torch.Tensor:
        if distance > 0 and not sees_later:
            return table.new_full(table.shape[1:], -math.inf)
        return table[_bucket(distance, len(table), module.max_distance, sees_later)]

    at_distance = torch.stack([bias(distance) for distance in range(1 - seq_len, seq_len)], 1)
    rows = [at_distance[:, seq_len - 1 - query : 2 * seq_len - 1 - query] for query in range(seq_len)]
    return torch.stack(rows, 1)[None].to(weight.dtype)


def _bucket(distance: int, buckets: int, farthest: int, sees_later: bool) -> int:
    """The row of T5's table for a key that is ``distance`` positions after the query."""
    later = 0
    if sees_later:
        buckets //= 2
        later = buckets if distance > 0 else 0
    distance, single = abs(distance), buckets // 2
    if distance < single:
        return later + distance
    # Of the other ranges, range b begins at single · (farthest / single)^(b / others).
    others = buckets - single
    begun = [b for b in range(others) if distance >= (1 - 1e-9) * single * (farthest / single) ** (b / others)]
    return later + single + begun[-1]


def _generator(purpose: bytes, seed: int, index: int) -> np.random.Generator:
    """Random numbers for one purpose in one sample."""
    digest = hashlib.blake2b(repr((seed, index)).encode(), digest_size=16, person=purpose).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def _by_rank(values: np.ndarray) -> list[int]:
    """Places in the order of their random numbers."""
    return sorted(range(len(values)), key=lambda place: values[place])


def _without_spans(sample: torch.Tensor, index: int, config: JobConfig, ids: TokenIds) -> torch.Tensor:
    """int64 [2, raw] → [3, seq]. Texts and spans alternate, and both are cut at random places into as many pieces."""
    (tokens, given), section = sample.tolist(), config.data
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
        labels.append(IGNORED if label == IGNORED else token)

    sentinels = iter(ids.sentinels)
    for t, token in enumerate(tokens):
        if is_noise[t] and not (t > 0 and is_noise[t - 1]):
            sentinel = next(sentinels)
            inputs.append(sentinel)
            write(sentinel, given[t])
        if is_noise[t]:
            write(token, given[t])
        else:
            inputs.append(token)
    inputs.append(ids.end_of_document)
    write(ids.end_of_document, given[-1])
    while len(targets) < config.training.decoder_seq_len:
        write(ids.pad, IGNORED)
    decoder_inputs = [ids.pad, *targets[:-1]]
    in_encoder = [1] * len(inputs) + [0] * len(targets)
    return torch.tensor([inputs + decoder_inputs, [IGNORED] * len(inputs) + labels, in_encoder])


def _with_masked_tokens(
    sample: torch.Tensor, index: int, config: JobConfig, ids: TokenIds, keeps_class: bool
) -> torch.Tensor:
    """int64 [2, seq] → [2, seq]. The label of a chosen token is the token; the class of a pair is the first label.

    Words are tried in random order. Of n-grams of a drawn length, the longest is taken that has no token which cannot
    be chosen or has been, and not more than are still to be chosen. If no word is short enough in the end, the first
    tokens of one are taken. Words that are too long from the beginning are cut into characters.
    """
    section, random = config.data, _generator(b"masked tokens", config.job.seed, index)
    (tokens, given), ordinary = sample.tolist(), set(ids.ordinary)
    free = {t for t, token in enumerate(tokens) if token in ordinary and given[t] != IGNORED}
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
    labels = [token if t in chosen else IGNORED for t, token in enumerate(tokens)]
    if keeps_class:
        labels[0] = given[0]
    kinds, others = random.random(len(tokens)).tolist(), random.random(len(tokens)).tolist()
    for t in chosen:
        if kinds[t] < 0.9:
            tokens[t] = ids.mask if kinds[t] < 0.8 else ids.ordinary[int(others[t] * len(ids.ordinary))]
    return torch.tensor([tokens, labels])


def _prefix_length(size: int, seed: int, index: int, begin: int) -> int:
    """Uniform from 0 to size - 1."""
    digest = hashlib.blake2b(repr((seed, index, begin)).encode(), digest_size=8, person=b"prefix").digest()
    return int.from_bytes(digest, "little") % size


def _pair(samples: Samples, index: int, config: JobConfig, ids: TokenIds) -> torch.Tensor:
    """A pair of sentences, int64 [2, seq], from the draws of `SentencePairs`. The first label is the class."""
    random, objective = _generator(b"sentence pairs", config.job.seed, index), config.data.sentence_objective
    given, size = samples[index], samples[index].shape[1]
    text = _text_of(given, size - 3, random, ids)
    cut = 1 + int(random.random() * (len(text) - 1))
    one, two, is_other = text[:cut], text[cut:], random.random() < 0.5
    if is_other and objective == "sentence_order":
        one, two = two, one
    elif is_other:
        drawn = int(random.random() * len(samples))
        others = [samples[(drawn + more) % len(samples)] for more in (0, 1)]
        other = _text_of(others[torch.equal(others[0][0], given[0])], size - 3, random, ids)
        two = other[max(len(other) - len(two), int(len(other) > 1)) :]  # never a whole text of several tokens
    row = [(ids.first, False), *one, (ids.separator, False), *two, (ids.separator, False)]
    row += [(ids.padding, False)] * (size - len(row))
    is_held_out = bool((given[1] == IGNORED).all())
    labels = [token if has_label and not is_held_out else IGNORED for token, has_label in row]
    if len(text) > 1 and not is_held_out:
        labels[0] = int(is_other)
    return torch.tensor([[token for token, _ in row], labels])


def _text_of(sample: torch.Tensor, most: int, random: np.random.Generator, ids: TokenIds) -> list[tuple[int, bool]]:
    """Tokens around a random one of a sample, int64 [2, seq], up to the ends of its document, and who has a label."""
    inputs, labels = sample.tolist()
    ends = [at for at, token in enumerate(inputs) if token in (ids.end_of_document, ids.first, ids.separator)]
    places = [at for at in range(len(inputs)) if at not in ends]
    if not places:
        return []
    token = places[int(random.random() * len(places))]
    begin = max((at + 1 for at in ends if at < token), default=0)
    end = min((at for at in ends if at > token), default=len(inputs))
    begin += int(random.random() * (max(0, end - begin - most) + 1))
    return [(inputs[at], labels[at] != IGNORED) for at in range(begin, min(end, begin + most))]


def _with_types(sample: torch.Tensor, separator: int) -> torch.Tensor:
    """A pair of sentences, int64 [2, seq] → [4 + seq, seq]."""
    inputs, labels = sample.tolist()
    positions = list(range(len(inputs)))
    first, last = (at for at in positions if inputs[at] == separator)
    seen = [int(at <= last) for at in positions]
    types = [int(first < at <= last) for at in positions]
    return torch.tensor([inputs, labels, positions, types, *[seen] * len(inputs)])


def _with_masks(sample: torch.Tensor, index: int, config: JobConfig, ids: TokenIds) -> torch.Tensor:
    """int64 [2 or 3, seq] → [5, seq]: inputs, labels, positions, and of each query the first key and the keys' end.

    Tokens of a segment see each other: those of its prefix all of them, and all of them earlier ones. Of samples that
    tell documents, [6, seq]: with 1 for the last document's tokens if they are all the same, and have no labels.
    """
    (inputs, labels, *given), section, order = sample.tolist(), config.data, range(sample.shape[1])
    begins = [t * (t > 0 and inputs[t - 1] == ids.end_of_document) for t in order]
    documents = given[0] if given else list(accumulate(begins, max))  # where each token's begins
    tail = {t for t in order if documents[t] == documents[-1]}
    is_filled = {(inputs[t], labels[t]) for t in tail} == {(inputs[-1], IGNORED)}
    positions = [t - documents[t] if section.reset_position_ids else t for t in order]
    segments = documents if section.reset_attention_mask else [0 for _ in order]
    prefix_ends = {begin: begin for begin in segments}
    for begin, size in Counter(segments).items() if section.prefix_lm else ():
        prefix_ends[begin] += _prefix_length(size, config.job.seed, index, begin)
    for t in order:
        crosses = section.eod_mask_loss and inputs[t] == ids.end_of_document
        if crosses or (section.prefix_lm_loss == "targets" and t + 1 < prefix_ends[segments[t]]):
            labels[t] = IGNORED
    ends = [max(t + 1, prefix_ends[segments[t]]) for t in order]
    padding = [[int(is_filled and t in tail) for t in order]] if given else []
    return torch.tensor([inputs, labels, positions, segments, ends, *padding])
