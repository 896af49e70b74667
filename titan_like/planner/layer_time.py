"""Seconds that one GPU takes for one microbatch in one transformer layer, and in the ends of the model.

Matrix products are computed in waves, one output tile per multiprocessor. The last wave and the tiles at the edges may
be partly empty (NVIDIA, "Matrix Multiplication Background": tile and wave quantization). A tile of depth K takes as
long as K + ``gemm_depth`` multiply-adds per element at the sustained rate. A product may instead be bound by memory.
All other operators read and write memory, with bytes counted as in arXiv 2205.05198, section 4, and Megatron-LM's
operators.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titan_like.models.parts import Core
from titan_like.planner.profile import Profile
from titan_like.planner.shapes import ExpertPart, LayerDescription, description
from titan_like.planner.workload import BYTES, NARROW, Workload, element_bytes, stored_dtype

# Rows, columns, and rate relative to the largest tile: smaller tiles reuse less of what they load.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.85), (128, 64, 0.65), (64, 64, 0.45))

# Additional operators without the fused softmax, forward and backward: cast up, scale, make the mask, fill, softmax,
# cast down.
_UNFUSED_SOFTMAX = (6, 4)


# Additional operators of a layer with experts, forward and backward: the router's choice, its losses, the order of the
# rows, copies in and out.
_EXPERT_OPERATORS = (40, 30)


class Cost(NamedTuple):
    """Seconds of one pass over one layer, or over one end of the model, for one microbatch."""

    forward: float  # computation
    backward: float
    recomputed: float  # forward computation repeated in the backward pass
    forward_tensor: float  # tensor- and context-parallel communication that computation waits for
    backward_tensor: float
    recomputed_tensor: float
    forward_host: float  # the host's time to launch the pass's operators
    backward_host: float  # including the repeated ones


def gemm_time(rows: float, columns: float, depth: float, batch: float, dtype: str, profile: Profile) -> float:
    """Seconds of ``batch`` products [rows, depth] · [depth, columns], with elements of 4 bytes in float32, else 2."""
    device = profile.device
    rate = device.peak_flops(dtype) * profile.gemm_efficiency
    if dtype in NARROW:
        rate *= profile.float8_relative if dtype == "float8" else profile.float4_relative
    element = element_bytes(dtype)
    width = device.multiprocessors
    # The best tile: waves, each as long as one tile takes, over all multiprocessors.
    best = float("inf")
    for tile_rows, tile_columns, relative in _TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns) * batch
        waves = -(-tiles // width)
        best = min(best, waves * tile_rows * tile_columns / relative)
    compute = best * width * 2 * (depth + profile.gemm_depth) / rate
    moved = element * batch * (rows * depth + depth * columns + rows * columns)
    time = max(compute, moved / profile.memory_rate)
    aligned = device.tensor_element
    if columns % aligned or depth % aligned:
        time = max(time, 2 * rows * columns * depth * batch / profile.misaligned_rate)
    return time


@lru_cache(maxsize=65536)
def linear_times(tokens: float, inputs: float, outputs: float, dtype: str, profile: Profile) -> tuple[float, float]:
    """Seconds of one linear layer: forward, and backward with the gradients of input and weights."""
    forward = gemm_time(tokens, outputs, inputs, 1, dtype, profile)
    inwards = gemm_time(tokens, inputs, outputs, 1, dtype, profile)
    weights = gemm_time(outputs, inputs, tokens, 1, dtype, profile)
    return forward, inwards + weights


def expert_times(work: Workload, profile: Profile, part: ExpertPart) -> tuple[float, float, float, float]:
    """Seconds of the products of a router and of the experts here, forward and backward, and bytes moved around them.

    All experts' products are one call, in which each multiplies its own rows. Rows are copied into the order of the
    experts and back, and with expert parallelism once more on the process that has the expert. A token's results are
    weighted and added up in float32.
    """
    tokens, element, here = work.tokens / work.tensor, element_bytes(work.dtype), part.num_experts // work.expert
    rows = work.expert_load * tokens * part.per_token
    sizes = rows / here, here, work.dtype, profile
    wide, narrow = _grouped_times(part.hidden, part.inner, *sizes), _grouped_times(part.inner, part.hidden, *sizes)
    routed = linear_times(tokens, part.hidden, part.num_experts, _router_dtype(work, profile), profile)
    copies = 4 if work.expert > 1 else 2
    row, inner = part.per_token * tokens * part.hidden, rows * part.inner
    forward_bytes = element * (2 * copies * row + 3 * inner) + (element + 4) * row
    backward_bytes = element * (2 * copies * row + 5 * inner) + (2 * element + 4) * row
    return (
        2 * wide[0] + narrow[0] + routed[0],
        2 * wide[1] + narrow[1] + routed[1],
        forward_bytes,
        backward_bytes,
    )


def _router_dtype(work: Workload, profile: Profile) -> str:
    """Our trainer's routers compute in float32, others in the type of activations."""
    return "float32" if profile.trainer_state else stored_dtype(work.dtype)


