"""The base class of what tensor parallelism does with a module (`titan_like.parallel.tensor_styles`)."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from titan_like.parallel.collectives import CopyToTensorRegion, Group, ReduceFromTensorRegion
from titan_like.parallel.extend import extend


class TensorParallel(nn.Module):
    """Base of the kinds, which `extend` puts in front of a module's class."""

    placements: ClassVar[dict[str, Placement]] = {}  # of the module's own parameters
    partial_gradients: ClassVar[tuple[str, ...]] = ()  # parameters whose gradients sequence parallelism leaves partial
    always_partial: ClassVar[tuple[str, ...]] = ()  # in a region: whole parameters, of which each rank has its own uses
    tensor_group: Group
    sequence_parallel: bool
    weight: Any  # these are the module's own
    bias: Any
    vocab_size: int
    padded_vocab_size: int

    @classmethod
    def split(cls, module: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """Distribute a module's own parameters, and extend it. Every rank has the full values, or none on meta.

        Raises a `ValueError` if a rank would hold nothing of a parameter.
        """
        for name, parameter in list(module.named_parameters(recurse=False)):
            distributed = distribute_tensor(parameter.data, mesh, [cls.placements[name]], src_data_rank=None)
            if distributed.to_local().numel() == 0:
                raise ValueError(f"{tuple(parameter.shape)} cannot be split over {mesh.size()}: one would hold nothing")
            module.register_parameter(name, nn.Parameter(distributed))
        extend(module, cls, tensor_group=Group.of(mesh), sequence_parallel=sequence_parallel)

    def copy_to_region(self, x: torch.Tensor) -> torch.Tensor:
        """Activation between layers → full activation [batch, seq, hidden]; sums its gradient over the ranks."""
        return CopyToTensorRegion.apply(x, self.sequence_parallel, self.tensor_group)

    def reduce_from_region(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums [batch, seq, hidden] → activation between layers."""
        return ReduceFromTensorRegion.apply(x, self.sequence_parallel, self.tensor_group)


class Style(ParallelStyle):
    """The style of a name in a plan, for `parallelize_module`."""

    def __init__(self, kind: type[TensorParallel], sequence_parallel: bool) -> None:
        self.kind, self.sequence_parallel = kind, sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.kind.split(module, device_mesh, self.sequence_parallel)
        return module


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter of any shape. Its gradient becomes the parameter's, with the same placement."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
