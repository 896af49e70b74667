"""What a layout is compared with: the product on one process in float64, and how far from it a layout may be.

There is one rule. One process that computes in a type is itself some way from float64. A layout adds the same numbers
in another order, which is another draw of the same rounding, so it may be `MARGIN` times as far away as the farthest
of the draws that are measured here, and always a few units of rounding.

Float8 products are part of what is computed exactly. In float64 the numbers that they round differ too little to tip a
rounding, so layouts must agree as closely as without them. In narrower types some roundings tip, in one layout and not
in another, and their number is a matter of chance: there the tolerance is at least one rounding to float8, and one more
for every update, which passes on what has tipped before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from titan_like.models.registry import model_config
from titan_like.verify.compare import DROPOUT, EXACT, HALF, SINGLE, Key, Reference, Row, distance
from titan_like.verify.processes import Member
from titan_like.verify.runs import EPS, Trace, dropout_sites, train_alone
from titan_like.verify.samples import masks_of_run, training_samples
from titan_like.verify.shrink import Small
from titan_like.verify.watch import first_samples

MARGIN = 8.0
FLOOR = {EXACT: 1e-12, SINGLE: 8 * EPS[SINGLE], "bfloat16": EPS["bfloat16"], "float16": EPS["float16"]}
WEIGHTS_FLOOR = 1e-10  # optimizers magnify the rounding of small gradients
NEGLIGIBLE = 1e-8  # a gradient below this share of the norm of all gradients is measured against that share instead
# Such a gradient may be zero but for the rounding of the numbers that cancel in it, as that of a bias before a softmax
# is. One process may even compute exactly zero, so its own distance from the exact result says nothing.
CANCELLED = {dtype: MARGIN * eps / NEGLIGIBLE for dtype, eps in EPS.items()}
TIPPED = 2.0**-3  # half the distance of neighbouring numbers of e5m2, which gradients become, relative to the smaller
FEW = 16  # elements: so few numbers may be right by chance in one step, but not in all

_LARGE_MODEL = 1_000_000  # parameters
_RATE = 1e-9
_EQUAL = (Row.INITIAL, Row.BATCH, Row.SKIPPED, Row.LOSS_SCALE)
_GRADIENTS = {Row.GRADIENT: Row.NORM, Row.LARGE_GRADIENT: Row.LARGE_NORM}  # with the row of their norm

Train = Callable[..., Trace]


def compute_reference(
    member: Member, small: Small, kinds: list[str], file: Path, train: Train = train_alone
) -> Reference | str:
    """Train in float64, then in each other type among ``kinds`` to measure how far its rounding leads away.

    ``train`` may be definitions, which show what the product on one process gets wrong. Returns a sentence instead if
    the training diverges, and so cannot be compared with any other.
    """
    config = small.config
    if model_config(config.model).num_parameters() > _LARGE_MODEL:  # threads only slow a small model down
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    exact = train(member, small, EXACT)
    sizes, allowed = sizes_of(exact), dict[str, dict[Key, float]]()
    for dtype in [EXACT, *(kind for kind in kinds if kind in (SINGLE, *HALF))]:
        # Another run in float64 would round almost exactly as the first does, which a layout does not, so weights are
        # perturbed. All take the whole batch at once, so that no bug of accumulation passes for rounding.
        draws = [train(member, small, dtype, seed=seed) for seed in (1, 2)]
        if not all(bool(value.isfinite().all()) for trace in (exact, *draws) for value in trace.values.values()):
            return f"one process alone trains to infinite or NaN numbers in {dtype}; lower the learning rate"
        for key, value in draws[-1].values.items():
            if key not in exact.values and key.row == Row.LOSS_SCALE:
                exact.values[key], sizes[key] = value, 1.0
        allowed[dtype] = allowances(small, dtype, sizes, exact, draws)
    if DROPOUT in kinds:
        allowed[DROPOUT] = {Key(1, Row.KEPT, site): 0.0 for site in dropout_sites(member, small)}
    save_file({str(key): value.contiguous() for key, value in exact.values.items()}, file)
    samples = masks_of_run(config).over(training_samples(config))
    known = first_samples(samples, (small.num_steps + 2) * config.training.global_batch_size)
    return Reference(small, file, known, exact.names, sizes, allowed, exact.outputs)


def is_cancelled(gradient: torch.Tensor, whole: float) -> bool:
    """Whether a gradient may be nothing but rounding, given the norm of all gradients."""
    return norm(gradient) < NEGLIGIBLE * whole


def sizes_of(exact: Trace) -> dict[Key, float]:
    """What the difference of each number or tensor is relative to."""
    sizes: dict[Key, float] = {}
    for key, value in exact.values.items():
        least = NEGLIGIBLE * exact.number(key.step, _GRADIENTS[key.row]) if key.row in _GRADIENTS else 0.0
        sizes[key] = 1.0 if key.row == Row.ZEROS else max(norm(value), least) or 1.0
    return sizes


def allowances(small: Small, dtype: str, sizes: dict[Key, float], exact: Trace, draws: list[Trace]) -> dict[Key, float]:
    """How far a layout may be from the exact result in a type, given runs of one process in that type."""
    rounding = TIPPED if small.config.float8.enable and dtype != EXACT else 0.0
    allowed, shares, worst = dict[Key, float](), dict[Key, float](), dict[Key, float]()
    tips = tipped(exact, draws[0]) if dtype == EXACT and small.num_steps else {}
    for key in draws[-1].values.keys() & exact.values.keys():
        shares[key] = farthest(key, draws, exact) / sizes[key]
        in_all_steps = key._replace(step=0)
        worst[in_all_steps] = max(shares[key], worst.get(in_all_steps, 0.0))
    for key, share in shares.items():
        # In narrower types rounding moves optimizers' steps too far, and may send a token to another expert.
        if (dtype in HALF and key.row == Row.FIGURES) or (dtype != EXACT and key.row in (Row.WEIGHT, Row.ZEROS)):
            continue
        if key.row in _EQUAL:
            allowed[key] = 0.0
            continue
        if key.row == Row.RATE:
            allowed[key] = _RATE
            continue
        if key.row == Row.ZEROS:
            allowed[key] = uncertain_zeros(exact, draws[0], key.step)
            continue
        if exact.values[key].numel() < FEW:
            share = worst[key._replace(step=0)]
        least = max(FLOOR[dtype], rounding * key.step, WEIGHTS_FLOOR * (key.row in (Row.WEIGHT, Row.PLACE)))
        if key.row in _GRADIENTS and is_cancelled(exact.values[key], exact.number(key.step, _GRADIENTS[key.row])):
            least = max(least, CANCELLED[dtype])
        allowed[key] = max(MARGIN * share, least, tips.get(key, 0.0) / sizes[key])
    return allowed


def uncertain(exact: Trace, draw: Trace, key: Key) -> torch.Tensor:
    """Which elements of a gradient may be nothing but rounding, which need not be the same in two runs."""
    gradient, drawn, whole = exact.values[key], draw.values[key], exact.number(key.step, Row.NORM)
    is_small = torch.maximum(gradient.abs(), drawn.abs()) < NEGLIGIBLE * whole
    return is_small & ((gradient != 0) | (drawn != 0) | is_cancelled(gradient, whole))


def uncertain_zeros(exact: Trace, draw: Trace, step: int) -> float:
    """How far a layout's number of zero gradient elements may be off."""
    keys = [Key(step, Row.GRADIENT, name) for name in exact.names]
    return 2.0 * sum(int(uncertain(exact, draw, key).sum()) for key in keys)


