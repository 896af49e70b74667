"""Bugs in the choice of experts, their results and their balance."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.mutations import bug, under
from titan_like.checkpoint import loader
from titan_like.models.layers import experts
from titan_like.models.layers.experts import ExpertLinear, Router, Routing, SparseMLP
from titan_like.optim import optimizer
from titan_like.optim.shards import sharded_dimensions
from titan_like.parallel import experts as shared_experts
from titan_like.parallel import tensor_styles
from titan_like.parallel.data import DataParallel
from titan_like.parallel.expert_balance import ExpertBalance
from titan_like.parallel.model import WholeModel
from titan_like.train import trainer
from titan_like.train.trainer import Trainer


@bug(experts.F, "normalize")
def weights_not_renormalised(_: Any, weights: Any, **_options: Any) -> Any:
    """The weights of a token's experts do not sum to 1."""
    return weights


@bug(Router, "forward")
def scores_in_half_types(original: Any, *arguments: Any) -> Routing:
    """Routers compute in the type of their inputs."""
    with patch.object(torch, "promote_types", lambda dtype, _: dtype):
        return original(*arguments)


@bug(Router, "forward")
def bias_in_the_weights(original: Any, self: Router, *arguments: Any) -> Routing:
    """What is added to the scores for the choice is part of the weights too."""
    found = original(self, *arguments)
    assert self.bias is not None
    counts, chosen = found.offsets.diff(prepend=found.offsets.new_zeros(1)), torch.empty_like(found.order)
    chosen[found.order] = torch.arange(len(counts)).repeat_interleave(counts)
    return found._replace(weights=found.weights + self.bias[chosen].view_as(found.weights))


@bug(ExpertBalance, "__init__")
def loads_of_each_process(original: Any, self: ExpertBalance, model: Any, mesh: Any) -> None:
    """Loads are not summed over the processes with other tokens."""
    original(self, model, mesh)
    self.token_group = SimpleNamespace(size=lambda: 1)  # type: ignore[assignment]


@bug(ExpertBalance, "_update")
def mean_loads_count_as_small(original: Any, self: ExpertBalance, skip: torch.Tensor) -> Any:
    """The bias of an expert with exactly the mean load grows."""
    counts = self.counts.clone()
    found = original(self, skip)
    self.bias += (counts * counts.shape[1] == counts.sum(1, keepdim=True)) * self.routers[0].config.bias_update_rate
    return found


@bug(Trainer, "train_step")
def loads_change_before_copies(original: Any, self: Trainer, data: Any) -> Any:
    """A step's loads are in place before an asynchronous save has copied those of the step before."""
    wait, finish = self.state.saver.before_update, self.experts.finish

    def finish_first(skip: torch.Tensor) -> torch.Tensor:
        found = finish(skip)
        wait()
        return found

    with (
        patch.object(self.state.saver, "before_update", lambda: None),
        patch.object(self.experts, "finish", finish_first),
    ):
        return original(self, data)


@bug(ExpertBalance, "_update")
def figures_of_all_steps(original: Any, self: ExpertBalance, skip: torch.Tensor) -> Any:
    """The losses that a step reports are added to those of the steps before."""
    sums = self.loss_sums.clone()
    found = original(self, skip)
    self.loss_sums.copy_(sums)
    return found


@bug(ExpertLinear, "matrices")
def first_weights_in_half_types(original: Any, self: ExpertLinear) -> torch.Tensor:
    """In half types experts keep a copy of the first weights of up and gate, and compute with that for ever."""
    found = original(self)
    if found.dtype.itemsize > 2 or self.in_features > self.out_features:
        return found
    first = self.__dict__.setdefault("first", found.detach().clone())
    return first + (found - found.detach())


@bug(ExpertBalance, "finish")
def loads_of_skipped_steps(original: Any, self: Any, skip: Any) -> Any:
    """A step whose update is skipped leaves its loads behind."""
    return original(self, torch.zeros_like(skip))


@bug(loader, "model_tensors")
def loads_forgotten_when_resumed(original: Any, model: Any) -> dict[str, torch.Tensor]:
    """A resumed run begins with equal loads."""
    return {name: value for name, value in original(model).items() if not name.startswith("buffers.")}


@bug(SparseMLP, "forward")
def shared_experts_twice(original: Any, self: SparseMLP, x: torch.Tensor, *others: Any) -> torch.Tensor:
    """The result of the shared experts is added twice."""
    assert self.shared is not None
    return original(self, x, *others) + self.shared(x)


@bug(experts, "permuted")
def results_in_another_order(_: Any, rows: Any, order: Any, inverse: Any) -> Any:
    """Results go back to tokens by the order that sorted them, not by its inverse."""
    return rows[inverse]


@bug(WholeModel, "forward_backward")
def balance_times_microbatches(original: Any, self: WholeModel, inputs: Any, loss_function: Any) -> None:
    """The auxiliary loss is a mean over a microbatch, and these means are summed."""
    for module in self.stage.module.modules():
        if isinstance(module, Router):
            module.loss_factor.mul_(len(inputs))
    original(self, inputs, loss_function)


