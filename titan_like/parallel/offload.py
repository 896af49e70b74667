"""Offload of activations: what layers save for the backward pass waits in the host's memory.

A side stream copies what a layer has saved while the next layer computes, and brings it back while the layer above is
in its backward pass (as torchtune's `OffloadActivations`, but a layer at a time). On a CPU the copies are in other
memory, and there are no streams.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from titan_like.models.transformer import Transformer
from titan_like.optim.shards import local
from titan_like.parallel.extend import extend
from titan_like.parallel.tuning import Tuning
from titan_like.torch_private import tree_leaves


class HostMemory:
    """Buffers in the host's memory, pinned for a GPU, and the stream that copies to and from them.

    One stream makes all copies in order, so a buffer whose content is on its way back can be written again at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.newest: LayerTensors | None = None
        self._leaving: deque[LayerTensors] = deque()
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def add(self, layer: LayerTensors) -> None:
        """Free what the layer before has saved: its copies had the time of this layer's forward pass."""
        self.newest = layer
        self._leaving.append(layer)
        while len(self._leaving) > (self.stream is not None):
            self._leaving.popleft().leave()

    def copies(self) -> torch.cuda.StreamContext:
        """A context for copies, which begin when the current stream has done what it has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)  # without a stream, an empty context

    def event(self) -> Any:
        """What tells that the copies so far have ended."""
        return None if self.stream is None else self.stream.record_event()

    def store(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor of one dimension to a buffer. Without one it stays on the device."""
        free = self._free[len(flat), flat.dtype]
        buffer = free.pop() if free else torch.empty(flat.shape, dtype=flat.dtype, pin_memory=self.stream is not None)
        return buffer.copy_(flat, non_blocking=True)

    def load(self, buffer: torch.Tensor, flat: torch.Tensor | None) -> None:
        """Copy a buffer back to the device, unless it is still there, and give the buffer up."""
        if flat is not None:
            flat.copy_(buffer, non_blocking=True)
        self._free[len(buffer), buffer.dtype].append(buffer)


class Saved:
    """A storage of which a layer saved one or several views: on the device, in the host's memory, or in both."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.on_device: torch.Tensor | None = tensor.detach().as_strided((size,), (1,), 0)
        self.on_host: torch.Tensor | None = None


class View(NamedTuple):
    """A tensor that autograd saved."""

    saved: Saved
    layer: LayerTensors
    dtype: torch.dtype
    where: tuple[Any, ...]  # size, stride and offset


class LayerTensors:
    """What a layer has saved of one microbatch."""

    def __init__(self, host: HostMemory, below: LayerTensors | None, least: float) -> None:
        """``below``: the layer before it, if any. ``least``: bytes of the smallest storage that leaves the device."""
        self.host, self.below, self.least = host, below, least
        self.saved: dict[int, Saved] = {}  # by id of the storage; empty once fetched, so that autograd alone keeps them
        self.is_fetched = False
        self.event: Any = None  # of the last copy

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | View:
        """Take note of a tensor that autograd saves."""
        if hasattr(tensor, "__tensor_flatten__") or tensor.untyped_storage().nbytes() < self.least:
            return tensor  # a DTensor or a float8 tensor is a weight
        key = id(tensor.untyped_storage())
        if key not in self.saved:
            self.saved[key] = Saved(tensor)
        return View(self.saved[key], self, tensor.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    @torch.no_grad()
    def send(self, kept: Iterable[torch.Tensor]) -> None:
        """Start to copy to the host's memory, except what shares storage with ``kept``.

        Nor experts that FSDP2 has gathered within the layer and freed by now: it gathers them into the same storage.
        """
        for key in [id(local(tensor).untyped_storage()) for tensor in kept]:
            self.saved.pop(key, None)
        with self.host.copies():
            for saved in self.saved.values():
                if saved.on_device is not None and saved.on_device.untyped_storage().nbytes():
                    saved.on_host = self.host.store(saved.on_device)
        self.event = self.host.event()

    def leave(self) -> None:
        """Free what has been copied, unless a backward pass has asked for it meanwhile."""
        if not self.is_fetched:
            self.wait()
            for saved in self.saved.values():
                saved.on_device = saved.on_device if saved.on_host is None else None

    def fetch(self) -> None:
        """Start to copy to new memory what has left."""
        if self.is_fetched:
            return
        self.is_fetched = True
        absent = [saved for saved in self.saved.values() if saved.on_device is None]
        for saved in absent:  # before the copies, which wait until the memory is free
            saved.on_device = torch.empty_like(saved.on_host, device=self.host.device)  # type: ignore[arg-type]
        with self.host.copies():
            for saved in self.saved.values():
                if saved.on_host is not None:
                    self.host.load(saved.on_host, saved.on_device if saved in absent else None)
                saved.on_host = None
        self.event = self.host.event()

    def begin_backward(self, _gradient: torch.Tensor) -> None:
        """Fetch for the layer below, as this layer's backward pass begins. The highest layer has none above it."""
        self.fetch()
        if self.below is not None:
            self.below.fetch()
        self.below = None

    def wait(self) -> None:
        """Let the current stream wait until the copies have ended."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None


def unpack(packed: torch.Tensor | View) -> torch.Tensor:
    """The tensor that `LayerTensors.pack` got."""
    if isinstance(packed, torch.Tensor):
        return packed
    saved, layer, dtype, where = packed
    layer.fetch()
    layer.wait()
    layer.saved = {}
    assert saved.on_device is not None
    return saved.on_device.view(dtype).as_strided(*where)


class Offloaded(nn.Module):
    """Extends a layer whose saved tensors go to the host's memory."""

    offload_host: HostMemory
    offload_least: float  # bytes
    is_lowest: bool  # in its stage
    keeps_input: bool  # the pipeline has it too, until the backward pass

    def forward(self, x: torch.Tensor, *inputs: Any, **named: Any) -> torch.Tensor:
        """As the layer itself."""
        if not torch.is_grad_enabled():
            return super().forward(x, *inputs, **named)
        host = self.offload_host
        layer = LayerTensors(host, None if self.is_lowest else host.newest, self.offload_least)
        with saved_tensors_hooks(layer.pack, unpack):
            output: torch.Tensor = super().forward(x, *inputs, **named)
        output.register_hook(layer.begin_backward)
        # What all layers take, such as rotary tables, would be copied for each of them. A copy of a weight in a 16-bit
        # dtype is an attribute of the weight's name.
        weights = [getattr(part, name) for part in self.modules() for name, _ in part.named_parameters(recurse=False)]
        shared = [tensor for tensor in tree_leaves((inputs, named)) if isinstance(tensor, torch.Tensor)]
        layer.send([*weights, *shared, *[x] * self.keeps_input])
        host.add(layer)
        return output


def offload_activations(model: Transformer, device: torch.device, tuning: Tuning) -> None:
    """Offload what the layers of a model, or of one pipeline stage, save. Apply it after compilation, in place.

    The model's last layer keeps its tensors, because its backward pass comes next.
    """
    host, layers = HostMemory(device), list(model.layers.values())
    for number, layer in enumerate(layers):
        is_last = model.is_last and number >= len(layers) - tuning.layers_on_device
        least = math.inf if is_last else tuning.offload_bytes
        where = {"is_lowest": number == 0, "keeps_input": number == 0 and not model.is_first}
        extend(layer, Offloaded, offload_host=host, offload_least=least, **where)
