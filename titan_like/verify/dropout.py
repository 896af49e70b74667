"""Check the masks that dropout draws on each process.

Masks must be equal where processes hold the same activations (tensor-parallel processes between layers, without
sequence parallelism) and different everywhere else: other samples, layers, attention heads, parts of the sequence.
Recomputation must draw the forward pass's masks again. Each process drops its share,
and scales up what it keeps, at every site where one process drops.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titan_like.models.layers.init import generator_of
from titan_like.parallel.layout import Layout
from titan_like.parallel.tensor_styles import RowLinear
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Report, Row
from titan_like.verify.places import local
from titan_like.verify.watch import digest

RATE = 0.3  # at least: gradients of other masks must differ by much
NOTHING = 1e-15  # a rate at which no element is dropped, yet layers do what they do for dropout
_TELLING = 128  # elements with which a mask is hardly ever drawn twice
_SCALE = 0.02  # by which the factor may be off; 16-bit dtypes round it
_DEVIATIONS = 6.0  # standard deviations of a binomial distribution by which the kept share may be off


@dataclass(frozen=True)
class Draw:
    """One draw of dropout on one process."""

    site: str  # the module whose forward pass, or recomputation, began last
    is_attention: bool
    is_recomputed: bool
    step: int
    place: str  # where in a run this is, in words; all tensor-parallel ranks share it
    tensor_rank: int
    stream: str  # digest of the random generator before the draw
    kept: torch.Tensor  # bool, this process's part of [batch, seq, hidden] or [batch, heads, seq, seq]
    scale: float  # factor of the elements that are kept
    has_own_features: bool  # whether tensor-parallel ranks have features of their own at the site

    @property
    def mask(self) -> tuple[object, ...]:
        """Equal where the same elements are kept, in any microbatch of a step."""
        return self.site, self.is_attention, self.step, digest(self.kept)


@contextmanager
def recorded_draws(trainer: Trainer) -> Iterator[list[Draw]]:
    """The draws of a trainer's steps, recomputation included.

    Replaces torch's two functions that draw dropout by functions that repeat the draw to see what it keeps.
    """
    draws, sites, generator = list[Draw](), [""], generator_of(trainer.run.device)
    ranks, tensor_rank = f"data rank {trainer.dp_rank}", trainer.mesh["tp"].get_local_rank()
    if trainer.cp_shard.size > 1:
        ranks += f", CP rank {trainer.cp_shard.rank}"
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def record(is_attention: bool, draw: Callable[[], torch.Tensor], redo: Callable[[], torch.Tensor]) -> torch.Tensor:
        before = generator.get_state()
        with torch.no_grad():
            drawn = local(redo()).cpu()
        generator.set_state(before)
        result = draw()
        if torch.equal(before, generator.get_state()):  # nothing is drawn in validation
            return result
        event = sites[-1], is_attention, is_in_backward_pass(), trainer.state.step + 1
        number = sum((draw.site, draw.is_attention, draw.is_recomputed, draw.step) == event for draw in draws)
        place = f"after {event[0]} in step {event[3]}, {ranks}, microbatch {number}"
        kept, keys = drawn != 0, drawn.shape[-1] if is_attention else 1
        scale = drawn[kept].double().mean().item() * keys
        draws.append(Draw(*event, place, tensor_rank, digest(before), kept, scale, bool(row_split)))
        return result

    def recorded_dropout(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        ones = torch.ones_like(x)
        return record(False, partial(dropout, x, *args, **options), partial(dropout, ones, *args, **options))

    def recorded_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        # Queries see all keys alike. With unit vectors as values, the result is the matrix of probabilities.
        units = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        plain = options | {"attn_mask": None, "is_causal": False}
        redo = partial(attention, torch.zeros_like(q), torch.zeros_like(k), units, **plain)
        return record(True, partial(attention, q, k, v, **options), redo)

    row_split = set[str]()  # the module in which the model is, if it is one of these

    def enter(name: str, module: nn.Module, *_: Any) -> None:
        sites.append(name)
        row_split.clear()
        if isinstance(module, RowLinear):
            row_split.add(name)

    for stage in trainer.model.stages:
        for name, module in stage.module.named_modules():
            module.register_forward_pre_hook(partial(enter, name))
            module.register_forward_hook(lambda *_: row_split.clear())
    recorded = patch.object(F, "scaled_dot_product_attention", recorded_attention)
    with patch.object(F, "dropout", recorded_dropout), recorded:
        yield draws


def check_draws(report: Report, draws: list[Draw], layout: Layout, rate: float) -> None:
    """Check this process's draws, and on rank 0 the draws of all processes."""
    forward, marks = [draw for draw in draws if not draw.is_recomputed], list[tuple[str, str, list[object]]]()
    masks = {draw.mask for draw in forward}
    for draw in draws:
        if draw.is_recomputed:  # in any order of microbatches
            report.require(draw.mask in masks, Key(1, Row.MASKS_AGAIN, draw.site), "a mask that no forward pass drew")
    _check_kept(report, forward, rate)
    for draw in forward:
        # Tensor-parallel ranks hold different activations if the sequence or the heads are split, else the same ones.
        has_parts = draw.kept.shape[1] > 1  # all ranks hold a sequence's first token
        has_own = draw.is_attention or draw.has_own_features
        is_split = layout.tensor > 1 if has_own else layout.sequence_parallel and has_parts
        if not is_split and not layout.sequence_parallel:  # this takes the first rank's mask of a first token
            report.share(Key(1, Row.MASKS_EQUAL, f"{draw.site} @ {draw.place}"), digest(draw.kept))
        if is_split or draw.tensor_rank == 0:
            rows = draw.kept.flatten(0, int(draw.is_attention))
            telling = rows if rows[0].numel() >= _TELLING else ()  # smaller ones are equal by chance
            # Two draws from the same state of a random stream may differ in shape, so the state is compared too.
            drawn: list[object] = [draw.stream, *((tuple(row.shape), digest(row)) for row in telling)]
            marks.append((draw.site, draw.place, drawn))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, marks)
    places: dict[object, str] = {}
    for site, place, drawn in (mark for marks in everywhere if report.rank == 0 for mark in marks):
        for mark in drawn:
            reason = f"the same mask is drawn {places.get(mark)} and {place}"
            report.require(mark not in places, Key(1, Row.MASKS_DIFFER, site), reason)
            places.setdefault(mark, place)


def _check_kept(report: Report, draws: list[Draw], rate: float) -> None:
    """Check that every site keeps its share, within what chance allows, and scales it up."""
    for site, is_attention in dict.fromkeys((draw.site, draw.is_attention) for draw in draws):
        at_site = [draw for draw in draws if (draw.site, draw.is_attention) == (site, is_attention)]
        total, expected = sum(draw.kept.numel() for draw in at_site), 1 - rate
        share = sum(int(draw.kept.sum()) for draw in at_site) / total
        allowed = _DEVIATIONS * math.sqrt(rate * expected / total) + 1 / total
        message = f"{share:.1%} of {'probabilities' if is_attention else 'elements'} are kept, not {expected:.1%}"
        report.add(Key(1, Row.KEPT, site), abs(share - expected), allowed, message)
        off = max(abs(draw.scale * expected - 1) for draw in at_site)
        report.add(Key(1, Row.KEPT, site), off, _SCALE, "what is kept is not scaled by 1/(1 - rate)")
