"""What a trace on fake CPU tensors replaces: operators that a GPU runs as one kernel, and what depends on data.

A CPU computes RMSNorm in six operators and dropout with a tensor of factors, and the host of experts' processes waits
for a router's loads, which fake tensors do not have. The stand-ins have the inputs, results, saved tensors and working
memory of a GPU's kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.models.layers.attention import AttentionCore, flex_attention
from titan_like.models.layers.cross_entropy import CHUNK_LOGITS, TokenLoss
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.parallel import cp_attention, experts, offload, tensor_heads
from titan_like.parallel.extend import extend
from titan_like.torch_private import attention_by_elementary_operators, local_tensor


def _operator(name: str, fake: Callable[..., Any], schema: str) -> Callable[..., Any]:
    """An operator that exists on fake tensors alone."""
    torch.library.define(f"titan_trace::{name}", schema)
    torch.library.register_fake(f"titan_trace::{name}", fake)
    return getattr(torch.ops.titan_trace, name)


def _as_projected(x: torch.Tensor) -> torch.Tensor:
    """Empty, [batch, heads, seq, head_dim] like x, in the order [batch, seq, heads, head_dim] of projections."""
    batch, heads, seq, head_dim = x.shape
    return x.new_empty(batch, seq, heads, head_dim).transpose(1, 2)


_attention = _operator(
    "attention",
    lambda q, k, v, bias, causal, window: (_as_projected(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, int window) -> (Tensor, Tensor)",
)
_attention_backward = _operator(
    "attention_backward",
    lambda gradient, q, k, v, bias, output, denominator, causal, window: (
        *map(_as_projected, (q, k, v)),
        q.new_empty(0 if bias is None else (q.shape[0], *bias.shape[1:])),
    ),
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor output, Tensor denominator, bool causal,"
    " int window) -> (Tensor, Tensor, Tensor, Tensor)",
)
_rms_norm = _operator(
    "rms_norm",
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[: x.ndim - weight.ndim], dtype=torch.float32)),
    "(Tensor x, Tensor weight) -> (Tensor, Tensor)",
)
_rms_norm_backward = _operator(
    "rms_norm_backward",
    lambda gradient, x, weight, root: (torch.empty_like(x), torch.empty_like(weight)),
    "(Tensor gradient, Tensor x, Tensor weight, Tensor root) -> (Tensor, Tensor)",
)
_to_host = _operator("to_host", lambda tensor: None, "(Tensor tensor) -> ()")


def _merged_all_reduce(tensors: Any, group: Any, operation: Any, *options: Any) -> Any:
    """The merged all-reduce of `titan_like.torch_private.coalesced`, which torch has no fake version of."""
    return torch.ops.c10d.allreduce_(tensors, group, operation, None, *options)[1]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, causal: bool, window: int) -> tuple[torch.Tensor, ...]:
        output, denominator = _attention(q, k, v, bias, causal, window)
        ctx.save_for_backward(q, k, v, bias, output, denominator)
        ctx.sees = causal, window
        ctx.set_materialize_grads(False)
        return output, denominator

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        *gradients, of_bias = _attention_backward(gradient, *ctx.saved_tensors, *ctx.sees)
        return *gradients, of_bias.sum(0, keepdim=True) if ctx.needs_input_grad[3] else None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output, root = _rms_norm(x, weight)
        ctx.save_for_backward(x, weight, root)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _rms_norm_backward(gradient, *ctx.saved_tensors)


def _flex_attention(q: Any, k: Any, v: Any, block_mask: int, return_aux: Any = None, **_: Any) -> Any:
    output, denominator = _Attention.apply(q, k, v, None, True, block_mask)
    return output if return_aux is None else (output, SimpleNamespace(lse=denominator))


class FlexCore(AttentionCore):
    """Attention to ranges of keys by FlexAttention, with the window in place of blocks, which depend on data."""

    def attend_to_ranges(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: KeyRanges) -> torch.Tensor:
        """As in the base class."""
        window = -ranges.window if self.has_chunks else ranges.window
        return flex_attention(q, k, v, window, self.scores_of(q), _flex_attention)


_STEPS = cp_attention.BlockSteps.default()


def _attend_to_block(q: Any, keys: Any, block: cp_attention.Block, exchange: cp_attention.Exchange) -> Any:
    if block.first is None:
        return _STEPS.attend(q, keys, block, exchange)
    return _attention(q, *keys, None, True, _share(exchange))


def _gradients_of_block(parts: Any, keys: Any, block: cp_attention.Block, exchange: cp_attention.Exchange) -> Any:
    if block.first is None:
        return _STEPS.gradients(parts, keys, block, exchange)
    gradient, q, *results = parts
    return _attention_backward(gradient, q, *keys, None, *results, True, _share(exchange))[:3]


def _share(exchange: cp_attention.Exchange) -> int:
    """The window of a chunk of the keys, if a query's whole window is spread evenly over all chunks."""
    return -(-exchange.window // (2 * exchange.size if exchange.travels else 1))


def _scaled_dot_product_attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> torch.Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and q.dtype not in (torch.bfloat16, torch.float16):  # for which GPUs have no fused kernel
        return attention_by_elementary_operators(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
    return _Attention.apply(q, k, v, attn_mask, is_causal, 0)[0]


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class WithoutSeed(tensor_heads.OwnRandomNumbers):
    """Random numbers without a stream of the rank's own, whose seed the host would read."""

    @contextmanager
    def own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """As in the base class."""
        yield


class KnownLoads(experts.SplitExperts):
    """Experts whose rank gets ``load`` times as many rows as it sends, from all ranks alike."""

    load: float

    def exchange(self, x: torch.Tensor, offsets: torch.Tensor) -> experts.Exchange:
        """As in the base class."""
        size, tensor = self.group.size, self.tensor_group
        counts = offsets.diff(prepend=offsets.new_zeros(1)).view(size, -1)
        arriving = experts.all_to_all(counts, self.group)
        gathered = arriving[None] if tensor is None else experts.all_gather(arriving[None], 0, tensor)
        sent, received = ([int(load * len(x)) // size] * size for load in (1, self.load))
        of_tensor_ranks = [sum(received)] * len(gathered)
        order = offsets.new_empty(sum(of_tensor_ranks), dtype=torch.int64)
        return experts.Exchange(sent, received, of_tensor_ranks, order, gathered.sum((0, 1)).to(torch.int32))


class StaysOnDevice(offload.HostMemory):
    """Records copies to the host without making them, so that a compiled layer's events are sorted out first."""

    def store(self, flat: torch.Tensor) -> None:
        """Record a copy, and keep the tensor where it is."""
        _to_host(flat)


def without_host_reads(model: nn.Module, expert_load: float = 1.0) -> None:
    """Let a model compute as on a GPU, without numbers that fake tensors lack. ``expert_load`` as in `Workload`."""
    host = StaysOnDevice(torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, experts.SplitExperts):
            extend(module, KnownLoads, load=expert_load)
        if isinstance(module, tensor_heads.OwnRandomNumbers):
            extend(module, WithoutSeed)
        if isinstance(module, AttentionCore):
            extend(module, FlexCore)
        if isinstance(module, offload.Offloaded):
            module.offload_host = host
        if isinstance(module, TokenLoss):
            module.chunk = module.chunk or CHUNK_LOGITS["cuda"]


def _empty_on(mode: Any, dtype: torch.dtype | None) -> Callable[..., nn.Module]:
    """`nn.Module.to_empty` on fake tensors, with parameters in ``dtype``, or in their own."""

    def to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        new: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, old in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if id(old) not in new:
                    new[id(old)] = nn.Parameter(_empty_parameter(mode, old, dtype or old.dtype), old.requires_grad)
                setattr(owner, name, new[id(old)])
            for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
                with mode:
                    setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        return module

    return to_empty


def _empty_parameter(mode: Any, old: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    with mode:  # only here: it would make a fake tensor of all that an operator reads of ``old``
        part = torch.empty(local_tensor(old).shape, dtype=dtype)
    if not isinstance(old, DTensor):
        return part
    placement = old.device_mesh, old.placements
    return DTensor.from_local(part, *placement, run_check=False, shape=old.shape, stride=old.stride())


DECOMPOSED = {
    operator: partial(function, steps=_STEPS._replace(attend=_attend_to_block, gradients=_gradients_of_block))
    for operator, function in cp_attention.WITH_STEPS.items()
}
"""Operators whose kernels and messages are recorded instead of themselves."""


@contextmanager
def as_on_gpu(mode: Any, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let the recipe run on fake tensors as on a GPU. Parameters are allocated in ``dtype``, or in their own.

    Models that it builds need `without_host_reads`.
    """
    with suppress(RuntimeError):  # registered already
        torch.library.register_fake("c10d::allreduce_coalesced_", _merged_all_reduce)
    # No `TorchFunctionMode`, which is off while `backward` runs, and with it recomputation.
    kernels: dict[str, Any] = {
        "scaled_dot_product_attention": _scaled_dot_product_attention,
        "dropout": _dropout,
        "rms_norm": lambda x, shape, weight=None, eps=None: _RMSNorm.apply(x, weight),
    }
    to_empty = mock.patch.object(nn.Module, "to_empty", _empty_on(mode, dtype))
    with mock.patch.multiple(F, **kernels), to_empty:
        yield
