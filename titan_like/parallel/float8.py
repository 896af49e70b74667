"""Float8 products in the layers' linear modules, with torchao's recipes, casts and kernels.

A linear module computes three products: its output, and the gradients of its input and of its weight. Here both factors
of each product are float8 copies. A copy is the tensor times a scale that brings its largest magnitude to the largest
float8 number: one scale for the whole tensor ("tensorwise"), or one for each row or column that the product sums over
("rowwise").

The scale depends on the microbatch and the weights alone, never on the layout. Tensor-parallel ranks take the largest
magnitude over all their shards, so each casts its shard as one process would cast the whole tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_like.config.errors import ConfigError, require
from titan_like.config.schema import Float8
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import Group, all_reduce
from titan_like.parallel.data import sharded_modules
from titan_like.parallel.tensor import matches_name
from titan_like.parallel.weight_gradients import LinearGemms, WeightGradients, with_own_gemms
from titan_like.torch_private import convert_gathers

logging.disable(logging.WARNING)  # torchao warns of kernels for other GPUs that it cannot load
from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402
from torchao.float8.config import ScalingGranularity, e4m3_dtype  # noqa: E402
from torchao.float8.float8_ops import addmm_float8_unwrapped  # noqa: E402
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig  # noqa: E402
from torchao.float8.float8_utils import amax_to_scale, pad_tensor_for_matmul, tensor_to_amax, to_fp8_saturated  # noqa: E402

logging.disable(logging.NOTSET)

MULTIPLE = 16  # the kernels take matrices whose sides are multiples of it
_TENSORWISE = ScalingGranularity.TENSORWISE

Scaled = tuple[torch.Tensor, torch.Tensor]
"""A float8 matrix and its scale: a scalar, or one number for each row or column with the other dimension of size 1."""


@dataclass(frozen=True)
class Float8Product:
    """The three products of one linear module. Matrices are what this process holds of them."""

    config: Float8LinearConfig
    emulates: bool  # computes with the float8 numbers in float32 or wider, for devices without float8 products
    split: int | None = None  # dimension of the weight [out, in] that tensor-parallel ranks share
    group: Group | None = None

    def linear(
        self, x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, deferred: WeightGradients | None
    ) -> torch.Tensor:
        """x · partᵀ: [..., in] → [..., out]. ``part`` is what this process holds of ``weight``."""
        keeper = None if deferred is None else partial(deferred.defer, weight)
        return _Linear.apply(x, part, self, keeper)

    def cast(self, role: str, tensor: torch.Tensor, dim: int, scale: torch.Tensor | None = None) -> Scaled:
        """A matrix for a product that sums over ``dim``; a tensorwise ``scale`` that is known can be given.

        ``role``: "input", x [tokens, in]; "weight", [out, in], which is ready if FSDP2 has gathered it in float8; or
        "gradient" of the output, [tokens, out].
        """
        if isinstance(tensor, Float8TrainingTensor):
            return tensor._data, tensor._scale
        to, split = {
            "input": (self.config.cast_config_input, 1 if self.split == 1 else None),
            "weight": (self.config.cast_config_weight, self.split),
            "gradient": (self.config.cast_config_grad_output, 1 if self.split == 0 else None),
        }[role]
        is_tensorwise = to.scaling_granularity is _TENSORWISE
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if scale is None or not is_tensorwise:
            amax = tensor_to_amax(tensor, scaling_granularity=to.scaling_granularity, axiswise_dim=dim).to(wide.dtype)
            if self.group is not None and split is not None and (is_tensorwise or split == dim):
                amax = all_reduce(amax, self.group, "max")
            scale = amax_to_scale(amax, to.target_dtype, self.config.round_scales_to_power_of_2)
        return to_fp8_saturated(wide * scale, to.target_dtype), scale

    def multiply(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        """a [n, k] · b [k, m] → [n, m] in ``dtype``. With ``fast``, a GPU may add up in less than float32."""
        if self.emulates:
            wide = torch.promote_types(dtype, torch.float32)
            return torch.mm(a[0].to(wide) / a[1], b[0].to(wide) / b[1]).to(dtype)
        first, second = a[0].contiguous(), b[0].t().contiguous()  # the kernels take rows of a and columns of b
        if first.shape[1] % MULTIPLE:  # a number of tokens
            first, second = (pad_tensor_for_matmul(factor, dims=1) for factor in (first, second))
        return addmm_float8_unwrapped(first, a[1], second.t(), b[1], dtype, use_fast_accum=fast)

    def weight_gradient(self, gradient: Scaled, x: Scaled, dtype: torch.dtype) -> torch.Tensor:
        """gradientᵀ · x, [out, in], of factors that were cast for a sum over tokens."""
        fast = self.config.gemm_config_grad_weight.use_fast_accum
        return self.multiply((gradient[0].t(), gradient[1].t()), x, dtype, fast)


class _Linear(torch.autograd.Function):
    """`Float8Product.linear`. The factors are cast again in the backward pass, as by torchao, to save only x itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor, product: Float8Product, keeper: Any) -> torch.Tensor:
        rows = x.flatten(0, -2)
        a, b = product.cast("input", rows, 1), product.cast("weight", _rounded(part, x.dtype), 1)
        ctx.product, ctx.keeper = product, keeper
        ctx.save_for_backward(x, part, a[1], b[1])
        result = product.multiply(a, (b[0].t(), b[1].t()), x.dtype, product.config.gemm_config_output.use_fast_accum)
        return result.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, part, x_scale, scale = ctx.saved_tensors
        product: Float8Product = ctx.product
        rows, outer = x.flatten(0, -2), gradient.flatten(0, -2)
        for_x, weight = product.cast("gradient", outer, 1), _rounded(part, x.dtype)
        fast = product.config.gemm_config_grad_input.use_fast_accum
        x_gradient = product.multiply(for_x, product.cast("weight", weight, 0, scale), x.dtype, fast).view_as(x)
        for_weight = product.cast("gradient", outer, 0, for_x[1])
        factors = for_weight, product.cast("input", rows, 0, x_scale), x.dtype
        if ctx.keeper is None:
            return x_gradient, product.weight_gradient(*factors), None, None
        ctx.keeper(partial(product.weight_gradient, *factors))
        return x_gradient, None, None, None


