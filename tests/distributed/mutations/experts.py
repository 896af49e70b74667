"""Bugs in the choice of experts, their results and their balance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from titan_like.checkpoint import loader
from titan_like.models.layers import experts
from titan_like.models.layers.experts import Router, Routing, SparseMLP
from titan_like.parallel.expert_balance import ExpertBalance
from titan_like.parallel.model import WholeModel


@contextmanager
def weights_not_renormalised() -> Iterator[None]:
    """The weights of a token's experts do not sum to 1."""
    with patch.object(experts.F, "normalize", lambda weights, **_: weights):
        yield


@contextmanager
def bias_in_the_weights() -> Iterator[None]:
    """What is added to the scores for the choice is part of the weights too."""
    original = Router.forward

    def forward(self: Router, x: torch.Tensor) -> Routing:
        found = original(self, x)
        assert self.bias is not None
        counts, chosen = found.ends.diff(prepend=found.ends.new_zeros(1)), torch.empty_like(found.order)
        chosen[found.order] = torch.arange(len(counts)).repeat_interleave(counts)
        return found._replace(weights=found.weights + self.bias[chosen].view_as(found.weights))

    with patch.object(Router, "forward", forward):
        yield


@contextmanager
def loads_of_each_process() -> Iterator[None]:
    """Loads are not summed over the processes with other tokens."""
    original = ExpertBalance.__init__

    def init(self: ExpertBalance, *arguments: Any) -> None:
        original(self, *arguments)
        self.token_group = SimpleNamespace(size=lambda: 1)  # type: ignore[assignment]

    with patch.object(ExpertBalance, "__init__", init):
        yield


@contextmanager
def loads_of_skipped_steps() -> Iterator[None]:
    """A step whose update is skipped leaves its loads behind."""
    original = ExpertBalance.finish
    with patch.object(ExpertBalance, "finish", lambda self, skip: original(self, torch.zeros_like(skip))):
        yield


@contextmanager
def loads_forgotten_when_resumed() -> Iterator[None]:
    """A resumed run begins with equal loads."""
    original = loader.model_tensors

    def weights(model: Any) -> dict[str, torch.Tensor]:
        return {name: value for name, value in original(model).items() if not name.startswith("buffers.")}

    with patch.object(loader, "model_tensors", weights):
        yield


@contextmanager
def shared_experts_twice() -> Iterator[None]:
    """The result of the shared experts is added twice."""
    original = SparseMLP.forward

    def forward(self: SparseMLP, x: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        return original(self, x) + self.shared(x)

    with patch.object(SparseMLP, "forward", forward):
        yield


@contextmanager
def results_in_another_order() -> Iterator[None]:
    """Results go back to tokens by the order that sorted them, not by its inverse."""
    with patch.object(experts._ByToken, "forward", staticmethod(_by_order)):
        yield


def _by_order(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(inverse)
    return rows[order]


@contextmanager
def balance_times_microbatches() -> Iterator[None]:
    """The auxiliary loss is a mean over a microbatch, and these means are summed."""
    original = WholeModel.forward_backward

    def forward_backward(self: WholeModel, inputs: Any, loss_function: Any) -> None:
        for module in self.stage.module.modules():
            if isinstance(module, Router):
                module.loss_factor.mul_(len(inputs))
        original(self, inputs, loss_function)

    with patch.object(WholeModel, "forward_backward", forward_backward):
        yield


@contextmanager
def later_stages_without_balance() -> Iterator[None]:
    """Only the first pipeline stage's layers have an auxiliary loss."""
    original = ExpertBalance.begin

    def begin(self: ExpertBalance, loss_scale: Any, num_tokens: int) -> None:
        is_first = self.pp_group.rank() == 0
        original(self, loss_scale if is_first else 0.0, num_tokens)

    with patch.object(ExpertBalance, "begin", begin):
        yield
