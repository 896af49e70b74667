"""Check the masks that dropout draws on each process, and give them to one process.

Masks must be equal where processes hold the same activations (tensor-parallel processes between layers, without
sequence parallelism) and different everywhere else: other samples, layers, attention heads, parts of the sequence.
Recomputation must draw the forward pass's masks again. The product on one process with the layout's masks is the
reference of a second run with the same seed, whose layers are compiled if the configuration compiles them. That shows
that rate and scale are right wherever dropout is applied, and equal masks equal where they must be.
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

import numpy as np
import torch
import torch.nn.functional as F

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.lengths import sample_length
from titan_like.models.layers.init import generator_of
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Report, Row
from titan_like.verify.places import joined, local
from titan_like.verify.shrink import FLAVOR
from titan_like.verify.watch import Watch, digest

RATE = 0.3  # at least: without the factor 1/(1 - rate), gradients differ by more than a half type's rounding
_NORM_EPS = 1.0  # norms would undo a factor that is missing everywhere, if this were small
_TELLING = 128  # elements of a mask, for it hardly ever to be drawn twice
_DEVIATIONS = 6.0  # standard deviations of a binomial distribution by which the kept share may be off


def with_dropout(config: JobConfig, rate: float) -> JobConfig:
    """A small run's configuration with dropout."""
    fields = {"dropout": max(rate, RATE), "norm_eps": _NORM_EPS}
    return edit(config, {"model.flavors": {FLAVOR: config.model.flavors[FLAVOR] | fields}})


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
    kept: np.ndarray  # bool, this process's part of [batch, seq, hidden] or [batch, heads, seq, seq]


class Recorded(NamedTuple):
    """The draws of a process, and what it draws them for."""

    draws: list[Draw]
    data_rank: int
    samples: list[list[int]]  # of each microbatch of the first step


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
            kept = (local(draw_kept()) != 0).cpu().numpy()
        generator.set_state(after)
        is_recomputed = is_in_backward_pass()
        number = self.count(self.site, is_attention, is_recomputed, self.step)
        where = Where(self.site, is_attention, self.step, self.data_rank, number)
        self.draws.append(Draw(where, self.tensor_rank, is_recomputed, digest(before), kept))
        return result


def _unit_vectors(values: torch.Tensor) -> torch.Tensor:
    """Values with which the result of attention is the matrix of its probabilities."""
    return torch.eye(values.shape[2], dtype=values.dtype, device=values.device).expand(*values.shape[:2], -1, -1)


class Replay:
    """Lets one process drop in its first step what the processes of a layout have dropped."""

    def __init__(self, recorded: list[Recorded], config: JobConfig, known: dict[str, int]) -> None:
        """``known`` are the indices of the first samples by their digests."""
        model = model_config(config.model)
        self.known, self.lengths, self.rate = known, sample_length(config, model), model.model_dump()["dropout"]
        # By the site, whether it is in attention, and the sample: the part of each tensor-parallel rank.
        self.masks: dict[tuple[str, bool, int], dict[int, np.ndarray]] = defaultdict(dict)
        for draws, _, samples in recorded:
            for draw in draws:
                if draw.where.step == 1 and not draw.is_recomputed:
                    of_batch = samples[draw.where.microbatch]
                    for sample, kept in zip(of_batch, np.array_split(draw.kept, len(of_batch)), strict=True):
                        self.masks[*draw.where[:2], sample][draw.tensor_rank] = kept

    @contextmanager
    def installed(self, trainer: Trainer, watch: Watch) -> Iterator[None]:
        """Replace torch's two functions that draw dropout."""
        sites, plain_attention = Recorder(trainer), F.scaled_dot_product_attention

        def mask(is_attention: bool, like: torch.Tensor) -> torch.Tensor:
            samples = watch.drawn[sites.count(sites.site, is_attention)]
            parts = [self.masks.get((sites.site, is_attention, sample), {}) for sample in samples]
            ranks = [rank for rank in sorted(parts[0]) if all(rank in part for part in parts)]
            kept = [torch.from_numpy(np.concatenate([part[rank] for part in parts])) for rank in ranks]
            if kept and kept[0].shape != like.shape:  # each rank has a part of the sequence, or of the heads
                kept = [torch.cat(kept, 1) if is_attention else joined(kept, self.lengths)]
            if not kept or kept[0].shape != like.shape:  # the layout drops nothing here
                return torch.ones_like(like)
            return kept[0].to(like) / (1 - self.rate)

        def dropout(x: torch.Tensor, _rate: float = 0.5, training: bool = True, *_: Any) -> torch.Tensor:
            return x * mask(False, x) if training else x

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            if not options["dropout_p"]:
                return plain_attention(q, k, v, **options)
            probabilities = plain_attention(q, k, _unit_vectors(v), **options | {"dropout_p": 0.0})
            values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            return (probabilities * mask(True, probabilities)) @ values

        with patch.object(F, "dropout", dropout), patch.object(F, "scaled_dot_product_attention", attention):
            yield