def _rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight as a module without float8 uses it. A master weight of `ComputeCopies` comes as it is."""
    return weight if isinstance(weight, Float8TrainingTensor) else weight.to(dtype)


def use_float8(model: Transformer, section: Float8, emulates: bool) -> None:
    """Let the layers' linear modules compute in float8, in place. Apply it after tensor parallelism.

    Modules that ``section.filter`` names, or whose sides are no multiples of 16, stay as they are.

    Raises:
        ConfigError: a pattern of the filter fits no module, or the sides of all modules or of a shard do not fit.
    """
    names = {name for name in (*dict(model.named_modules()), *model.absent) if name.startswith("layers.")}
    for pattern in section.filter:
        problem = f'"{pattern}" fits no module of the layers; use names such as "layers.*.mlp"'
        require(any(matches_name(pattern, name) for name in names), "float8.filter", section.filter, problem)
    if not emulates:
        convert_to_float8_training(nn.Identity())  # corrects torch's compiler where it writes wrong float8 numbers
    config, found = Float8LinearConfig.from_recipe_name(section.recipe), list(float8_linears(model, section))
    problem = f"no linear module of the layers has sides that are multiples of {MULTIPLE}; set it to false"
    require(found or section.filter, "float8.enable", True, problem)
    # Modules of a kind share an object, which the compiler can then take for a constant of all layers' graphs.
    products: dict[int | None, Float8Product] = {}
    for name, module in found:
        split, group = _split_of(name, module)
        product = products.setdefault(split, Float8Product(config, emulates, split, group))
        with_own_gemms(module).float8 = product


def _split_of(name: str, module: nn.Linear) -> tuple[int | None, Group | None]:
    """The dimension of a module's weight that tensor-parallel ranks share, and these ranks; None if they do not.

    Raises:
        ConfigError: float8 products cannot take the shards, or the module was split by a style of torch's.
    """
    weight = module.weight
    if not isinstance(weight, DTensor):
        return None, None
    problem = f"{name} is split by torch's own style; use one of ours, or name it in float8.filter"
    require(isinstance(module, LinearGemms), "float8.enable", True, problem)
    rows, columns = weight.to_local().shape
    if rows % MULTIPLE or columns % MULTIPLE:
        problem = f"leaves a process {rows} × {columns} of {name}, but float8 takes multiples of {MULTIPLE}; lower it, "
        problem += "or name the module in float8.filter"
        raise ConfigError("parallelism.tensor_parallel_degree", weight.device_mesh.size(), problem)
    (placement,) = weight.placements
    return placement.dim if isinstance(placement, Shard) else None, Group.of(weight.device_mesh)


def float8_linears(model: Transformer, section: Float8) -> Iterator[tuple[str, nn.Linear]]:
    """The linear modules that compute in float8, by name. The choice does not depend on the layout."""
    for name, module in model.layers.named_modules(prefix="layers"):
        if not isinstance(module, nn.Linear) or module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            continue
        parents = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        if not any(matches_name(pattern, parent) for pattern in section.filter for parent in parents):
            yield name, module


class Float8Gathers:
    """Makes ZeRO gather the weights of float8 products in float8: half the bytes of a half type, the same numbers.

    Each rank casts its shard with the scale of the whole weight. Before each forward pass of the model one all-reduce
    finds these scales for all weights. Only one scale for the whole tensor fits both products that use the weight.
    """

    def __init__(self, model: Transformer, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        modules = [m for m in model.modules() if isinstance(m, LinearGemms) and m.float8 is not None]
        self.dtype, self.scales = dtype, torch.empty(0)
        self.groups = [mesh[name].get_group() for name in ("dp_shard", "tp") if mesh[name].size() > 1]
        self.shards = convert_gathers(sharded_modules(model), modules, self.cast, self.wrap)
        if self.shards:  # else the filter names all modules of this stage
            model.register_forward_pre_hook(self.find_scales, prepend=True)

    @torch.no_grad()
    def find_scales(self, *_: Any) -> None:
        """Find the scale of each weight, on all its ranks together."""
        largest = torch.stack([torch.linalg.vector_norm(shard(), torch.inf) for shard in self.shards])
        largest = largest.to(self.dtype).to(torch.promote_types(self.dtype, torch.float32))  # rounding keeps the order
        for group in self.groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        self.scales = amax_to_scale(largest, e4m3_dtype)

    def cast(self, index: int, shard: torch.Tensor) -> Scaled:
        """A shard of the weight with this index, in float8, and its scale."""
        wide, scale = shard.to(self.dtype).to(torch.promote_types(self.dtype, torch.float32)), self.scales[index]
        return to_fp8_saturated(wide * scale, e4m3_dtype), scale

    def wrap(self, data: torch.Tensor, scale: torch.Tensor, known: Any = None) -> torch.Tensor:
        """The gathered weight, which autograd takes for one of this type. ``known`` is that of an earlier gather, whose
        numbers are up to date but not its scale.
        """
        if known is None:
            return Float8TrainingTensor(data, scale, self.dtype, LinearMMConfig(), GemmInputRole.WEIGHT)
        known._scale = scale
        return known
