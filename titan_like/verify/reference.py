"""The same training in one process and one plain loop.

It shares no code with the trainer, its optimizers or its loss, so their mistakes cannot cancel out. It runs in float64,
which counts as exact, and in the types whose rounding is measured. Some steps are bad: their gradients are not finite,
so they consume samples and update nothing.

Tolerances follow from rounding alone. One process that computes in a type is itself some way from the exact result. A
layout adds the same numbers in another order, which is another draw of the same rounding, so it may be `MARGIN` times
as far away. The measured distance may be tiny by chance; the tolerance is at least a few units of rounding.

Float8 products are part of what is computed exactly. In float64 the numbers that they round differ too little to tip a
rounding, so layouts must agree as closely as without them. In narrower types some roundings tip, in one layout and not
in another, and their number is a matter of chance: there the tolerance is at least one rounding to float8, and one more
for every update, which passes on what has tipped before it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from titan_like.config.entry_points import load_entry
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.models.config import NUM_OPTIONS
from titan_like.models.layers import init
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.optim.registry import RULES, find_rule
from titan_like.train.layout_rules import is_sparse
from titan_like.verify.compare import EXACT, HALF, SINGLE, Key, Reference, Row, distance
from titan_like.verify.experts import PlainExperts, starve_an_expert
from titan_like.verify.float8 import TIPPED, take_float8
from titan_like.verify.masks import described, model_arguments, take_definitions
from titan_like.verify.matrix_optimizers import PlainAdafactor, PlainMuon
from titan_like.verify.places import Outputs
from titan_like.verify.processes import Member
from titan_like.verify.samples import IGNORED, batches, training_samples, validation_samples
from titan_like.verify.shrink import Small

MARGIN = 8.0
EPS = {EXACT: 2.0**-52, SINGLE: 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
FLOOR = {EXACT: 1e-12, SINGLE: 8 * EPS[SINGLE], "bfloat16": EPS["bfloat16"], "float16": EPS["float16"]}
WEIGHTS_FLOOR = 1e-10  # AdamW magnifies the rounding of small gradients
REPORTED = 8 * EPS[SINGLE]  # for losses: the trainer may report them in float32, whatever it computes in
# In units of a half type. Where the same pieces are rounded alike, only the order of float32 sums differs: by some 32
# units of float32 for sums of hundreds of numbers. In bfloat16 that tips a share f = 32 · 2⁻¹⁶ of roundings, by one
# unit each, which adds √f / 2 to a tensor. From the first layer to its gradient there are about 40 roundings, which add
# up as √40. In float16, f is eight times as large, and layers pass on what is tipped: there it is one rounding of
# everything. In a vector of few elements, a single one that is tipped adds more.
SAME_TYPE_SHARE = {"bfloat16": math.sqrt(40 * 32) * 2.0**-8 / 2, "float16": 1 / 2}
# One rounding: here autograd rounds the sum of a tied table's two uses to the half type, while from torch 2.15 on the
# trainer's FSDP2 adds them in the type of the reduction (`titan_like.torch_private.sum_uses_in_full`).
TIED_TABLE_SHARE = dict.fromkeys(HALF, 1 / 2) if torch.__version__ >= "2.15" else SAME_TYPE_SHARE
# Rounding decides between two scores of experts whose gap is less than this many times its median error in the type, or
# four times its standard deviation. One run of the reference decides all of these choices the other way. A layout that
# decides some of them so may be this many times as far away.
TIE, TIES_MARGIN = 6.0, 2.0
NEGLIGIBLE = 1e-8  # a gradient below this share of the norm of all gradients is measured against that share instead
# Such a gradient may be zero but for the rounding of the numbers that cancel in it, as that of a bias before a softmax
# is. One process may even compute exactly zero, so its own distance from the exact result says nothing.
CANCELLED = {dtype: MARGIN * eps / NEGLIGIBLE for dtype, eps in EPS.items()}
FLOAT16_SCALE = 1024.0  # of the loss: raises small gradients without any overflow
LARGE = 1e4  # multiplies the final norm's weights; the exponential of a logit then exceeds the range of float64
BLOCK_ELEMENTS = 64  # of initial weights per generator: small matrices then have many blocks, as large ones do

_CLIPPED_SHARE = 0.1  # of the first gradient norm: with this max_norm every step is clipped but the last
_LARGE_MODEL = 1_000_000  # parameters
FEW = 16  # elements
_COMPARED = 16  # leading elements that tell a matrix from others
_ROUNDING = 1e-12  # of a gradient's largest element: float64 rounding alone makes elements of this size
_AS_WEIGHTS = (Row.WEIGHT, Row.LARGE_LOSS, Row.LARGE_GRADIENT, Row.LARGE_NORM)
_LONG = {Row.LARGE_LOSS: Row.LONG_LOSS, Row.LARGE_GRADIENT: Row.LONG_GRADIENT, Row.LARGE_NORM: Row.LONG_NORM}
_GRADIENTS = {Row.GRADIENT: Row.NORM, Row.LARGE_GRADIENT: Row.LARGE_NORM}  # with the row of their norm
_GRADIENTS[Row.LONG_GRADIENT] = Row.LONG_NORM
_TERMS = {"tokens": "lm_loss", "pair": "sentence_loss", "choice": "choice_loss"}
_LOSSES = (Row.LOSS, Row.LARGE_LOSS, Row.LONG_LOSS, Row.VALIDATION, Row.WHOLE_VALIDATION)


@dataclass
class Trace:
    """What one run computed."""

    names: list[str]
    values: dict[Key, torch.Tensor] = field(default_factory=dict)  # float64; a number has no dimensions
    gaps: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)  # of `PlainExperts`

    def keep(self, step: int, row: Row, values: Mapping[str, torch.Tensor] | float) -> None:
        """Copy a number, or the tensors of a row by name, to the CPU."""
        if not isinstance(values, Mapping):
            values = {"": torch.tensor(values, dtype=torch.float64)}
        for name, value in values.items():
            self.values[Key(step, row, name)] = value.detach().to("cpu", torch.float64, copy=True)

    def keep_losses(self, step: int, row: Row, model: Transformer, losses: list[float]) -> None:
        """Keep a loss, and its terms by their names in metrics.jsonl if the model predicts more than tokens."""
        self.keep(step, row, sum(losses))
        kinds = model.config.predictions
        if kinds != ("tokens",) and row != Row.LARGE_LOSS:
            terms = zip(kinds, losses, strict=True)
            self.keep(step, row, {_TERMS[kind]: torch.tensor(loss, dtype=torch.float64) for kind, loss in terms})

    def number(self, step: int, row: Row) -> float:
        """A number that was kept."""
        return self.values[Key(step, row)].item()


def compute_reference(member: Member, small: Small, kinds: list[str], file: Path) -> Reference | str:
    """Train in float64, then in each other type among ``kinds`` to measure how far its rounding leads away.

    Returns a sentence instead if the training diverges, and so cannot be compared with any other.
    """
    init.BLOCK_ELEMENTS, device, config = BLOCK_ELEMENTS, torch.device(member.device), small.config
    if model_config(config.model).num_parameters() > _LARGE_MODEL:  # threads only slow a small model down
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    piece = config.training.micro_batch_size
    batch = piece if config.float8.enable else config.training.global_batch_size  # float8 scales are a microbatch's
    if config.training.max_norm:
        whole_norm = train(replace(small, num_steps=1, longer={}), EXACT, batch, device).number(1, Row.NORM)
        config = edit(config, {"training.max_norm": float(f"{_CLIPPED_SHARE * whole_norm:.3g}")})
        small = replace(small, config=config)
    exact = train(small, EXACT, batch, device)
    sizes, allowed = sizes_of(exact), dict[str, dict[Key, float]]()
    for dtype in [EXACT, *(kind for kind in kinds if kind in (SINGLE, *HALF))]:
        # The same samples in smaller pieces and in reverse order. Half types keep the layout's order: they round the
        # gradients of each piece, which matters more than the order of the sum. A second run in float64 would round
        # almost exactly as the first does, which a layout does not, so its weights are perturbed.
        is_exact = dtype == EXACT
        traces = [train(small, dtype, piece, device, is_reversed=dtype not in HALF, is_perturbed=is_exact)]
        if dtype in (EXACT, SINGLE):  # one distance alone may be small by chance
            traces.append(train(small, dtype, batch, device, is_perturbed=is_exact))
        if dtype == SINGLE:
            traces.append(train(small, dtype, piece, device, is_perturbed=True))
        if not all(bool(value.isfinite().all()) for trace in (exact, *traces) for value in trace.values.values()):
            return f"one process alone trains to infinite or NaN numbers in {dtype}; lower the learning rate"
        draws, ties = [(trace, 1.0) for trace in traces], dict[tuple[int, str], float]()
        if dtype in HALF and is_sparse(model_config(config.model)):
            # A choice of experts that rounding decides moves gradients far more than rounding itself.
            ties = {key: TIE * (gap - exact.gaps[key]).abs().median().item() for key, gap in traces[0].gaps.items()}
            draws.append((train(small, dtype, piece, device, ties=ties), TIES_MARGIN / MARGIN))
        allowed[dtype] = allowances(small, dtype, sizes, exact, draws)
        if dtype == EXACT:
            for step in [key.step for key in sizes if key.row == Row.NORM]:
                key, (zeros, uncertain) = Key(step, Row.ZEROS), count_zeros(exact, traces[0], step)
                exact.keep(step, Row.ZEROS, zeros)
                sizes[key], allowed[dtype][key] = 1.0, uncertain
        if dtype in HALF:
            # The same, for choices between scores that are nearer than rounding in another order moves them.
            nearer = {key: SAME_TYPE_SHARE[dtype] * gap for key, gap in ties.items()}
            tied = train(replace(small, num_steps=1), dtype, piece, device, ties=nearer) if ties else traces[0]
            for name in exact.names:
                key, gradient = Key(1, Row.SAME_TYPE, name), Key(1, Row.GRADIENT, name)
                exact.values[key], sizes[key] = traces[0].values[gradient], sizes[gradient]
                apart = TIES_MARGIN * distance(tied.values[gradient], exact.values[key]) / sizes[key]
                is_tied = name == "embedding.weight" and model_config(config.model).tied_embeddings
                share = (TIED_TABLE_SHARE if is_tied else SAME_TYPE_SHARE)[dtype]
                one_element = exact.values[key].abs().max().item() / max(sizes[key], NEGLIGIBLE)
                allowed[dtype][key] = max(max(share, one_element) * EPS[dtype], apart)
    save_file({str(key): value.contiguous() for key, value in exact.values.items()}, file)
    return Reference(small, file, exact.names, alike(exact), sizes, allowed)


def train(
    small: Small, dtype: str, piece: int, device: torch.device, is_reversed: bool = False, is_perturbed: bool = False,
    outputs: tuple[int, Outputs] | None = None, large: float = LARGE, ties: Mapping[tuple[int, str], float] = {},
) -> Trace:  # fmt: skip
    """Train with at most ``piece`` samples in a forward pass.

    float64 ends with a step whose logits are ``large`` and in which an expert gets no token, and with one of longer
    sequences from the start.

    If the run ``is_perturbed``, each initial weight is off by the rounding error of a sum over the longer side of its
    matrix, so that everything after it rounds differently.
    ``outputs`` is a step and where to record its modules' outputs; the run ends with that step's backward pass.
    ``ties`` are those of `PlainExperts`.
    """
    compute_type, config, last = getattr(torch, dtype), small.config, small.num_steps
    model = build_model(model_config(config.model), config.model.family)
    model.to(torch.promote_types(compute_type, torch.float32)).init_weights(config.job.seed)
    model.to(device)
    take_definitions(model, config, in_pairs=dtype == EXACT)
    take_float8(model, config.float8)
    experts = PlainExperts(model, ties)
    parameters = dict(model.named_parameters())
    noise = torch.Generator(device).manual_seed(config.job.seed + is_reversed)
    for parameter in parameters.values() if is_perturbed else ():
        signs = torch.rand(parameter.shape, generator=noise, device=device, dtype=parameter.dtype).sub_(0.5).sign_()
        parameter.data.mul_(1 + EPS[dtype] * math.sqrt(max(parameter.shape)) * signs)
    optimizer = build_optimizer(list(parameters.items()), config)
    samples, validation = training_samples(config), validation_samples(config)
    unit = config.training.micro_batch_size if config.float8.enable else 1
    filled = -(-len(validation) // unit) * unit  # the last microbatch is full, and float8 scales depend on all of it
    held_out = described(validation, range(filled), config).to(device)
    scale = FLOAT16_SCALE if dtype == "float16" else 1.0
    trace = Trace(sorted(parameters, key=lambda name: not name.startswith(model.entry)))  # in forward order
    trace.gaps = experts.gaps
    trace.keep(0, Row.INITIAL, parameters)
    rows = (Row.LOSS, Row.GRADIENT, Row.NORM)
    for step, batch in batches(config, last + (dtype == EXACT)).items():
        if step > last:
            rows = (Row.LARGE_LOSS, Row.LARGE_GRADIENT, Row.LARGE_NORM)
            for parameter in model.last_norm.parameters():
                parameter.data.mul_(large)
            if large > 1:
                starve_an_expert(model)
        if outputs is not None and step == outputs[0]:
            outputs[1].follow(model)
        pieces = described(samples, batch, config).to(device).split(piece)
        counts = num_labels(model, pieces)
        losses = add_gradients(model, pieces[::-1] if is_reversed else pieces, counts, compute_type, scale, experts)
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for gradient in gradients.values():
            gradient.div_(scale)
        grad_norm = math.sqrt(sum(norm(gradient) ** 2 for gradient in gradients.values()))
        if outputs is not None and step == outputs[0]:
            return trace
        trace.keep_losses(step, rows[0], model, losses)
        if step in small.bad_steps:
            scale = scale / 2 if dtype == "float16" else scale
            experts.forget()
        else:
            trace.keep(step, rows[2], grad_norm)
            trace.keep(step, rows[1], gradients)
            factor = clip_factor(small.max_norm(step), grad_norm)
            for gradient in gradients.values():
                gradient.mul_(factor)
            set_learning_rate(optimizer, config, step, small.total)
            optimizer.step()
            experts.update()
        optimizer.zero_grad()
        if step > last:
            break
        trace.keep(step, Row.WEIGHT, parameters)
        if step % config.evaluation.interval == 0:
            size = config.evaluation.steps * config.training.global_batch_size
            trace.keep_losses(step, Row.VALIDATION, model, mean_losses(model, held_out[:size], compute_type, piece))
        if step == last:
            trace.keep(last, Row.WHOLE_VALIDATION, sum(mean_losses(model, held_out, compute_type, piece)))
    if dtype == EXACT and small.longer:
        longer = replace(small, config=edit(config, small.longer), num_steps=0, longer={})
        found = train(longer, dtype, piece, device, is_reversed, is_perturbed, large=1.0).values.items()
        trace.values |= {Key(1, _LONG[row], name): value for (_, row, name), value in found if row in _LONG}
    return trace


def labels_of(model: Transformer, batch: torch.Tensor) -> list[torch.Tensor]:
    """The labels of each of a model's predictions, in samples [n, rows, seq] from `described`."""
    kind, labels = model.config.predictions, batch[:, 1]
    if kind == ("choice",):
        return [labels.unflatten(0, (-1, NUM_OPTIONS))[:, 0, 0]]
    return [labels[:, 1:], labels[:, 0]] if "pair" in kind else [labels]


