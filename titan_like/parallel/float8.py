"""Float8 products in the layers' linear modules and experts, with torchao's recipes, casts and kernels.

A linear module computes three products: its output, and the gradients of its input and of its weight. Here both factors
of each product are float8 copies. A copy is the tensor times a scale that brings its largest magnitude to the largest
float8 number: one scale for the whole tensor ("tensorwise"), or one for each row or column that the product sums over
("rowwise").

The scale depends on the microbatch and the weights alone, never on the layout. Tensor-parallel ranks take the largest
magnitude over all their shards, so each casts its shard as one process would cast the whole tensor. Each expert is cast
by itself: its matrix, and the rows of each microbatch that are sent to it.
"""

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
from titan_like.models.layers.experts import ExpertLinear, expert_product, expert_weight_gradient
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import Group, all_reduce
from titan_like.parallel.data import sharded_modules
from titan_like.parallel.experts import SplitExperts
from titan_like.parallel.tensor import matches_name
from titan_like.parallel.tensor_styles import ReplicatedLinear
from titan_like.parallel.weight_gradients import LinearGemms, WeightGradients, with_own_gemms
from titan_like.torch_private import grouped_float8_product
from titan_like.torch_private.fsdp import convert_gathers

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
    splits_tokens: bool = False  # whether each of these ranks has other tokens, and the whole weight

    def linear(
        self, x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, deferred: WeightGradients | None
    ) -> torch.Tensor:
        """x · partᵀ: [..., in] → [..., out]. ``part`` is what this process holds of ``weight``."""
        keeper = None if deferred is None or not weight.requires_grad else partial(deferred.defer, weight)
        return _Linear.apply(x, part, self, keeper)

    def cast(self, role: str, tensor: torch.Tensor, dim: int, scale: torch.Tensor | None = None) -> Scaled:
        """A matrix for a product that sums over ``dim``; a tensorwise ``scale`` that is known can be given.

        ``role``: "input", x [tokens, in]; "weight", [out, in], which is ready if FSDP2 has gathered it in float8; or
        "gradient" of the output, [tokens, out].
        """
        if isinstance(tensor, Float8TrainingTensor):
            return tensor._data, tensor._scale
        tokens = 0 if self.splits_tokens else None
        to, split = {
            "input": (self.config.cast_config_input, 1 if self.split == 1 else tokens),
            "weight": (self.config.cast_config_weight, self.split),
            "gradient": (self.config.cast_config_grad_output, 1 if self.split == 0 else tokens),
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
        if not ctx.needs_input_grad[1]:
            return x_gradient, None, None, None
        for_weight = product.cast("gradient", outer, 0, for_x[1])
        factors = for_weight, product.cast("input", rows, 0, x_scale), x.dtype
        if ctx.keeper is None:
            return x_gradient, product.weight_gradient(*factors), None, None
        ctx.keeper(partial(product.weight_gradient, *factors))
        return x_gradient, None, None, None


def _rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight as a module without float8 uses it. A master weight of `ComputeCopies` comes as it is."""
    return weight if isinstance(weight, Float8TrainingTensor) else weight.to(dtype)


@dataclass(frozen=True)
class Float8Experts:
    """The three products of stacked experts. All factors are e4m3, which alone the grouped kernel takes.

    Rows of tokens are sorted by group: by expert, then by the microbatch that they are from, because under
    expert parallelism several data-parallel ranks send theirs. ``offsets`` are the ends of the groups, int32.
    """

    config: Float8LinearConfig
    emulates: bool
    group: Group | None = None  # tensor-parallel ranks that have other rows of the same microbatch and experts
    expert_ranks: int = 1  # number of these ranks that hold different experts

    def linear(self, x: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[rows, in] and [E, out, in] → [rows, out]."""
        return _ExpertLinear.apply(x, matrices, offsets.to(x.device), self)

    @property
    def is_tensorwise(self) -> bool:
        """Whether a matrix, or all rows of a group, have one scale."""
        return self.config.cast_config_input.scaling_granularity is _TENSORWISE

    def cast(self, rows: torch.Tensor, dim: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [n, k] in float8 for a sum over ``dim``, and their scale, [n, 1], or [groups, 1 or k] if dim is 0."""
        if dim == 1 and not self.is_tensorwise:
            by_row = scale = self.scale_of(rows.abs().amax(1, keepdim=True))
        else:
            scale = self.scale_of(self.largest(rows, offsets))
            by_row = scale[_groups_of(rows, offsets)]
        return to_fp8_saturated(_wide(rows) * by_row, e4m3_dtype), scale if dim == 0 else by_row

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Scales of float8 numbers whose largest magnitudes were these, float32."""
        return amax_to_scale(amax, e4m3_dtype, self.config.round_scales_to_power_of_2)

    def largest(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The largest magnitudes of each group on all ranks: [n, k] → [groups, k], or [groups, 1]. 0 without rows."""
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        amax = torch.segment_reduce(rows.abs(), "max", lengths=counts, axis=0, unsafe=True, initial=0.0)
        amax = amax.amax(1, keepdim=True) if self.is_tensorwise else amax
        if self.group is None:
            return amax
        ep_rank = self.group.rank % self.expert_ranks  # EP groups are neighbouring ranks
        by_rank = amax.new_zeros(self.expert_ranks, *amax.shape)
        by_rank[ep_rank] = amax
        return all_reduce(by_rank, self.group, "max")[ep_rank]

    def by_expert(self, rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor, fast: bool) -> torch.Tensor:
        """Rows [n, k] times the matrices [E, k, m] of their experts → [n, m]."""
        matrices = matrices.to(rows.dtype)
        scale = self.scale_of(matrices.abs().amax((1, 2) if self.is_tensorwise else 1, keepdim=True))
        a, (b, b_scale) = self.cast(rows, 1, offsets), (to_fp8_saturated(_wide(matrices) * scale, e4m3_dtype), scale)
        per_expert = len(offsets) // len(matrices)
        ends = offsets[per_expert - 1 :: per_expert].contiguous()
        if self.emulates or rows.dtype != torch.bfloat16:
            wide = _wide(rows).dtype
            values = (b.to(wide) / b_scale).transpose(1, 2)
            return expert_product(a[0].to(wide) / a[1], values, ends).to(rows.dtype)
        columns = b.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes columns of them
        factors = (a[0].contiguous(), a[1].flatten()), (columns, b_scale[:, 0].expand(-1, b.shape[2]).contiguous())
        return grouped_float8_product(*factors, ends, rows.dtype, fast)

    def weight_gradient(
        self, gradient: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, num_experts: int
    ) -> torch.Tensor:
        """gradientᵀ · x of each expert, a sum over microbatches: [n, out] and [n, in] → [E, out, in]."""
        (a, a_scale), (b, b_scale) = self.cast(gradient, 0, offsets), self.cast(x, 0, offsets)
        of_group = _groups_of(x, offsets)
        if self.emulates or x.dtype != torch.bfloat16:
            wide = _wide(x).dtype
            products = expert_weight_gradient(a.to(wide) / a_scale[of_group], b.to(wide) / b_scale[of_group], offsets)
        else:
            # The kernel takes groups of whole 16 rows. Zeros fill them up, without asking how many rows each has.
            counts = offsets.diff(prepend=offsets.new_zeros(1))
            filled = (counts + MULTIPLE - 1) // MULTIPLE * MULTIPLE
            ends = filled.cumsum(0).to(torch.int32)
            places = torch.arange(len(x), device=x.device) + (ends - filled - offsets + counts)[of_group]
            size = (len(x) + (MULTIPLE - 1) * len(offsets)) // MULTIPLE * MULTIPLE
            zeros = (data.new_zeros(size, data.shape[1], dtype=torch.uint8) for data in (a, b))
            a, b = (
                whole.index_copy(0, places, data.view(torch.uint8)).t().contiguous().view(e4m3_dtype)
                for whole, data in zip(zeros, (a, b), strict=True)
            )
            factors = (a, a_scale.expand(-1, len(a)).flatten()), (b.t(), b_scale.expand(-1, len(b)).flatten())
            fast = self.config.gemm_config_grad_weight.use_fast_accum
            products = grouped_float8_product(*factors, ends, x.dtype, fast)
        if len(products) > num_experts:
            products = products.unflatten(0, (num_experts, -1)).sum(1)
        return products.to(x.dtype)


class _ExpertLinear(torch.autograd.Function):
    """`Float8Experts.linear`, which saves what it casts, as `_Linear` does."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor, product: Float8Experts
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(x, matrices, offsets)
        return product.by_expert(x, matrices.transpose(1, 2), offsets, product.config.gemm_config_output.use_fast_accum)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, matrices, offsets = ctx.saved_tensors
        product: Float8Experts = ctx.product
        fast = product.config.gemm_config_grad_input.use_fast_accum
        x_gradient = product.by_expert(gradient, matrices, offsets, fast)
        return x_gradient, product.weight_gradient(gradient, x, offsets, len(matrices)), None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _groups_of(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row's group, [n], given the ends of the groups."""
    numbers = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
    return torch.searchsorted(offsets, numbers, right=True)


def use_float8(model: Transformer, section: Float8, emulates: bool, tensor_group: Group | None = None) -> None:
    """Let the layers' linear modules and experts compute in float8, in place. Apply it after tensor parallelism.

    Modules that ``section.filter`` names, or whose sides are no multiples of 16, stay as they are. The ranks of
    ``tensor_group`` have other tokens of the same microbatch. Raises a `ConfigError` if a pattern of the filter fits no
    module, or the sides of all modules or of a shard do not fit, or the GPU lacks products for experts.
    """
    names = {name for name in (*dict(model.named_modules()), *model.absent) if name.startswith("layers.")}
    for pattern in section.filter:
        reason = f'"{pattern}" fits no module of the layers; use names such as "layers.*.mlp"'
        require(any(matches_name(pattern, name) for name in names), "float8.filter", section.filter, reason)
    if not emulates:
        convert_to_float8_training(nn.Identity())  # corrects torch's compiler where it writes wrong float8 numbers
    config, linears = Float8LinearConfig.from_recipe_name(section.recipe), list(float8_linears(model, section))
    reason = f"no linear module of the layers has sides that are multiples of {MULTIPLE}; set it to false"
    require(linears or section.filter, "float8.enable", True, reason)
    has_experts = any(isinstance(module, ExpertLinear) for _, module in linears)
    reason = "this GPU has no grouped float8 products for experts, unlike Hopper; name them in float8.filter, such as "
    reason += '"layers.*.mlp.experts"'
    fits = emulates or not has_experts or torch.cuda.get_device_capability() == (9, 0)
    require(fits, "float8.enable", True, reason)
    # Modules of a kind share an object, which the compiler can then take for a constant of all layers' graphs.
    products: dict[tuple[int | None, bool], Float8Product] = {}
    experts = _experts_product(model, config, emulates, tensor_group)
    for name, module in linears:
        if isinstance(module, ExpertLinear):
            module.float8 = experts
            continue
        split, group = _split_of(name, module)
        of_part = isinstance(module, ReplicatedLinear) and module.sequence_parallel
        product = products.setdefault((split, of_part), Float8Product(config, emulates, split, group, of_part))
        with_own_gemms(module).float8 = product


def _experts_product(
    model: Transformer, config: Float8LinearConfig, emulates: bool, tensor_group: Group | None
) -> Float8Experts:
    """The product of all experts. Ranks that exchange rows will keep each microbatch's rows together."""
    tensor, ranks = 1 if tensor_group is None else tensor_group.size, 1
    for module in model.modules():
        if isinstance(module, SplitExperts):
            ranks = module.group.size
            module.microbatches = max(1, ranks // tensor)
    return Float8Experts(config, emulates, tensor_group if ranks < tensor else None, ranks)


def _split_of(name: str, module: nn.Linear) -> tuple[int | None, Group | None]:
    """The dimension of a module's weight that tensor-parallel ranks share, and these ranks; None if they do not.

    Raises a `ConfigError` if float8 products cannot take the shards, or the module was split by a style of torch's.
    """
    weight = module.weight
    if not isinstance(weight, DTensor):
        return None, None
    reason = f"{name} is split by torch's own style; use one of ours, or name it in float8.filter"
    require(isinstance(module, LinearGemms), "float8.enable", True, reason)
    rows, columns = weight.to_local().shape
    if rows % MULTIPLE or columns % MULTIPLE:
        reason = f"leaves a process {rows} × {columns} of {name}, but float8 takes multiples of {MULTIPLE}; lower it, "
        reason += "or name the module in float8.filter"
        raise ConfigError("parallelism.tensor_parallel_degree", weight.device_mesh.size(), reason)
    (placement,) = weight.placements
    return placement.dim if isinstance(placement, Shard) else None, Group.of(weight.device_mesh)


def float8_linears(model: Transformer, section: Float8) -> Iterator[tuple[str, nn.Linear | ExpertLinear]]:
    """The linear modules and experts that compute in float8, by name. The choice does not depend on the layout."""
    for name, module in model.layers.named_modules(prefix="layers"):
        if (
            not isinstance(module, nn.Linear | ExpertLinear)
            or module.in_features % MULTIPLE
            or module.out_features % MULTIPLE
        ):
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
        """The gathered weight, which autograd takes for one of this type.

        ``known`` is the weight of an earlier gather, whose numbers are up to date but not its scale.
        """
        if known is None:
            return Float8TrainingTensor(data, scale, self.dtype, LinearMMConfig(), GemmInputRole.WEIGHT)
        known._scale = scale
        return known
