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
from typing import Any
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
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify import record
from titan_like.verify.observe import Watched, digest
from titan_like.verify.record import EXACT, Key, Measure, Seen, Tensors
from titan_like.verify.reference import FLOOR, REPORTED, mean_loss, norm, summed_loss
from titan_like.verify.samples import IGNORED, fingerprint
from titan_like.verify.shrink import FLAVOR, Small, edit

_STEPS = 2
_RATE = 0.1  # where the model has none
_DEVIATIONS = 6.0  # of a binomial distribution, that the share of what is kept may be off
_GRADIENT_ROUNDING = 64 * FLOOR[EXACT]


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

    @property
    def where(self) -> tuple[str, bool]:
        """The place in the model."""
        return self.site, self.is_attention


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
            with again(x.device) as redraw:
                result = dropout(x, p, training, inplace)
                with redraw() as stream:
                    self.note(dropout(torch.ones_like(x), p, True), stream, is_attention=False)
            return result

        def watched_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not options.get("dropout_p"):
                return attention(q, k, v, *args, **options)
            with again(q.device) as redraw:
                result = attention(q, k, v, *args, **options)
                with redraw() as stream:
                    # With unit vectors as values the result is the probabilities, those dropped being zero.
                    units = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
                    self.note(attention(q, k, units, *args, **options), stream, is_attention=True)
            return result

        watched = patch.object(F, "scaled_dot_product_attention", watched_attention)
        with patch.object(F, "dropout", watched_dropout), watched:
            yield

    def enter(self, name: str) -> None:
        """A module's forward pass begins, for the first time or in recomputation."""
        self.site = name

    def note(self, result: torch.Tensor, stream: str, is_attention: bool) -> None:
        """Keep the mask: elements that are not zero."""
        kept = ((result.to_local() if isinstance(result, DTensor) else result) != 0).cpu()
        is_recomputed = torch._C._current_graph_task_id() != -1  # within a backward pass
        place = self.site, is_attention, is_recomputed, self.step
        self.draws.append(Draw(*place, microbatch=self.drawn[place], stream=stream, kept=kept))
        self.drawn[place] += 1


@contextmanager
def again(device: torch.device) -> Iterator[Callable[[], Any]]:
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

    rank: int
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
    loss = trainer.validate()
    key = Key(1, record.DROPOUT_VALIDATION)
    wanted = _untrained_loss(run)
    seen.add(key, Measure(abs(loss - wanted) / abs(wanted), REPORTED, f"it is {loss:.9g}, not {wanted:.9g}"))
    _watch_sites(recorder, (stage.module for stage in trainer.model.stages))
    samples = run.datasets["train"]
    batch = run.config.training.global_batch_size
    drawn: list[list[int]] = []
    data = Watched(trainer._load_data(), {fingerprint(samples[index]): index for index in range(batch)}, drawn)
    with recorder.installed():
        first_loss = trainer.train_step(data).loss
        first_step = list(drawn)
        trainer.save(is_last=True)
        recorder.step = 2
        trainer.train_step(data)
    data.close()
    resumed = Trainer(run)
    resumed_data = resumed._load_data()
    resumed.train_step(resumed_data)
    resumed_data.close()
    for (name, parameter), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        same = digest(local_part(parameter)[0]) == digest(local_part(other)[0])
        seen.wrong(Key(_STEPS, record.DROPOUT_RESUMED, name), None if same else "its weights are others")
    places = {name: trainer.mesh[name].get_local_rank() for name in ("tp", "dp_replicate", "dp_shard")}
    data_rank = places["dp_replicate"] * trainer.mesh["dp_shard"].size() + places["dp_shard"]
    shares: list[Share] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(shares, Share(dist.get_rank(), data_rank, places["tp"], recorder.draws, first_step))
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        _check_masks(run, seen, shares, rate)
        results = [_replay(run, shares, rate)]
    dist.broadcast_object_list(results, src=0)
    if isinstance(results[0], str):
        seen.wrong(Key(1, record.MASKS_EVERYWHERE), results[0])
        return
    wanted_loss, wanted = results[0]
    key = Key(1, record.DROPOUT_LOSS)
    detail = f"{first_loss:.9g}, not {wanted_loss:.9g}"
    seen.add(key, Measure(abs(first_loss - wanted_loss) / abs(wanted_loss), REPORTED, detail))
    whole = math.sqrt(sum(norm(gradient) ** 2 for gradient in wanted.values()))
    for name, local, offset in trainer.gradients or []:
        part = wanted[name][tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))]
        size = max(norm(wanted[name]), 1e-8 * whole)
        difference = norm(local.cpu() - part) / size
        seen.add(Key(1, record.DROPOUT_GRADIENT, name), Measure(difference, _GRADIENT_ROUNDING))


