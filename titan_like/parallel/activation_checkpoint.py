"""Activation checkpointing: the backward pass recomputes what the forward pass did not save."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_like.config.schema import ActivationCheckpoint
from titan_like.models.layers import experts
from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend
from titan_like.torch_private import (
    float8_product,
    functional_collectives,
    grouped_float8_operator,
    grouped_product_operator,
)

# Selective mode (arXiv 2205.05198, section 5) saves the outputs of matrix products with weights and of their sums over
# tensor-parallel processes. It recomputes everything else: the attention core, norms, activation functions, dropout,
# and the all-gathers of sequence parallelism.
_KEPT_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
    float8_product,
    grouped_product_operator,
    grouped_float8_operator,
    torch.ops.titan_like.expert_product.default,
    functional_collectives.all_reduce.default,
    functional_collectives.reduce_scatter_tensor.default,
}
_THIN = 16  # of products that are so many times as wide as what they sum over, as adapters', large results cost little


def apply_activation_checkpoint(model: Transformer, section: ActivationCheckpoint) -> None:
    """Wrap the forward pass of every n-th layer, or of its experts, in place. Parameters keep their names."""
    if section.mode in ("none", "budget"):  # the compiler keeps to a budget
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if section.mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matrix_products)
    for name, layer in model.layers.items():
        if int(name) % section.every_n_layers:  # numbered over the whole model, so stages do not change the choice
            continue
        for module in [layer] if section.mode != "experts" else layer.children():
            if module is layer or isinstance(module, experts.SparseMLP):
                extend(module, Recomputed, checkpoint_options=options)


class Recomputed(nn.Module):
    """Extends a module whose backward pass recomputes its forward pass."""

    checkpoint_options: dict[str, Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the module itself."""
        return checkpoint(super().forward, *inputs, **self.checkpoint_options, **named)


def _keep_matrix_products(_context: Any, operation: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operation is torch.ops.aten.mm.default and _THIN * args[0].shape[1] <= args[1].shape[1]:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
