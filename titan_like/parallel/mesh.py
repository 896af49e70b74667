"""The device mesh: which processes form which groups."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_like.parallel.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Mesh with the dimensions (dp_replicate, dp_shard); ranks of one shard group are neighbours."""
    return init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One dimension over all processes that see different samples."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")
