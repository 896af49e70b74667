"""CP shards of sequences, as numbers."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from titan_like.data.batch import Batch
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import KeyRanges, block_mask
from titan_like.parallel.collectives import Group
from titan_like.parallel.context import CPShard, RingCore, apply_context_parallel
from titan_like.parallel.cp_attention import attention, shard_positions
from titan_like.parallel.extend import extend


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_have_every_position_once_and_equal_work(size: int) -> None:
    length = 1024
    shards = [shard_positions(length, size, rank) for rank in range(size)]
    assert torch.cat(shards).sort().values.equal(torch.arange(length))
    work = torch.stack([(own + 1).sum() for own in shards]).double()  # pairs of a query and a key that it sees
    assert work.max() / work.mean() == 1


def test_a_shard_keeps_positions_masks_and_labels_of_its_tokens() -> None:
    tokens, order = torch.arange(100, 116)[None], torch.arange(16)[None]
    mask = KeyRanges(order // 4 * 4, order + 1)
    sample_labels, factors = torch.tensor([3]), torch.ones(2)
    whole = Batch(tokens, tokens + 1, order % 4, mask, padding_mask=tokens >= 110, sample_labels=sample_labels)
    whole = whole._replace(loss_factors=factors)
    cut = CPShard(2, 1, "all_gather").shard(whole)
    assert cut.padding_mask is not None and cut.padding_mask.tolist() == [[False] * 6 + [True] * 2]
    assert cut.tokens.tolist() == [list(range(104, 112))] and cut.labels is not None
    assert cut.labels.tolist() == [list(range(105, 113))]
    assert cut.positions is not None and cut.positions.tolist() == [[0, 1, 2, 3] * 2]
    assert cut.document_mask is not None and cut.document_mask.first.tolist() == [[4] * 4 + [8] * 4]
    assert cut.document_mask.end.tolist() == [list(range(5, 13))]
    assert cut.sample_labels is sample_labels and cut.loss_factors is factors
    cut = CPShard(2, 0, "ulysses").shard(Batch(tokens, document_mask=mask))
    assert cut.document_mask is mask and cut.positions is not None
    assert cut.positions.tolist() == [*range(4), *range(12, 16)]


def test_an_encoder_and_a_decoder_are_sharded_apart() -> None:
    tokens = torch.arange(12)[None]  # 8 of the encoder
    cut = CPShard(2, 0, "all_gather").shard(Batch(tokens, tokens, encoder_len=8))
    assert cut.labels is not None
    assert cut.tokens.tolist() == cut.labels.tolist() == [[0, 1, 6, 7, 8, 11]]
    assert cut.encoder_len == 4 and cut.document_mask is None
    assert cut.positions is not None and cut.positions.tolist() == [0, 1, 6, 7, 0, 3]


def test_blocks_of_a_shard_of_queries_say_what_they_see() -> None:
    places = shard_positions(1024, 2, 1)
    mask = block_mask(torch.zeros_like(places)[None], places[None] + 1, 1024)
    assert mask.shape == (1, 1, 512, 1024)
    seen = mask.to_dense()[0, 0]
    assert seen.int().tolist() == [[int(128 * key <= last) for key in range(8)] for last in places[127::128].tolist()]


class Sharded(nn.Module):
    """Shards the context of its part, which could do so alone."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part, self.groups = part, list[Group]()

    def shard_context(self, group: Group) -> None:
        self.groups.append(group)
        if isinstance(self.part, Sharded):
            self.part.shard_context(group)


def test_nested_modules_shard_the_context_once() -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleList([Sharded(Sharded(AttentionCore(0.0))), Sharded()])
    group = cast(Group, SimpleNamespace(size=2))
    apply_context_parallel(model, group, "ring")
    outer, alone = model.layers
    assert outer.groups == outer.part.groups == alone.groups == [group]
    assert isinstance(outer.part.part, RingCore) and model.context_shards == 2


@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_denominators_are_merged_in_float32(is_masked: bool, travels: bool) -> None:
    """A rounded one would be lost among the rounding of bfloat16 inputs."""
    q, k, v = (torch.randn(1, heads, 16, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    order = torch.arange(16)[None]
    first, end = (order * 0, order + 1) if is_masked else (None, None)
    # Of one process, which sends nothing.
    result, denominator = attention(q, torch.stack((k, v)), first, end, None, True, 0.5, 0.0, 0, "", 1, 0, travels)
    scores = (q.float() @ k.repeat_interleave(2, 1).float().transpose(2, 3)) * 0.5
    expected = scores.masked_fill(order > order.T, -torch.inf).logsumexp(3)
    assert result.dtype == torch.bfloat16 and denominator.dtype == torch.float32
    # bfloat16 would round it by up to 2⁻⁸. In half types torch's kernel takes exponentials that on CPUs without AVX-512
    # are off by about 2⁻¹⁴.
    torch.testing.assert_close(denominator, expected, rtol=0, atol=2.0**-12)


def test_a_ring_refuses_biases_instead_of_leaving_them_out() -> None:
    q, bias = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 16)
    extend(core := AttentionCore(0.0), RingCore, group=None)
    with pytest.raises(ValueError, match="all_gather"):
        core(q, q, q, None, bias)
