"""The size of an element of each data type that a configuration or a measured row can name."""

from __future__ import annotations

NARROW = ("float8", "float4")  # only a layer's matrix products with weights run in these; the rest is bfloat16
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def stored_dtype(dtype: str) -> str:
    """The type of activations, weights and gradients in a run that computes its products in ``dtype``."""
    return "bfloat16" if dtype in NARROW else dtype


def element_bytes(dtype: str) -> int:
    """Bytes of one activation in a run that computes its products in ``dtype``."""
    return BYTES[stored_dtype(dtype)]
