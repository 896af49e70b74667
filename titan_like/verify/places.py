"""Find the module at which a layout departs from the reference: the first of the forward pass whose output differs, or
else the first of the backward pass that passes a wrong gradient on."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.data.lengths import SampleLength
from titan_like.torch_private import is_in_backward_pass

FORWARD, BACKWARD = "forward", "backward"
_FIRST_STEP, _LATER = 1e-9, 1e-6  # relative differences in float64 that rounding cannot explain
_LOGITS = ("output", "output_bias", "mask_padding")  # modules in whose place `TokenLoss` computes
_SMALL = 1e-3  # a microbatch whose norm is below this share of the batch's is measured against that share instead

Place = tuple[str, str]  # pass (FORWARD or BACKWARD), module name


class Outputs:
    """Records every module's output in training, and the gradient of that output, by microbatch."""

    def __init__(self) -> None:
        self.tensors: dict[Place, dict[int, torch.Tensor]] = defaultdict(dict)
        self.order: list[str] = []  # modules in the order of the forward pass
        self.predictions: set[str] = set()  # modules whose outputs the model returns
        self._latest: dict[str, object] = {}

    def follow(self, model: nn.Module) -> None:
        """Record every forward pass from now on, except recomputed ones."""
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(lambda module, _, output, name=name: self._note(module, name, output))
        model.register_forward_hook(lambda model, _, output: self._note_predictions(output))

    def _note(self, module: nn.Module, name: str, output: object) -> None:
        if not module.training or not isinstance(output, torch.Tensor) or is_in_backward_pass():
            return
        self.order += [name] if name not in self.order else []
        self._latest[name] = output
        microbatch = len(self.tensors[FORWARD, name])
        self.tensors[FORWARD, name][microbatch] = local(output)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._note_gradient(name, microbatch, gradient))

    def _note_predictions(self, output: object) -> None:
        returned = output if isinstance(output, tuple) else (output,)
        self.predictions |= {name for name, latest in self._latest.items() if any(latest is one for one in returned)}
        self._latest.clear()

    def _note_gradient(self, name: str, microbatch: int, gradient: torch.Tensor) -> None:
        self.tensors[BACKWARD, name][microbatch] = local(gradient)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the part of a tensor that this process holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def differing(
    found: Outputs,
    expected: Outputs,
    samples: list[list[int]],
    tensor_mesh: DeviceMesh,
    step: int,
    lengths: SampleLength,
) -> dict[Place, float]:
    """The places whose relative difference exceeds what rounding explains.

    ``expected`` holds the whole batch as one microbatch; ``samples`` lists the rows of it that each of this process's
    microbatches takes, and ``lengths`` has their positions.
    """
    wrong: dict[Place, float] = {}
    for place, by_microbatch in found.tensors.items():
        whole = expected.tensors[place].get(0)
        if whole is None:
            continue
        # Position embeddings [seq, hidden] and relative biases [1, heads, seq, seq] have the whole batch's gradient.
        has_samples = whole.ndim > 2 and len(whole) > 1
        if place[0] == BACKWARD and not has_samples:
            continue
        for microbatch, value in by_microbatch.items():
            if microbatch >= len(samples):
                continue
            rows = whole[samples[microbatch]] if has_samples else whole
            part = _shard_like(value, rows, tensor_mesh, lengths)
            if value.shape != part.shape:
                continue
            part = part.to(value.device)
            value = torch.where(part.isneginf() & value.isneginf(), 0.0, value.double())  # logits of the padding
            part, finite = torch.nan_to_num(part, neginf=0.0), torch.nan_to_num(whole, neginf=0.0)
            size = max(part.norm().item(), _SMALL * finite.norm().item(), 1e-30)
            difference = (value - part).norm().item() / size
            if not difference <= max(_FIRST_STEP if step == 1 else _LATER, wrong.get(place, 0.0)):  # NaN differs
                wrong[place] = difference
    return wrong


def _shard_like(value: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh, lengths: SampleLength) -> torch.Tensor:
    """The part of ``whole`` that this tensor-parallel rank holds if ``value`` is split, or all of it."""
    for dim in range(whole.ndim if value.ndim == whole.ndim else 0):
        if value.shape[dim] != whole.shape[dim]:
            spans = _spans(whole.shape[dim], lengths) if dim == 1 else [whole.shape[dim]]
            pieces = [span.chunk(mesh.size(), dim) for span in whole.split(spans, dim)]
            whole = torch.cat([parts[min(mesh.get_local_rank(), len(parts) - 1)] for parts in pieces], dim)
    return whole


def joined(parts: list[torch.Tensor], lengths: SampleLength) -> torch.Tensor:
    """The whole of a tensor [batch, seq, …] of which each rank has a part by sequence parallelism."""
    spans = _spans(len(parts) * parts[0].shape[1], lengths)
    by_span = zip(*(part.split([span // len(parts) for span in spans], 1) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, 1) for pieces in by_span], 1)


def up_to_the_loss(order: list[str], predictions: set[str]) -> tuple[list[str], set[str]]:
    """`Outputs.order` and `Outputs.predictions` of a model that returns logits, as those of one that returns losses.

    The reference computes logits. In training the loss takes the input of the output matrix.
    """
    if _LOGITS[0] not in order:
        return order, predictions
    before = order[order.index(_LOGITS[0]) - 1]
    return [name for name in order if name not in _LOGITS], {before, *predictions.difference(_LOGITS)}


def _spans(length: int, lengths: SampleLength) -> list[int]:
    """Lengths of the spans of a sequence of which each rank has its share: those of encoder and decoder, if both."""
    return [lengths.encoder, lengths.decoder] if lengths.decoder and length == lengths.positions else [length]


def first_place(order: list[str], predictions: set[str], wrong: list[dict[Place, float]], step: int) -> str | None:
    """Describe the module at fault, given what each rank found wrong. None if every module is right.

    ``order`` has the modules in the order of the forward pass; ``predictions`` are those whose outputs go to the loss.
    """

    def told(phase: str, name: str) -> str | None:
        found = [(one[phase, name], rank) for rank, one in enumerate(wrong) if (phase, name) in one]
        return f"by {max(found)[0]:.3g} on rank {max(found)[1]}, in step {step}" if found else None

    for name in order:
        if how := told(FORWARD, name):
            return f"{name}: its output is the first of the forward pass that differs, {how}"
    for name, later in zip(order[::-1], ["the loss", *order[:0:-1]], strict=True):
        if how := told(BACKWARD, name):
            taker = "the loss" if name in predictions else later
            return f"{taker}: what it passes back to {name} is the first gradient that differs, {how}"
    return None
