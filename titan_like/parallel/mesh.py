"""The device mesh, which says how ranks form process groups."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_like.parallel.layout import Layout
from titan_like.torch_private import flattened

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_DIMENSIONS = ("pp", "dp_replicate", "expert_shard", "ep")


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Arrange all ranks in a mesh with the dimensions `DIMENSIONS`.

    The ranks that share a sequence have the same weights, so they are part of ``dp_shard``: rank r of it has the
    samples of data rank r div context, and the slice r mod context of their sequences.

    Tensor parallelism communicates most, so its groups are neighbouring ranks on one node. Pipeline stages communicate
    least, so they are the farthest apart (arXiv 2104.04473, takeaway 1).
    """
    sizes = (layout.pipeline, layout.replicate, layout.weight_shards, layout.tensor)
    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One-dimensional mesh of the ranks that hold the same part of the model and see other samples or slices."""
    return one_dimension(mesh, "dp", "dp_replicate", "dp_shard")


def token_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One-dimensional mesh of the ranks of a stage, each of which has tokens of its own if tensor ranks split them."""
    return one_dimension(mesh, "tokens", "dp_replicate", "dp_shard", "tp")


def one_dimension(mesh: DeviceMesh, name: str, *dimensions: str) -> DeviceMesh:
    """One-dimensional mesh over neighbouring dimensions of a mesh, ``name`` if several are wider than 1.

    All processes of the job call it.
    """
    wider = [dimension for dimension in dimensions if mesh[dimension].size() > 1] or [dimensions[-1]]
    return mesh[wider[0]] if len(wider) == 1 else flattened(mesh[tuple(wider)], name)


def build_expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """The same ranks with the dimensions `EXPERT_DIMENSIONS`. All processes of the job call it.

    Of the ranks of ``dp_shard`` and ``tp``, which all have other tokens, ``size`` neighbours share the experts of a
    layer. ZeRO shards those of a rank over ``expert_shard``.
    """
    shards = mesh["dp_shard"].size() * mesh["tp"].size() // size
    sizes = (mesh["pp"].size(), mesh["dp_replicate"].size(), shards, size)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=EXPERT_DIMENSIONS)