def num_labels(model: Transformer, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Number of labels of each prediction: [predictions]. pieces: each [n, rows, seq], from `described`."""
    counts = [[(labels != IGNORED).sum() for labels in labels_of(model, piece)] for piece in pieces]
    return torch.tensor(counts).sum(0)


def add_gradients(
    model: Transformer, pieces: Sequence[torch.Tensor], counts: torch.Tensor, dtype: torch.dtype, scale: float = 1.0,
    experts: PlainExperts | None = None,
) -> list[float]:  # fmt: skip
    """Add the gradients of ``scale`` × the loss of pieces [n, rows, seq], given all their `num_labels`.

    Losses that balance ``experts`` are part of it, but not of what is returned.

    Returns the loss of each prediction; their sum is the loss.
    """
    total = torch.zeros(len(counts), dtype=torch.float64)
    for piece in pieces:
        losses = summed_losses(model, piece, dtype)
        means = torch.stack([loss / count for loss, count in zip(losses, counts, strict=True)])
        balance = 0.0 if experts is None else experts.loss_of_piece(sum(p.shape[0] * p.shape[2] for p in pieces))
        ((means.sum() + balance) * scale).backward()
        total += means.detach().double().cpu()
    return total.tolist()


def summed_losses(model: Transformer, batch: torch.Tensor, compute_type: torch.dtype) -> list[torch.Tensor]:
    """Sums of the losses of each prediction, in samples [n, rows, seq] from `described`, at least float32."""
    weights = {name: parameter.to(compute_type) for name, parameter in model.named_parameters()}
    found = torch.func.functional_call(model, weights, model_arguments(batch))
    outputs = list(found) if isinstance(found, tuple) else [found]
    if model.config.objective == "span_corruption":
        batch = batch[:, :, -outputs[0].shape[1] :]  # the logits are of the decoder's positions, which come last
    kind, labels = model.config.predictions, labels_of(model, batch)
    if "tokens" in kind:
        outputs[0] = outputs[0][..., : model.config.vocab_size]  # whatever the model does to the padding
    if "pair" in kind:
        outputs[0] = outputs[0][:, 1:]  # the first token's label is the pair's
    if "choice" in kind:
        outputs[0] = outputs[0].unflatten(0, (-1, NUM_OPTIONS)).flatten(1)
    accumulator = torch.promote_types(compute_type, torch.float32)
    return [
        F.cross_entropy(
            output.to(accumulator).reshape(-1, output.shape[-1]), own.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        for output, own in zip(outputs, labels, strict=True)
    ]


@torch.no_grad()
def mean_losses(model: Transformer, batch: torch.Tensor, compute_type: torch.dtype, piece: int) -> list[float]:
    """The losses of held-out samples [n, rows, seq], without dropout: the mean of each prediction's."""
    model.eval()
    parts = [torch.stack(summed_losses(model, part, compute_type)).double() for part in batch.split(piece)]
    model.train()
    return (torch.stack(parts).sum(0).cpu() / num_labels(model, [batch])).tolist()


def build_optimizer(named: list[tuple[str, torch.nn.Parameter]], config: JobConfig) -> torch.optim.Optimizer:
    """The update rule, with weight decay for matrices alone. A user's own optimizer is its own reference."""
    section, groups = config.optimizer, list[dict[str, Any]]()
    for is_matrix in (True, False):
        members = [(name, parameter) for name, parameter in named if (parameter.ndim > 1) == is_matrix]
        names, parameters = [name for name, _ in members], [parameter for _, parameter in members]
        decay = section.weight_decay if is_matrix else 0.0
        groups.append({"params": parameters, "names": names, "weight_decay": decay})
    if section.name not in RULES:
        return load_entry("optimizer.name", find_rule(section))(groups, section)
    if section.name == "adafactor":
        return PlainAdafactor(groups, section)
    if section.name == "muon":
        return PlainMuon(groups, section)
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, foreach=False)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, foreach=False)


