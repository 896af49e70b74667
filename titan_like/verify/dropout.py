"""Which random numbers dropout draws on each process, and whether those are the right ones.

Masks must be equal where processes hold the same activations (tensor-parallel processes between layers, without
sequence parallelism) and different everywhere else: other samples, layers, attention heads, parts of the sequence.
Recomputation must draw the forward pass's masks again. One process that is given the same masks must then have the same
loss and gradients: so rate and scale are right wherever they are applied.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.models.layers.init import local_part
from titan_like.models.layers.random import generator_of
from titan_like.models.registry import build_model
from titan_like.models.transformer import Transformer
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify import record
from titan_like.verify.observe import Watched, digest
from titan_like.verify.record import EXACT, Key, Measure, Seen, Tensors
from titan_like.verify.reference import FLOOR, REPORTED, mean_loss, norm, summed_loss
from titan_like.verify.samples import IGNORED, Samples, sample_digest
from titan_like.verify.shrink import FLAVOR, Small, edit

_STEPS = 2
_RATE = 0.1  # where the model has none
_DEVIATIONS = 6.0  # of a binomial distribution, that the share of what is kept may be off
_GRADIENT_ROUNDING = 64 * FLOOR[EXACT]

Where = tuple[str, bool, int, int, int]  # site, whether in attention, step, data-parallel rank, microbatch
Gradients = tuple[float, Tensors]  # and the loss


@dataclass
class Draw:
    """One draw of dropout on one process."""

    site: str  # the module after whose start it was drawn
    is_attention: bool
    is_recomputed: bool
    step: int
    microbatch: int  # in the order of drawing at this site
    stream: str  # digest of the random generator before the draw
    kept: torch.Tensor  # bool, [batch, seq, hidden] or [batch, heads, seq, seq]; parts of it on this process


@dataclass
class Recorder:
    """Notes every draw while it is installed."""

    step: int = 1
    site: str = ""
    draws: list[Draw] = field(default_factory=list)
    drawn: Counter[tuple[str, bool, bool, int]] = field(default_factory=Counter)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's two functions that draw dropout."""
        dropout, attention = F.dropout, F.scaled_dot_product_attention

        def watched_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if not training or p == 0:
                return dropout(x, p, training, inplace)
            with redrawing(x.device) as redraw:
                result = dropout(x, p, training, inplace)
                with redraw() as stream:
                    self.note(dropout(torch.ones_like(x), p, True), stream, is_attention=False)
            return result

        def watched_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not options.get("dropout_p"):
                return attention(q, k, v, *args, **options)
            with redrawing(q.device) as redraw:
                result = attention(q, k, v, *args, **options)
                with redraw() as stream:
                    # With unit vectors as values the result is the probabilities, those dropped being zero.
                    units = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
                    self.note(attention(q, k, units, *args, **options), stream, is_attention=True)
            return result

        watched = patch.object(F, "scaled_dot_product_attention", watched_attention)
        with patch.object(F, "dropout", watched_dropout), watched:
            yield

    def follow(self, model: nn.Module) -> None:
        """Note which module's forward pass began last, for the first time or in recomputation."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, i, name=name: setattr(self, "site", name))

    def note(self, result: torch.Tensor, stream: str, is_attention: bool) -> None:
        """Keep the mask: elements that are not zero."""
        kept = ((result.to_local() if isinstance(result, DTensor) else result) != 0).cpu()
        is_recomputed = is_in_backward_pass()  # within a backward pass
        place = self.site, is_attention, is_recomputed, self.step
        self.draws.append(Draw(*place, microbatch=self.drawn[place], stream=stream, kept=kept))
        self.drawn[place] += 1


@contextmanager
def redrawing(device: torch.device) -> Iterator[Callable[[], Any]]:
    """A function whose context draws again the device's numbers drawn since this one's start, and leaves no trace.

    The context's value is a digest of where in which random stream they begin.
    """
    generator = generator_of(device)
    before = generator.get_state()

    @contextmanager
    def redraw() -> Iterator[str]:
        after = generator.get_state()
        generator.set_state(before)
        with torch.no_grad():
            yield digest(before)
        generator.set_state(after)

    yield redraw


@dataclass
class Share:
    """What one process has of a run with dropout."""

    data_rank: int
    tensor_rank: int
    draws: list[Draw]
    samples: list[list[int]]  # of each microbatch of the first step


class _KeepsGradients(Trainer):
    """Keeps this process's parts of the first step's gradients, and ends that step without an update."""

    gradients: list[tuple[str, torch.Tensor, tuple[int, ...]]] | None = None

    def _update(self, grad_norm: float, lr: float) -> None:
        if self.gradients is None:
            parts = [(name, *local_part(p.grad)) for name, p in self.model.named_parameters() if p.grad is not None]
            self.gradients = [(name, local.clone(), offset) for name, local, offset in parts]
        super()._update(grad_norm, lr)


def observe_dropout(run: Run, seen: Seen, small: Small) -> None:
    """Train two steps with dropout, the second one once more in a resumed run; the first rank compares."""
    rate = small.dropout or _RATE
    flavor = run.config.model.flavors[FLAVOR] | {"dropout": rate}
    # Compiled layers call no function that could be watched.
    changes = {"model.flavors": {FLAVOR: flavor}, "compile.enable": False, "checkpoint.enable": True}
    run = replace(run, config=edit(run.config, changes), model=run.model.model_copy(update={"dropout": rate}))
    recorder, trainer = Recorder(), _KeepsGradients(run)
    held_out, size = cast(Samples, run.datasets["validation"]), run.config.training.global_batch_size
    untrained = mean_loss(_fresh_model(run), held_out.first(size), torch.float64, size)
    loss = trainer.validate()
    told = f"it is {loss:.9g}, not {untrained:.9g}"
    seen.add(Key(1, record.DROPOUT_VALIDATION), Measure(abs(loss / untrained - 1), REPORTED, told))
    for stage in trainer.model.stages:
        recorder.follow(stage.module)
    samples = run.datasets["train"]
    batch = run.config.training.global_batch_size
    drawn: list[list[int]] = []
    data = Watched(trainer._load_data(), {sample_digest(samples[index]): index for index in range(batch)}, drawn)
    with recorder.installed():
        first_loss = trainer.train_step(data).loss
        first_step = list(drawn)
        trainer.save()
        recorder.step = 2
        trainer.train_step(data)
    data.close()
    trainer.finish_save()
    resumed = Trainer(run)
    resumed_data = resumed._load_data()
    resumed.train_step(resumed_data)
    resumed_data.close()
    for (name, parameter), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        same = digest(local_part(parameter)[0]) == digest(local_part(other)[0])
        seen.wrong(Key(_STEPS, record.DROPOUT_RESUMED, name), None if same else "its weights are others")
    _check_recomputed(seen, recorder.draws)
    places = {name: trainer.mesh[name].get_local_rank() for name in ("tp", "dp_replicate", "dp_shard")}
    data_rank = places["dp_replicate"] * trainer.mesh["dp_shard"].size() + places["dp_shard"]
    shares: list[Share] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(shares, Share(data_rank, places["tp"], recorder.draws, first_step))
    results: list[Gradients] = [(0.0, {})]
    if dist.get_rank() == 0:
        draws = _by_place(shares)
        _check_kept(seen, draws, rate)
        _check_masks(run, seen, draws)
        results = [_replay(run, seen, draws, shares, rate)]
    dist.broadcast_object_list(results, src=0)
    wanted_loss, wanted = results[0]
    told = f"{first_loss:.9g}, not {wanted_loss:.9g}"
    seen.add(Key(1, record.DROPOUT_LOSS), Measure(abs(first_loss / wanted_loss - 1), REPORTED, told))
    whole = math.sqrt(sum(norm(gradient) ** 2 for gradient in wanted.values()))
    for name, local, offset in trainer.gradients or []:
        part = wanted[name][tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))]
        difference = norm(local.cpu() - part) / max(norm(wanted[name]), 1e-8 * whole)
        seen.add(Key(1, record.DROPOUT_GRADIENT, name), Measure(difference, _GRADIENT_ROUNDING))


def _fresh_model(run: Run) -> Transformer:
    model = build_model(run.model, run.config.model.family).double()
    model.init_weights(run.config.job.seed)
    return model


def _by_place(shares: list[Share]) -> dict[Where, dict[int, Draw]]:
    """Draws of the forward passes: place → tensor-parallel rank → draw."""
    draws: dict[Where, dict[int, Draw]] = defaultdict(dict)
    for share in shares:
        for draw in share.draws:
            if not draw.is_recomputed:
                where = (draw.site, draw.is_attention, draw.step, share.data_rank, draw.microbatch)
                draws[where][share.tensor_rank] = draw
    return draws


def _replay(run: Run, seen: Seen, draws: dict[Where, dict[int, Draw]], shares: list[Share], rate: float) -> Gradients:
    """The first step's loss and gradients of one process, without parallelism, that drops what the layout dropped."""
    samples = cast(Samples, run.datasets["train"])
    model, recorder = _fresh_model(run), Recorder()
    recorder.follow(model)
    now = (0, 0)  # data-parallel rank, microbatch

    def mask(is_attention: bool, shape: torch.Size) -> torch.Tensor:
        parts = draws.get((recorder.site, is_attention, 1, *now), {})
        kept = [draw.kept for _, draw in sorted(parts.items())]
        if kept and kept[0].shape != shape:  # parts of the sequence, or heads
            kept = [torch.cat(kept, 1)]
        if kept and kept[0].shape == shape:
            return kept[0].double() / (1 - rate)
        told = f"data rank {now[0]} has no mask {list(shape)} after {recorder.site}"
        seen.wrong(Key(1, record.MASKS_EVERYWHERE, recorder.site), told)
        return torch.ones(shape, dtype=torch.float64)

    def dropout(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x * mask(False, x.shape)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(future, -math.inf)
        return (scores.softmax(3) * mask(True, scores.shape)) @ v

    step = {share.data_rank: share.samples for share in shares}
    batch = samples.first(sum(len(indices) for microbatches in step.values() for indices in microbatches))
    num_tokens = (batch[:, 1] != IGNORED).sum()
    loss = torch.zeros((), dtype=torch.float64)
    with patch.object(F, "dropout", dropout), patch.object(F, "scaled_dot_product_attention", attention):
        for data_rank, microbatches in step.items():
            for microbatch, indices in enumerate(microbatches):
                now = (data_rank, microbatch)
                part = summed_loss(model, batch[indices], torch.float64) / num_tokens
                part.backward()
                loss += part.detach()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_kept(seen: Seen, draws: dict[Where, dict[int, Draw]], rate: float) -> None:
    """Every place in the model keeps its share, as far as chance allows."""
    kept: Counter[tuple[str, bool]] = Counter()
    drawn: Counter[tuple[str, bool]] = Counter()
    for (site, is_attention, *_), parts in draws.items():
        for draw in parts.values():
            whole = torch.ones_like(draw.kept)
            kept[site, is_attention] += int((draw.kept.tril() if is_attention else draw.kept).sum())
            drawn[site, is_attention] += int((whole.tril() if is_attention else whole).sum())
    for (site, is_attention), total in drawn.items():
        found, wanted = kept[site, is_attention] / total, 1 - rate
        allowed = _DEVIATIONS * math.sqrt(rate * wanted / total) + 1 / total
        told = f"{found:.1%} of {'probabilities' if is_attention else 'elements'} are kept, not {wanted:.1%}"
        seen.add(Key(1, record.KEPT, site), Measure(abs(found - wanted), allowed, told))


def _check_masks(run: Run, seen: Seen, draws: dict[Where, dict[int, Draw]]) -> None:
    """Every layer draws where the others do. Masks of the same activations are equal, and no others are."""
    sites: dict[str, set[tuple[str, bool]]] = defaultdict(set)
    for site, is_attention, *_ in draws:
        layer = ".".join(site.split(".")[:2]) if site.startswith("layers.") else "the embedding"
        sites[layer].add((site.removeprefix(layer), is_attention))
    everywhere = set.union(*(sites[f"layers.{number}"] for number in range(run.model.num_layers)))
    for layer in ("the embedding", *(f"layers.{number}" for number in range(run.model.num_layers))):
        lacks = not sites[layer] if layer == "the embedding" else not everywhere or sites[layer] != everywhere
        told = f"{layer} does not draw dropout where the other layers do"
        seen.wrong(Key(1, record.MASKS_EVERYWHERE, layer), told if lacks else None)
    known: dict[tuple[object, ...], Where] = {}
    for where, parts in draws.items():
        site, is_attention, *_ = where
        first, *others = parts.values()
        # Parts of the sequence or heads are different activations; else tensor-parallel processes hold the same ones.
        length = run.model.num_attention_heads if is_attention else run.config.training.seq_len
        is_split = first.kept.shape[1] < length
        same = is_split or all(torch.equal(first.kept, other.kept) for other in others)
        told = f"tensor-parallel processes draw other masks {_told(where)}"
        seen.wrong(Key(1, record.MASKS_EQUAL, site), None if same else told)
        for draw in parts.values() if is_split else [first]:
            masks = draw.kept.flatten(0, 1) if is_attention else draw.kept
            # Two draws that begin at one place of a random stream need not have the same shape.
            for mark in ((draw.stream,), *((tuple(mask.shape), digest(mask)) for mask in masks)):
                again = f"it is that {_told(known[mark])} as well as {_told(where)}" if mark in known else None
                known.setdefault(mark, where)
                seen.wrong(Key(1, record.MASKS_DIFFER, site), again)


def _told(where: Where) -> str:
    site, _, step, data_rank, microbatch = where
    return f"after {site} in step {step}, data rank {data_rank}, microbatch {microbatch}"


def _check_recomputed(seen: Seen, draws: list[Draw]) -> None:
    """Recomputation draws what the forward pass has drawn."""
    forward = {(draw.site, draw.is_attention, draw.step, digest(draw.kept)) for draw in draws if not draw.is_recomputed}
    for draw in draws:
        if draw.is_recomputed:
            known = (draw.site, draw.is_attention, draw.step, digest(draw.kept)) in forward
            told = None if known else "a mask that no forward pass drew"
            seen.wrong(Key(1, record.MASKS_AGAIN, draw.site), told)
