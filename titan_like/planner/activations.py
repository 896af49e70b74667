"""Activations of our own trainer: what its layers, its ends and its loss keep of a microbatch until the backward pass.

Other stacks keep what arXiv 2205.05198 says (`titan_like.planner.memory`). Ours is PyTorch's autograd over the modules
of `titan_like.models`, and differs from the paper in named places:

- with sequence parallelism the whole input of each column-split matrix is kept, as it was gathered;
- inside attention and MLP is kept what autograd saves as one layer runs (`saved_tensors`): rotated queries and keys
  beside the projection's result; of a gated MLP the gate, the activated gate, the other half and their product;
- RMSNorm is one operator on a GPU; on a CPU it is several, which keep float32 copies;
- fused attention keeps the logarithm of each row's sum, in float32. Where torch has no fused kernel (a CPU with
  dropout; a GPU with grouped queries in float32 or before the A100), the matrix is kept;
- selective recomputation keeps the result of every product with weights and of every sum over processes, the layer's
  two last products too, which the backward pass does not need;
- the loss keeps its own logits with tensor parallelism and on a CPU, else float32 probabilities of the vocabulary.

Bytes of one microbatch. Held to torch's memory tracker by tests/distributed/test_activation_memory.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import nn

from titan_like.metrics.devices import Device
from titan_like.models.config import TransformerConfig
from titan_like.models.parts import one_layer, only_layer
from titan_like.parallel.schedules.shape import MAX_PENDING_SENDS
from titan_like.planner.dtypes import BYTES
from titan_like.planner.saved_tensors import layer_input_bytes, saved_inside
from titan_like.planner.shapes import description
from titan_like.planner.workload import Workload

_LOSS_BLOCK = 4 << 20  # bytes of logits that the loss works on at a time on a CPU


class Kept(NamedTuple):
    """Bytes on one GPU, of one microbatch."""

    stage: float  # until the backward pass, of a stage besides its layers
    layer: float  # of a layer: the mean where some are recomputed and some are not
    entry: float  # of the embedding
    head: float  # of the final norm
    logits: float  # of the loss
    layer_work: float  # more, while the backward pass is in a layer
    loss_work: float  # more, while the loss or its backward pass is computed
    message: float  # between pipeline stages


@lru_cache(maxsize=4096)
def kept(
    model: TransformerConfig,
    tokens: float,
    seq_len: int,
    tensor: int,
    sequence_parallel: bool,
    recompute: str,
    recompute_every: int,
    dtype: str,
    device: Device,
) -> Kept:
    """What a microbatch keeps that has so many tokens; ``tensor`` processes share each layer."""
    e, t, h = BYTES[dtype], tensor, model.hidden_size
    outside = h / (t if sequence_parallel else 1)  # elements of the residual stream per token, here
    gathered = h if sequence_parallel else 0
    dropout = getattr(model, "dropout", 0.0) > 0
    mask = (e if device.is_cpu else 1) * outside if dropout else 0  # a CPU keeps it as factors
    parts, layer_module = description(model), only_layer(one_layer(model))
    saved = saved_inside(model, dtype)

    # Of norms; of each region its gathered input, and what is split inside; of the sums behind regions.
    whole = sum(_norm(layer_module.get_submodule(name), h, outside, dtype, device) for name in parts.norms)
    whole += len(parts.regions) * (e * h + mask)
    for region in parts.regions:
        if not region.cores:
            whole += saved[region.name] / t
        elif _has_fused_core(model, dtype, dropout, device):  # and the logarithm of each row's sum
            whole += saved[region.name] / t + region.cores * 4 * model.num_attention_heads / t
        else:
            whole += e * region.rows / t + region.cores * _unfused_core(model, seq_len, t, dtype, dropout, device)
    kept_of_recomputed, unused = whole, 0.0
    if recompute == "full":
        kept_of_recomputed = e * outside
    elif recompute == "selective":
        # Of the MLP's last product and its sum nothing is asked again: they stay until the layer is done.
        unused = e * (h + (outside if t > 1 else 0))
        kept_of_recomputed = e * (outside + sum(region.columns for region in parts.regions) / t)
        kept_of_recomputed += len(parts.regions) * unused
    share = -(-model.num_layers // recompute_every) / model.num_layers
    layer = share * kept_of_recomputed + (1 - share) * whole
    # Gradients: of the stream; what is gathered of it; of the MLP's inner activations, some freed as others are made.
    mlps = [region for region in parts.regions if not region.cores]
    inner = max([2 * gathered, *(max(gathered + mlp.rows / t, mlp.columns / t) for mlp in mlps)])
    layer_work = whole - kept_of_recomputed + unused + e * (outside + inner)

    logits = model.padded_vocab_size / t
    if t == 1 and device.is_cpu:  # logits, which become their gradient, and per token a label
        block = min(4 * logits, _LOSS_BLOCK / tokens)  # of probabilities in float32; narrower logits are copied, too
        # Or, after the loss, the gradients of the head's input and weight, before that is added to what there is.
        loss, loss_work = e * logits + 8, max((1 + (e < 4)) * block, e * h * (1 + logits / tokens))
    elif t == 1:  # log-softmax; backward two gradients of it
        loss, loss_work = 4 * logits, 8 * logits
    else:  # logits, and per token a row, two masks and a sum; float32 copies of narrower ones
        loss, loss_work = e * logits + 14, (4 if e == 4 else 8) * logits
    entry = mask + (9 if t > 1 else 0)
    norm = _norm(one_layer(model).norm, h, outside, dtype, device) + e * h  # the output is the next product's input
    per_token = (layer, entry, norm, loss, layer_work, loss_work, e * outside)
    return Kept(layer_input_bytes(model, seq_len), *(tokens * part for part in per_token))


def _norm(module: nn.Module, h: int, outside: float, dtype: str, device: Device) -> float:
    """Per token, without the output."""
    if not isinstance(module, nn.RMSNorm):  # the input, mean and deviation
        return BYTES[dtype] * outside + 2 * 4 * outside / h
    if device.is_cpu:  # the input and its normalised form in float32, and the deviation
        return 2 * 4 * outside + 4 * outside / h
    return BYTES[dtype] * outside + 4 * outside / h


def _unfused_core(model: TransformerConfig, seq_len: int, t: int, dtype: str, dropout: bool, device: Device) -> float:
    """Per token: scaled queries, keys and values, and of the matrix softmax, mask and result."""
    e = BYTES[dtype]
    mask = (e if device.is_cpu else 1) + e if dropout else 0
    return 3 * e * model.hidden_size / t + model.num_attention_heads / t * seq_len * (e + mask)


def _has_fused_core(model: TransformerConfig, dtype: str, dropout: bool, device: Device) -> bool:
    """Whether torch's scaled_dot_product_attention has a kernel that does not keep the matrix."""
    if device.is_cpu:
        return not dropout
    is_grouped = model.num_kv_heads != model.num_attention_heads
    return not (is_grouped and (dtype == "float32" or "V100" in device.name))