def check_masks(report: Report, recorded: list[Recorded], layout: Layout, rate: float) -> None:
    """Check the masks of all processes of a layout."""
    forward: dict[Where, dict[int, Draw]] = defaultdict(dict)
    draws = [draw for one in recorded for draw in one.draws]
    for draw in draws:
        if not draw.is_recomputed:
            forward[draw.where][draw.tensor_rank] = draw
    _check_recomputed(report, draws)
    _check_kept(report, forward, rate)
    _check_different(report, forward, layout)


def _check_kept(report: Report, draws: dict[Where, dict[int, Draw]], rate: float) -> None:
    """Check that every site keeps its share, within what chance allows."""
    kept: dict[tuple[str, bool], list[np.ndarray]] = defaultdict(list)
    for where, parts in draws.items():
        kept[where.site, where.is_attention] += [draw.kept for draw in parts.values()]
    for (site, is_attention), masks in kept.items():
        total = sum(mask.size for mask in masks)
        found, wanted = sum(int(mask.sum()) for mask in masks) / total, 1 - rate
        allowed = _DEVIATIONS * math.sqrt(rate * wanted / total) + 1 / total
        told = f"{found:.1%} of {'probabilities' if is_attention else 'elements'} are kept, not {wanted:.1%}"
        report.add(Key(1, Row.KEPT, site), abs(found - wanted), allowed, told)


def _check_different(report: Report, draws: dict[Where, dict[int, Draw]], layout: Layout) -> None:
    """Check that masks of different activations differ. If masks that should be equal are not, `Replay` shows it."""
    known: dict[tuple[object, ...], Where] = {}
    for where, parts in draws.items():
        first = next(iter(parts.values()))
        # Tensor-parallel ranks hold different activations if the sequence or the heads are split, else the same ones.
        has_parts = first.kept.shape[1] > 1  # all ranks hold a sequence's first token
        is_split = layout.tensor > 1 if where.is_attention else layout.sequence_parallel and has_parts
        for draw in parts.values() if is_split else [first]:
            masks = torch.from_numpy(draw.kept).flatten(0, int(where.is_attention))
            telling = masks if masks[0].numel() >= _TELLING else ()  # smaller ones are equal by chance
            # Two draws from the same state of a random stream may differ in shape, so the state is compared too.
            for mark in ((draw.stream,), *((tuple(mask.shape), digest(mask)) for mask in telling)):
                again = f"it is that {known[mark]} as well as {where}" if mark in known else None
                known.setdefault(mark, where)
                report.exact(Key(1, Row.MASKS_DIFFER, where.site), again)


def _check_recomputed(report: Report, draws: list[Draw]) -> None:
    """Check that recomputation draws what a forward pass on the same process drew, in any order of microbatches."""

    def mask(draw: Draw) -> tuple[object, ...]:
        return draw.where._replace(microbatch=0), draw.tensor_rank, draw.kept.tobytes()

    forward = {mask(draw) for draw in draws if not draw.is_recomputed}
    for draw in draws:
        if draw.is_recomputed:
            told = None if mask(draw) in forward else "a mask that no forward pass drew"
            report.exact(Key(1, Row.MASKS_AGAIN, draw.where.site), told)