def _grouped_times(
    inputs: int, outputs: int, rows: float, experts: int, dtype: str, profile: Profile
) -> tuple[float, float]:
    """`linear_times` of several experts' linear layers in one call, each on its own ``rows``."""
    forward = gemm_time(rows, outputs, inputs, experts, dtype, profile)
    inwards = gemm_time(rows, inputs, outputs, experts, dtype, profile)
    weights = gemm_time(outputs, inputs, rows, experts, dtype, profile)
    return forward / profile.grouped_relative, (inwards + weights) / profile.grouped_relative


def attention_times(work: Workload, profile: Profile, core: Core) -> tuple[float, float]:
    """Seconds of an attention core, from QKᵀ to PV: forward and backward.

    Fused attention (arXiv 2205.14135) is bound by computation, with five products in the backward pass and two in the
    forward pass. Unfused attention has two batched products forward and four backward, and reads and writes the matrix
    for softmax, dropout and mask. A ring of processes adds up float32 results of each one's keys
    (`titan_like.parallel.ring_attention`).
    """
    heads, heads_of_keys = (n / work.tensor for n in (work.model.num_attention_heads, work.model.num_kv_heads))
    width = work.model.head_dim
    lengths = work.seq_len, work.decoder_seq_len
    rows, columns = lengths[core.queries] / work.context, lengths[core.keys]
    flops = 4 * work.micro_batch_size * heads * rows * columns * width
    if work.flash:
        is_causal = core.is_causal if work.decoder_seq_len else work.causal
        half = 0.5 if profile.causal_half and is_causal else 1.0
        peak = profile.device.peak_flops(stored_dtype(work.dtype))
        forward = half * flops / (peak * profile.attention_efficiency)
        backward = 2.5 * forward
        if work.context > 1 and work.context_method == "ring":
            size = work.context * work.micro_batch_size * width / profile.memory_rate
            queries, values = size * rows * heads, size * columns / work.context * 2 * heads_of_keys
            forward += (6 * 4 + element_bytes(work.dtype)) * queries  # both are scaled, then added up
            backward += 3 * 4 * (queries + values)
        return forward, backward
    batch = work.micro_batch_size * heads
    score = gemm_time(rows, columns, width, batch, stored_dtype(work.dtype), profile)
    value = gemm_time(rows, width, columns, batch, stored_dtype(work.dtype), profile)
    matrix = batch * rows * columns  # elements
    element = element_bytes(work.dtype)
    softmax = 2 * element if softmax_is_fused(work, profile) else 8 * element
    dropout = 2 * element + 1 if work.dropout else 0
    bandwidth = profile.memory_rate
    forward = score + value + (softmax + dropout) * matrix / bandwidth
    backward = 2 * (score + value) + (softmax + element + dropout) * matrix / bandwidth
    return forward, backward


