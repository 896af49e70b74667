"""The gated delta rule (arXiv 2412.06464): linear attention that decays its state and corrects what it recalls.

For each head, with queries and keys of length 1, the state S [key size, value size] and the output o follow

    S' = exp(g) · S        S = S' + β · k (v - k S')        o = q S / √(key size)

In Kimi's delta attention (arXiv 2510.26692) g differs between the rows of S.

Between chunks of a sequence this is a recurrence, and within one it is a triangular system (arXiv 2412.06464, section
3.3). A document of a packed sequence begins with a state of zeros.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64  # positions, as in flash-linear-attention
_RESET = -100.0  # log of a decay that leaves nothing of a state in float32
_EPS = 1e-6  # added to squared lengths, as in flash-linear-attention


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """`chunked_gated_delta_rule` of queries and keys of any length, which are divided by it.

    On a GPU, flash-linear-attention computes it if it is installed, except in float64.
    """
    of_rows = g.ndim == 4
    kernel = _kernel(of_rows) if v.is_cuda and v.dtype != torch.float64 else None
    if kernel is None:
        return chunked_gated_delta_rule(_normalised(q), _normalised(k), v, g, beta, starts, chunk)
    if starts is not None:  # lengths of documents would need a wait for the GPU
        is_first = starts == torch.arange(v.shape[1], device=v.device)
        g = g.masked_fill(is_first[..., None, None] if of_rows else is_first[..., None], _RESET)
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    return kernel(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


@cache
def _kernel(of_rows: bool) -> Callable[..., Any] | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
    except ImportError:
        warnings.warn(
            "gated delta nets run without flash-linear-attention, slower and with more memory; "
            "pip install 'titan_like[linear]'",
            stacklevel=2,
        )
        return None
    return chunk_kda if of_rows else chunk_gated_delta_rule


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Vectors in the last dimension of length 1, at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def chunked_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """q and k [batch, seq, key heads, key size], v [batch, seq, heads, value size] → shape and dtype of v.

    Each key head serves equally many consecutive heads of v. ``g`` is the log of the decay and ``beta`` the strength of
    the correction, both [batch, seq, heads]; or decays are of the state's rows, [batch, seq, heads, key size], with as
    many key heads. ``starts``, int64 [batch, seq], is where each position's document begins; None: at 0. It computes in
    float32 at least.
    """
    batch, seq, heads, value_size = v.shape
    key_heads, key_size = k.shape[2:]
    result_dtype, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    q, k, v, beta = (in_chunks(x.to(dtype), key_heads, chunk) for x in (q, k, v, beta[..., None]))
    q = key_size**-0.5 * q
    decay, since_chunk = chunk_decays(g.to(dtype), starts, key_heads, chunk)
    if g.ndim == 4:  # [..., chunk, chunk, key size], in products of as many factors as the two below have
        between_keys, scores = ((k.unsqueeze(-3) * decay) @ torch.stack((k, q), -1)).unbind(-1)
        at_end = decay[..., -1, :, :]
    else:
        between_keys, scores = k @ k.mT * decay, q @ k.mT * decay
        at_end = decay[..., -1:, :].mT

    # A correction depends on those before it in the chunk, and linearly on the state before the chunk.
    system = between_keys * beta
    known = torch.cat((beta * v, beta * since_chunk * k), 5)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    corrections, of_state = solved.split([value_size, key_size], 5)
    reads = torch.cat((of_state, since_chunk * q), 4)
    writes = (k * at_end).mT
    kept = since_chunk[..., -1:, :].mT

    state: torch.Tensor | None = None
    outputs = []
    chunks = zip(*(x.unbind(0) for x in (corrections, reads, scores, writes, kept)), strict=True)
    for number, (correction, read, score, write, keep) in enumerate(chunks):
        if state is None:
            outputs.append(score @ correction)
        else:
            of_correction, of_output = (read @ state).chunk(2, 3)
            correction = correction - of_correction
            outputs.append(of_output + score @ correction)
        if number + 1 < len(kept):
            written = write @ correction
            state = written if state is None else keep * state + written
    output = torch.stack(outputs, 1).permute(0, 1, 4, 2, 3, 5)  # [batch, chunks, chunk, key heads, …, value size]
    return output.reshape(batch, -1, heads, value_size)[:, :seq].to(result_dtype)


def in_chunks(x: torch.Tensor, groups: int, chunk: int) -> torch.Tensor:
    """[batch, seq, n, size] → [chunks, batch, groups, n / groups, chunk, size], filled up with zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1)).permute(1, 0, 3, 4, 2, 5).contiguous()


def chunk_decays(
    g: torch.Tensor, starts: torch.Tensor | None, groups: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left, at each position of a chunk, of each earlier one, and of the state before the chunk.

    Logs of decays ``g`` [batch, seq, heads] and ``starts`` as in `chunked_gated_delta_rule` → [chunks, batch, groups,
    heads / groups, chunk, chunk] and [..., chunk, 1]. Decays of rows, [batch, seq, heads, rows] → [..., chunk, chunk,
    rows] and [..., chunk, rows].
    """
    log_decay = in_chunks(g if g.ndim == 4 else g[..., None], groups, chunk).cumsum(4)  # since the chunk's beginning
    order = torch.arange(chunk, device=g.device)
    is_hidden = order[:, None] < order
    since_chunk = log_decay.exp()
    if starts is not None:
        # Where each position's document begins, counted from the position's chunk.
        first = in_chunks(starts[..., None, None].expand(-1, -1, groups, -1), groups, chunk)
        first = first - chunk * torch.arange(len(first), device=g.device).view(-1, 1, 1, 1, 1, 1)
        is_hidden, since_chunk = is_hidden | (order < first), since_chunk.masked_fill(first >= 0, 0)
    if g.ndim == 4:
        between, is_hidden = log_decay.unsqueeze(-2) - log_decay.unsqueeze(-3), is_hidden[..., None]
    else:
        between = log_decay - log_decay.mT
    return between.masked_fill(is_hidden, -torch.inf).exp(), since_chunk


def chunk_products(seq: int, key_heads: int, heads: int, key_size: int, value_size: int, chunk: int = CHUNK) -> int:
    """Multiplications of a sequence in `chunked_gated_delta_rule`, of which a triangular system is a whole matrix."""
    chunks = -(-seq // chunk)
    pairs = 2 * key_heads * key_size + heads * (key_size + 2 * value_size)
    return chunks * chunk**2 * pairs + (chunks - 1) * chunk * 3 * heads * key_size * value_size


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal convolution of each channel within its document.

    x [batch, seq, channels], weight [channels, 1, taps] and bias [channels] → like x. ``starts`` as in
    `chunked_gated_delta_rule`. It is a sum of elementwise products, which a compiler fuses.
    """
    seq, taps = x.shape[1], weight.shape[2]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    weight = weight.to(torch.promote_types(x.dtype, torch.float32))
    order = torch.arange(seq, device=x.device)
    total = x * weight[:, 0, -1]
    for lag in range(1, taps):
        product = padded[:, taps - 1 - lag : taps - 1 - lag + seq] * weight[:, 0, -1 - lag]
        if starts is not None:
            product = product.masked_fill((order - lag < starts)[..., None], 0)
        total = total + product
    return (total if bias is None else total + bias).to(x.dtype)
