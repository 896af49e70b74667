"""How fast bytes move between GPUs. Times in seconds, sizes in bytes, bandwidths in bytes per second, one direction.

Rings, as NCCL runs them for large messages: an all-reduce of n ranks moves 2(n-1)/n of its bytes over every link, an
all-gather or reduce-scatter (n-1)/n (NVIDIA nccl-tests, PERFORMANCE.md; arXiv 2104.04473, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, eq=False)
class Links:
    """Achieved bandwidths and latencies of a cluster of equal nodes."""

    gpus_per_node: int
    nvlink: float  # of one GPU
    node: float  # all of a node's network cards together, for collectives
    node_messages: float  # the same for messages between two GPUs
    nvlink_latency: float
    network_latency: float
    ring_part: float = 1.0  # of a node's cards, the most that one ring uses
    switched: bool = True  # NVLink through switches: two GPUs can use all their links with each other
    one_node: bool = False  # the job has no more GPUs than a node

    def ring_bandwidth(self, size: int, stride: int) -> float:
        """What one ring gets when all GPUs of a node are in such rings at once.

        Ranks ``stride`` apart, ``size`` of them: a node holds gpus_per_node / stride of a ring's ranks, and as many
        rings as the stride, which share the node's cards.
        """
        if self._stays_inside(size, stride):
            return self.nvlink if self.switched else self.nvlink * (size - 1) / (self.gpus_per_node - 1)
        rings = min(stride, self.gpus_per_node)
        share = self.node * min(1 / rings, self.ring_part)
        return min(share, self.nvlink) if rings < self.gpus_per_node else share

    def all_reduce(self, nbytes: float, size: int, stride: int) -> float:
        """Sum of ``nbytes`` on every rank."""
        if size == 1 or nbytes == 0:
            return 0.0
        latency, per_byte = _ring(self, size, stride)
        few = min(1, 64 / (size - 1))  # NCCL turns to trees, whose latency grows with the logarithm
        return 2 * (few * latency + nbytes * per_byte)

    def all_gather(self, nbytes: float, size: int, stride: int) -> float:
        """Result of ``nbytes`` on every rank; a reduce-scatter of such an input takes as long."""
        if size == 1 or nbytes == 0:
            return 0.0
        latency, per_byte = _ring(self, size, stride)
        return latency + nbytes * per_byte

    def _stays_inside(self, size: int, stride: int) -> bool:
        """Whether no ring leaves its node. Where nodes do not hold a whole number of groups, some have ranks in two."""
        ranks = size * stride
        return ranks <= self.gpus_per_node and (self.one_node or self.gpus_per_node % ranks == 0)

    def ring_latency(self, size: int, stride: int) -> float:
        """Of a first byte's way round a ring; between nodes only where the ring leaves one."""
        hops, between = size - 1, 0
        if not self._stays_inside(size, stride):
            between = max(1, -(-size * stride // self.gpus_per_node) - 1) if stride < self.gpus_per_node else hops
        return between * self.network_latency + (hops - between) * self.nvlink_latency

    def message(self, nbytes: float, stride: int, ranks: int = 2) -> float:
        """From each GPU to the one ``stride`` on, in rows of so many ranks, all GPUs at once: the slowest message.

        A row that does not end in its node leaves it, and each GPU has its part of the node's cards.
        """
        if stride * ranks <= self.gpus_per_node:
            return self.nvlink_latency + nbytes / self.nvlink
        return self.network_latency + nbytes * self.gpus_per_node / self.node_messages


@lru_cache(maxsize=4096)
def _ring(links: Links, size: int, stride: int) -> tuple[float, float]:
    """Of one way round: seconds of the first byte, and of each byte of the result."""
    return links.ring_latency(size, stride), (size - 1) / size / links.ring_bandwidth(size, stride)
