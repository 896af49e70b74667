"""Samples with positions, loss mask and attention mask by definition: one token, and one pair of tokens, at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from titan_like.config.schema import Data, JobConfig
from titan_like.data.masks import MaskedSamples, prefix_length
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.transformer import Transformer
from titan_like.verify.samples import END_OF_DOCUMENT, IGNORED, SEPARATOR, Samples, has_masks, masks_of_run


def described(samples: Samples, indices: Iterable[int], config: JobConfig) -> torch.Tensor:
    """Samples as int64 [n, 2, seq]: inputs and labels, of the model's objective.

    If [data] asks for masks, [n, 3 + seq, seq]: inputs, labels, positions, and for each query the keys that it sees. If
    samples are pairs of sentences, [n, 4 + seq, seq]: with the types of the tokens after the positions.
    """
    masks = masks_of_run(config)
    if masks.pair_tokens is not None:
        made = MaskedSamples(samples, masks)
        return torch.stack([_with_types(made[index]) for index in indices])
    if masks.masked is not None:
        return torch.stack([masks.masked.apply(samples[index], config.job.seed, index) for index in indices])
    if not has_masks(config.data):
        return torch.stack([samples[index] for index in indices])
    return torch.stack([_with_masks(samples[index], index, config.data, config.job.seed) for index in indices])


def model_arguments(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a model takes of samples from `described`: tokens, and positions, bool [n, 1, seq, seq] and types."""
    rows, seq_len = batch.shape[1:]
    if rows == 2:
        return (batch[:, 0],)
    types = (batch[:, 3],) if rows == 4 + seq_len else ()
    return batch[:, 0], batch[:, 2], batch[:, None, -seq_len:].bool(), *types


def take_dense_masks(model: Transformer, config: JobConfig) -> None:
    """Let a model's attention take a mask of all pairs in place of intervals, if there are any."""
    if not has_masks(config.data) and masks_of_run(config).pair_tokens is None:
        return

    def attend_with(core: AttentionCore) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rate, is_grouped = core.dropout if core.training else 0.0, q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, enable_gqa=is_grouped)

        core.forward = attend  # type: ignore

    for module in model.modules():
        if isinstance(module, AttentionCore):
            attend_with(module)


def _with_types(sample: torch.Tensor) -> torch.Tensor:
    """A pair of sentences, int64 [2, seq] → [4 + seq, seq]."""
    inputs, labels = sample.tolist()
    positions = list(range(len(inputs)))
    first, last = (at for at in positions if inputs[at] == SEPARATOR)
    seen = [int(at <= last) for at in positions]
    types = [int(first < at <= last) for at in positions]
    return torch.tensor([inputs, labels, positions, types, *[seen] * len(inputs)])


def _with_masks(sample: torch.Tensor, index: int, section: Data, seed: int) -> torch.Tensor:
    """int64 [2, seq] → [3 + seq, seq]."""
    inputs, labels = sample.tolist()
    seq_len, document, documents = len(inputs), 0, []
    for token in inputs:
        documents.append(document)
        document += token == END_OF_DOCUMENT
    positions = [documents[:t].count(documents[t]) if section.reset_position_ids else t for t in range(seq_len)]
    segments = documents if section.reset_attention_mask else [0] * seq_len
    prefix = set()
    for segment in set(segments) if section.prefix_lm else ():
        members = [t for t in range(seq_len) if segments[t] == segment]
        prefix |= set(members[: prefix_length(len(members), seed, index, members[0])])
    for t in range(seq_len):
        crosses = section.eod_mask_loss and inputs[t] == END_OF_DOCUMENT
        if crosses or (section.prefix_lm_loss == "targets" and t + 1 in prefix and segments[t] == segments[t + 1]):
            labels[t] = IGNORED

    def sees(query: int, key: int) -> bool:
        return segments[query] == segments[key] and (key <= query or {query, key} <= prefix)

    seen = [[sees(query, key) for key in range(seq_len)] for query in range(seq_len)]
    return torch.tensor([inputs, labels, positions, *seen])
