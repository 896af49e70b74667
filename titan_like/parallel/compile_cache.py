"""Compiling layers, and whether torch's compiler has work to do before the first step: it keeps its results on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from titan_like import __version__
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend
from titan_like.parallel.layout import Layout
from titan_like.torch_private import compiler_cache


class Compiled(nn.Module):
    """Extends a layer whose forward pass is compiled, as one graph: communication hooks stay outside."""

    compiled: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the layer itself."""
        return self.compiled(*inputs, **named)


def compile_layers(model: Transformer, fullgraph: bool) -> None:
    """Compile each layer of a model, or of one pipeline stage, when it first runs."""
    for layer in model.layers.values():
        extend(layer, Compiled, compiled=torch.compile(layer.forward, fullgraph=fullgraph))


class CompileCache:
    """Remembers which layers have been compiled on this machine, in an empty file next to the compiler's results."""

    def __init__(self, config: JobConfig, model: TransformerConfig, device: torch.device) -> None:
        """What is compiled depends on the shapes, on what is applied to a layer, on torch and on the device."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        training, layout = config.training, Layout.of(config.parallelism)
        shapes = training.seq_len, training.decoder_seq_len, training.micro_batch_size, training.dtype
        split = layout.tensor, layout.sequence_parallel
        data = config.data.reset_attention_mask, config.data.prefix_lm
        versions = torch.__version__, __version__
        applied = config.activation_checkpoint, config.float8
        known = (versions, name, model.model_dump_json(), shapes, split, data, applied)
        self.folder = compiler_cache()
        self._marker = self.folder / "titan_like" / hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def describe_work(self) -> str | None:
        """A line for the log if the layers have yet to be compiled."""
        if self._marker.exists():
            return None
        return f"compiling the layers, once: about half a minute; {self.folder} keeps the result"

    def note_done(self) -> None:
        """Remember that the layers have been compiled. It does not matter if that fails."""
        with suppress(OSError):
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
