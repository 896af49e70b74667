"""The device mesh: which processes form which groups."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_like.parallel.layout import Layout

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Mesh with the dimensions `DIMENSIONS`.

    Neighbouring ranks, on one node, share tensors: tensor parallelism talks most. Pipeline stages talk least and are
    farthest apart (arXiv 2104.04473, takeaway 1).
    """
    sizes = (layout.pipeline, layout.replicate, layout.shard, layout.tensor)
    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One dimension over the processes that see different samples and hold the same stage and shard of tensors."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")
