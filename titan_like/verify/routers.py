"""Replays the reference's choice of experts in 16-bit dtypes.

Where two scores nearly tie, rounding to 16 bits sends a token to other experts, which changes gradients by far more
than rounding does. So each run in such a dtype takes the choice of the float64 run, and its own routers are checked by
themselves: their scores are the reference's within the tolerance of the dtype, and of the reference's scores they
choose the reference's experts. Their own choice then differs only where scores tie within that tolerance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from titan_like.data.loading.lengths import sample_length
from titan_like.models.config import has_experts
from titan_like.models.layers.experts import Router
from titan_like.models.registry import model_config
from titan_like.parallel.extend import extend
from titan_like.torch_private import TorchDispatchMode, is_in_backward_pass
from titan_like.verify.compare import HALF, Key, Row, distance
from titan_like.verify.places import part_like
from titan_like.verify.samples import batches
from titan_like.verify.shrink import Small

if TYPE_CHECKING:
    from titan_like.verify.watch import StepWatch

Note = Callable[[Key, torch.Tensor, torch.Tensor | None], object]  # takes what routers compute, and the reference's


def replays(small: Small) -> bool:
    """Whether the runs in the configuration's dtype replay choices."""
    return small.config.training.dtype in HALF and has_experts(model_config(small.config.model))


@torch.library.custom_op("titan_like::observed_choice", mutates_args=())
def observed_choice(scores: torch.Tensor, experts: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """A copy of the choice, int64 [n, k], of the router with this number. `Choices` takes its place."""
    return experts.clone()


@observed_choice.register_fake
def _(scores: torch.Tensor, experts: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(experts)


class ObservedRouter(Router):
    """Extends a router whose choice in training can be replaced."""

    number: torch.Tensor  # a tensor, because the compiler makes a graph for each value of an integer

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """As in the base class, unless the choice is replaced."""
        experts = self.own_choice(scores)
        return observed_choice(scores, experts, self.number) if self.training else experts

    def own_choice(self, scores: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        return super().choose(scores)


class Choices(TorchDispatchMode):
    """Notes what the routers of a watched trainer compute in each step, and replays the reference's choice."""

    def __init__(self, watch: StepWatch, note: Note, exact: Callable[[Key], torch.Tensor] | None) -> None:
        """``exact``: reads the reference's scores or choices of a whole batch, [samples, seq, …]. None: record them."""
        super().__init__()
        self.watch, self.note, self.exact = watch, note, exact
        self._step = 0
        self._passes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)  # scores, choice
        modules = [named for stage in watch.trainer.model.stages for named in stage.module.named_modules()]
        self._routers = [(name, cast(ObservedRouter, module)) for name, module in modules if isinstance(module, Router)]
        for number, (_, router) in enumerate(self._routers):
            extend(router, ObservedRouter, number=torch.tensor(number, device=router.weight.device))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Layers are compiled as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.titan_like.observed_choice.default:
            return self._choice(*args).clone()
        return func(*args, **(kwargs or {}))

    def _choice(self, scores: torch.Tensor, experts: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        step = self.watch.at_step
        if step > self.watch.small.num_steps:
            return experts
        if step != self._step:
            self._step = step
            self._passes.clear()
        passes = self._passes[int(number)]
        if is_in_backward_pass():  # the forward pass that is recomputed, of any microbatch, had these scores
            return min(passes, key=lambda one: distance(one[0], scores))[1]
        name, router = self._routers[int(number)]
        choice = self._replayed(router, name, len(passes), scores, experts)
        passes.append((scores.clone(), choice))
        return choice

    def _replayed(
        self, router: ObservedRouter, name: str, microbatch: int, scores: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """The choice for the tokens of a microbatch on this process, whose own ``scores`` [n, E] are noted."""
        trainer, step = self.watch.trainer, self.watch.at_step
        of_scores, of_choice = Key(step, Row.SCORES, name), Key(step, Row.CHOICE, name)
        if self.exact is None:
            length = sample_length(trainer.config, trainer.run.model).positions
            self.note(of_scores, scores.unflatten(0, (-1, length)), None)
            self.note(of_choice, experts.unflatten(0, (-1, length)), None)
            return experts
        size = trainer.config.training.micro_batch_size
        rows = list(range(microbatch * size, (microbatch + 1) * size))
        if self.watch.drawn:  # else this is one process, which takes samples in order
            first = batches(self.watch.small.config, step)[step].start
            rows = [index - first for index in self.watch.drawn[microbatch]]
        whole_scores, whole_choice = self.exact(of_scores), self.exact(of_choice)
        if not all(0 <= row < len(whole_scores) for row in rows):  # samples of another step, which is found by itself
            return experts
        by_sample = (len(rows), -1)
        own = scores.unflatten(0, by_sample)
        exact_scores = part_like(own, whole_scores[rows], trainer).to(scores.device)
        exact_choice = part_like(experts.unflatten(0, by_sample), whole_choice[rows], trainer).to(scores.device)
        again = router.own_choice(exact_scores.flatten(0, 1)).unflatten(0, by_sample)
        self.note(of_scores, own, exact_scores)
        self.note(of_choice, again.sort().values, exact_choice.sort().values)
        return exact_choice.flatten(0, 1).to(experts.dtype)
