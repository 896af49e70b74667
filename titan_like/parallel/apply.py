"""One recipe from configuration to a model ready to train."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import build_model
from titan_like.models.transformer import Transformer
from titan_like.parallel.activation_checkpoint import apply_activation_checkpoint
from titan_like.parallel.data import DataParallel


def build_parallel_model(
    config: JobConfig, model_config: TransformerConfig, mesh: DeviceMesh, device: torch.device
) -> tuple[Transformer, DataParallel]:
    """Build on the meta device, apply every parallelism in order, allocate this rank's part, initialise it."""
    with torch.device("meta"):
        model = build_model(model_config, config.model.family)
    apply_activation_checkpoint(model, config.activation_checkpoint)
    if config.compile.enable:
        for layer in model.layers.values():  # whole layers: communication hooks stay outside the graph
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    if config.parallelism.zero_stage == 0:  # hooks on parameters: those must exist
        model.to_empty(device=device)
    dtypes = getattr(torch, config.training.dtype), getattr(torch, config.training.reduce_dtype)
    data_parallel = DataParallel(model, mesh, config.parallelism.zero_stage, *dtypes)
    if config.parallelism.zero_stage > 0:  # only this rank's shards are ever allocated
        model.to_empty(device=device)
    model.init_weights(config.job.seed)
    return model, data_parallel
