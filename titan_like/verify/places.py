"""Where in the model a layout first goes astray: the first module, in the order of the forward pass, whose output
differs from the reference's, or else the first of the backward pass whose output's gradient does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from titan_like.torch_private import is_in_backward_pass
from titan_like.verify.record import Tensors, Truth

FORWARD, BACKWARD = "forward", "backward"
_FIRST_STEP, _LATER = 1e-9, 1e-6  # relative differences in float64 that rounding cannot make
_SMALL = 1e-3  # a sample that is a smaller part of its batch than this is compared with that instead


def watch_outputs(model: nn.Module, on_output: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
    """Call back with every module's output, in training and not in recomputation."""

    def hook(module: nn.Module, _inputs: Any, output: Any, name: str) -> None:
        is_recomputed = is_in_backward_pass()
        if module.training and isinstance(output, torch.Tensor) and not is_recomputed:
            on_output(name, output)

    return [
        module.register_forward_hook(lambda m, i, o, name=name: hook(m, i, o, name))
        for name, module in model.named_modules()
        if name
    ]


class PlaceRecorder:
    """Keeps every module's output in one step of the reference, whole batches at a time, and that output's gradient."""

    def __init__(self, step: int) -> None:
        self.step, self.tensors, self.order = step, Tensors(), list[str]()
        self._hooks: list[RemovableHandle] = []

    def watch(self, step: int, model: nn.Module) -> None:
        """A step begins."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = watch_outputs(model, self._keep) if step == self.step else []

    def _keep(self, name: str, output: torch.Tensor) -> None:
        self.order.append(name)
        self.tensors[f"{FORWARD} {name}"] = output.detach().clone().contiguous()
        if output.requires_grad:
            output.register_hook(lambda g: self.tensors.update({f"{BACKWARD} {name}": g.detach().clone().contiguous()}))

    def save(self, file: Path) -> list[str]:
        """Write the tensors for other processes; names of the modules in the order of the forward pass."""
        save_file(self.tensors, file)
        return self.order


@dataclass
class PlaceSeen:
    """What one process saw: relative differences above what is allowed, by pass and module."""

    rank: int
    differing: dict[tuple[str, str], float]


class PlaceWatch:
    """Compares the outputs of a trainer's modules in one step with the reference's."""

    def __init__(self, trainer: Any, truth: Truth, step: int, file: Path) -> None:
        self.trainer, self.step = trainer, step
        self.expected = load_file(file)
        self.differing: dict[tuple[str, str], float] = {}
        self.allowed = _FIRST_STEP if step == 1 else _LATER
        self._hooks: list[RemovableHandle] = []
        self._calls: Counter[str] = Counter()
        self._drawn: list[list[int]] = []
        self._first = 0

    def begin(self, step: int, drawn: list[list[int]]) -> None:
        """A step begins, on samples that will be added to ``drawn``."""
        if step == self.step:
            self._drawn, self._first = drawn, self.trainer.consumed_samples
            for stage in self.trainer.model.stages:
                self._hooks += watch_outputs(stage.module, self._compare_output)

    def end(self) -> None:
        """A step has ended."""
        while self._hooks:
            self._hooks.pop().remove()

    def _compare_output(self, name: str, output: torch.Tensor) -> None:
        microbatch = self._calls[name]
        self._calls[name] += 1
        self._compare(FORWARD, name, microbatch, output)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._compare(BACKWARD, name, microbatch, gradient))

    @torch.no_grad()
    def _compare(self, phase: str, name: str, microbatch: int, value: torch.Tensor) -> None:
        whole = self.expected.get(f"{phase} {name}")
        has_samples = whole is not None and whole.ndim > 2  # positions have none: their gradient is that of all samples
        if whole is None or microbatch >= len(self._drawn) or (phase == BACKWARD and not has_samples):
            return
        local = value.to_local() if isinstance(value, DTensor) else value
        expected = whole.to(local.device)
        if has_samples:
            expected = expected[[index - self._first for index in self._drawn[microbatch]]]
        tensor = self.trainer.mesh["tp"]
        for dim in range(expected.ndim):
            if local.ndim == expected.ndim and local.shape[dim] != expected.shape[dim]:
                pieces = expected.chunk(tensor.size(), dim)
                expected = pieces[min(tensor.get_local_rank(), len(pieces) - 1)]
        if local.shape != expected.shape:
            return
        finite = torch.nan_to_num(expected, neginf=0.0)  # logits of the padding
        padded = torch.where(expected.isneginf() & local.isneginf(), 0.0, local.double())
        share = _SMALL * torch.nan_to_num(whole, neginf=0.0).norm().item()
        difference = (padded - finite).norm().item() / max(finite.norm().item(), share, 1e-30)
        known = self.differing.get((phase, name), 0.0)
        if not difference <= max(self.allowed, known):
            self.differing[phase, name] = difference


def first_place(order: list[str], seen: list[PlaceSeen], step: int) -> str | None:
    """The module at fault, in words; None where all modules compute what they should."""

    def found(phase: str, name: str) -> str | None:
        wrong = [(one.differing[phase, name], one.rank) for one in seen if (phase, name) in one.differing]
        return f"by {max(wrong)[0]:.3g} on rank {max(wrong)[1]}" if wrong else None

    for name in order:
        if how := found(FORWARD, name):
            return f"{name}: its output is the first of the forward pass that differs, {how}, in step {step}"
    for position in range(len(order) - 1, -1, -1):
        if how := found(BACKWARD, order[position]):
            last = position == len(order) - 1
            taker = "the loss" if last else order[position + 1]
            what = f"what it passes back to {order[position]}"
            return f"{taker}: {what} is the first gradient of the backward pass that differs, {how}, in step {step}"
    return None
