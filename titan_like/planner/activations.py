"""Bytes of activations that our own trainer keeps of one microbatch until its backward pass.

Other stacks keep what arXiv 2205.05198 says (benchmarks/stack_memory.py). Ours keeps what PyTorch's autograd saves in
the modules of `titan_like.models`. It differs from the paper as follows:

- With sequence parallelism, the gathered input of each column-split matrix is kept whole.
- Inside attention and the MLP, autograd keeps what `saved_tensors` finds by running one layer: rotated queries and keys
  as well as the projection's result, and for a gated MLP the gate, the activated gate, the other half and their
  product.
- RMSNorm is one operator on a GPU. On a CPU it is several operators, which keep float32 copies.
- Fused attention keeps the log-sum-exp of each row in float32. Where torch has no fused kernel (on a CPU with dropout
  or a bias, on a GPU with grouped queries in float32 or older than the A100), the attention matrix is kept.
- Selective recomputation keeps the result of every product with weights and of every tensor-parallel sum, including the
  layer's last two, which the backward pass does not need.
- A layer with experts keeps the rows of its tokens, k for each, in the order of the experts and in that of the tokens.
  With expert parallelism, those that arrive are as many at equal loads, and `Workload.expert_load` times as many on the
  busiest rank.
- The loss keeps the gradients of its input and of the output matrix (`titan_like.models.layers.cross_entropy`).

tests/distributed/test_activation_memory.py checks these formulas against torch's memory tracker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from torch import nn

from titan_like.metrics.devices import Device
from titan_like.models.layers.cross_entropy import BLOCK_BYTES, PRODUCT, num_chunks
from titan_like.models.parts import Core, layers_of, one_of_each
from titan_like.parallel.schedules.communication import MAX_PENDING_SENDS
from titan_like.planner.saved_tensors import Saved, layer_input_bytes, saved_inside
from titan_like.planner.shapes import description
from titan_like.planner.workload import BYTES, Counts, Workload


class Kept(NamedTuple):
    """Bytes on one GPU for one microbatch."""

    stage: float  # until the backward pass, for a whole stage, whatever its layers
    layers: tuple[float, ...]  # per layer of each kind: the mean of recomputed and other layers
    entry: float  # by the embedding and whatever else is before the layers
    head: float  # by the final norm and whatever else is before the output matrix
    logits: float  # by the loss
    layer_work: tuple[float, ...]  # on top of these, while the backward pass is in a layer of each kind
    loss_work: float  # on top of these, while the loss or its backward pass runs
    message: float  # one message between pipeline stages


class _How(NamedTuple):
    """What the bytes of a microbatch on one process depend on."""

    work: Workload
    device: Device

    @property
    def outside(self) -> float:
        """Elements of the residual stream per token on this process."""
        return self.work.model.hidden_size / (self.work.tensor if self.work.sequence_parallel else 1)

    @property
    def dropout(self) -> bool:
        """Whether the model drops elements in training."""
        return getattr(self.work.model, "dropout", 0.0) > 0

    @property
    def mask(self) -> float:
        """Bytes of a dropout mask per token there. A CPU keeps the mask as factors."""
        return (BYTES[self.work.dtype] if self.device.is_cpu else 1) * self.outside if self.dropout else 0


def kept_of(work: Workload, device: Device) -> Kept:
    """What one microbatch of a run keeps on ``device``."""
    return _kept(_How(work.one_microbatch()._replace(recompute_every=work.recompute_every), device))


@lru_cache(maxsize=4096)
def _kept(how: _How) -> Kept:
    work, device, outside = how.work, how.device, how.outside
    model, t, labelled = work.model, work.tensor, work.labelled
    e, h = BYTES[work.dtype], model.hidden_size
    layers, layer_work = [], []
    for kind in range(len(model.layer_counts)):
        found = [_layer(how, kind, stack) for stack in range(1 + model.has_decoder)]
        fixed = _fixed(how, kind)
        layers.append(sum([n * one for n, (one, _) in zip(work.stack_tokens, found, strict=False)]) + fixed)
        layer_work.append(sum([n * more for n, (_, more) in zip(work.stack_tokens, found, strict=False)]))

    # The loss: the gradient of the output matrix until the backward pass, and work space. Its input's gradient takes as
    # much as the head's output, which is counted with the head.
    loss = loss_work = 0.0
    if "tokens" in model.predictions:
        columns = -(-model.padded_vocab_size // t)
        chunks = num_chunks(max(1, int(labelled)), columns, "cpu" if device.is_cpu else "cuda")
        matrix, several_in_half = columns * h, chunks > 1 and e < 4
        loss = matrix * (4 if several_in_half else e)
        # The input, what it was gathered from, and that of an RMSNorm whose operators on a CPU keep copies instead; a
        # chunk's logits, and on a CPU a block of probabilities without the padding or of 16-bit logits in
        # float32, or a product before it is added to those of other chunks. Or in the end the matrix's gradient in the
        # type of computation.
        used = model.vocab_size / model.padded_vocab_size if e == 4 and t == 1 else 1.0
        block = used * min(4 * labelled * columns / chunks, BLOCK_BYTES) if device.is_cpu else 0.0
        others = (t > 1 and work.sequence_parallel) + (
            e < 4 and device.is_cpu and isinstance(one_of_each(model).norm, nn.RMSNorm)
        )
        loss_work = e * labelled * (h + others * outside + columns / chunks) + max(
            block, several_in_half * e * min(matrix, PRODUCT)
        )
        loss_work = max(loss_work, several_in_half * e * matrix)
    ends = one_of_each(model)
    entry = how.mask + (9 if t > 1 else 0) + _end(how, ends.entry)
    head = tuple(name for name in ends.head if name not in ends.pooled)
    norm = _end(how, head) + e * h
    return Kept(
        layer_input_bytes(model, work.dtype, work.seq_len, work.decoder_seq_len, t) / work.context,
        tuple(layers),
        work.positions * entry,
        labelled * norm + (work.positions - labelled) * e * outside,  # its input is a view of all positions
        loss,
        tuple(layer_work),
        loss_work,
        work.positions * (e * outside),
    )


def _layer(how: _How, kind: int, stack: int) -> tuple[float, float]:
    """Bytes that one layer keeps per token of one stack, and the work space of its backward pass."""
    work, device, outside = how.work, how.device, how.outside
    model, t, e, h = work.model, work.tensor, BYTES[work.dtype], work.model.hidden_size
    gathered = h if work.sequence_parallel else 0
    parts, layer_module = description(model).kinds[kind], layers_of(one_of_each(model))[kind]
    saved, part = _saved(how, kind), parts.experts
    norms = [name for name, of in zip(parts.norms, parts.norm_stacks, strict=True) if of == stack]
    regions = [region for region in parts.regions if region.stack == stack]

    # A layer without recomputation, in bytes per token: its norms, the gathered input and the dropout mask of each
    # region, and what each region keeps inside, where tensor parallelism splits it.
    whole = sum(_norm(how, layer_module.get_submodule(name)) for name in norms)
    whole += len(regions) * (e * h + how.mask)
    outside_regions, after_cores, scores = whole, 0.0, 0.0
    for region, core in zip(parts.regions, parts.cores, strict=True):
        if region.stack != stack:  # of another stack, which cross attention takes as its memory
            whole += (e * h + saved[region.name][stack] / t) * (region.memory > 0)
        elif core is None:
            whole += saved[region.name][stack] / t
            after_cores += outside_regions / len(regions) + saved[region.name][stack] / t
        else:
            keys = (work.seq_len, work.decoder_seq_len)[core.keys]
            scores = max(scores, _gradients_of_scores(how, keys, core))
            if _has_fused_core(how, core):  # plus the log-sum-exp of each row
                whole += saved[region.name][stack] / t + region.cores * 4 * model.num_attention_heads / t
            else:
                inside = "float32" if core.is_biased and device.is_cpu else work.dtype
                whole += e * region.rows / t + region.cores * _unfused_core(how, keys, inside)
    rows = inside_experts = 0.0  # rows of experts, relative to the tokens here between layers
    if part:
        rows = work.expert_load * part.per_token / t
        inside_experts = rows * (e * h + 16 * (work.expert > 1))
        inside_experts += work.expert_load * saved[f"{part.name}.experts"].token / t
        inside_experts += saved[part.name].token / t
        # A router keeps its input in float32, and shared experts their own, gathered if there are several processes.
        if e >= 4 and (t > 1 or not part.has_shared):
            inside_experts += e * outside
        whole += inside_experts
        shared = saved.get(f"{part.name}.shared")
        inside_experts += 0 if shared is None else e * h + shared.token / t
    if not regions:  # the layer passes these positions on, and its first norm's input is a view of all of them
        whole += e * outside
    kept_of_recomputed, unused = whole, 0.0
    # The same for a layer that is recomputed.
    if work.recompute == "full":
        kept_of_recomputed = e * outside
    elif work.recompute == "experts":
        kept_of_recomputed = whole - inside_experts + e * outside * (part is not None)
    elif work.recompute == "selective":
        # The backward pass needs neither the MLP's last product nor its sum, but both stay until the layer is done.
        unused = e * (h + (outside if t > 1 else 0))
        memory = sum(region.memory for region in parts.regions if region.stack != stack)
        kept_of_recomputed = e * (outside + (sum(region.columns for region in regions) + memory) / t)
        kept_of_recomputed += len(regions) * unused
        if part:  # results of three products of each expert, and of the router's
            kept_of_recomputed += rows * e * (2 * part.inner + h) + max(e, 4) * part.num_experts / t
            unused *= part.has_shared
    share = -(-model.num_layers // work.recompute_every) / model.num_layers
    layer = share * kept_of_recomputed + (1 - share) * whole
    # Work space of a layer's backward pass: what recomputation makes again, the gradient of the residual stream, and
    # the larger of the gathered gradients and the MLP's inner gradients, some of which are freed before others exist.
    # Later, in attention, the MLP's share is free, but there may be gradients of scores, and of values and results.
    mlps = [region for region in regions if not region.cores]
    inner = e * max([2 * gathered, *(max(gathered + mlp.rows / t, mlp.columns / t) for mlp in mlps)])
    if part:  # shared experts have run their backward pass by then
        freed = sum(saved[mlp.name].token / t - e * outside for mlp in mlps)
        inner = max(inner, _experts_work(how, h / t, rows * h, rows * part.inner) - freed)
    if scores:
        after_cores += (unused + e * sum(mlp.columns for mlp in mlps) / t) * (work.recompute == "selective")
        inner = max(inner, scores + 2 * e * model.attention_size / t - after_cores)
    keeps_copies = device.is_cpu and isinstance(one_of_each(model).norm, nn.RMSNorm)
    if e < 4 and (part is not None if work.recompute == "experts" else keeps_copies and work.recompute != "none"):
        inner += e * outside  # the input of what is recomputed, of which the layer itself keeps float32 copies
    return layer, whole - kept_of_recomputed + unused + e * outside + inner


def _saved(how: _How, kind: int) -> Mapping[str, Saved]:
    work = how.work
    return saved_inside(work.model, work.dtype, work.context, work.context_method, not how.device.is_cpu)[kind]


def _fixed(how: _How, kind: int) -> float:
    """Bytes that a layer keeps whatever the tokens, such as the router's weights in float32."""
    layers, every = how.work.model.num_layers, how.work.recompute_every
    share = -(-layers // every) / layers if how.work.recompute != "none" else 0
    return (1 - share) * sum([one.fixed for one in _saved(how, kind).values()])


def _experts_work(how: _How, stream: float, outer: float, inner: float) -> float:
    """Bytes per token that the backward pass of a layer's experts needs on top of what the layer keeps.

    Gradients of the results and of their weights, before these are summed, both in float32 at least; or of the three
    factors inside the experts, when neither the results nor the products are needed any more. The gradient of results
    in a half type exists together with the results, except where these were recomputed. Or four copies of the rows,
    instead of the results, while these are sent back, in a recomputation too.

    Args:
        how: what the bytes of a microbatch depend on.
        stream: elements of hidden states per token.
        outer: elements of the experts' rows.
        inner: elements of each factor.
    """
    e = BYTES[how.work.dtype]
    sums = 2 * max(e, 4) * outer
    if e < 4:
        sums += 4 * stream + e * outer * (how.work.recompute == "none")
    return max(sums, e * (2 * inner - outer), (how.work.expert > 1) * 3 * e * outer)


def _end(how: _How, names: tuple[str, ...]) -> float:
    """Bytes per token that one end keeps: the inputs of norms and products, and of the activations after products."""
    found = 0.0
    ends = one_of_each(how.work.model)
    for module in [part for name in names for part in ends.get_submodule(name).modules()]:
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            found += _norm(how, module)
        elif isinstance(module, nn.Linear):
            found += 2 * BYTES[how.work.dtype] * how.outside
    return found


def _norm(how: _How, module: nn.Module) -> float:
    """Bytes that a norm keeps per token, without its output."""
    e, h, outside = BYTES[how.work.dtype], how.work.model.hidden_size, how.outside
    if not isinstance(module, nn.RMSNorm):  # the input, the mean and the deviation
        return e * outside + 2 * 4 * outside / h
    if how.device.is_cpu:  # float32 copies of the input and of its normalised form, and the deviation
        return 2 * 4 * outside + 4 * outside / h
    return e * outside + 4 * outside / h


def _unfused_core(how: _How, keys: int, dtype: str) -> float:
    """Bytes per token: scaled queries, keys and values; of the matrix the softmax, the dropout mask and its result."""
    e, model, context = BYTES[dtype], how.work.model, how.work.context
    mask = (e if how.device.is_cpu else 1) + e if how.dropout else 0
    # Gathered keys, which are scaled too, share their memory with the values.
    vectors = (3 if context == 1 else 1 + 3 * context) * model.attention_size
    rows = model.num_attention_heads * keys
    return (e * vectors + rows * (e + mask)) / how.work.tensor


def _gradients_of_scores(how: _How, keys: int, core: Core) -> float:
    """Bytes per token that the backward pass of an attention core needs for matrices of scores, if it has a bias.

    A CPU computes the gradients of the softmax's output and of its input in float32. A fused kernel on a GPU writes the
    bias's gradient for each sample, and the sum over them comes after it.
    """
    if not core.is_biased:
        return 0.0
    element = 2 * BYTES["float32"] if how.device.is_cpu else BYTES[how.work.dtype]
    return how.work.model.num_attention_heads / how.work.tensor * keys * element


def _has_fused_core(how: _How, core: Core) -> bool:
    """Whether torch's scaled_dot_product_attention has a kernel that does not keep the attention matrix."""
    model = how.work.model
    if how.device.is_cpu:
        return not (how.dropout or core.is_biased)
    is_grouped = model.num_kv_heads != model.num_attention_heads
    return not (is_grouped and (how.work.dtype == "float32" or "V100" in how.device.name))


class Moment(NamedTuple):
    """What a rank holds at some moment, apart from weights and optimizer state."""

    gradients: float  # the share of the rank's gradients that exists
    activations: float  # bytes
    logits: float


def full_moments(
    work: Workload, one: Kept, layers: Counts, held: int, stages: int, ends: Sequence[bool]
) -> list[Moment]:
    """The moments of which one is a rank's fullest, however large its gradients are.

    Gradients exist from the first backward pass on. If all forward passes come before it, as with one microbatch, the
    fullest moment is either just before the first backward pass or in the last one.

    Args:
        work: the run.
        one: what one of its microbatches keeps.
        layers: layers on the rank, by kind.
        held: the most microbatches in flight, summed over the rank's stages.
        stages: stages on the rank.
        ends: whether the rank has the first stage, and whether it has the last.
    """
    m, (is_first, is_last) = work.microbatches, ends
    of_layers, more, first_layer = _layers_of_rank(one, layers, stages == 1)
    # A last stage runs each backward pass right after its forward pass, unless all forward passes come first.
    losses = m if work.schedule in ("gpipe", "looped_bfs") else 1
    chunk = one.stage + (of_layers + is_first * one.entry) / stages
    found = held * chunk
    if work.pipeline > 1:
        found += (min(MAX_PENDING_SENDS, m * stages) + 2) * one.message
    logits = 0.0
    if is_last:
        # First candidate: a layer's backward pass while the most microbatches are in flight. By then the memory of the
        # loss is free again. Selective recomputation still holds the last layer's output; with tensor parallelism,
        # that is already counted in `unused`.
        holds_output = work.tensor == 1 and description(work.model).kinds[-1].experts is None
        head = one.head - one.message * (work.recompute == "selective" and holds_output)
        found += losses * one.head
        more -= head + one.logits + one.loss_work
        logits = losses * one.logits + one.loss_work
    forward = found + max(0.0, more)
    if held < stages * m:
        return [Moment(1, forward, logits)]
    # If every microbatch is in flight at once, there are two more candidates: the backward pass of a stage's first
    # layer, whose own gradients come last, and the moment after it, with all gradients and one microbatch less.
    left, left_logits = max(0.0, found - chunk - is_last * one.head), is_last * (losses - 1) * one.logits
    last_layer = Moment(1 - 1 / (sum(layers) + 1), left + one.stage + first_layer, left_logits)
    return [Moment(0.0, forward, logits), last_layer, Moment(1, left, left_logits)]


@lru_cache(maxsize=65536)
def _layers_of_rank(one: Kept, layers: Counts, is_one_stage: bool) -> tuple[float, float, float]:
    """Bytes that a rank's layers keep; that the fullest of them needs to run; and both, of a stage's first layer.

    When a layer runs its backward pass, the memory of the layers after it in its stage is free again. That matters if
    a layer of an earlier kind needs more work space, as an encoder's does. A rank with several stages may be in one
    without those layers.
    """
    most, free, first_layer = -math.inf, 0.0, 0.0
    for number, layer, layer_work in zip(reversed(layers), reversed(one.layers), reversed(one.layer_work), strict=True):
        if number:
            most = max(most, layer_work - free)
            first_layer = layer + layer_work
        free += number * layer * is_one_stage
    return sum(map(mul, layers, one.layers)), most, first_layer
