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

from titan_like.data.loading.lengths import sample_length
from titan_like.models.layers.cross_entropy import TokenLoss
from titan_like.models.layers.experts import ExpertLinear, Experts
from titan_like.parallel.cp_attention import shard_positions
from titan_like.parallel.tensor_styles import ColumnLinear
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Reference, Report, Row, distance
from titan_like.verify.samples import batches

if TYPE_CHECKING:
    from titan_like.verify.watch import StepWatch

FORWARD, BACKWARD, INPUT = "forward", "backward", "input"

# FORWARD for a module's output, BACKWARD for that output's gradient, INPUT and a number for an input's; and the module.
Place = tuple[str, str]


class Outputs:
    """Records every module's output in training, its gradient and the gradients of its inputs, by microbatch."""

    def __init__(self) -> None:
        self.tensors: dict[Place, dict[int, torch.Tensor]] = defaultdict(dict)
        self.order: list[Place] = []  # beginning (INPUT) and end (FORWARD) of each module's forward pass
        self.predictions: set[str] = set()  # modules whose outputs the loss of tokens takes
        self._calls: Counter[str] = Counter()

    def follow(self, model: nn.Module) -> None:
        """Record every forward pass from now on, except recomputed ones."""
        for name, module in model.named_modules():
            if isinstance(module, TokenLoss):
                module.register_forward_pre_hook(lambda *_: self.predictions.add(self.order[-1][1]))
            elif name and not isinstance(module, Experts | ExpertLinear):  # their rows are in the order of experts
                module.register_forward_pre_hook(partial(self._note_inputs, name))
                module.register_forward_hook(partial(self._note_output, name))

    def whole(self, scale: torch.Tensor | float) -> dict[Place, torch.Tensor]:
        """Each place's tensor of all microbatches, if it has one entry a sample. Gradients lose the loss ``scale``."""
        ordered = {place: [parts[number] for number in sorted(parts)] for place, parts in self.tensors.items()}
        wholes = {place: torch.cat(parts) if parts[0].ndim > 2 else parts[0] for place, parts in ordered.items()}
        return {place: whole if place[0] == FORWARD else whole / scale for place, whole in wholes.items()}

    def _note_inputs(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note when a module begins, and give it copies of its inputs, whose gradients are its own."""
        if not module.training or is_in_backward_pass():
            return inputs
        self._note_order((INPUT, name))
        self._calls[name] += 1
        copies = list(inputs)
        # What goes back from a column linear is a partial sum.
        for number, x in enumerate(inputs if not isinstance(module, ColumnLinear) else ()):
            if isinstance(x, torch.Tensor) and x.requires_grad and not isinstance(x, nn.Parameter):
                copies[number] = x.clone()
                copies[number].register_hook(partial(self._keep, f"{INPUT} {number}", name, self._calls[name]))
        return tuple(copies)

    def _note_output(self, name: str, module: nn.Module, _inputs: object, output: object) -> None:
        # A scalar is the loss of a whole microbatch.
        if module.training and isinstance(output, torch.Tensor) and output.ndim and not is_in_backward_pass():
            self._note_order((FORWARD, name))
            shard = local(output)
            # A bias of -inf hides a key.
            self._keep(FORWARD, name, self._calls[name], shard.masked_fill_(shard.isneginf(), 0))
            if output.requires_grad:
                output.register_hook(partial(self._keep, BACKWARD, name, self._calls[name]))

    def _note_order(self, place: Place) -> None:
        if place not in self.order:
            self.order.append(place)

    def _keep(self, phase: str, name: str, call: int, tensor: torch.Tensor) -> None:
        self.tensors[phase, name][call - 1] = local(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the part of a tensor that this process holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def compare_outputs(watch: StepWatch, outputs: Outputs, reference: Reference, report: Report) -> None:
    """Compare what modules have computed in a step with the reference, whose tensors are of the whole batch."""
    step, trainer, allowed = watch.at_step, watch.trainer, reference.allowed_in(report.kind)
    first = batches(watch.small.config, step)[step].start
    for place, by_microbatch in outputs.tensors.items():
        key = Key(step, Row.PLACE, "/".join(place))
        if key not in allowed:
            continue
        whole = reference.whole(key)
        # Position embeddings [seq, hidden] and relative biases [1, heads, seq, seq] have the whole batch's gradient.
        has_samples = whole.ndim > 2 and len(whole) > 1
        # Ranks that share a key-value head have partial sums of its gradient.
        shared = trainer.run.model.num_kv_heads
        is_partial = whole.ndim == 4 and shared < trainer.mesh["tp"].size() and shared in whole.shape[1:3]
        if place[0] != FORWARD and (is_partial or not has_samples):
            continue
        for microbatch, value in by_microbatch.items():
            if microbatch < len(watch.drawn):
                rows = [index - first for index in watch.drawn[microbatch]]
                part = part_like(value, whole[rows] if has_samples else whole, trainer).to(value.device)
                value = value if place[0] == FORWARD else value / trainer.state.loss_scale
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
            rank = tensor.get_local_rank()
            if whole.ndim == 4:  # fewer key-value heads than ranks, which share them
                rank = rank * len(chunks[0]) // tensor.size()
            pieces = [parts[min(rank, len(parts) - 1)] for parts in chunks]
        whole = torch.cat(pieces, dim)
    return whole


def first_place(reference: Reference, reports: list[Report], step: str) -> str | None:
    """Describe the module at fault, given what each rank found wrong in ``step``. None if all are right."""
    outputs = reference.outputs
    assert outputs is not None
    wrong: dict[Place, str] = {}
    checks = [check for report in reports for check in report.checks.values() if not check.ok]
    for check in sorted(checks, key=lambda check: (check.worst, check.rank)):
        phase, _, name = check.parameter.partition("/")
        wrong[phase.split()[0], name] = f"by {check.worst:.3g} on rank {check.rank}, in {step}"
    for place in outputs.order:
        if place[0] == FORWARD and place in wrong:
            return f"{place[1]}: its output is the first of the forward pass that differs, {wrong[place]}"
    later = "the loss"
    for phase, name in reversed(outputs.order):
        if phase == INPUT and (INPUT, name) in wrong:
            return f"{name}: what it passes back to its input is the first gradient that differs, {wrong[INPUT, name]}"
        if phase == FORWARD:
            if how := wrong.get((BACKWARD, name)):  # though the modules that take this output pass right gradients back
                taker = "the loss" if name in outputs.predictions else later
                return f"{taker}: what it passes back to {name} is the first gradient that differs, {how}"
            later = name
    return None
