"""Check the masks that dropout draws on each process.

Masks must be equal where processes hold the same activations (tensor-parallel processes between layers, without
sequence parallelism) and different everywhere else: other samples, layers, attention heads, parts of the sequence.
Recomputation must draw the forward pass's masks again. Each drops its share, and scales up what it keeps, at every site
where one process drops.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.models.layers.init import generator_of
from titan_like.parallel.layout import Layout
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Report, Row
from titan_like.verify.places import local
from titan_like.verify.shrink import FLAVOR
from titan_like.verify.watch import digest

RATE = 0.3  # at least: gradients of other masks must differ by much
NOTHING = 1e-15  # a rate at which no element is dropped, yet layers do what they do for dropout
_TELLING = 128  # elements of a mask, for it hardly ever to be drawn twice
_SCALE = 0.02  # that the factor may be off; half types round it
_DEVIATIONS = 6.0  # standard deviations of a binomial distribution by which the kept share may be off


def with_dropout(config: JobConfig, rate: float) -> JobConfig:
    """A small run's configuration with dropout."""
    return edit(config, {"model.flavors": {FLAVOR: config.model.flavors[FLAVOR] | {"dropout": rate}}})


class Where(NamedTuple):
    """Where in a run dropout is drawn. All tensor-parallel ranks share it."""

    site: str  # the module whose forward pass began last
    is_attention: bool
    step: int
    data_rank: int
    microbatch: int  # counted at this site

    def __str__(self) -> str:
        return f"after {self.site} in step {self.step}, data rank {self.data_rank}, microbatch {self.microbatch}"


@dataclass
class Draw:
    """One draw of dropout on one process."""

    where: Where
    tensor_rank: int
    is_recomputed: bool
    stream: str  # digest of the random generator before the draw
    kept: torch.Tensor  # bool, this process's part of [batch, seq, hidden] or [batch, heads, seq, seq]
    scale: float  # that multiplies what is kept


class Recorder:
    """Records every draw while it is installed."""

    def __init__(self, trainer: Trainer) -> None:
        self.data_rank = trainer.run.layout.data_rank(trainer.mesh.get_rank())
        self.tensor_rank = trainer.mesh["tp"].get_local_rank()
        self.step, self.site, self.draws, self.device = 1, "", list[Draw](), trainer.run.device
        self._counts: Counter[tuple[object, ...]] = Counter()
        for stage in trainer.model.stages:  # keep ``site`` at the module whose forward, or recomputation, began last
            for name, module in stage.module.named_modules():
                module.register_forward_pre_hook(lambda m, i, name=name: setattr(self, "site", name))

    def count(self, *place: object) -> int:
        """How often this has been called for a place."""
        self._counts[place] += 1
        return self._counts[place] - 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's two functions that draw dropout by ones that repeat the draw to see what it keeps."""
        dropout, attention = F.dropout, F.scaled_dot_product_attention

        def watched_dropout(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            ones = torch.ones_like(x)
            return self._watch(False, partial(dropout, x, *args, **options), partial(dropout, ones, *args, **options))

        def watched_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            equal = torch.zeros_like(q), torch.zeros_like(k), _unit_vectors(v)  # queries see all keys alike
            seen = options | {"attn_mask": None, "is_causal": False}
            return self._watch(True, partial(attention, q, k, v, **options), partial(attention, *equal, **seen))

        watched = patch.object(F, "scaled_dot_product_attention", watched_attention)
        with patch.object(F, "dropout", watched_dropout), watched:
            yield

    def _watch(
        self, is_attention: bool, draw: Callable[[], torch.Tensor], draw_kept: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        generator = generator_of(self.device)
        before = generator.get_state()
        result = draw()
        after = generator.get_state()
        if torch.equal(before, after):  # nothing is drawn in validation
            return result
        generator.set_state(before)
        with torch.no_grad():
            drawn = local(draw_kept()).cpu()
        generator.set_state(after)
        is_recomputed = is_in_backward_pass()
        number = self.count(self.site, is_attention, is_recomputed, self.step)
        where = Where(self.site, is_attention, self.step, self.data_rank, number)
        kept, keys = drawn != 0, drawn.shape[-1] if is_attention else 1
        scale = drawn[kept].double().mean().item() * keys
        self.draws.append(Draw(where, self.tensor_rank, is_recomputed, digest(before), kept, scale))
        return result


def _unit_vectors(values: torch.Tensor) -> torch.Tensor:
    """Values with which the result of attention is the matrix of its probabilities."""
    return torch.eye(values.shape[2], dtype=values.dtype, device=values.device).expand(*values.shape[:2], -1, -1)


def check_draws(report: Report, draws: list[Draw], layout: Layout, rate: float) -> None:
    """Check the draws of this process, and on rank 0 those of all."""
    forward, marks = [draw for draw in draws if not draw.is_recomputed], list[tuple[Where, list[Any]]]()
    known = {_mask_of(draw) for draw in forward}
    for draw in draws:
        if draw.is_recomputed:  # in any order of microbatches
            message = None if _mask_of(draw) in known else "a mask that no forward pass drew"
            report.exact(Key(1, Row.MASKS_AGAIN, draw.where.site), message)
    _check_kept(report, forward, rate)
    for draw in forward:
        # Tensor-parallel ranks hold different activations if the sequence or the heads are split, else the same ones.
        has_parts = draw.kept.shape[1] > 1  # all ranks hold a sequence's first token
        is_split = layout.tensor > 1 if draw.where.is_attention else layout.sequence_parallel and has_parts
        if not is_split and not layout.sequence_parallel:  # which takes the first rank's mask of a first token
            report.share(Key(1, Row.MASKS_EQUAL, f"{draw.where.site} @ {draw.where}"), digest(draw.kept))
        if is_split or draw.tensor_rank == 0:
            masks = draw.kept.flatten(0, int(draw.where.is_attention))
            telling = masks if masks[0].numel() >= _TELLING else ()  # smaller ones are equal by chance
            # Two draws from the same state of a random stream may differ in shape, so the state is compared too.
            marks.append((draw.where, [draw.stream, *((tuple(mask.shape), digest(mask)) for mask in telling)]))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, marks)
    drawn: dict[object, Where] = {}
    for where, found in (pair for pairs in everywhere if report.rank == 0 for pair in pairs):
        for mark in found:
            again = f"it is that {drawn[mark]} as well as {where}" if mark in drawn else None
            drawn.setdefault(mark, where)
            report.exact(Key(1, Row.MASKS_DIFFER, where.site), again)


def _mask_of(draw: Draw) -> tuple[object, ...]:
    return draw.where._replace(microbatch=0), digest(draw.kept)


def _check_kept(report: Report, draws: list[Draw], rate: float) -> None:
    """Check that every site keeps its share, within what chance allows, and scales it up."""
    by_site: dict[tuple[str, bool], list[Draw]] = defaultdict(list)
    for draw in draws:
        by_site[draw.where.site, draw.where.is_attention].append(draw)
    for (site, is_attention), here in by_site.items():
        total, wanted = sum(draw.kept.numel() for draw in here), 1 - rate
        found = sum(int(draw.kept.sum()) for draw in here) / total
        allowed = _DEVIATIONS * math.sqrt(rate * wanted / total) + 1 / total
        message = f"{found:.1%} of {'probabilities' if is_attention else 'elements'} are kept, not {wanted:.1%}"
        report.add(Key(1, Row.KEPT, site), abs(found - wanted), allowed, message)
        off = max(abs(draw.scale * wanted - 1) for draw in here)
        report.add(Key(1, Row.KEPT, site), off, _SCALE, "what is kept is not scaled by 1/(1 - rate)")
