"""Attention over CP shards is exact by every method, with as many bytes as the formulas say."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import Collectives, collect
from tests.float64 import bound
from titan_like.data.batch import Batch
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.parallel.collectives import Group
from titan_like.parallel.context import CORES, CPShard
from titan_like.parallel.cp_attention import shard_positions
from titan_like.parallel.extend import extend

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 2, 8, 4, 32, 8
MASKS = ("causal", "documents", "prefix", "bidirectional")
# Windows that end within chunks of the sequence, and documents that do.
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 11}, "window documents": {"window": 7}, "softcap": {"softcap": 0.7},
    "sinks": {"num_sinks": HEADS}, "all documents": {"window": 3, "softcap": 0.7, "num_sinks": HEADS},
}  # fmt: skip


def mask_of(mask: str) -> KeyRanges | None:
    """Documents of 5, 11, 1 and 15 tokens, and in the second sample of 32; a prefix of 9 tokens in each."""
    order = torch.arange(LENGTH).expand(BATCH, -1)
    if mask in ("causal", "bidirectional", "window", "softcap", "sinks"):
        return None
    if mask == "prefix":
        return KeyRanges(torch.zeros_like(order), torch.maximum(order + 1, torch.full_like(order, 9)))
    starts = torch.tensor([0, 5, 16, 17]).repeat_interleave(torch.tensor([5, 11, 1, 15]))
    return KeyRanges(torch.stack((starts, torch.zeros_like(starts))), order + 1)


def attend_on_shards(rank: int, size: int) -> dict[str, Any]:
    """For each method and mask, how far the result and the gradients are from those of one process, and the bytes."""
    group = Group(dist.group.WORLD.group_name, size, rank)
    found: dict[str, Any] = {}
    exchange, messages = dist.batch_isend_irecv, Counter[str]()

    def counted(operations: list[dist.P2POp]) -> Any:
        messages["sent"] += sum(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return exchange(operations)

    for dtype in (torch.float64, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        shapes = [(BATCH, heads, LENGTH, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        *inputs, gradient = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for mask in (*MASKS, *FEATURES):
            for method in CORES:
                options = FEATURES.get(mask, {"is_causal": mask != "bidirectional"})
                whole, part = (AttentionCore(0.0, **options).to(torch.float64) for _ in range(2))
                for core in (whole, part):
                    if core.sinks is not None:
                        torch.nn.init.normal_(core.sinks, generator=torch.Generator().manual_seed(1))
                leaves = [x.clone().requires_grad_() for x in inputs]
                expected = whole(*leaves, mask_of(mask))
                expected.backward(gradient)
                extend(part, CORES[method], group=group)
                places = shard_positions(LENGTH, size, rank)
                own = [x[:, :, places].to(dtype).requires_grad_() for x in inputs]
                tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
                cp_shard = CPShard(size, rank, method)
                cut = cp_shard.shard(Batch(tokens, document_mask=mask_of(mask)))
                messages.clear()
                with Collectives() as sent, patch.object(dist, "batch_isend_irecv", counted):
                    result = part(*own, cut.document_mask)
                    result.backward(gradient[:, :, places].to(dtype))
                pairs = [(result, expected), *((x.grad, y.grad) for x, y in zip(own, leaves, strict=True))]
                norms = [y.double().norm() for _, y in pairs]
                errors = [(x.double() - y[:, :, places]).norm() / n for (x, y), n in zip(pairs, norms, strict=True)]
                if whole.sinks is not None and part.sinks is not None:  # a rank has the part of its queries or heads
                    total = part.sinks.grad.clone()
                    dist.all_reduce(total)
                    errors.append((total - whole.sinks.grad).norm() / whole.sinks.grad.norm())
                name = f"{dtype} {method} {mask}".removeprefix("torch.")
                for kind, taken, given in sent.calls:
                    messages[kind] += max(taken, given)
                found[name] = [error.item() for error in errors], dict(messages)
    return found


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.exhaustive), 4])
def attended(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, collect(attend_on_shards, request.param, request.param)


def test_every_method_is_exact_with_every_mask(attended: tuple[int, list[dict[str, Any]]]) -> None:
    _, ranks = attended
    assert all(len(found) == 2 * (len(MASKS) + len(FEATURES)) * len(CORES) for found in ranks)
    for found in ranks:
        for name, (errors, _) in found.items():
            if name.startswith("float64"):
                assert max(errors) < bound(), (name, errors)
            else:
                # Inputs, the result and gradients are rounded once each, by at most 2^-9; an error of the inputs
                # reaches a result through scores of about 3.
                assert max(errors) < 6 * 2.0**-9, (name, errors)


def test_bytes_are_those_of_the_formulas(attended: tuple[int, list[dict[str, Any]]]) -> None:
    """docs/long_context.md has the formulas."""
    size, ranks = attended
    for found in ranks:
        for name, (_, sent) in found.items():
            dtype, method, *_ = name.split()
            element, wide = (8, 8) if dtype == "float64" else (2, 4)
            row = BATCH * LENGTH * HEAD_DIM // size  # elements of a head on a process
            if method == "all_gather":
                both = 2 * KV_HEADS * row * size * element
                assert sent == {"all_gather_into_tensor": both, "reduce_scatter_tensor": both}, (name, sent)
            elif method == "ulysses":
                assert sent == {"all_to_all_single": 2 * (2 * HEADS + 2 * KV_HEADS) * row * element}, (name, sent)
            else:
                values, gradients = 2 * KV_HEADS * row * element, 2 * KV_HEADS * row * wide
                assert sent == {"sent": 2 * (size - 1) * values + size * gradients}, (name, sent)
