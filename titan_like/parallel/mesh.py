"""The device mesh, which says how ranks form process groups."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_like.parallel.layout import Layout
from titan_like.torch_private import flattened

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")


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
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    return flattened(mesh["dp_replicate", "dp_shard"], "dp")
