"""Bytes of parameters, gradients and optimizer state per rank under each ZeRO stage. Pure formulas."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.models.config import TransformerConfig

_MASTER = 4  # bytes of float32, the type of master weights, summed gradients and moments


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. Communication buffers and activations are not in it."""

    between_steps: int  # gradients are freed after each step
    peak: int  # largest moment of a step with gradient accumulation


def state_bytes(
    model: TransformerConfig, zero_stage: int, shard_degree: int, compute_bytes: int = 4, moments: int = 2
) -> StateBytes:
    """Size of training state for shards of equal size.

    With P parameters, N ranks to shard over, and float32 throughout:

    ======  ==================  ==========================================================
    stage   between steps       peak
    ======  ==================  ==========================================================
    0       12P                 16P
    1       12P/N               4P gathered + 4P gradients + 12P/N
    2       12P/N               4P gathered + 16P/N + gradients not yet reduced
    3       12P/N               units gathered + 16P/N + gradients not yet reduced
    ======  ==================  ==========================================================

    ``compute_bytes`` below 4 (bfloat16, float16) makes gathered weights and fresh gradients that much smaller; stage 0
    then also keeps a float32 master copy beside the compute copy. ``moments`` is 2 for AdamW and 0 for plain SGD.
    """
    total, layer = model.num_parameters(), model.layer_parameters
    entry, head = model.entry_parameters, model.head_parameters
    ranks = shard_degree if zero_stage else 1
    shards = _MASTER * (1 + moments) * total // ranks
    if zero_stage == 0 and compute_bytes == _MASTER:
        return StateBytes(shards, shards + _MASTER * total)

    # The head's gradients come first and are reduced last, with the root; a layer's are reduced when complete. A tied
    # table's gradient is stored only when its second use, the embedding, has added to it.
    early = head - (model.padded_vocab_size * model.hidden_size if model.tied_embeddings else 0)
    fresh_gradients = compute_bytes * max(early + layer, head + entry)
    if zero_stage == 3:
        root = head + (entry if model.tied_embeddings else 0)
        in_a_layer = compute_bytes * (root + layer + early + layer)
        at_the_end = 2 * compute_bytes * (head + entry)
        return StateBytes(shards, shards + _MASTER * total // ranks + max(in_a_layer, at_the_end))
    gathered = compute_bytes * total
    if zero_stage == 2:
        return StateBytes(shards, shards + gathered + _MASTER * total // ranks + fresh_gradients)
    # Stages 0 and 1 add up whole gradients; float32 ones are added up in place.
    added_up = _MASTER * total + (0 if compute_bytes == _MASTER else fresh_gradients)
    return StateBytes(shards, shards + gathered + added_up)
