"""FLOPs of training in three conventions, each with a name.

- ``hardware``: with recomputation and the full attention matrix (arXiv 2104.04473, appendix), limited to a layer's
  sliding window. HFU is this rate over the peak. It counts the whole forward pass of a recomputed layer; torch skips
  that layer's last matmul if nothing after it needs the result.
- ``model``: without recomputation, with the same attention matrix. It gives MFU as defined in arXiv 2204.02311.
- ``causal``: without recomputation, with half of the attention matrix under a causal mask. If samples have masks of
  their own (documents, prefixes, padding), with the (query, key) pairs that these leave visible.

A rate per token counts the tokens of `training.seq_len`. The layers of a decoder also work on ``decoder_seq_len``
positions of each sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_like.config.schema import ActivationCheckpoint
from titan_like.models.config import TransformerConfig

if TYPE_CHECKING:
    import torch

    from titan_like.models.layers.key_ranges import KeyRanges


def layer_flops(model: TransformerConfig, seq_len: int, decoder_seq_len: int = 0, causal: bool = False) -> int:
    """FLOPs of one sample's forward pass in all layers; a multiply-add is 2.

    For GPT: 24h² + 4sh per token and layer (arXiv 2104.04473). ``causal`` counts half of an attention matrix with a
    causal mask.
    """
    lengths = (seq_len, decoder_seq_len)
    width = 4 * model.attention_size
    return _over_layers(model, lambda kind: 2 * kind.products(lengths) + width * kind.scores(lengths, causal))


def _over_layers(model: TransformerConfig, of_kind: Callable[[Any], int]) -> int:
    """The sum over all layers of a figure that depends on the layer's kind."""
    return sum(count * of_kind(kind) for count, kind in zip(model.layer_counts, model.parts.kinds, strict=True))


def head_flops(model: TransformerConfig, seq_len: int, decoder_seq_len: int = 0) -> int:
    """FLOPs of one sample's forward pass in the head and the output matrix: 2hV for the logits of each token."""
    return 2 * model.parts.head_matrices * (decoder_seq_len if model.has_decoder else seq_len)


def recomputed_flops(
    model: TransformerConfig, seq_len: int, recompute: ActivationCheckpoint, decoder_seq_len: int = 0
) -> int:
    """FLOPs per sample that activation checkpointing recomputes: in whole layers, what mixes positions, or experts.

    The compiler's choice within a budget is unknown and counts as 0, except for a budget of 0: whole layers.
    """
    lengths = (seq_len, decoder_seq_len)
    total = 0
    mode = "full" if recompute.budget == 0 else recompute.mode
    for count, kind in zip(recomputed_layers(model, recompute), model.parts.kinds, strict=True):
        core = 4 * model.attention_size * kind.scores(lengths)
        selective = core + 2 * kind.mixed(lengths)
        full, experts = 2 * kind.products(lengths) + core, 2 * kind.experts * seq_len
        total += count * {"full": full, "selective": selective, "experts": experts}.get(mode, 0)
    return total


def model_flops_per_token(
    model: TransformerConfig, seq_len: int, causal: bool = False, decoder_seq_len: int = 0
) -> float:
    """Forward plus backward (2 × forward), without recomputation; ``causal`` as in `layer_flops`."""
    lengths = seq_len, decoder_seq_len
    return 3 * (layer_flops(model, *lengths, causal) + head_flops(model, *lengths)) / seq_len


def hardware_flops_per_token(
    model: TransformerConfig, seq_len: int, recompute: ActivationCheckpoint, decoder_seq_len: int = 0
) -> float:
    """``model`` plus what activation checkpointing recomputes."""
    forward = layer_flops(model, seq_len, decoder_seq_len) + head_flops(model, seq_len, decoder_seq_len)
    return (3 * forward + recomputed_flops(model, seq_len, recompute, decoder_seq_len)) / seq_len


def recomputed_layers(model: TransformerConfig, recompute: ActivationCheckpoint) -> tuple[int, ...]:
    """Number of checkpointed layers of each kind."""
    if recompute.mode == "none":
        return (0,) * len(model.layer_counts)
    chosen = Counter(model.layer_kinds[:: recompute.every_n_layers])
    return tuple(chosen[kind] for kind in range(len(model.layer_counts)))