def softmax_is_fused(work: Workload, profile: Profile) -> bool:
    """Whether scale, mask and softmax are one operator.

    Megatron-LM's fused operator takes four rows of attention matrices at once, so it needs a multiple of four samples ×
    heads.
    """
    return profile.fused_softmax and work.micro_batch_size * work.model.num_attention_heads // work.tensor % 4 == 0


def accumulation_time(parameters: float, work: Workload, profile: Profile) -> float:
    """Seconds to add a microbatch's gradients to the sum: read the new ones, read and write the sum.

    ``parameters`` are those on the process.
    """
    if not work.accumulates or profile.fused_accumulation:
        return 0.0
    element = element_bytes(work.dtype)
    return parameters * (element + 2 * profile.gradient_state) / profile.memory_rate


def parameters_here(parameters: float, part: ExpertPart | None, work: Workload) -> float:
    """A layer's parameters on one process before ZeRO: tensor parallelism splits all but experts."""
    of_experts = part.parameters if part else 0
    return (parameters - of_experts) / work.tensor + of_experts / work.expert


@lru_cache(maxsize=65536)
def layer_cost(work: Workload, profile: Profile, kind: int = 0) -> Cost:
    """Seconds of one transformer layer, of one kind, on one of the ranks that share it."""
    model, t, dtype = work.model, work.tensor, work.dtype
    parts, sizes = description(model).kinds[kind], model.parts.kinds[kind]
    element = element_bytes(dtype)
    bandwidth = profile.memory_rate
    mask = 1 if work.dropout else 0
    # Bytes moved between products. Forward: norms (2 each), residual additions with bias and dropout (3 each),
    # activation functions, and copies of queries, keys, values and the heads' output. Backward: gradients in and out,
    # and the saved inputs.
    forward_bytes = backward_bytes = 0.0
    for stack, tokens in enumerate(work.stack_tokens):
        outside = tokens * model.hidden_size / (t if work.sequence_parallel else 1)  # elements of the residual stream
        norms, regions = parts.norm_stacks.count(stack), sum(region.stack == stack for region in parts.regions)
        forward_bytes += outside * ((2 * norms + 3 * regions) * element + regions * mask)
        backward_bytes += outside * ((4 * norms + 3 * regions) * element + regions * mask)
    forward = backward = core_forward = core_backward = last_product = 0.0
    for region, attention in zip(parts.regions, parts.cores, strict=True):
        tokens, others = work.stack_tokens[region.stack], work.stack_tokens[1 - region.stack]
        first = linear_times(tokens, region.inputs, region.columns / t, dtype, profile)
        last = linear_times(tokens, region.rows / t, region.outputs, dtype, profile)
        forward, backward, last_product = forward + first[0] + last[0], backward + first[1] + last[1], last[0]
        if region.memory:
            memory = linear_times(others, region.inputs, region.memory / t, dtype, profile)
            forward, backward = forward + memory[0], backward + memory[1]
            copied = 2 * element * others * region.memory / t
            forward_bytes, backward_bytes = forward_bytes + copied, backward_bytes + copied
        if attention is not None:
            core = attention_times(work, profile, attention)
            core_forward, core_backward = core_forward + region.cores * core[0], core_backward + region.cores * core[1]
            copied = 2 * element * tokens * (region.columns + region.rows) / t
            forward_bytes, backward_bytes = forward_bytes + copied, backward_bytes + copied
        else:  # elementwise, from the results of the first products to the inputs of the last
            inner = tokens / t * element
            forward_bytes += inner * (region.columns + region.rows)
            backward_bytes += inner * (region.columns + 3 * region.rows)
    part, in_experts = parts.experts, 0.0
    if part is not None:
        more = expert_times(work, profile, part)
        forward, backward = forward + more[0], backward + more[1]
        forward_bytes, backward_bytes = forward_bytes + more[2], backward_bytes + more[3]
        in_experts = more[0] + more[2] / bandwidth
        if not part.has_shared:
            last_product = 0.0  # recomputation repeats everything: the weights of the experts' results need these
    if work.compiled:
        forward_bytes *= profile.compiled_traffic
        backward_bytes *= profile.compiled_traffic
    forward = forward + core_forward + forward_bytes / bandwidth
    backward = backward + core_backward + backward_bytes / bandwidth
    backward += accumulation_time(parameters_here(sizes.parameters, part, work), work, profile)

    recomputed = 0.0
    if work.recompute == "full":
        recomputed = forward - (0 if profile.recompute_whole else last_product)
    elif work.recompute == "experts":
        recomputed = in_experts
    elif work.recompute == "selective" and profile.trainer_state:  # everything but products with weights
        recomputed = core_forward + forward_bytes / bandwidth
    elif work.recompute == "selective" and not work.flash:
        recomputed = core_forward
    forward_tensor, backward_tensor, recomputed_tensor = _layer_communication(work, profile, parts)

    # The host launches the layer's operators and its collectives.
    operators_forward, operators_backward = profile.host_operators
    messages = sum(parts.leaves) if t > 1 else 0
    if part is not None:
        operators_forward += _EXPERT_OPERATORS[0]
        operators_backward += _EXPERT_OPERATORS[1]
        messages += 3 * (work.expert > 1)
    if not work.flash and not softmax_is_fused(work, profile):
        operators_forward += _UNFUSED_SOFTMAX[0]
        operators_backward += _UNFUSED_SOFTMAX[1]
    host_forward = (operators_forward + messages) * profile.operator_time
    host_backward = (operators_backward + messages) * profile.operator_time
    if t > 1 and not work.compiled:
        host_forward += profile.tensor_host_forward
        host_backward += profile.tensor_host_backward
    if work.recompute == "full":
        host_backward += host_forward
    elif work.recompute == "experts" and part is not None:
        host_backward += _EXPERT_OPERATORS[0] * profile.operator_time
    return Cost(
        forward, backward, recomputed, forward_tensor, backward_tensor, recomputed_tensor, host_forward, host_backward
    )


