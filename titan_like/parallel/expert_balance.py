"""Keeping the experts' loads equal, from statistics of the global batch. docs/experts.md has the definitions.

Every layout and every number of microbatches must train the same. A microbatch's backward pass runs before later
microbatches have been routed, so the auxiliary loss takes the loads of the step before. They are summed over all ranks
once a step, in integers, and are part of a checkpoint.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.models.config import has_experts
from titan_like.models.layers.experts import Router
from titan_like.parallel.mesh import one_dimension
from titan_like.parallel.model import ParallelModel

FIGURES = ("balance_loss", "router_z_loss", "min_expert_share", "max_expert_share", "expert_load_entropy")
"""Figures of a step: both losses without their coefficients, summed over layers; the smallest and the largest share of
a layer's tokens that an expert got, times the number of experts, so that 1 is the mean; the mean over layers of the
entropy of these shares, in units of its maximum."""


class ExpertBalance:
    """Updates a process's routers before and after each step. Without routers it does nothing."""

    def __init__(self, model: ParallelModel, mesh: DeviceMesh) -> None:
        """The routers' weights and buffers must be allocated. Their buffers become rows of common tensors."""
        modules = (module for stage in model.stages for module in stage.module.modules())
        self.routers = [module for module in modules if isinstance(module, Router)]
        # Whether some stage has routers, if not this one.
        self.is_of_model = has_experts(model.stages[0].module.config)
        if not self.is_of_model:
            return
        # Experts need sequence parallelism, so all ranks of a stage have tokens of their own.
        self.token_group = one_dimension(mesh, "tokens", "dp_replicate", "dp_shard", "tp").get_group()
        self.pp_group = mesh.get_group("pp")
        for name in ("load", "bias", "counts", "loss_sums", "loss_factor"):
            buffers = [getattr(router, name) for router in self.routers]
            if not buffers or buffers[0] is None:
                continue
            stacked = torch.stack(buffers)
            setattr(self, name, stacked)
            for router, row in zip(self.routers, stacked, strict=True):
                setattr(router, name, row)

    load: torch.Tensor  # each [routers, …]; see `Router`
    bias: torch.Tensor
    counts: torch.Tensor
    loss_sums: torch.Tensor
    loss_factor: torch.Tensor

    def begin(self, loss_scale: torch.Tensor | float, num_tokens: torch.Tensor | float) -> None:
        """Call this before a step's passes. ``num_tokens``: tokens of the global batch that are not padding."""
        if self.routers:
            self.loss_factor.fill_(loss_scale / num_tokens)

    def finish(self, skip: torch.Tensor) -> torch.Tensor:
        """Call this after a step's passes: update loads and biases, unless ``skip`` (bool, a scalar).

        Returns:
            `FIGURES`, float64, equal on all ranks; empty if the model has no routers.
        """
        if not self.is_of_model:
            return torch.empty(0, dtype=torch.float64, device=skip.device)
        return self._finish(skip)

    @torch.no_grad()
    def _finish(self, skip: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(4, dtype=torch.float64, device=skip.device)  # summed over layers; entropies; layers
        extremes = torch.full_like(losses[:2], -math.inf)
        if self.routers:
            load, means = self._update(skip)
            entropies = torch.special.entr(load).sum(1) / math.log(load.shape[1])
            losses = torch.cat((means.sum(0), entropies.sum()[None], losses.new_full((1,), len(load))))
            extremes = torch.stack((-load.min(), load.max())) * load.shape[1]
        if self.pp_group.size() > 1:
            dist.all_reduce(losses, group=self.pp_group)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.pp_group)
        return torch.stack((losses[0], losses[1], -extremes[0], extremes[1], losses[2] / losses[3]))

    def _update(self, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loads of this step [routers, E] and its mean losses [routers, 2], both float64."""
        config, counts, sums = self.routers[0].config, self.counts, self.loss_sums
        if self.token_group.size() > 1:
            dist.all_reduce(counts, group=self.token_group)
            dist.all_reduce(sums, group=self.token_group)
        total = counts.sum(1, keepdim=True)  # real tokens × k, or a multiple of it where layers are recomputed
        load, means = counts.double() / total, sums.double() * config.experts_per_token / total
        self.load.copy_(torch.where(skip, self.load, load.to(self.load.dtype)))
        if config.balance == "bias":
            missing = (total - config.num_experts * counts).sign()  # -1, 0 or 1
            self.bias.add_(missing.to(self.bias.dtype) * ~skip, alpha=config.bias_update_rate)
        counts.zero_()
        sums.zero_()
        return load, means
