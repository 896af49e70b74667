"""Formulas are compared in float64: whatever order a processor's kernels add in, an error is far above the rounding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from titan_like.models.decoder.model import Decoder


def bound(terms: int = 4096, dtype: torch.dtype = torch.float64) -> float:
    """Largest relative difference of two results that each add ``terms`` numbers, one after the other, in any order.

    Each addition and product rounds either result by at most eps / 2. The default is for whole models: four layers,
    forward and backward, of eight sums in a row with 64 terms each.
    """
    return terms * torch.finfo(dtype).eps


class _Float64(TorchFunctionMode):
    """Puts float64 where code names float32, as transformers' norms, softmax, RoPE and routers do, or bfloat16()."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func in (torch.Tensor.float, torch.Tensor.bfloat16) else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Create and compute everything in float64, also where ours or transformers' code says float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def exact_rope() -> Any:
    """Let our models have rotary tables in float64, in a context or a function. All else follows `training.dtype`."""
    tables = {name: in_float64()(getattr(Decoder, name)) for name in ("rotary_tables", "query_scale")}
    return patch.multiple(Decoder, **tables)
