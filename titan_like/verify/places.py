"""Find the module at which a layout departs from the reference.

It is the first of the forward pass whose output differs, or else the first of the backward pass that passes a wrong
gradient on. Several modules may take one tensor, so the gradient that each of them passes back is recorded by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.data.lengths import SampleLength
from titan_like.models.layers.cross_entropy import TokenLoss
from titan_like.parallel.context import CPShard
from titan_like.parallel.cp_attention import shard_positions
from titan_like.parallel.tensor_styles import ColumnLinear
from titan_like.torch_private import is_in_backward_pass

FORWARD, BACKWARD, INPUT = "forward", "backward", "input"
_FIRST_STEP, _LATER = 1e-9, 1e-6  # relative differences in float64 that rounding cannot explain
_GROSS = 0.25  # the same in half types where rounding is not measured, or decides which experts a token goes to
_SMALL = 1e-3  # a microbatch whose norm is below this share of the batch's is measured against that share instead

# A module and what of it: FORWARD, its output; BACKWARD, the gradient of that; INPUT and a number, that of an input.
Place = tuple[str, str]


class Outputs:
    """Records every module's output in training, its gradient and those of the inputs, by microbatch."""

    def __init__(self) -> None:
        self.tensors: dict[Place, dict[int, torch.Tensor]] = defaultdict(dict)
        self.order: list[Place] = []  # beginning (INPUT) and end (FORWARD) of each module's forward pass
        self.predictions: set[str] = set()  # modules whose outputs the loss of tokens takes
        self._calls: Counter[str] = Counter()

    def follow(self, model: nn.Module) -> None:
        """Record every forward pass from now on, except recomputed ones."""
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(partial(self._note_inputs, name))
                module.register_forward_hook(partial(self._note, name))

    def whole(self) -> dict[Place, torch.Tensor]:
        """What each place has of all microbatches, if it has one entry a sample."""
        found = {place: [parts[number] for number in sorted(parts)] for place, parts in self.tensors.items()}
        return {place: torch.cat(parts) if parts[0].ndim > 2 else parts[0] for place, parts in found.items()}

    def _note_inputs(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note when a module begins, and give it copies of its inputs, whose gradients are its own."""
        if not module.training or is_in_backward_pass():
            return inputs
        if isinstance(module, TokenLoss):
            self.predictions.add(self.order[-1][1])
            return inputs
        self.order += [(INPUT, name)] if (INPUT, name) not in self.order else []
        self._calls[name] += 1
        if isinstance(module, ColumnLinear):  # what goes back is a partial sum
            return inputs
        copies = list(inputs)
        for number, x in enumerate(inputs):
            if isinstance(x, torch.Tensor) and x.requires_grad and not isinstance(x, nn.Parameter):
                copies[number] = x.clone()
                self._follow_gradient((f"{INPUT} {number}", name), copies[number])
        return tuple(copies)

    def _note(self, name: str, module: nn.Module, _inputs: object, output: object) -> None:
        if not module.training or not isinstance(output, torch.Tensor) or is_in_backward_pass():
            return
        if isinstance(module, TokenLoss):
            return
        self.order += [(FORWARD, name)] if (FORWARD, name) not in self.order else []
        self.tensors[FORWARD, name][self._calls[name] - 1] = local(output)
        if output.requires_grad:
            self._follow_gradient((BACKWARD, name), output)

    def _follow_gradient(self, place: Place, tensor: torch.Tensor) -> None:
        microbatch = self._calls[place[1]] - 1

        def note(gradient: torch.Tensor) -> None:
            self.tensors[place][microbatch] = local(gradient)

        tensor.register_hook(note)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the part of a tensor that this process holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def allowances(
    rounded: dict[Place, torch.Tensor], exact: dict[Place, torch.Tensor], margin: float, eps: float, has_experts: bool
) -> dict[Place, float]:
    """How far each place may be from one process in a half type, whose rounding unit is ``eps``.

    It is ``margin`` times the distance from that process to float64. Their scales may differ, by that of the loss.
    """
    allowed = dict.fromkeys(rounded, _GROSS)
    for place in () if has_experts else rounded.keys() & exact.keys():
        flat = (torch.nan_to_num(one[place].double(), neginf=0.0).flatten() for one in (rounded, exact))
        here, there = (F.normalize(tensor, dim=0) for tensor in flat)
        allowed[place] = max(margin * (here - there).norm().item(), eps)
    return allowed


def differing(
    found: Outputs, expected: dict[Place, torch.Tensor], samples: list[list[int]], cut: Cut, step: int,
    allowed: dict[Place, float],
) -> dict[Place, float]:  # fmt: skip
    """The places whose relative difference exceeds what rounding explains.

    ``expected`` holds the whole batch; ``samples`` lists the rows of it that each of this process's
    microbatches takes. What is ``allowed`` in float64 depends on the step alone.
    """
    wrong: dict[Place, float] = {}
    for place, by_microbatch in found.tensors.items():
        least = allowed.get(place, _FIRST_STEP if step == 1 else _LATER)
        whole = expected.get(place)
        if whole is None:
            continue
        # Position embeddings [seq, hidden] and relative biases [1, heads, seq, seq] have the whole batch's gradient.
        has_samples = whole.ndim > 2 and len(whole) > 1
        if place[0] != FORWARD and not has_samples:
            continue
        for microbatch, value in by_microbatch.items():
            if microbatch >= len(samples):
                continue
            rows = whole[samples[microbatch]] if has_samples else whole
            part = cut.like(value, rows)
            if value.shape != part.shape:
                continue
            part = part.to(value.device)
            value = torch.where(part.isneginf() & value.isneginf(), 0.0, value.double())  # biases that hide a key
            part, finite = torch.nan_to_num(part, neginf=0.0), torch.nan_to_num(whole, neginf=0.0)
            size = max(part.norm().item(), _SMALL * finite.norm().item(), 1e-30)
            difference = (value - part).norm().item() / size
            if not difference <= max(least, wrong.get(place, 0.0)):  # NaN differs
                wrong[place] = difference
    return wrong


class Cut(NamedTuple):
    """What this process holds of the reference's tensors."""

    cp_shard: CPShard
    size: int  # tensor-parallel ranks
    rank: int
    lengths: SampleLength

    def like(self, value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The part of ``whole`` that is here if ``value`` is of a CP shard, or split over tensor ranks."""
        for dim in range(whole.ndim if value.ndim == whole.ndim else 0):
            if value.shape[dim] == whole.shape[dim]:
                continue
            spans = [whole.shape[dim]]
            # [seq, hidden], [batch, seq, hidden] or [batch, heads, seq, …]
            if (self.cp_shard.size > 1 and dim == whole.ndim // 2) or (dim == 1 and whole.ndim < 4):
                spans = _spans(whole.shape[dim], self.lengths)
            pieces = list(whole.split(spans, dim))
            if self.cp_shard.size > 1 and dim == whole.ndim // 2:
                positions = [shard_positions(span, self.cp_shard.size, self.cp_shard.rank) for span in spans]
                pieces = [piece.index_select(dim, local) for piece, local in zip(pieces, positions, strict=True)]
            if sum(piece.shape[dim] for piece in pieces) != value.shape[dim]:
                chunks = [piece.chunk(self.size, dim) for piece in pieces]
                pieces = [parts[min(self.rank, len(parts) - 1)] for parts in chunks]
            whole = torch.cat(pieces, dim)
        return whole


def joined(parts: list[torch.Tensor], lengths: SampleLength) -> torch.Tensor:
    """The whole of a tensor [batch, seq, …] of which each rank has a part by sequence parallelism."""
    spans = _spans(len(parts) * parts[0].shape[1], lengths)
    by_span = zip(*(part.split([span // len(parts) for span in spans], 1) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, 1) for pieces in by_span], 1)


def _spans(length: int, lengths: SampleLength) -> list[int]:
    """Lengths of the spans of a sequence of which each rank has its share: those of encoder and decoder, if both."""
    return [lengths.encoder, lengths.decoder] if lengths.decoder and length == lengths.positions else [length]


def first_place(order: list[Place], predictions: set[str], wrong: list[dict[Place, float]], where: str) -> str | None:
    """Describe the module at fault, given what each rank found wrong. None if every module is right.

    ``order`` is that of `Outputs`; ``predictions`` are the modules whose outputs the loss takes; ``where``, the step.
    """
    inputs = sorted({phase for one in wrong for phase, _ in one if phase.startswith(INPUT)})

    def told(phase: str, name: str) -> str | None:
        found = [(one[phase, name], rank) for rank, one in enumerate(wrong) if (phase, name) in one]
        return f"by {max(found)[0]:.3g} on rank {max(found)[1]}, in {where}" if found else None

    for phase, name in order:
        if phase == FORWARD and (how := told(FORWARD, name)):
            return f"{name}: its output is the first of the forward pass that differs, {how}"
    later = "the loss"
    for phase, name in reversed(order):
        if phase == INPUT:
            if how := next(filter(None, (told(number, name) for number in inputs)), None):
                return f"{name}: what it passes back to its input is the first gradient that differs, {how}"
            continue
        if how := told(BACKWARD, name):  # though right gradients come from the modules that take this output
            taker = "the loss" if name in predictions else later
            return f"{taker}: what it passes back to {name} is the first gradient that differs, {how}"
        later = name
    return None
