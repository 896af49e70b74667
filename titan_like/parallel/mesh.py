"""The device mesh, which says how ranks form process groups."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_like.parallel.collectives import Group
from titan_like.parallel.layout import Layout
from titan_like.torch_private import flattened


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Arrange all ranks in a mesh with the dimensions of `Layout.mesh`.

    Tensor parallelism communicates most, so its groups are neighbouring ranks on one node. Pipeline stages communicate
    least, so they are the farthest apart (arXiv 2104.04473, takeaway 1).
    """
    return init_device_mesh(device_type, tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))


def one_dimension(mesh: DeviceMesh, name: str, *dimensions: str) -> DeviceMesh:
    """One-dimensional mesh over neighbouring dimensions of a mesh, ``name`` if several are wider than 1.

    All processes of the job call it.
    """
    wider = [dimension for dimension in dimensions if mesh[dimension].size() > 1] or [dimensions[-1]]
    return mesh[wider[0]] if len(wider) == 1 else flattened(mesh[tuple(wider)], name)


def build_expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The same ranks, by the ranks that hold the same experts. All processes of the job call it.

    EP groups are neighbours among the ranks of ``dp_shard`` and ``tp``, which all have different tokens. Where tensor
    parallelism splits experts too, ``etp`` is its dimension.
    """
    sizes = {"pp": layout.pipeline, "dp_replicate": layout.replicate, "expert_shard": layout.expert_shards}
    sizes |= {"ep": layout.expert} | ({"etp": layout.expert_tensor} if layout.expert_tensor > 1 else {})
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def context_group(layout: Layout) -> Group:
    """This rank's CP group. All processes of the job call it."""
    ranks = torch.arange(layout.num_processes).view(-1, layout.context, layout.tensor).transpose(1, 2)
    return _group(ranks.reshape(-1, layout.context), "cp")


def kv_group(layout: Layout, num_kv_heads: int) -> Group:
    """The tensor-parallel ranks that share a key-value head with this one. All processes of the job call it."""
    return _group(torch.arange(layout.num_processes).view(-1, layout.ranks_per_kv_head(num_kv_heads)), "kv")


def _group(ranks: torch.Tensor, name: str) -> Group:
    """This rank's group. A row of ``ranks`` is a group."""
    groups, world = ranks.tolist(), dist.group.WORLD
    if world is not None and world.bound_device_id is not None:  # NCCL: one split makes all groups, as in DeviceMesh
        group = dist.split_group(world, groups, group_desc=name)
    else:
        group, _ = dist.new_subgroups_by_enumeration(groups, group_desc=name)
    assert group is not None
    return Group(group.group_name, group.size(), group.rank())
