"""How tensor parallelism splits what computes head by head or channel by channel: see `tensor_styles`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from titan_like.models.layers.init import generator_of
from titan_like.parallel.tensor_base import TensorParallel, local


class OwnRandomNumbers(TensorParallel):
    """Base of what draws random numbers for features or heads of this rank, where ranks share a stream."""

    @contextmanager
    def own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw from a stream of this rank."""
        # All ranks draw the same number from the CPU's generator, which needs no wait for the device. Activation
        # checkpointing restores that generator, so a recomputation draws the same number again.
        seed = int(torch.randint(2**48, ())) * self.tensor_group.size + self.tensor_group.rank
        generator = generator_of(device)
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


class SplitHeads(OwnRandomNumbers):
    """Splits heads and their sinks. Each rank has its own attention dropout; all other random numbers are shared."""

    placements: ClassVar = {"sinks": Shard(0)}
    sinks: Any

    @classmethod
    def split(cls, module: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """As in the base class, if there are sinks, or dropout that without sequence parallelism would be shared."""
        if module.sinks is not None or (module.dropout and not sequence_parallel):
            super().split(module, mesh, sequence_parallel)

    def local_sinks(self) -> torch.Tensor | None:
        """Return the sinks of this rank's heads."""
        return None if self.sinks is None else local(self.sinks)

    def forward(self, *inputs: Any) -> torch.Tensor:
        """As the module itself, on [batch, heads here, seq, head_dim], with a random stream of this rank."""
        if not (self.training and self.dropout):
            return super().forward(*inputs)
        with self.own_random_numbers(inputs[0].device):
            return super().forward(*inputs)


_OF_CHANNELS = ("weight", "bias", "conv", "a_log", "dt_bias", "skip", "alpha_p", "alpha_n")


class SplitChannels(TensorParallel):
    """Splits the heads or channels of a module that computes from its `weights`."""

    placements: ClassVar = dict.fromkeys(_OF_CHANNELS, Shard(0))

    def weights(self) -> tuple[torch.Tensor | None, ...]:
        """Return the weights of this rank's heads or channels."""
        weights = super().weights()  # type: ignore[misc]
        return tuple(None if weight is None else local(weight) for weight in weights)


class SharedChannels(SplitChannels):
    """Replicates, in a region, channels that all ranks' heads read."""

    placements: ClassVar = dict.fromkeys(_OF_CHANNELS, Replicate())
    always_partial = _OF_CHANNELS