def _untrained_loss(run: Run) -> float:
    """The validation loss of the initial weights, in float64."""
    held_out = run.datasets["validation"]
    model = _fresh_model(run)
    size = run.config.evaluation.steps * run.config.training.global_batch_size
    return mean_loss(model, held_out.first(size), torch.float64, size)  # type: ignore[attr-defined]


def _fresh_model(run: Run) -> Transformer:
    model = build_model(run.model, run.config.model.family).double()
    model.init_weights(run.config.job.seed)
    return model


def _watch_sites(recorder: Recorder, modules: Iterator[nn.Module]) -> None:
    for module in modules:
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda m, i, name=name: recorder.enter(name))


def _replay(run: Run, shares: list[Share], rate: float) -> tuple[float, Tensors] | str:
    """Loss and gradients of one process, without parallelism, that drops what the layout's processes dropped.

    A sentence where they have not drawn all that it needs.
    """
    config, samples = run.config, run.datasets["train"]
    masks: dict[tuple[str, bool, int, int], dict[int, torch.Tensor]] = defaultdict(dict)
    for share in shares:
        for draw in share.draws:
            if draw.step == 1 and not draw.is_recomputed:
                masks[*draw.where, share.data_rank, draw.microbatch][share.tensor_rank] = draw.kept
    model, recorder = _fresh_model(run), Recorder()
    _watch_sites(recorder, iter([model]))
    now = (0, 0)
    missing: list[str] = []

    def mask(is_attention: bool, shape: torch.Size) -> torch.Tensor:
        parts = masks.get((recorder.site, is_attention, *now), {})
        kept = [part for _, part in sorted(parts.items())]
        if not kept:
            missing.append(f"no process draws dropout after {recorder.site} for data rank {now[0]}")
            return torch.ones(shape, dtype=torch.float64)
        whole = kept[0] if kept[0].shape == shape else torch.cat(kept, 1)  # parts of the sequence, or heads
        if whole.shape != shape:
            missing.append(f"masks after {recorder.site} have shape {tuple(whole.shape)}, not {tuple(shape)}")
            return torch.ones(shape, dtype=torch.float64)
        return whole.double() / (1 - rate)

    def dropout(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x * mask(False, x.shape)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(
            torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf
        )
        return (scores.softmax(3) * mask(True, scores.shape)) @ v

    whole_batch = samples.first(config.training.global_batch_size)  # type: ignore[attr-defined]
    step = {share.data_rank: share.samples for share in shares}
    num_tokens = sum(
        (whole_batch[indices][:, 1] != IGNORED).sum() for microbatches in step.values() for indices in microbatches
    )
    loss = torch.zeros((), dtype=torch.float64)
    with patch.object(F, "dropout", dropout), patch.object(F, "scaled_dot_product_attention", attention):
        for data_rank, microbatches in step.items():
            for number, indices in enumerate(microbatches):
                now = (data_rank, number)
                part = summed_loss(model, whole_batch[indices], torch.float64) / num_tokens
                part.backward()
                loss += part.detach()
    if missing:
        return missing[0]
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_masks(run: Run, seen: Seen, shares: list[Share], rate: float) -> None:
    """Whether masks are equal and different where they must be, and keep as much as they must."""
    microbatches = len(shares[0].samples)
    layers = {f"layers.{number}" for number in range(run.model.num_layers)}
    sites: dict[str, set[tuple[str, bool]]] = {layer: set() for layer in layers}
    outside = False
    for share in shares:
        counts: Counter[tuple[str, bool, int]] = Counter()
        for draw in share.draws:
            if draw.is_recomputed:
                continue
            layer = ".".join(draw.site.split(".")[:2])
            outside = outside or layer not in layers
            if layer in layers:
                sites[layer].add((draw.site.removeprefix(layer), draw.is_attention))
            counts[*draw.where, draw.step] += 1
        for (site, _, step), times in counts.items():
            wrong = f"rank {share.rank} draws {times} times after {site}, not {microbatches}"
            seen.wrong(Key(step, record.MASKS_EVERYWHERE, site), wrong if times % microbatches else None)
        _check_kept(seen, share, rate)
    everywhere = set.union(*sites.values())
    for layer in sorted(layers):
        lacking = everywhere - sites[layer]
        told = f"layer {layer} draws nothing after {min(lacking)[0]}" if lacking else None
        seen.wrong(Key(1, record.MASKS_EVERYWHERE, layer), told)
    nothing = "no layer draws dropout" if not everywhere else None if outside else "the embedding draws no dropout"
    seen.wrong(Key(1, record.MASKS_EVERYWHERE), nothing)
    _check_identities(run, seen, shares)


def _check_kept(seen: Seen, share: Share, rate: float) -> None:
    """Every place in the model keeps its share, as far as chance allows."""
    kept: Counter[tuple[str, bool]] = Counter()
    drawn: Counter[tuple[str, bool]] = Counter()
    for draw in share.draws:
        causal = draw.kept.tril() if draw.is_attention else draw.kept
        kept[draw.where] += int(causal.sum())
        drawn[draw.where] += int(torch.ones_like(draw.kept).tril().sum()) if draw.is_attention else draw.kept.numel()
    for (site, is_attention), total in drawn.items():
        found = kept[site, is_attention] / total
        allowed = _DEVIATIONS * math.sqrt(rate * (1 - rate) / total) + 1 / total
        what = "attention probabilities" if is_attention else "elements"
        told = f"{found:.1%} of {what} after {site} are kept, not {1 - rate:.1%}, on rank {share.rank}"
        seen.add(Key(1, record.KEPT, f"{site} {what}"), Measure(abs(found - (1 - rate)), allowed, told))


_Identity = tuple[str, int, int, int, int, object, bool]  # see `_parts`


def _check_identities(run: Run, seen: Seen, shares: list[Share]) -> None:
    """Masks of the same activations are equal, and no two of different activations are."""
    by_identity: dict[_Identity, tuple[str, int]] = {}
    by_digest: dict[tuple[tuple[int, ...], str], tuple[_Identity, int]] = {}
    streams: dict[str, tuple[_Identity, int]] = {}
    problems: dict[str, str] = {}
    for share in shares:
        forward = {(draw.where, draw.step, digest(draw.kept)) for draw in share.draws if not draw.is_recomputed}
        for draw in share.draws:
            if draw.is_recomputed and (draw.where, draw.step, digest(draw.kept)) not in forward:
                told = f"rank {share.rank} recomputes a mask after {draw.site} that no forward pass drew"
                problems.setdefault(record.MASKS_AGAIN, told)
        for identity, part, stream in _parts(run, share):
            if stream is not None:  # two draws that begin at one place of a stream need not have the same shape
                other, rank = streams.setdefault(stream, (identity, share.rank))
                if other != identity:
                    told = f"{_name(identity)} on rank {share.rank} begins as {_name(other)} on rank {rank} does"
                    problems.setdefault(record.MASKS_DIFFER, told)
            mine = digest(part)
            known, rank = by_identity.setdefault(identity, (mine, share.rank))
            if known != mine:
                told = f"{_name(identity)} is drawn otherwise on rank {share.rank} than on rank {rank}"
                problems.setdefault(record.MASKS_EQUAL, told)
                continue
            other, rank = by_digest.setdefault((tuple(part.shape), mine), (identity, share.rank))
            if other != identity:
                told = f"{_name(identity)} on rank {share.rank} is that of {_name(other)} on rank {rank}"
                problems.setdefault(record.MASKS_DIFFER, told)
    for row in (record.MASKS_EQUAL, record.MASKS_DIFFER, record.MASKS_AGAIN):
        seen.wrong(Key(1, row), problems.get(row))


def _parts(run: Run, share: Share) -> Iterator[tuple[_Identity, torch.Tensor, str | None]]:
    """Each sample's (and head's) mask with what it is a mask of: equal identities are the same activations.

    As (identity, mask, digest of the stream that the draw began with if this is its first part).
    """
    for draw in share.draws:
        if draw.is_recomputed:
            continue
        count = draw.kept.shape[1]
        place: object = share.tensor_rank if count < run.config.training.seq_len else "whole"
        first = share.tensor_rank * count if count < run.model.num_attention_heads else 0
        for sample, mask in enumerate(draw.kept):
            heads = list(mask) if draw.is_attention else [mask]
            for number, part in enumerate(heads):
                within = first + number if draw.is_attention else place
                identity = (draw.site, draw.step, share.data_rank, draw.microbatch, sample, within, draw.is_attention)
                yield identity, part, None if sample or number else draw.stream


def _name(identity: _Identity) -> str:
    site, step, data_rank, microbatch, sample, within, is_attention = identity
    what = f", head {within}" if is_attention else "" if within == "whole" else f", part {within} of the sequence"
    return f"the mask after {site} (step {step}, data rank {data_rank}, microbatch {microbatch}, sample {sample}{what})"