def _layer_communication(work: Workload, profile: Profile, parts: LayerDescription) -> tuple[float, float, float]:
    """Seconds of exposed tensor- and context-parallel communication: forward, backward, repeated forward.

    Attention and the MLP each need one all-reduce of the hidden states per pass (arXiv 1909.08053, figure 4). Sequence
    parallelism replaces it by an all-gather and a reduce-scatter, which move as much (arXiv 2205.05198). Its second
    all-gather in the backward pass overlaps with the gradient of the input, so it is not counted.
    """
    if work.tensor == work.context == work.expert == 1:
        return 0.0, 0.0, 0.0
    forward = backward = recomputed = 0.0
    if work.tensor > 1:
        nbytes = work.model.hidden_size * element_bytes(work.dtype)
        sums = sum(parts.leaves)
        for stack, tokens in enumerate(work.stack_tokens):
            if tokens:
                one = profile.links.all_reduce(tokens * nbytes, work.tensor, 1)
                forward += parts.leaves[stack] * one
                # Cross attention also takes the encoder's positions, whose gradients are summed.
                backward += sum(region.memory > 0 and region.stack != stack for region in parts.regions) * one
        backward += forward
        if work.recompute == "full":
            # Everything but the last sum. With sequence parallelism that is a reduce-scatter, half an all-reduce.
            repeats_last = profile.recompute_whole or (parts.experts is not None and not parts.experts.has_shared)
            last = 0 if repeats_last else 0.5 if work.sequence_parallel else 1
            recomputed = forward * (1 - last / max(sums, 1))
    if work.context > 1:
        for core in filter(None, parts.cores):
            there, back = _context_communication(work, profile, core)
            forward, backward = forward + there, backward + back
            recomputed += there * (work.recompute in ("selective", "full"))
    exposed = profile.tensor_exposed
    forward, backward, recomputed = forward * exposed, backward * exposed, recomputed * exposed
    if parts.experts is not None and work.expert > 1:
        exchange = exchange_time(work, profile, parts.experts) * profile.expert_exposed
        forward, backward = forward + exchange, backward + exchange
        recomputed += exchange * (work.recompute != "none")
    return forward, backward, recomputed