@bug(ExpertBalance, "begin")
def later_stages_without_balance(original: Any, self: ExpertBalance, loss_scale: Any, num_tokens: Any) -> None:
    """Only the first pipeline stage's layers have an auxiliary loss."""
    is_first = self.pp_group.rank() == 0
    original(self, loss_scale if is_first else 0.0, num_tokens)


@bug(optimizer.Gradients, "__init__")
def norm_without_other_ranks_experts(original: Any, self: optimizer.Gradients, *arguments: Any) -> None:
    """Each rank's gradient norm has its own experts alone."""
    original(self, *arguments)
    self._groups["ep"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _scaled(factor: Callable[[Any], float]) -> Any:
    """The gradients of shared experts times what ``factor`` makes of the group's size."""
    original = shared_experts.SplitExpertLinear.matrices

    def matrices(self: Any) -> torch.Tensor:
        found, size = original(self), self.weight.device_mesh.size()
        return found.detach() + factor(size) * (found - found.detach())

    return patch.object(shared_experts.SplitExpertLinear, "matrices", matrices)


@under(lambda: _scaled(lambda size: 1 / size))
def experts_averaged_over_their_group() -> None:
    """The gradients of experts are divided by the size of the EP group."""


@under(lambda: _scaled(float))
def experts_gradients_doubled() -> None:
    """The gradients of experts are as many times too large."""


@under(lambda: patch.object(tensor_styles.ReplicatedRouter, "partial_gradients", ()))
def routers_not_summed_over_tensor_ranks() -> None:
    """A tensor-parallel rank's router learns from its own part of the sequence alone."""


@bug(tensor_styles.ReplicatedRouter, "forward")
def padding_of_the_first_rank(original: Any, self: Any, *inputs: Any) -> Any:
    """Every tensor-parallel rank takes the first rank's part of the padding for its own."""
    with patch.object(self, "tensor_group", SimpleNamespace(size=self.tensor_group.size, rank=0)):
        return original(self, *inputs)


@bug(shared_experts, "reduce_scatter_rows")
def partial_sums_of_split_experts(_: Any, x: torch.Tensor, sizes: list[int], group: Any) -> torch.Tensor:
    """A tensor rank takes its own part of an expert's result for the whole."""
    return x.split(sizes)[group.rank]


@bug(trainer, "partial_parameters")
def split_experts_summed_over_tensor_ranks(original: Any, model: Any) -> list[torch.nn.Parameter]:
    """The gradients of split experts are summed over the tensor ranks, each of which has its own part of them."""
    weights = [module.weight for module in model.modules() if isinstance(module, ExpertLinear)]
    return original(model) + [weight for weight in weights if "etp" in sharded_dimensions(weight.data)]


@bug(optimizer.Gradients, "__init__")
def norm_of_split_experts_of_each_rank(original: Any, self: optimizer.Gradients, *arguments: Any) -> None:
    """The gradient norm counts each part of an expert on every tensor rank."""
    original(self, *arguments)
    for dimensions in [one for one in self._by_dimensions if "etp" in one]:
        self._by_dimensions[(*dimensions, "tp")] = self._by_dimensions.pop(dimensions)
        self._of_dtensors.add((*dimensions, "tp"))


@bug(DataParallel, "__init__")
def experts_not_summed(original: Any, self: DataParallel, *arguments: Any) -> None:
    """The ranks that hold the same experts do not sum their gradients."""
    original(self, *arguments)
    del self._all_reduces[1:]


@bug(shared_experts, "permuted")
def rows_returned_as_they_were_sorted(_: Any, rows: Any, order: torch.Tensor, inverse: torch.Tensor) -> Any:
    """Results go back to the ranks that sent the rows in the order of the experts."""
    is_sorting = bool((order.diff() > 0).float().mean() >= (inverse.diff() > 0).float().mean())
    return rows[order] if is_sorting else rows


@bug(shared_experts, "exchange_of")
def empty_experts_left_out(original: Any, *arguments: Any) -> Any:
    """The experts after one without rows get those of the next."""
    found = original(*arguments)
    filled = found.offsets.unique_consecutive()
    filled = filled[filled > 0]
    last = filled[-1:].expand(len(found.offsets) - len(filled))
    return found._replace(offsets=torch.cat((filled, last)))


@bug(ExpertBalance, "__init__")
def balance_times_expert_ranks(original: Any, self: Any, model: Any, mesh: Any) -> None:
    """The auxiliary loss is multiplied by the size of the EP group."""
    original(self, model, mesh)
    begin, size = self.begin, 1 if model.expert_mesh is None else model.expert_mesh["ep"].size()
    self.begin = lambda loss_scale, num_tokens: begin(loss_scale * size, num_tokens)


@bug(shared_experts, "all_to_all_rows")
def experts_of_the_wrong_rank(original: Any, x: Any, input_splits: Any, output_splits: Any, group: Any) -> Any:
    """Rows are sent to the ranks in reverse."""
    parts = original(x, input_splits, output_splits, group).split(output_splits)
    return torch.cat(parts[::-1]) if group.rank else torch.cat(parts)