def clip_factor(max_norm: float, grad_norm: float) -> float:
    """The factor by which clipping multiplies gradients. A ``max_norm`` of 0 does not clip."""
    return min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0


def set_learning_rate(optimizer: torch.optim.Optimizer, config: JobConfig, step: int, total: int) -> None:
    """Set an optimizer's learning rate for a step of a run of ``total`` steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, total)


def learning_rate(config: JobConfig, step: int, total: int) -> float:
    """The learning rate of a step, counted from 1, in a run of ``total`` steps."""
    section = config.lr_scheduler
    peak, floor = config.optimizer.lr, section.min_lr_ratio
    length = (section.decay_steps or max(1, total // 10)) if section.decay == "wsd" else 0  # of the final decay
    warmup = min(section.warmup_steps, max(0, total - length))
    if step <= warmup:
        return peak * step / warmup
    if section.decay == "constant":
        return peak
    if section.decay == "inverse_sqrt":
        return peak * max(floor, math.sqrt(max(warmup, 1) / step))
    if section.decay == "wsd":
        done = max(0.0, (step - (total - length)) / length)
    else:
        done = min(1.0, (step - warmup) / max(1, (section.decay_steps or total) - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if section.decay == "cosine" else 1 - done
    return peak * (floor + (1 - floor) * left)


def alike(trace: Trace) -> list[tuple[str, str]]:
    """Pairs of matrices whose initial values are the same random numbers, up to their scale."""
    initial = {name: trace.values[Key(0, Row.INITIAL, name)] for name in trace.names}
    names = [name for name, tensor in initial.items() if tensor.ndim > 1 and tensor.numel() >= _COMPARED]
    starts = torch.stack([initial[name].flatten()[:_COMPARED] for name in names])
    starts /= starts.norm(dim=1, keepdim=True).clamp_min(1e-30)
    pairs = (starts @ starts.t()).triu(diagonal=1).gt(1 - 1e-6).nonzero().tolist()
    return [(names[first], names[second]) for first, second in pairs]


def count_zeros(exact: Trace, other: Trace, step: int) -> tuple[float, float]:
    """(number of zero elements in a step's gradients, how far a layout may be off).

    ``other`` is the same run in another order of summation. An element that only rounding makes nonzero is uncertain.
    """
    zeros, uncertain, whole = 0, 0, exact.number(step, Row.NORM)
    for name in exact.names:
        gradient, second = (trace.values[Key(step, Row.GRADIENT, name)] for trace in (exact, other))
        small = torch.maximum(gradient.abs(), second.abs()) < _ROUNDING * gradient.abs().max()
        zeros += int((gradient == 0).sum())
        uncertain += int((small & ((gradient != 0) | (second != 0)) | is_cancelled(gradient, whole)).sum())
    return float(zeros), 2.0 * uncertain


def is_cancelled(gradient: torch.Tensor, whole: float) -> bool:
    """Whether a gradient may be nothing but rounding, given the norm of all gradients."""
    return norm(gradient) < NEGLIGIBLE * whole


def sizes_of(exact: Trace) -> dict[Key, float]:
    """What the difference of each number or tensor is relative to."""
    sizes: dict[Key, float] = {}
    for key, value in exact.values.items():
        least = NEGLIGIBLE * exact.number(key.step, _GRADIENTS[key.row]) if key.row in _GRADIENTS else 0.0
        sizes[key] = max(norm(value), least) or 1.0
    return sizes


def allowances(
    small: Small, dtype: str, sizes: dict[Key, float], exact: Trace, draws: list[tuple[Trace, float]]
) -> dict[Key, float]:
    """How far a layout may be from the exact result in a type.

    ``draws`` are runs of one process in that type, each with the share of its distance that counts.
    """
    rounding = TIPPED if small.config.float8.enable and dtype != EXACT else 0.0
    allowed, tips, shares, worst = {}, tipped(small, dtype, draws, exact), dict[Key, float](), dict[Key, float]()
    for key in draws[0][0].values:
        shares[key] = _farthest(key, draws, exact) / sizes[key]
        in_all_steps = key._replace(step=0)
        worst[in_all_steps] = max(shares[key], worst.get(in_all_steps, 0.0))
    for key, share in shares.items():
        if key.row == Row.INITIAL:
            allowed[key] = 0.0
        elif key.row != Row.WEIGHT or dtype not in HALF:  # there rounding moves AdamW's steps too far
            if exact.values[key].numel() < FEW:  # so few numbers may be right by chance in one step, but not in all
                share = worst[key._replace(step=0)]
            # The step with large logits uses the weights as they are after the last update.
            least = max(
                FLOOR[dtype],
                rounding * key.step,
                WEIGHTS_FLOOR * (key.row in _AS_WEIGHTS),
                REPORTED * (key.row in _LOSSES),
            )
            if key.row in _GRADIENTS and is_cancelled(exact.values[key], exact.number(key.step, _GRADIENTS[key.row])):
                least = max(least, CANCELLED[dtype])
            allowed[key] = max(MARGIN * share, least, tips.get(key, 0.0) / sizes[key])
    return allowed


def _farthest(key: Key, draws: list[tuple[Trace, float]], exact: Trace) -> float:
    return max(share * distance(trace.values[key], exact.values[key]) for trace, share in draws)


def tipped(small: Small, dtype: str, draws: list[tuple[Trace, float]], exact: Trace) -> dict[Key, float]:
    """How far rounding may move each parameter's weights apart under AdamW and the like, after each step.

    AdamW divides each element of a gradient by about its own magnitude plus eps. A rounding error that is a share x of
    that sum can move the weight by x times two steps, and by both whole steps if it decides the sign.
    """
    distances: dict[Key, float] = {}
    config, section = small.config, small.config.optimizer
    eps = 1e-15 if section.name == "adafactor" else section.eps  # the root of what Adafactor adds to squares
    rate_share = 1e-2 / section.lr if section.relative_step else 1.0
    for name in exact.names if config.optimizer.name != "sgd" else []:
        share, moved = torch.zeros_like(exact.values[Key(0, Row.INITIAL, name)]), 0.0
        for step in sorted(key.step for key in exact.values if key.row == Row.WEIGHT and key.name == name):
            key = Key(step, Row.GRADIENT, name)
            if key in exact.values:
                wanted, seen, whole = exact.values[key], draws[0][0].values[key], exact.number(step, Row.NORM)
                cancelled = is_cancelled(wanted, whole)
                error = max(_farthest(key, draws, exact), cancelled * EPS[dtype] * whole)
                clipping = clip_factor(small.max_norm(step), whole)
                of_size = MARGIN * error / math.sqrt(wanted.numel()) * clipping / (wanted.abs() * clipping + eps)
                share = torch.maximum(share, ((seen != 0) | cancelled) * of_size.clamp(max=1))
                moved += 2 * rate_share * learning_rate(config, step, small.total)
            distances[Key(step, Row.WEIGHT, name)] = moved * norm(share)
    return distances


def norm(tensor: torch.Tensor) -> float:
    """L2 norm, summed in float64."""
    return tensor.detach().double().norm().item()
