"""How fast bytes move between GPUs. Seconds, bytes, and bytes per second in one direction.

Collectives are rings, as NCCL runs them for large messages. Of its bytes, an all-reduce over n ranks moves 2(n-1)/n
over every link, and an all-gather or reduce-scatter (n-1)/n (NVIDIA nccl-tests, PERFORMANCE.md; arXiv 2104.04473,
section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, eq=False)
class Links:
    """Achieved bandwidths and latencies of a cluster of equal nodes."""

    gpus_per_node: int
    nvlink: float  # of one GPU
    node: float  # of all network cards of a node together, in collectives
    node_messages: float  # the same, in messages between two GPUs
    nvlink_latency: float
    network_latency: float
    ring_part: float = 1.0  # the largest share of a node's cards that one ring can use
    switched: bool = True  # NVLink has switches, so two GPUs can use all their links with each other
    one_node: bool = False  # the job has no more GPUs than one node

    def ring_bandwidth(self, size: int, stride: int) -> float:
        """Bytes per second of one ring while all GPUs of a node are in such rings.

        A ring has ``size`` ranks, ``stride`` apart. A node holds gpus_per_node / stride of a ring's ranks, and
        ``stride`` rings share its network cards.
        """
        if self._stays_inside(size, stride):
            return self.nvlink if self.switched else self.nvlink * (size - 1) / (self.gpus_per_node - 1)
        rings = min(stride, self.gpus_per_node)
        share = self.node * min(1 / rings, self.ring_part)
        return min(share, self.nvlink) if rings < self.gpus_per_node else share

    def all_reduce(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds to sum ``nbytes`` on every rank."""
        if size == 1 or nbytes == 0:
            return 0.0
        latency, per_byte = _ring(self, size, stride)
        few = min(1, 64 / (size - 1))  # NCCL changes to trees, whose latency grows with the logarithm
        return 2 * (few * latency + nbytes * per_byte)

    def all_gather(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds to all-gather a result of ``nbytes``; a reduce-scatter of an input of that size takes as long."""
        if size == 1 or nbytes == 0:
            return 0.0
        latency, per_byte = _ring(self, size, stride)
        return latency + nbytes * per_byte

    def _stays_inside(self, size: int, stride: int) -> bool:
        """Whether no ring leaves its node. If groups do not divide a node evenly, some of them span two nodes."""
        ranks = size * stride
        return ranks <= self.gpus_per_node and (self.one_node or self.gpus_per_node % ranks == 0)

    def ring_latency(self, size: int, stride: int) -> float:
        """Seconds until the first byte is round a ring, over hops inside nodes and, if it leaves one, between nodes."""
        hops, between = size - 1, 0
        if not self._stays_inside(size, stride):
            between = max(1, -(-size * stride // self.gpus_per_node) - 1) if stride < self.gpus_per_node else hops
        return between * self.network_latency + (hops - between) * self.nvlink_latency

    def message(self, nbytes: float, stride: int, ranks: int = 2) -> float:
        """Seconds of the slowest message if each GPU sends one to the GPU ``stride`` further on, in rows of ``ranks``.

        A row that does not fit in a node leaves it, and each GPU then has its share of the node's cards.
        """
        if stride * ranks <= self.gpus_per_node:
            return self.nvlink_latency + nbytes / self.nvlink
        return self.network_latency + nbytes * self.gpus_per_node / self.node_messages


@lru_cache(maxsize=4096)
def _ring(links: Links, size: int, stride: int) -> tuple[float, float]:
    """One way round a ring: seconds for the first byte, and seconds per byte of the result."""
    return links.ring_latency(size, stride), (size - 1) / size / links.ring_bandwidth(size, stride)