def visible_pairs(model: TransformerConfig, mask: KeyRanges) -> torch.Tensor:
    """Visible (query, key) pairs under a batch's mask and the layers' windows, summed over all layers: a scalar."""
    windows = Counter[tuple[int, bool]]()
    for kind, count in zip(model.parts.kinds, model.layer_counts, strict=True):
        for core in kind.cores:
            windows[core.window, core.has_chunks] += count
    visible = mask.end - mask.first
    pairs = []
    for (window, has_chunks), count in windows.items():
        most = (mask.end - 1) % window + 1 if has_chunks else window or None  # with chunks the mask is causal
        pairs.append(count * (visible if most is None else visible.clamp(max=most)).sum())
    return sum(pairs, visible.new_zeros(()))


def megatron_flops_per_token(
    model: TransformerConfig, seq_len: int, recompute: ActivationCheckpoint, decoder_seq_len: int = 0
) -> float:
    """FLOPs as in Megatron-LM's log line: 24·k·l·h²·(1 + s/6h + V/16lh), k = 4 with full recomputation and 3 without.

    With k = 4 this is exact (arXiv 2104.04473, appendix). With k = 3 it counts the logits at 3/4, as Megatron-LM does,
    so utilisations do not use it. It is computed from the weights, so it also covers GQA and SwiGLU.
    """
    layers, head = layer_flops(model, seq_len, decoder_seq_len), head_flops(model, seq_len, decoder_seq_len)
    recomputed = sum(recomputed_layers(model, recompute)) / sum(model.layer_counts) if recompute.mode == "full" else 0
    return (3 + recomputed) * ((layers + 0.75 * head) / seq_len)


@dataclass(frozen=True)
class Throughput:
    """Rates of one step. Utilisations are fractions of the peak, or None if the peak is unknown."""

    tokens_per_second: float
    tflops_per_device: float  # Megatron-LM's convention
    mfu_model: float | None
    mfu_causal: float | None
    hfu: float | None


@dataclass(frozen=True)
class ThroughputMeter:
    """Computes the rates of a run's steps."""

    model: TransformerConfig
    seq_len: int
    recompute: ActivationCheckpoint
    num_devices: int
    peak_tflops: float | None
    decoder_seq_len: int = 0
    adapters: int = 0  # elements of LoRA adapters, if nothing else is trained

    def measure(self, tokens: int, seconds: float, num_pairs: float = 0) -> Throughput:
        """Rates of a step that took ``seconds`` for ``tokens`` tokens on all devices together.

        ``num_pairs``: the sum of `visible_pairs` over the step, if its samples have masks of their own.
        """
        per_device = tokens / seconds / self.num_devices / 1e12
        sizes, decoder = (self.model, self.seq_len), self.decoder_seq_len
        full = model_flops_per_token(*sizes, decoder_seq_len=decoder)
        causal = model_flops_per_token(*sizes, causal=True, decoder_seq_len=decoder)
        if num_pairs:  # forward and backward of QKᵀ and PV: 3 · 2 · 2 for each element and pair
            scores = _over_layers(self.model, lambda kind: kind.scores((self.seq_len, decoder))) / self.seq_len
            causal = full - 12 * self.model.attention_size * (scores - num_pairs / tokens)
        saved = 0.0
        if self.adapters:  # frozen weights have no gradients: a third of their FLOPs is not computed
            products = _over_layers(self.model, lambda kind: kind.products((self.seq_len, decoder)))
            saved = (2 * products + head_flops(*sizes, decoder)) / self.seq_len - 6 * self.adapters

        def utilisation(flops_per_token: float) -> float | None:
            return None if self.peak_tflops is None else (flops_per_token - saved) * per_device / self.peak_tflops

        return Throughput(
            tokens_per_second=tokens / seconds,
            tflops_per_device=(megatron_flops_per_token(*sizes, self.recompute, decoder) - saved) * per_device,
            mfu_model=utilisation(full),
            mfu_causal=utilisation(causal),
            hfu=utilisation(hardware_flops_per_token(*sizes, self.recompute, decoder)),
        )
