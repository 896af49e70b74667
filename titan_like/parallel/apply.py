"""The one recipe from a configuration to a model that is ready to train.

The steps, in order: split into pipeline stages, adapters, tensor and context parallelism, activation checkpointing,
compilation, data parallelism, allocation of this process's part, initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.errors import ConfigError, blamed_on
from titan_like.config.schema import JobConfig
from titan_like.data.loading.lengths import sample_length
from titan_like.models.config import TransformerConfig, has_experts
from titan_like.models.layers.cross_entropy import TokenLoss
from titan_like.models.layers.experts import mark_stacks
from titan_like.models.registry import build_model
from titan_like.parallel.activation_checkpoint import apply_activation_checkpoint
from titan_like.parallel.collectives import Group
from titan_like.parallel.compile import compile_layers, compile_whole
from titan_like.parallel.compile_scope import compile_scope
from titan_like.parallel.context import apply_context_parallel
from titan_like.parallel.cuda_graph import GraphedModel
from titan_like.parallel.data import DataParallel, shares_nothing
from titan_like.parallel.experts import apply_expert_parallel
from titan_like.parallel.kv_heads import share_heads
from titan_like.parallel.layout import method_of, resolve_layout
from titan_like.parallel.lora import add_adapters, freeze
from titan_like.parallel.mesh import build_expert_mesh, context_group, kv_group
from titan_like.parallel.model import ParallelModel, Stage, WholeModel, stages_of_tied_parameters
from titan_like.parallel.offload import offload_activations
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD
from titan_like.parallel.split import StageLayers, layers_per_stage, split_layers
from titan_like.parallel.tensor import apply_tensor_parallel
from titan_like.parallel.tuning import DEFAULT_TUNING, Tuning
from titan_like.parallel.weight_gradients import defer_weight_gradients

if TYPE_CHECKING:
    from titan_like.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class Recipe:
    """What all stages of a process are built from."""

    config: JobConfig
    model: TransformerConfig
    mesh: DeviceMesh
    device: torch.device
    tuning: Tuning = DEFAULT_TUNING
    data_parallel: Callable[..., DataParallel] = DataParallel  # takes what `DataParallel` takes


def build_pipeline(
    config: JobConfig,
    model_config: TransformerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    tuning: Tuning = DEFAULT_TUNING,
) -> Pipeline | WholeModel:
    """Build and initialise this process's stages, and return what runs batches through them."""
    model = build_parallel_model(config, model_config, mesh, device, tuning)
    model.init_weights(config.job.seed)
    positions = sample_length(config, model_config).positions
    return run_batches(config, model, mesh, device, config.training.micro_batch_size, positions)


def run_batches(
    config: JobConfig, model: ParallelModel, mesh: DeviceMesh, device: torch.device, batch: int, seq_len: int
) -> Pipeline | WholeModel:
    """Wrap a model in the object that runs microbatches of ``batch`` sequences of ``seq_len`` through its stages."""
    layout = resolve_layout(config.parallelism, mesh.size())
    if layout.pipeline == 1:
        return GraphedModel(model, layout) if config.compile.cudagraphs else WholeModel(model, layout)
    from titan_like.parallel.pipeline import Pipeline  # importing torch's pipelining takes a second

    hidden_shape = batch, seq_len // layout.sequence_shards, model.stages[0].module.config.hidden_size
    dtype = getattr(torch, config.training.dtype)
    return Pipeline(model, layout, mesh["pp"].get_group(), hidden_shape, dtype, device)


def build_parallel_model(
    config: JobConfig,
    model_config: TransformerConfig,
    mesh: DeviceMesh,
    device: torch.device,
    tuning: Tuning = DEFAULT_TUNING,
) -> ParallelModel:
    """Build this process's stages, allocated but not yet initialised."""
    pp_rank, ranks = mesh["pp"].get_local_rank(), resolve_layout(config.parallelism, mesh.size()).stage_ranks
    splits = split_layers(layers_per_stage(config, model_config, len(ranks)))
    local_splits = {index: splits[index] for index, rank in enumerate(ranks) if rank == pp_rank}
    stages, expert_mesh = build_stages(Recipe(config, model_config, mesh, device, tuning), local_splits)
    return ParallelModel(stages, stages_of_tied_parameters(model_config, splits), expert_mesh)


