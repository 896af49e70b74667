"""Where in the model a layout first goes astray: the first module, in the order of the forward pass, whose output
differs from the reference's, or else the first of the backward pass whose output's gradient does."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.torch_private import is_in_backward_pass

FORWARD, BACKWARD = "forward", "backward"
_FIRST_STEP, _LATER = 1e-9, 1e-6  # relative differences in float64 that rounding cannot make
_SMALL = 1e-3  # a sample that is a smaller part of its batch than this is compared with that instead

Place = tuple[str, str]  # pass, module


class Outputs:
    """What a model's modules compute: every output in training, and its gradient, by microbatch."""

    def __init__(self) -> None:
        self.tensors: dict[Place, dict[int, torch.Tensor]] = defaultdict(dict)
        self.order: list[str] = []  # of the modules in the forward pass

    def follow(self, model: nn.Module) -> None:
        """Note each forward pass from now on, except in recomputation."""
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(lambda module, _, output, name=name: self._note(module, name, output))

    def _note(self, module: nn.Module, name: str, output: object) -> None:
        if not module.training or not isinstance(output, torch.Tensor) or is_in_backward_pass():
            return
        self.order += [name] if name not in self.order else []
        microbatch = len(self.tensors[FORWARD, name])
        self.tensors[FORWARD, name][microbatch] = local(output)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._note_gradient(name, microbatch, gradient))

    def _note_gradient(self, name: str, microbatch: int, gradient: torch.Tensor) -> None:
        self.tensors[BACKWARD, name][microbatch] = local(gradient)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what is here of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def differing(
    found: Outputs, expected: Outputs, samples: list[list[int]], tensor_mesh: DeviceMesh, step: int
) -> dict[Place, float]:
    """Relative differences above what is allowed; ``samples`` has the rows of the batch that each microbatch takes."""
    wrong: dict[Place, float] = {}
    for place, by_microbatch in found.tensors.items():
        whole = expected.tensors[place].get(0)
        for microbatch, value in by_microbatch.items():
            has_samples = whole is not None and whole.ndim > 2  # positions have none: their gradient is that of all
            if whole is None or microbatch >= len(samples) or (place[0] == BACKWARD and not has_samples):
                continue
            part = whole[samples[microbatch]] if has_samples else whole
            for dim in range(part.ndim):
                if value.ndim == part.ndim and value.shape[dim] != part.shape[dim]:
                    pieces = part.chunk(tensor_mesh.size(), dim)
                    part = pieces[min(tensor_mesh.get_local_rank(), len(pieces) - 1)]
            if value.shape != part.shape:
                continue
            finite, part = torch.nan_to_num(whole, neginf=0.0), part.to(value.device)
            value = torch.where(part.isneginf() & value.isneginf(), 0.0, value.double())  # logits of the padding
            part = torch.nan_to_num(part, neginf=0.0)
            size = max(part.norm().item(), _SMALL * finite.norm().item(), 1e-30)
            difference = (value - part).norm().item() / size
            if not difference <= max(_FIRST_STEP if step == 1 else _LATER, wrong.get(place, 0.0)):
                wrong[place] = difference
    return wrong


def first_place(order: list[str], wrong: list[dict[Place, float]], step: int) -> str | None:
    """The module at fault, in words, given what each rank found; None where all modules compute what they should."""

    def told(phase: str, name: str) -> str | None:
        found = [(one[phase, name], rank) for rank, one in enumerate(wrong) if (phase, name) in one]
        return f"by {max(found)[0]:.3g} on rank {max(found)[1]}, in step {step}" if found else None

    for name in order:
        if how := told(FORWARD, name):
            return f"{name}: its output is the first of the forward pass that differs, {how}"
    for name, taker in zip(order[::-1], ["the loss", *order[:0:-1]], strict=True):
        if how := told(BACKWARD, name):
            return f"{taker}: what it passes back to {name} is the first gradient that differs, {how}"
    return None
