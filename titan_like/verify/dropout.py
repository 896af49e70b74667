"""Check the masks that dropout draws on each process.

Masks must be equal where processes hold the same activations (tensor-parallel processes between layers, without
sequence parallelism) and different everywhere else: other samples, layers, attention heads, parts of the sequence.
Recomputation must draw the forward pass's masks again. The model on one process with the layout's masks must compute
the same loss and gradients, which shows that rate and scale are right wherever dropout is applied.

A second trainer with the same seed, whose layers are compiled if the configuration compiles them, must compute the same
gradients. All are in the configuration's own type.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titan_like.config.load import edit
from titan_like.data.batch import model_fields, num_labels
from titan_like.data.lengths import sample_length
from titan_like.models.layers.init import generator_of, local_part
from titan_like.models.registry import build_model
from titan_like.models.transformer import Transformer
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Report, Row, distance
from titan_like.verify.places import joined, local
from titan_like.verify.reference import CANCELLED, FEW, FLOOR, MARGIN, NEGLIGIBLE, TIPPED, is_cancelled, norm
from titan_like.verify.shrink import FLAVOR, Small
from titan_like.verify.token_ids import batch_of, masks_of_run
from titan_like.verify.watch import FLOAT16_SCALE, Watch, digest, first_samples, steps_alone

RATE = 0.3  # at least: without the factor 1/(1 - rate), gradients differ by more than a half type's rounding
_NORM_EPS = 1.0  # norms would undo a factor that is missing everywhere, if this were small
_TELLING = 128  # elements that a mask is drawn from, for it hardly ever to be drawn twice
_DEVIATIONS = 6.0  # standard deviations of a binomial distribution by which the kept share may be off
_ATTENTION = F.scaled_dot_product_attention

Gradients = tuple[float, dict[str, torch.Tensor]]  # loss, gradient of each parameter


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
    drawn_from: torch.Tensor  # bool, like `kept`: the elements that are not zero anyway


class Recorder:
    """Records every draw while it is installed."""

    def __init__(self, data_rank: int, tensor_rank: int) -> None:
        self.data_rank, self.tensor_rank, self.step, self.site = data_rank, tensor_rank, 1, ""
        self.draws: list[Draw] = []
        self._counts: Counter[tuple[str, bool, bool, int]] = Counter()

    @classmethod
    def of(cls, trainer: Trainer) -> Recorder:
        """A recorder of the draws of a trainer's model on this process."""
        data_rank = trainer.run.layout.data_rank(trainer.mesh.get_rank())
        recorder = cls(data_rank, trainer.mesh["tp"].get_local_rank())
        for stage in trainer.model.stages:
            recorder.follow(stage.module)
        return recorder

    def follow(self, model: nn.Module) -> None:
        """Keep ``site`` at the module whose forward pass, or recomputation, began last."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, i, name=name: setattr(self, "site", name))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's two functions that draw dropout by ones that repeat the draw to see what it keeps."""
        dropout, attention = F.dropout, F.scaled_dot_product_attention

        def watched_dropout(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            ones = torch.ones_like(x)
            return self._watch(False, lambda x: dropout(x, *args, **options), x, ones, ones)

        def watched_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: Any, **options: Any) -> Any:
            everything = probabilities(q, k, v, *mask, **options)
            return self._watch(True, lambda v: attention(q, k, v, *mask, **options), v, _unit_vectors(v), everything)

        watched = patch.object(F, "scaled_dot_product_attention", watched_attention)
        with patch.object(F, "dropout", watched_dropout), watched:
            yield

    def _watch(
        self, is_attention: bool, draw: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor,
        ones: torch.Tensor, everything: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Draw for ``inputs``, and again for ``ones``, which shows what is kept of ``everything``."""
        generator = generator_of(inputs.device)
        before = generator.get_state()
        result = draw(inputs)
        after = generator.get_state()
        if torch.equal(before, after):  # nothing is drawn in validation
            return result
        generator.set_state(before)
        with torch.no_grad():
            kept = draw(ones)
        generator.set_state(after)
        place = (self.site, is_attention, is_in_backward_pass(), self.step)
        where = Where(self.site, is_attention, self.step, self.data_rank, self._counts[place])
        self._counts[place] += 1
        parts = [(local(tensor) != 0).cpu() for tensor in (kept, everything)]
        self.draws.append(Draw(where, self.tensor_rank, is_in_backward_pass(), digest(before), *parts))
        return result


def probabilities(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: Any, **options: Any) -> torch.Tensor:
    """What attention multiplies the values with, before any is dropped: [batch, heads, queries, keys]."""
    return _ATTENTION(q, k, _unit_vectors(v), *mask, **options | {"dropout_p": 0.0})


def _unit_vectors(values: torch.Tensor) -> torch.Tensor:
    """Values with which the result of attention is the matrix of its probabilities."""
    return torch.eye(values.shape[2], dtype=values.dtype, device=values.device).expand(*values.shape[:2], -1, -1)


def observe_dropout(run: Run, report: Report, small: Small) -> None:
    """Train two steps with dropout, and validate between them. Rank 0 checks the masks of all ranks."""
    rate, dtype = max(small.dropout or 0.0, RATE), run.config.training.dtype
    fields, compiles = {"dropout": rate, "norm_eps": _NORM_EPS}, {"compile.enable": run.config.compile.enable}
    run = replace(run, model=run.model.model_copy(update=fields))
    # Compiled layers do not call the functions that are watched.
    flavor = run.config.model.flavors[FLAVOR] | fields
    run = changed_run(run, {"model.flavors": {FLAVOR: flavor}, "compile.enable": False})
    watch = Watch(first_samples(run.masks.over(run.datasets["train"]), run.config.training.global_batch_size))
    trainer, again = trainer_of(run, watch), Watch()
    recorder, data = Recorder.of(trainer), trainer._load_data()
    with recorder.installed():
        loss, drawn, gradients = trainer.read_step(trainer.train_step(data)).loss, watch.drawn, watch.gradients
        trainer.validate()  # which must leave the random numbers of the next step alone
        recorder.step = 2
        trainer.train_step(data)
    data.close()
    # Run one operation at a time, compiled layers draw the same random numbers as others.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        steps_alone(trainer_of(changed_run(run, compiles), again), 1)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (recorder.draws, recorder.data_rank, drawn))
    results: list[Any] = [None] * 3
    if dist.get_rank() == 0:
        draws = [draw for draws, *_ in everywhere for draw in draws]
        forward: dict[Where, dict[int, Draw]] = defaultdict(dict)
        for draw in draws:
            if not draw.is_recomputed:
                forward[draw.where][draw.tensor_rank] = draw
        _check_recomputed(report, draws)
        _check_kept(report, forward, rate)
        _check_masks(run, report, forward)
        step = {rank: samples for _, rank, samples in everywhere}
        wanted_loss, wanted = _replay(run, report, forward, step, rate)
        rounded_loss, rounded = _replay(run, report, forward, step, rate, getattr(torch, dtype))
        allowed = max(MARGIN * abs(rounded_loss / wanted_loss - 1), FLOOR[dtype])
        results = [wanted_loss, allowed, _bounds(wanted, rounded, dtype, run.config.float8.enable)]
    dist.broadcast_object_list(results, src=0)
    wanted_loss, allowed, bounds = results
    told = f"it is {loss:.9g}, not {wanted_loss:.9g}"
    report.add(Key(1, Row.DROPOUT_LOSS), abs(loss / wanted_loss - 1), allowed, told)
    for row, found in ((Row.DROPOUT_GRADIENT, gradients), (Row.DROPOUT_AGAIN, again.gradients)):
        for name, gradient in found:
            (part, offset), (whole, size, allowed) = local_part(gradient), bounds[name]
            expected = whole[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))]
            report.add(Key(1, row, name), distance(part.cpu(), expected) / size, allowed)


def trainer_of(run: Run, watch: Watch) -> Trainer:
    """A watched trainer, whose loss scale does not overflow."""
    trainer = Trainer(run, observer=watch)
    if trainer.scaler is not None:
        trainer.scaler.scale.fill_(FLOAT16_SCALE)
    return trainer


def changed_run(run: Run, values: dict[str, Any]) -> Run:
    """The run with other settings, whose model and data are the same."""
    config = edit(run.config, values)
    return replace(run, config=config, masks=masks_of_run(config))


def _bounds(
    exact: dict[str, torch.Tensor], rounded: dict[str, torch.Tensor], dtype: str, float8: bool
) -> dict[str, tuple[torch.Tensor, float, float]]:
    """Each gradient, what a difference from it is relative to, and how large that may be in a type.

    ``rounded`` are the gradients of one process in that type, which bound the difference as in `allowances`.
    """
    whole, bounds = math.hypot(*map(norm, exact.values())), {}
    sizes = {name: max(norm(gradient), NEGLIGIBLE * whole) for name, gradient in exact.items()}
    shares = {name: distance(rounded[name], gradient) / sizes[name] for name, gradient in exact.items()}
    least = max(FLOOR[dtype], TIPPED * float8)
    for name, gradient in exact.items():
        share = shares[name] if gradient.numel() >= FEW else max(shares.values())
        floor = CANCELLED[dtype] if is_cancelled(gradient, whole) else least
        bounds[name] = gradient, sizes[name], max(MARGIN * share, floor)
    return bounds


def _fresh_model(run: Run) -> Transformer:
    model = build_model(run.model, run.config.model.family).double()
    model.initial_elements = run.tuning.initial_elements
    model.init_weights(run.config.job.seed)
    if run.config.float8.enable:
        from titan_like.parallel.float8 import use_float8  # which imports torchao

        use_float8(model, run.config.float8, emulates=True)
    return model


def _replay(
    run: Run, report: Report, draws: dict[Where, dict[int, Draw]], step: dict[int, list[list[int]]], rate: float,
    dtype: torch.dtype = torch.float64,
) -> Gradients:  # fmt: skip
    """The first step's loss and gradients of one process that drops what the layout dropped, computed in ``dtype``.

    ``step`` has the sample indices of each microbatch, by data-parallel rank.
    """
    model, recorder = _fresh_model(run), Recorder(0, 0)
    recorder.follow(model)
    places = [(rank, number) for rank, microbatches in step.items() for number in range(len(microbatches))]
    samples, lengths = run.datasets["train"], sample_length(run.config, run.model)
    pieces = [batch_of(samples, step[rank][number], run.config) for rank, number in places]

    def mask(is_attention: bool, shape: torch.Size) -> torch.Tensor:
        parts = draws.get(Where(recorder.site, is_attention, 1, *current), {})
        kept = [draw.kept for _, draw in sorted(parts.items())]
        if kept and kept[0].shape != shape:  # each rank has a part of the sequence, or of the heads
            kept = [torch.cat(kept, 1) if is_attention else joined(kept, lengths)]
        if kept and kept[0].shape == shape:
            return (kept[0].double() / (1 - rate)).to(dtype)
        told = f"data rank {current[0]} has no mask {list(shape)} after {recorder.site}"
        report.exact(Key(1, Row.MASKS_EVERYWHERE, recorder.site), told)
        return torch.ones(shape, dtype=dtype)

    def dropout(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x * mask(False, x.shape)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *seen: Any, **options: Any) -> torch.Tensor:
        everything = probabilities(q, k, v, *seen, **options)
        return (everything * mask(True, everything.shape)) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    counts, loss = torch.stack([num_labels(piece, run.model.predictions) for piece in pieces]).sum(0), 0.0
    with patch.object(F, "dropout", dropout), patch.object(F, "scaled_dot_product_attention", attention):
        for current, piece in zip(places, pieces, strict=True):  # noqa: B007 (mask() reads it)
            factors = (1 / counts.double()).to(torch.promote_types(dtype, torch.float32))
            fields = model_fields(piece._replace(loss_factors=factors))
            weights = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
            found = torch.func.functional_call(model, weights, (piece.tokens,), fields).sum()
            found.backward()
            loss += found.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_kept(report: Report, draws: dict[Where, dict[int, Draw]], rate: float) -> None:
    """Check that every site keeps its share, within what chance allows."""
    kept: dict[tuple[str, bool], list[torch.Tensor]] = defaultdict(list)
    for where, parts in draws.items():
        for draw in parts.values():
            kept[where.site, where.is_attention].append(draw.kept[draw.drawn_from])
    for (site, is_attention), masks in kept.items():
        total = sum(mask.numel() for mask in masks)
        found, wanted = sum(int(mask.sum()) for mask in masks) / total, 1 - rate
        allowed = _DEVIATIONS * math.sqrt(rate * wanted / total) + 1 / total
        told = f"{found:.1%} of {'probabilities' if is_attention else 'elements'} are kept, not {wanted:.1%}"
        report.add(Key(1, Row.KEPT, site), abs(found - wanted), allowed, told)


def _check_masks(run: Run, report: Report, draws: dict[Where, dict[int, Draw]]) -> None:
    """Check that masks of different activations differ.

    Masks that should be equal are not checked here: if they differ, so do the loss and gradients of `_replay`.
    """
    known: dict[tuple[object, ...], Where] = {}
    layout = run.layout
    for where, parts in draws.items():
        first = next(iter(parts.values()))
        # Tensor-parallel ranks hold different activations if the sequence or the heads are split, else the same ones.
        has_parts = first.kept.shape[1] > 1  # all ranks hold a sequence's first token
        is_split = layout.tensor > 1 if where.is_attention else layout.sequence_parallel and has_parts
        for draw in parts.values() if is_split else [first]:
            masks, varied = (m.flatten(0, int(where.is_attention)) for m in (draw.kept, draw.drawn_from))
            masks = masks[varied.flatten(1).sum(1) >= _TELLING]  # smaller ones are equal by chance
            # Two draws from the same state of a random stream may differ in shape, so the state is compared too.
            for mark in ((draw.stream,), *((tuple(mask.shape), digest(mask)) for mask in masks)):
                again = f"it is that {known[mark]} as well as {where}" if mark in known else None
                known.setdefault(mark, where)
                report.exact(Key(1, Row.MASKS_DIFFER, where.site), again)


def _check_recomputed(report: Report, draws: list[Draw]) -> None:
    """Check that recomputation draws what a forward pass on the same process drew, in any order of microbatches."""

    def mask(draw: Draw) -> tuple[object, ...]:
        return draw.where._replace(microbatch=0), draw.tensor_rank, digest(draw.kept)

    forward = {mask(draw) for draw in draws if not draw.is_recomputed}
    for draw in draws:
        if draw.is_recomputed:
            told = None if mask(draw) in forward else "a mask that no forward pass drew"
            report.exact(Key(1, Row.MASKS_AGAIN, draw.where.site), told)
