"""Find the module at which a layout departs from the reference.

It is the first of the forward pass whose output differs, or else the first of the backward pass that passes a wrong
gradient on. Several modules may take one tensor, so the gradient that each of them passes back is recorded by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.data.lengths import sample_length
from titan_like.models.layers.cross_entropy import TokenLoss
from titan_like.parallel.cp_attention import shard_positions
from titan_like.parallel.tensor_styles import ColumnLinear
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Reference, Report, Row, distance
from titan_like.verify.samples import batches

if TYPE_CHECKING:
    from titan_like.verify.watch import StepWatch

FORWARD, BACKWARD, INPUT = "forward", "backward", "input"

# A module and what of it: FORWARD, its output; BACKWARD, the gradient of that; INPUT and a number, that of an input.
Place = tuple[str, str]


def key_of(step: int, place: Place) -> Key:
    """The key under which a module's outputs or gradients at this place are compared."""
    return Key(step, Row.PLACE, "/".join(place))


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

    def whole(self, scale: torch.Tensor | float) -> dict[Place, torch.Tensor]:
        """What each place has of all microbatches, if it has one entry a sample. Gradients lose the loss ``scale``."""
        found = {place: [parts[number] for number in sorted(parts)] for place, parts in self.tensors.items()}
        wholes = {place: torch.cat(parts) if parts[0].ndim > 2 else parts[0] for place, parts in found.items()}
        return {place: whole if place[0] == FORWARD else whole / scale for place, whole in wholes.items()}

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
        # A bias of -inf hides a key.
        self.tensors[FORWARD, name][self._calls[name] - 1] = local(output).masked_fill_(local(output).isneginf(), 0)
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


def compare_outputs(watch: StepWatch, outputs: Outputs, reference: Reference, report: Report) -> None:
    """Compare what modules have computed in a step with the reference, whose tensors are of the whole batch."""
    step, trainer, allowed = watch.at_step, watch.trainer, reference.allowed_in(report.kind)
    first = batches(watch.small.config, step)[step].start
    for place, by_microbatch in outputs.tensors.items():
        key = key_of(step, place)
        if key not in allowed:
            continue
        whole = reference.whole(key)
        # Position embeddings [seq, hidden] and relative biases [1, heads, seq, seq] have the whole batch's gradient.
        has_samples = whole.ndim > 2 and len(whole) > 1
        if place[0] != FORWARD and not has_samples:
            continue
        for microbatch, value in by_microbatch.items():
            if microbatch < len(watch.drawn):
                rows = [index - first for index in watch.drawn[microbatch]]
                part = part_like(value, whole[rows] if has_samples else whole, trainer).to(value.device)
                value = value if place[0] == FORWARD else value / trainer.loss_scale
                if value.shape == part.shape:
                    report.add(key, distance(value, part) / reference.sizes[key], allowed[key])


def part_like(value: torch.Tensor, whole: torch.Tensor, trainer: Trainer) -> torch.Tensor:
    """The part of ``whole`` that this process has if ``value`` is of a CP shard, or split over tensor ranks."""
    context, tensor = trainer.cp_shard, trainer.mesh["tp"]
    lengths = sample_length(trainer.config, trainer.run.model)
    for dim in range(whole.ndim if value.ndim == whole.ndim else 0):
        if value.shape[dim] == whole.shape[dim]:
            continue
        # [seq, hidden], [batch, seq, hidden] or [batch, heads, seq, …]
        is_sharded, spans = context.size > 1 and dim == whole.ndim // 2, [whole.shape[dim]]
        if (is_sharded or (dim == 1 and whole.ndim < 4)) and lengths.decoder and spans == [lengths.positions]:
            spans = [lengths.encoder, lengths.decoder]  # each rank has its share of both
        pieces = list(whole.split(spans, dim))
        if is_sharded:
            positions = [shard_positions(span, context.size, context.rank) for span in spans]
            pieces = [piece.index_select(dim, local) for piece, local in zip(pieces, positions, strict=True)]
        if sum(piece.shape[dim] for piece in pieces) != value.shape[dim]:
            chunks = [piece.chunk(tensor.size(), dim) for piece in pieces]
            pieces = [parts[min(tensor.get_local_rank(), len(parts) - 1)] for parts in chunks]
        whole = torch.cat(pieces, dim)
    return whole


def first_place(outputs: Outputs, reports: list[Report], where: str) -> str | None:
    """Describe the module at fault, given what each rank found wrong. None if every module is right.

    ``outputs`` are those of one process; ``where`` is the step.
    """
    wrong: dict[Place, tuple[float, int]] = {}
    for report in reports:
        for key, check in report.checks.items():
            phase, _, name = key.name.partition("/")
            if not check.ok:
                wrong[phase, name] = max((check.worst, report.rank), wrong.get((phase, name), (0.0, 0)))
    inputs = sorted({phase for phase, _ in wrong if phase.startswith(INPUT)})

    def how_wrong(phase: str, name: str) -> str | None:
        worst, rank = wrong.get((phase, name), (0.0, 0))
        return f"by {worst:.3g} on rank {rank}, in {where}" if (phase, name) in wrong else None

    for phase, name in outputs.order:
        if phase == FORWARD and (how := how_wrong(FORWARD, name)):
            return f"{name}: its output is the first of the forward pass that differs, {how}"
    later = "the loss"
    for phase, name in reversed(outputs.order):
        if phase == INPUT:
            if how := next(filter(None, (how_wrong(number, name) for number in inputs)), None):
                return f"{name}: what it passes back to its input is the first gradient that differs, {how}"
            continue
        if how := how_wrong(BACKWARD, name):  # though right gradients come from the modules that take this output
            taker = "the loss" if name in outputs.predictions else later
            return f"{taker}: what it passes back to {name} is the first gradient that differs, {how}"
        later = name
    return None
