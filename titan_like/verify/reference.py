"""What a layout is compared with: the exact results of a plain loop, and how far from them it may be.

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
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from titan_like.config.load import edit
from titan_like.models.layers import init
from titan_like.models.registry import model_config
from titan_like.train.layout_rules import is_sparse
from titan_like.verify.compare import EXACT, HALF, SINGLE, Key, Reference, Row, distance
from titan_like.verify.float8 import TIPPED
from titan_like.verify.plain_training import EPS, Trace, clip_factor, norm, rate_of, train
from titan_like.verify.processes import Member
from titan_like.verify.samples import training_samples
from titan_like.verify.shrink import Small
from titan_like.verify.token_ids import masks_of_run
from titan_like.verify.watch import first_samples

MARGIN = 8.0
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
BLOCK_ELEMENTS = 64  # of initial weights per generator: small matrices then have many blocks, as large ones do

_CLIPPED_SHARE = 0.1  # of the first gradient norm: with this max_norm every step is clipped but the last
_LARGE_MODEL = 1_000_000  # parameters
FEW = 16  # elements
_COMPARED = 16  # leading elements that tell a matrix from others
_ROUNDING = 1e-12  # of a gradient's largest element: float64 rounding alone makes elements of this size
_AS_WEIGHTS = (Row.WEIGHT, Row.LARGE_LOSS, Row.LARGE_GRADIENT, Row.LARGE_NORM)
_GRADIENTS = {Row.GRADIENT: Row.NORM, Row.LARGE_GRADIENT: Row.LARGE_NORM}  # with the row of their norm
_GRADIENTS[Row.LONG_GRADIENT] = Row.LONG_NORM
_LOSSES = (Row.LOSS, Row.LARGE_LOSS, Row.LONG_LOSS, Row.VALIDATION, Row.WHOLE_VALIDATION, Row.FIGURES)


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
    samples = masks_of_run(config).over(training_samples(config))
    known = first_samples(samples, (small.num_steps + 2) * config.training.global_batch_size)
    return Reference(small, file, known, exact.names, alike(exact), sizes, allowed)


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
                moved += 2 * rate_share * rate_of(small, step)
            distances[Key(step, Row.WEIGHT, name)] = moved * norm(share)
    return distances
