"""Bugs in masks, prefixes, positions and labels of packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan_like.data import masks
from titan_like.data.masked_tokens import MaskedTokens
from titan_like.data.masks import MaskedSamples, Masks
from titan_like.data.source import IGNORED_LABEL
from titan_like.models.layers import interval_attention
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.visible import VisibleKeys
from titan_like.models.transformer import ModelInputs, Transformer
from titan_like.parallel.collectives import Group
from titan_like.parallel.tensor_styles import PositionEmbedding
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer


@contextmanager
def later_stages_attend_causally() -> Iterator[None]:
    """Pipeline stages after the first get no mask."""
    original = Transformer.forward

    def forward(self: Transformer, x: torch.Tensor, positions: Any = None, visible: Any = None, *others: Any) -> Any:
        return original(self, x, positions, visible if self.is_first else None, *others)

    with patch.object(Transformer, "forward", forward):
        yield


@contextmanager
def later_stages_count_positions_through() -> Iterator[None]:
    """Pipeline stages after the first get no positions."""
    original = Transformer.forward

    def forward(self: Transformer, x: torch.Tensor, positions: Any = None, visible: Any = None, *others: Any) -> Any:
        return original(self, x, positions if self.is_first else None, visible, *others)

    with patch.object(Transformer, "forward", forward):
        yield


@contextmanager
def recomputation_attends_causally() -> Iterator[None]:
    """What is recomputed has no mask."""
    original = AttentionCore.forward

    def forward(
        self: AttentionCore, q: Any, k: Any, v: Any, visible: VisibleKeys | None = None, bias: Any = None
    ) -> torch.Tensor:
        if visible is not None and is_in_backward_pass():
            visible = visible._replace(end=torch.arange(1, q.shape[2] + 1).expand_as(visible.end))
        return original(self, q, k, v, visible, bias)

    with patch.object(AttentionCore, "forward", forward):
        yield


@contextmanager
def first_part_of_positions_everywhere() -> Iterator[None]:
    """Under sequence parallelism every process looks up the positions of the sequence's first part."""
    original = PositionEmbedding.forward

    def forward(self: PositionEmbedding, module: Any, group: Group, positions: torch.Tensor) -> torch.Tensor:
        first = positions[..., : positions.shape[-1] // group.size]
        positions = torch.cat([first] * group.size, -1) if self.sequence_parallel else positions
        return original(self, module, group, positions)

    with patch.object(PositionEmbedding, "forward", forward):
        yield


@contextmanager
def second_half_of_heads_sees_all_documents() -> Iterator[None]:
    """Tensor-parallel processes but the first let tokens see other documents."""
    original = AttentionCore.forward

    def forward(
        self: AttentionCore, q: Any, k: Any, v: Any, visible: VisibleKeys | None = None, bias: Any = None
    ) -> torch.Tensor:
        if visible is not None and dist.get_rank() % 2:
            visible = visible._replace(first=torch.zeros_like(visible.first))
        return original(self, q, k, v, visible, bias)

    with patch.object(AttentionCore, "forward", forward):
        yield


@contextmanager
def documents_leak() -> Iterator[None]:
    """Tokens see the documents before theirs."""
    original = Masks.split_rows

    def split_rows(self: Masks, batch: torch.Tensor) -> tuple[ModelInputs, torch.Tensor]:
        inputs, labels = original(self, batch)
        assert inputs.visible is not None
        visible = inputs.visible._replace(first=torch.zeros_like(inputs.visible.first))
        return inputs._replace(visible=visible), labels

    with patch.object(Masks, "split_rows", split_rows):
        yield


@contextmanager
def prefix_one_token_short() -> Iterator[None]:
    """The last token of a prefix is not seen by the tokens before it."""
    original = masks.prefix_ends

    def prefix_ends(first: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        return torch.maximum(original(first, seed, index) - 1, first)

    with patch.object(masks, "prefix_ends", prefix_ends):
        yield


@contextmanager
def masks_drawn_by_each_process() -> Iterator[None]:
    """Data-parallel processes draw prefixes and masked tokens from a seed of their own."""
    original = Masks.add_rows

    def add_rows(self: Masks, sample: torch.Tensor, index: int) -> torch.Tensor:
        return original(self, sample, index + (dist.get_rank() << 40))

    with patch.object(Masks, "add_rows", add_rows):
        yield


@contextmanager
def mask_of_the_first_sample_for_all() -> Iterator[None]:
    """All samples of a microbatch have the first one's mask."""
    original = Masks.split_rows

    def split_rows(self: Masks, batch: torch.Tensor) -> tuple[ModelInputs, torch.Tensor]:
        inputs, labels = original(self, batch)
        assert inputs.visible is not None
        first, end = (x[:1].expand_as(x) for x in (inputs.visible.first, inputs.visible.end))
        return inputs._replace(visible=VisibleKeys(first, end)), labels

    with patch.object(Masks, "split_rows", split_rows):
        yield


@contextmanager
def validation_attends_causally() -> Iterator[None]:
    """Validation leaves out the masks."""
    original = Trainer.validate

    def validate(self: Trainer) -> float:
        def plain(_: Masks, batch: torch.Tensor) -> tuple[ModelInputs, torch.Tensor]:
            return ModelInputs(batch[:, 0]), batch[:, 1]

        with patch.object(Masks, "split_rows", plain):
            return original(self)

    with patch.object(Trainer, "validate", validate):
        yield


@contextmanager
def prefixes_drawn_from_the_start_when_resumed() -> Iterator[None]:
    """A resumed run numbers its samples from 0 when it draws their prefixes."""
    original = Trainer._load_data

    def load_data(self: Trainer) -> Any:
        consumed = self.consumed_samples

        def sample(self: MaskedSamples, index: int) -> torch.Tensor:
            return self.masks.add_rows(self.samples[index], index - consumed)

        MaskedSamples.__getitem__ = sample  # type: ignore[method-assign]
        return original(self)

    with patch.object(Trainer, "_load_data", load_data):
        yield


@contextmanager
def replaced_tokens_are_their_own_labels() -> Iterator[None]:
    """A masked token is to be predicted as the mask."""
    original = MaskedTokens.apply

    def apply(self: MaskedTokens, sample: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        inputs, labels = original(self, sample, seed, index)
        return torch.stack((inputs, torch.where(labels == IGNORED_LABEL, labels, inputs)))

    with patch.object(MaskedTokens, "apply", apply):
        yield


@contextmanager
def later_blocks_of_documents_miss_a_key() -> Iterator[None]:
    """On a CPU, blocks of queries after the first of a document do not see its first token."""
    original = interval_attention._blocks

    def blocks(*inputs: torch.Tensor) -> Iterator[tuple[int, slice, slice, torch.Tensor]]:
        for row, queries, keys, visible in original(*inputs):
            if queries.start > keys.start:
                visible = visible & (torch.arange(visible.shape[1]) > 0)
            yield row, queries, keys, visible

    with patch.object(interval_attention, "_blocks", blocks):
        yield
