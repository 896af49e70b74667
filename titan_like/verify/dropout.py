"""Which random numbers dropout draws on each process, and whether those are the right ones.

Masks must be equal where processes hold the same activations (tensor-parallel processes between layers, without
sequence parallelism) and different everywhere else: other samples, layers, attention heads, parts of the sequence.
Recomputation must draw the forward pass's masks again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.config.schema import JobConfig
from titan_like.models.layers.random import generator_of
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.results import DropoutSeen, Mask
from titan_like.verify.shrink import FLAVOR, edit

STEPS = 2


@dataclass
class Recorder:
    """Notes every draw while it is installed."""

    step: int = 0
    site: str = ""
    masks: list[Mask] = field(default_factory=list)
    drawn: Counter[tuple[str, bool, bool, int]] = field(default_factory=Counter)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's two functions that draw dropout."""
        dropout, attention = F.dropout, F.scaled_dot_product_attention

        def watched_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if not training or p == 0:
                return dropout(x, p, training, inplace)
            with again(x.device) as redraw:
                result = dropout(x, p, training, inplace)
                with redraw() as stream:
                    self.note(dropout(torch.ones_like(x), p, True), stream, is_attention=False)
            return result

        def watched_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not options.get("dropout_p"):
                return attention(q, k, v, *args, **options)
            with again(q.device) as redraw:
                result = attention(q, k, v, *args, **options)
                with redraw() as stream:
                    # With unit vectors as values the result is the probabilities, those dropped being zero.
                    units = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
                    self.note(attention(q, k, units, *args, **options), stream, is_attention=True)
            return result

        watched = patch.object(F, "scaled_dot_product_attention", watched_attention)
        with patch.object(F, "dropout", watched_dropout), watched:
            yield

    def enter(self, name: str, module: nn.Module, _inputs: Any) -> None:
        """A module's forward pass begins, be it for the first time or in recomputation."""
        self.site = name

    def note(self, kept: torch.Tensor, stream: str, is_attention: bool) -> None:
        """Keep the mask, elements that are not zero, as digests."""
        kept = (kept.to_local() if isinstance(kept, DTensor) else kept) != 0
        is_recomputed = torch._C._current_graph_task_id() != -1  # within a backward pass
        place = self.site, is_attention, is_recomputed, self.step
        slices = kept.flatten(0, 1) if is_attention else kept
        parts, shape = tuple(digest(part) for part in slices), tuple(kept.shape)
        self.masks.append(Mask(*place, microbatch=self.drawn[place], shape=shape, parts=parts, stream=stream))
        self.drawn[place] += 1


@contextmanager
def again(device: torch.device) -> Iterator[Callable[[], Any]]:
    """A function whose context draws again the device's numbers drawn since this one's start, and leaves no trace.

    The context's value is a digest of where in which random stream they begin.
    """
    generator = generator_of(device)
    before = generator.get_state()

    @contextmanager
    def redraw() -> Iterator[str]:
        after = generator.get_state()
        generator.set_state(before)
        with torch.no_grad():
            yield digest(before)
        generator.set_state(after)

    yield redraw


def digest(tensor: torch.Tensor) -> str:
    """Equal for tensors that are equal to the bit."""
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=12).hexdigest()


class _KeepsGradients(Trainer):
    gradients: dict[str, torch.Tensor] | None = None

    def _update(self, grad_norm: float, lr: float) -> None:
        if self.gradients is None:
            self.gradients = {
                name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).detach().clone()
                for name, p in self.model.named_parameters()
                if p.grad is not None
            }
        super()._update(grad_norm, lr)


def observe_dropout(
    rank: int, prepare_run: Callable[[JobConfig], Run], config: JobConfig, dropout: float | None
) -> DropoutSeen:
    """Train two steps with dropout; where activations are recomputed, the first one once more without that."""
    flavor = config.model.flavors[FLAVOR] | {"dropout": dropout or 0.1}
    config = edit(
        config,
        {
            "model.flavors": {FLAVOR: flavor},
            "training.dtype": "float64",
            "training.reduce_dtype": "float32",
            "compile.enable": False,  # compiled layers call no function that could be watched
        },
    )
    recorder = Recorder()
    trainer = _KeepsGradients(prepare_run(config))
    seen = DropoutSeen(rank, {name: trainer.mesh[name].get_local_rank() for name in trainer.mesh.mesh_dim_names or ()})
    seen.validation.append(trainer.validate())
    for stage in trainer.model.stages:
        for name, module in stage.module.named_modules():
            module.register_forward_pre_hook(lambda m, i, name=name: recorder.enter(name, m, i))
    data = trainer._load_data()
    with recorder.installed():
        for step in range(STEPS):
            recorder.step = step
            trainer.train_step(data)
    data.close()
    seen.masks = recorder.masks
    if config.activation_checkpoint.mode != "none":
        plain = _KeepsGradients(prepare_run(edit(config, {"activation_checkpoint.mode": "none"})))
        plain.validate()
        data = plain._load_data()
        plain.train_step(data)
        data.close()
        assert trainer.gradients is not None and plain.gradients is not None
        for name, gradient in plain.gradients.items():
            distance = (trainer.gradients[name] - gradient).double().norm()
            seen.recompute[name] = (distance / gradient.double().norm().clamp_min(1e-30)).item()
    return seen