def build_stages(recipe: Recipe, splits: Mapping[int, StageLayers]) -> tuple[list[Stage], DeviceMesh | None]:
    """Build some stages, by their number in the pipeline, and the mesh that splits experts, if they need their own."""
    mesh = recipe.mesh
    layout = resolve_layout(recipe.config.parallelism, mesh.size())
    context = context_group(layout) if layout.context > 1 else None
    has_own_mesh = has_experts(recipe.model) and layout.splits_experts
    expert_mesh = build_expert_mesh(layout, mesh.device_type) if has_own_mesh else None
    shares_heads = layout.ranks_per_kv_head(recipe.model.num_kv_heads) > 1
    groups = context, kv_group(layout, recipe.model.num_kv_heads) if shares_heads else None
    return [build_stage(recipe, index, split, *groups, expert_mesh) for index, split in splits.items()], expert_mesh


def build_stage(
    recipe: Recipe,
    index: int,
    split: StageLayers,
    context: Group | None = None,
    heads: Group | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Stage:
    """Build one stage on the meta device, apply every parallelism in order, and allocate this process's part.

    ``context`` is the CP group, and ``heads`` has the ranks that share a key-value head, if any do.

    Raises a `ConfigError` if the tensor-parallel plan, or float8, does not fit the model.
    """
    config, mesh, device, tuning = recipe.config, recipe.mesh, recipe.device, recipe.tuning
    layout, zero_stage = resolve_layout(config.parallelism, mesh.size()), config.parallelism.zero_stage
    dtype = getattr(torch, config.training.dtype)
    # Master weights are float32. Only float64 training, which exists for exact comparisons, keeps them in float64.
    with torch.device("meta"):
        module = build_model(recipe.model, config.model.family).to(torch.promote_types(dtype, torch.float32))
    module.keep_stage(split.layers, split.is_first, split.is_last)
    module.initial_elements = tuning.initial_elements
    for part in module.modules():
        if isinstance(part, TokenLoss):
            part.chunk = tuning.loss_logits
    if config.lora.rank:
        add_adapters(module, config.lora)
    if expert_mesh is not None:
        apply_expert_parallel(module, expert_mesh["ep", "etp"] if layout.expert_tensor > 1 else expert_mesh["ep"])
    if layout.tensor > 1:
        with blamed_on("model.family", config.model.family, after="; correct the family's sharding module"):
            apply_tensor_parallel(module, mesh["tp"], layout.sequence_parallel)
    if heads is not None:
        share_heads(module, heads)
    if config.lora.rank:
        freeze(module, dtype)
    if context is not None:
        apply_context_parallel(module, context, method_of(config, recipe.model).name)
    if config.float8.enable:
        try:
            from titan_like.parallel.float8 import use_float8  # which imports torchao
        except ImportError as error:
            reason = f'torchao cannot be used ({error}); pip install "titan_like[float8]", or set it to false'
            raise ConfigError("float8.enable", True, reason) from None

        emulates = device.type != "cuda" or dtype == torch.float64
        use_float8(module, config.float8, emulates, Group.of(mesh["tp"]) if layout.tensor > 1 else None)
    # A compiled layer's backward pass cannot be split. Zero-bubble schedules still run then, but gain nothing.
    splits_backward = layout.schedule in SPLIT_BACKWARD and not config.compile.enable
    weight_gradients = defer_weight_gradients(module) if splits_backward else None
    compiles_whole = config.compile.enable and compile_scope(config, recipe.model, layout) == "model"
    # Full recomputation wraps the compiled layer: torch cannot compile recomputation and DTensors together.
    recomputes_compiled_layers = config.activation_checkpoint.mode == "full" and not compiles_whole
    if not recomputes_compiled_layers:
        apply_activation_checkpoint(module, config.activation_checkpoint)
    if compiles_whole:
        compile_whole(module)
    elif config.compile.enable:
        # Split experts exchange rows outside of graphs.
        compile_layers(module, config.activation_checkpoint, fullgraph=expert_mesh is None)
    if recomputes_compiled_layers:
        apply_activation_checkpoint(module, config.activation_checkpoint)
    if config.activation_checkpoint.offload:
        offload_activations(module, device, tuning)
    allocates_whole = zero_stage == 0 or shares_nothing(mesh, expert_mesh)
    if allocates_whole:  # hooks and copies need parameters that are already allocated
        module.to_empty(device=device)
    sharded = recipe.data_parallel(module, mesh, expert_mesh, config, tuning)
    if not allocates_whole:  # after sharding, so that only this process's shards are ever allocated
        module.to_empty(device=device)
    mark_stacks(module)
    gathers_weights = zero_stage > 0 and mesh["dp_shard"].size() > 1
    # The second part of a split backward pass sets gradients by hand, which float8 parameters do not take.
    if config.float8.enable and config.float8.recipe == "tensorwise" and gathers_weights and weight_gradients is None:
        from titan_like.parallel.float8 import Float8Gathers

        Float8Gathers(module, mesh, dtype)
    return Stage(index, module, sharded, weight_gradients)