def exchange_time(work: Workload, profile: Profile, part: ExpertPart) -> float:
    """Seconds of two all-to-alls of a layer's rows, to the experts and back.

    Each process sends hidden states of its own tokens to k experts each. What it gets is more on the process with the
    most work, which the others wait for.
    """
    rows = work.expert_load * work.tokens / work.tensor * part.per_token
    copies = part.per_token if profile.sends_once_per_node else 1
    return 2 * profile.links.all_to_all(rows * part.hidden * element_bytes(work.dtype), work.expert, 1, copies)


def _context_communication(work: Workload, profile: Profile, core: Core) -> tuple[float, float]:
    """Seconds that an attention core waits for the processes that share the sequence: forward and backward.

    Gathers and all-to-alls are waited for. A ring's keys and values arrive during attention to those that are there.
    In the backward pass that holds for the first arrival only: later ones come before gradients, for which each step
    waits (`titan_like.parallel.ring_attention`).
    """
    model, size, element, links = work.model, work.context, element_bytes(work.dtype), profile.links
    lengths, row = (work.seq_len, work.decoder_seq_len), work.micro_batch_size * model.head_dim / work.tensor
    queries = row * lengths[core.queries] / size * model.num_attention_heads * element  # bytes of a process
    values = 2 * row * lengths[core.keys] / size * model.num_kv_heads * element
    if work.context_method == "ulysses":
        one_way = (links.all_to_all(nbytes, size, work.tensor) for nbytes in (queries + values, queries))
        return (sum(one_way),) * 2
    gather = links.all_gather(values * size, size, work.tensor)
    if work.context_method == "all_gather":
        return gather, gather
    send = gather / (size - 1)  # to the next process, at the same time as all others
    sums = links.all_gather(values * size * max(1, BYTES["float32"] / element), size, work.tensor) / (size - 1)
    forward, backward = (max(0.0, send - seconds / size) for seconds in attention_times(work, profile, core))
    return (size - 1) * forward, backward + (size - 2) * send + size * sums


@lru_cache(maxsize=65536)
def ends_cost(work: Workload, profile: Profile) -> tuple[Cost, Cost]:
    """Costs of the embedding before the first layer, and of norm, logits and loss after the last.

    Each rank has V/t columns of logits. An unfused loss reads and writes them in float32 about five times forward and
    twice backward; a fused one reads and writes them as they are. The sums of a few numbers per token over the ranks
    are not counted.
    """
    model, t, hidden = work.model, work.tensor, work.model.hidden_size
    positions, tokens = work.positions, work.labelled
    element = element_bytes(work.dtype)
    bandwidth = profile.memory_rate
    product_type = stored_dtype(work.dtype)
    vocabulary = -(-model.padded_vocab_size // t)
    vocabulary += -vocabulary % profile.device.tensor_element
    logits = linear_times(tokens, hidden, vocabulary, product_type, profile)
    is_fused = profile.fused_loss and (work.compiled or not profile.trainer_state)  # our trainer's is, once compiled
    copies = 0 if is_fused else 4
    loss_forward = tokens * vocabulary * (element + 5 * copies) / bandwidth
    loss_backward = tokens * vocabulary * (element + (2 * copies or element)) / bandwidth
    before, around = positions * hidden * element, tokens * hidden * element
    reduce, sums = (profile.links.all_reduce(size, t, 1) * profile.tensor_exposed for size in (around, before))
    host = 10 * profile.operator_time
    table = accumulation_time(model.padded_vocab_size * hidden / t, work, profile)  # the gradient of a table is dense
    entry = Cost(3 * before / bandwidth, 4 * before / bandwidth + table, 0, sums, 0, 0, host, host)
    head = Cost(
        logits[0] + loss_forward + 2 * around / bandwidth,
        logits[1] + loss_backward + 4 * around / bandwidth + table,
        0,
        0,
        reduce,
        0,
        2 * host,
        2 * host,
    )
    return entry, head
