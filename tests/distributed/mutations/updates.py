"""Bugs in the update: clipping, scales, skipped steps, rates, decay."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from tests.distributed.mutations import bug
from titan_like.optim import adamw, schedule
from titan_like.optim.optimizer import Gradients, LossScaler
from titan_like.train import trainer, training_state
from titan_like.train.trainer import Trainer
from titan_like.verify.processes import Prepare

HALF = ("bfloat16", "float16")


@bug(Gradients, "norm")
def bad_gradients_known_to_their_holder(original: Any, self: Gradients) -> torch.Tensor:
    """Gradients that are not finite count only on the processes that hold them."""
    whole = original(self)
    return whole if whole.isfinite() or not _are_finite(self) else torch.ones_like(whole)


def _are_finite(gradients: Gradients) -> bool:
    return all(part.isfinite().all() for parts in gradients.local().values() for part in parts)


def after_init(change: Callable[[Trainer], None]) -> Prepare:
    """Plant a change of every trainer once it is built."""

    @wraps(change)
    def init(original: Any, self: Trainer, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        change(self)

    return bug(Trainer, "__init__")(init)


@after_init
def bad_gradients_kept(self: Trainer) -> None:
    """A skipped step leaves its gradients for the next one to add to."""
    zero_grad = self.state.optimizer.zero_grad

    def zero_unless_bad(set_to_none: bool = True) -> None:
        if _are_finite(self.gradients_held):
            zero_grad(set_to_none)

    self.state.optimizer.zero_grad = zero_unless_bad  # type: ignore[method-assign]


@bug(Trainer, "train_step")
def learning_rate_waits_in_skipped_steps(original: Any, self: Trainer, data: Any) -> Any:
    """The schedule counts updates in place of steps."""
    factor, skipped = schedule.lr_factor, self.state.skipped_steps
    with patch.object(schedule, "lr_factor", lambda section, step, total: factor(section, step - skipped, total)):
        return original(self, data)


@bug(schedule, "lr_factor")
def end_of_decay_forgotten(original: Any, section: Any, step: int, total: int) -> float:
    """The learning rate falls until the end of the run, wherever its decay is to end."""
    return original(section.model_copy(update={"decay_steps": None}), step, total)


@bug(Trainer, "_update")
def gradients_not_unscaled(_: Any, self: Trainer, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
    """float16's loss scale stays in the gradients."""
    factor = (self.config.training.max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    trainer.update(self.state.optimizer, self.gradients_held, lr, factor, skip)


@after_init
def vectors_decay(self: Trainer) -> None:
    """In half types weight decay applies to norms and biases too."""
    for group in self.state.optimizer.param_groups if self.config.training.dtype in HALF else []:
        group["weight_decay"] = self.config.optimizer.weight_decay


@bug(Trainer, "_update")
def clipped_by_another_norm_in_half_types(original: Any, self: Any, grad_norm: Any, lr: float, *skip: Any) -> None:
    """In half types gradients are clipped by their norm times the number of data-parallel processes."""
    original(self, grad_norm * (self.dp_size if self.config.training.dtype in HALF else 1), lr, *skip)


@bug(training_state, "LossScaler")
def loss_scale_begins_at_1(_: Any, device: Any, scale: Any = 1.0, **rest: Any) -> Any:
    """float16 begins without a loss scale."""
    return LossScaler(device, scale, **rest)


@bug(LossScaler, "update")
def loss_scale_never_grows(original: Any, self: LossScaler, overflowed: torch.Tensor) -> None:
    """The loss scale only ever falls."""
    original(self, overflowed)
    self.good_steps.clamp_(max=self.growth_interval - 2)


@after_init
def weights_rounded_to_bfloat16(self: Trainer) -> None:
    """Master weights lose what bfloat16 does not hold."""

    def round_weights(*_: Any) -> None:
        for parameter in self.model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())

    if self.config.training.dtype == "bfloat16":
        self.state.optimizer.register_step_post_hook(round_weights)


@after_init
def betas_swapped(self: Trainer) -> None:
    """AdamW takes each of its betas for the other."""
    for group in self.state.optimizer.param_groups:
        group["betas"] = group["betas"][::-1]


@bug(Trainer, "_update")
def small_gradients_scaled_up(_: Any, self: Trainer, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
    """Clipping brings every gradient to max_norm, smaller ones too."""
    factor = self.config.training.max_norm / (grad_norm + 1e-6) / self.state.loss_scale
    trainer.update(self.state.optimizer, self.gradients_held, lr, factor, skip)


@bug(Trainer, "_update")
def clip_applied_twice(_: Any, self: Trainer, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
    """The clip factor multiplies gradients twice."""
    clip = (self.config.training.max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    trainer.update(self.state.optimizer, self.gradients_held, lr, clip.square() / self.state.loss_scale, skip)


@bug(adamw.AdamWUnit, "step")
def clip_not_applied(original: Any, self: adamw.AdamWUnit, factor: torch.Tensor | None, *skip: Any) -> None:
    """The update takes gradients as they are."""
    original(self, None, *skip)


@bug(adamw, "fused_adamw_")
def skip_ignored_for_vectors(original: Any, tensors: Any, gradients: Any, settings: Any, found_inf: Any) -> None:
    """A step that is to be skipped updates the parameters that do not decay."""
    original(tensors, gradients, settings, found_inf if settings["weight_decay"] else torch.zeros_like(found_inf))


@bug(adamw.InBlocks, "__call__")
def copies_written_before_weights(original: Any, self: adamw.InBlocks, *update: Any) -> None:
    """The copies with which the next step computes are an update behind."""
    weights = [[weight.clone() for weight in block.copied] for block in self._blocks]
    original(self, *update)
    for block, old in zip(self._blocks, weights, strict=True):
        for (piece, copy), weight in zip(block.copies, old, strict=True):
            piece.of(copy).copy_(weight)
