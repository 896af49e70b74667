"""What collectives achieved between processes, as bench_comm.py measures it.

Sizes and bus bandwidths are defined as in NCCL's tests (doc/PERFORMANCE.md of nccl-tests): the size is the whole
buffer's, which for an all-gather is the result; the bus bandwidth is what each process sends and receives on its links,
whatever their number is.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

BETWEEN_NODES = "two nodes"  # ranks with the same number on two nodes
# Operation → bytes that each of n processes sends over its link, as a share of the buffer.
BUS_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_receive": lambda n: 1.0,
}


@dataclass(frozen=True)
class Measurement:
    """One operation on buffers of one size, in all groups of a dimension at the same time."""

    dimension: str
    processes: int  # in a group
    operation: str
    bytes: int
    seconds: float  # on the slowest process
    sharing: int = 0  # groups that share a node's links to others; 0: they stay inside one node

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the buffer per second."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each process sends."""
        return self.algorithm_bandwidth * BUS_SHARES[self.operation](self.processes)

    def as_dict(self) -> dict[str, Any]:
        """The measurement for JSON."""
        rates = {"algorithm_bandwidth": self.algorithm_bandwidth, "bus_bandwidth": self.bus_bandwidth}
        return asdict(self) | rates


def operation_on(name: str, buffer: torch.Tensor, spare: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """One run of an operation on ``buffer``, whose elements the group's size divides. ``spare`` is as large."""
    n, rank = group.size(), group.rank()
    if n == 1:
        return lambda: None
    part = spare[: buffer.numel() // n]
    if name == "send_receive":
        to, source = (dist.get_global_rank(group, (rank + step) % n) for step in (1, -1))

        def exchange() -> None:
            messages = [dist.P2POp(dist.isend, buffer, to, group), dist.P2POp(dist.irecv, spare, source, group)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        return exchange
    return {
        "all_reduce": lambda: dist.all_reduce(buffer, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(buffer, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, buffer, group=group),
        "all_to_all": lambda: dist.all_to_all_single(spare, buffer, group=group),
    }[name]