def farthest(key: Key, draws: list[Trace], exact: Trace) -> float:
    """The largest distance of a draw from the exact result."""
    return max(distance(trace.values[key], exact.values[key]) for trace in draws)


def tipped(exact: Trace, draw: Trace) -> dict[Key, float]:
    """How far rounding may move each parameter's weights apart, after each step.

    Many optimizers divide each element of a gradient by about its own magnitude, so an element that is nothing but
    rounding moves its weight by a whole step, as large as the largest that an element of the parameter has made.
    """
    distances: dict[Key, float] = {}
    for name in exact.names:
        before = exact.values[Key(0, Row.INITIAL, name)]
        elements, moved = torch.zeros_like(before), 0.0
        for step in sorted(key.step for key in exact.values if key.row == Row.WEIGHT and key.name == name):
            key, weight = Key(step, Row.GRADIENT, name), exact.values[Key(step, Row.WEIGHT, name)]
            if key in exact.values:
                elements = torch.maximum(elements, uncertain(exact, draw, key).double())
                moved += 2 * (weight - before).abs().max().item()
            distances[Key(step, Row.WEIGHT, name)] = moved * norm(elements)
            before = weight
    return distances


def norm(tensor: torch.Tensor) -> float:
    """L2 norm, summed in float64."""
    return tensor.detach().double().norm().item()