def kept_of(work: Workload, device: Device) -> Kept:
    """What a microbatch of a run keeps."""
    return kept(
        work.model,
        work.tokens,
        work.seq_len,
        work.tensor,
        work.sequence_parallel,
        work.recompute,
        work.recompute_every,
        work.dtype,
        device,
    )


class Moment(NamedTuple):
    """Bytes on one GPU when it holds most."""

    gradients: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def fullest_moment(
    work: Workload, one: Kept, layers: int, held: int, stages: int, ends: tuple[bool, bool], gradients: float
) -> Moment:
    """What a rank holds besides weights and optimizer state when it holds most.

    Gradients exist from the first backward pass on: where all forward passes come before it, as with one microbatch,
    most is held either before it or after it.

    Args:
        work: the run.
        one: what its microbatches keep.
        layers: layers of the rank.
        held: most microbatches in flight, summed over the rank's stages.
        stages: stages of the rank.
        ends: whether it has the first stage, and the last.
        gradients: bytes, of the rank.
    """
    m, (is_first, is_last) = work.microbatches, ends
    # The last stage's backward pass follows its forward pass at once, but where all forward passes come first.
    losses = m if work.schedule in ("gpipe", "looped_bfs") else 1
    chunk = one.stage + (layers * one.layer + is_first * one.entry) / stages
    found = held * chunk + is_last * losses * one.head
    if work.pipeline > 1:
        found += (min(MAX_PENDING_SENDS, m * stages) + 2) * one.message
    # While layers go back, what the loss needed is free again, but for the last layer's output, which selective
    # recomputation holds on to (with tensor parallelism `unused` has it).
    head = one.head - one.message * (work.recompute == "selective" and work.tensor == 1)
    more = one.layer_work - is_last * (head + one.logits + one.loss_work)
    logits = is_last * (losses * one.logits + one.loss_work)
    forward = found + max(0.0, more)
    if held < stages * m:
        return Moment(gradients, forward, logits)
    # Or in the first layer of a stage, whose own gradients come last; or with all gradients, and a microbatch less.
    left, left_logits = max(0.0, found - chunk - is_last * one.head), is_last * (losses - 1) * one.logits
    last_layer = gradients * (1 - 1 / (layers + 1)), left + one.stage + one.layer + one.layer_work, left_logits
    return Moment(*max((0.0, forward, logits), last_layer, (gradients, left, left_logits), key=sum))
