"""Memory of the loss with its output matrix, forward and backward, in several ways.

    python benchmarks/loss.py [--positions 8192 --vocab 128256 --hidden 2048] [--dtype float32] [--json FILE]

ours      `titan_like.models.layers.cross_entropy`: chunks of positions, each with its gradient
eager     whole logits, a float32 copy and torch's cross entropy, as most training loops have it
torch     `F.linear_cross_entropy`, where torch has it (from 2.13 on)

Bytes are the most at any moment beyond inputs and weights, counted operator by operator on tensors without memory, so
no machine is too small. Operators that compute on a GPU in one compiled kernel are counted as on a CPU, block by block.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from runs import ROOT, parser_of, write
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT))

from titan_like.models.layers import cross_entropy

Side = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside this context that are alive, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        given = {one.untyped_storage()._cdata for one in arguments}
        result = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given | self._known:
                self._add(one.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def ours(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The trainer's loss."""
    factor = torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32))
    return cross_entropy.TokenLoss(len(weight), len(weight))(x[None], weight, None, labels[None], factor)


def eager(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whole logits and torch's cross entropy in float32."""
    return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")


def fused(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What torch offers."""
    return F.linear_cross_entropy(x, weight, labels, reduction="sum")  # type: ignore[attr-defined]


SIDES: dict[str, Side] = {"ours": ours, "eager": eager}
if hasattr(F, "linear_cross_entropy"):
    SIDES["torch"] = fused


def peak_bytes(side: Side, options: argparse.Namespace) -> int:
    """The most bytes at once, inputs and weights excepted."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = getattr(torch, options.dtype)
        x = torch.empty(options.positions, options.hidden, dtype=dtype, requires_grad=True)
        weight = torch.empty(options.vocab, options.hidden, dtype=dtype, requires_grad=True)
        labels = torch.zeros(options.positions, dtype=torch.int64)
        with LiveBytes() as live:
            side(x, weight, labels).backward()
        return live.peak


def main() -> None:
    """Measure every side and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()
    bytes_of = {name: peak_bytes(side, options) for name, side in SIDES.items()}
    ours_over = {name: round(bytes_of["ours"] / size, 3) for name, size in bytes_of.items()}
    rows = [{"side": name, "peak_bytes": size, "ours_over_it": ours_over[name]} for name, size in bytes_of.items()]
    for row in rows:
        print(f"{row['side']:6} {row['peak_bytes'] / 2**20:10,.0f} MiB   ours ÷ it {row['ours_over_it']:.2f}")
    shape = {name: getattr(options, name) for name in ("positions", "vocab", "hidden", "dtype")}
    write(options.json, {"torch": torch.__version__, **shape, "rows": rows})


if __name__ == "__main__":
    main()
