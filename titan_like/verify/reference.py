"""The same training written down plainly: one process, one loop, nothing of the trainer's, the optimizers' or the
loss's code. A mistake there cannot cancel out.

It runs in float64, which is taken for exact, and in the types whose rounding is to be measured. Some steps are bad:
their gradients are not finite, so they consume samples and update nothing.

Tolerances follow from rounding alone. One process that computes in a type is itself some way from the exact result. A
layout sums the same numbers in another order and with other partial sums, so it is another draw from the same rounding:
it may be `MARGIN` times as far. Where chance makes the measured distance tiny there is a floor of a few units of
rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from titan_like.config.schema import JobConfig, LRScheduler
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.verify import record
from titan_like.verify.record import EXACT, HALF, SINGLE, Key, Tensors, Truth, bad_steps, num_steps
from titan_like.verify.samples import IGNORED, Samples, training_samples, validation_samples

MARGIN = 8.0
EPS = {EXACT: 2.0**-52, SINGLE: 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
FLOOR = {EXACT: 1e-12, SINGLE: 8 * EPS[SINGLE], "bfloat16": EPS["bfloat16"], "float16": EPS["float16"]}
WEIGHTS_FLOOR = 1e-10  # AdamW magnifies what rounding does to small gradients
# The trainer may report losses in float32 whatever it computes in.
REPORTED = 8 * EPS[SINGLE]
# Of the unit of a half type: with the same pieces rounded alike, what is left is the order of float32 sums, which now
# and then tips a rounding to the half type.
SAME_TYPE_SHARE = 1 / 32
# A parameter's gradient that is smaller than this share of all gradients' norm is compared with that instead.
NEGLIGIBLE = 1e-8
FLOAT16_SCALE = 1024.0  # of the loss: raises small gradients, and overflows nowhere
LARGE = 1e4  # that the final norm's weights are multiplied by: the exponential of a logit is then beyond float64

_CLIPPED_SHARE = 0.1  # of the first gradient norm, that gradients are clipped at: every step is clipped
_LARGE_MODEL = 1_000_000  # parameters
_COMPARED = 16  # elements of a matrix by which to tell it from others
_ROUNDING = 1e-12  # of a gradient's largest element: smaller ones are zero but for float64's rounding
_LOSSES = (record.LOSS, record.LARGE_LOSS, record.VALIDATION, record.WHOLE_VALIDATION)

Watch = Callable[[int, Transformer], None]  # called before the forward passes of a step


@dataclass
class Trace:
    """One run. Tensors are float64."""

    names: list[str]
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    scalars: dict[Key, float] = field(default_factory=dict)

    def keep(self, step: int, row: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies of a row's tensors, on the CPU."""
        for name, tensor in tensors.items():
            self.tensors[Key(step, row, name)] = tensor.detach().to("cpu", torch.float64, copy=True)


def compute_truth(config: JobConfig, good_steps: int, dtypes: list[str], file: Path, device: torch.device) -> Truth:
    """Train in float64, then in each of ``dtypes`` to see how far their rounding leads away from it."""
    if model_config(config.model).num_parameters() > _LARGE_MODEL:  # threads only slow a small model down
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    training, section = config.training, config.parallelism
    micro_batch = training.micro_batch_size
    ranks = section.data_parallel_replicate_degree * section.data_parallel_shard_degree
    samples = training_samples(config, micro_batch, ranks)
    if training.max_norm:
        whole_norm = train(config, samples, 1, EXACT, training.global_batch_size, device).scalars[Key(1, record.NORM)]
        max_norm = float(f"{_CLIPPED_SHARE * whole_norm:.3g}")
        config = config.model_copy(update={"training": training.model_copy(update={"max_norm": max_norm})})
    exact = train(config, samples, good_steps, EXACT, training.global_batch_size, device)
    other = train(config, samples, good_steps, EXACT, micro_batch, device, is_reversed=True)
    sizes = sizes_of(exact)
    allowed = {EXACT: allowances(config, EXACT, sizes, exact, [other])}
    stored = {str(key): tensor for key, tensor in exact.tensors.items()}
    for dtype in dtypes:
        # The same samples in another order and in smaller pieces. Types that round more than they add do it piece by
        # piece as every layout does, since it is each piece's gradients that are rounded.
        is_half = dtype in HALF
        traces = [train(config, samples, good_steps, dtype, micro_batch, device, is_reversed=not is_half)]
        if dtype == SINGLE:
            traces.append(train(config, samples, good_steps, dtype, training.global_batch_size, device))
        allowed[dtype] = allowances(config, dtype, sizes, exact, traces)
        if is_half:
            for name in exact.names:
                key = Key(1, f"{record.SAME_TYPE} {dtype}", name)
                stored[str(key)] = traces[0].tensors[Key(1, record.GRADIENT, name)]
                sizes[key] = sizes[Key(1, record.GRADIENT, name)]
                allowed[dtype][key] = SAME_TYPE_SHARE * EPS[dtype]
    facts: dict[Key, object] = dict(exact.scalars)
    consumed = 0
    for step in range(1, num_steps(good_steps) + 1):
        batch_size = batch_size_at(config, consumed)
        consumed += batch_size
        facts[Key(step, record.BATCH)] = (batch_size, consumed, consumed * training.seq_len)
        facts[Key(step, record.LOSS_SCALE)] = FLOAT16_SCALE / 2 ** sum(bad < step for bad in bad_steps(good_steps))
        rate, zeros = Key(step, record.RATE), Key(step, record.ZEROS)
        facts[rate], sizes[rate] = learning_rate(config, step, training.steps or 0), config.optimizer.lr
        for rows in allowed.values():
            rows[rate] = 1e-9
        if step not in bad_steps(good_steps):
            facts[zeros], allowed[EXACT][zeros] = count_zeros(exact, other, step)
            sizes[zeros] = 1.0
    save_file(stored, file)
    initial = {name: exact.tensors[Key(0, record.INITIAL, name)] for name in exact.names}
    return Truth(
        file=file,
        names=exact.names,
        alike=alike(initial),
        max_norm=config.training.max_norm,
        micro_batch_size=micro_batch,
        data_parallel=ranks,
        sizes=sizes,
        allowed=allowed,
        facts=facts,
    )


def alike(initial: Tensors) -> list[tuple[str, str]]:
    """Pairs of matrices that begin with the same random numbers, up to their scale."""
    names = [name for name, tensor in initial.items() if tensor.ndim > 1 and tensor.numel() >= _COMPARED]
    starts = torch.stack([initial[name].flatten()[:_COMPARED] for name in names])
    starts /= starts.norm(dim=1, keepdim=True).clamp_min(1e-30)
    pairs = (starts @ starts.t()).triu(diagonal=1).gt(1 - 1e-6).nonzero().tolist()
    return [(names[first], names[second]) for first, second in pairs]


def train(
    config: JobConfig,
    samples: Samples,
    good_steps: int,
    dtype: str,
    piece: int,
    device: torch.device,
    is_reversed: bool = False,
    watch: Watch | None = None,
) -> Trace:
    """Train, with at most ``piece`` samples in a forward pass; float64 ends with logits too large to exponentiate."""
    compute_type, total = getattr(torch, dtype), num_steps(good_steps)
    model = build_model(model_config(config.model), config.model.family)
    model.to(torch.promote_types(compute_type, torch.float32)).init_weights(config.job.seed)
    model.to(device)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(list(parameters.values()), config)
    held_out = validation_samples(config).first(len(validation_samples(config))).to(device)
    scale = FLOAT16_SCALE if dtype == "float16" else 1.0
    trace = Trace(sorted(parameters, key=lambda name: not name.startswith(model.entry)))  # as in the forward pass
    trace.keep(0, record.INITIAL, parameters)

    def validate(step: int, row: str, size: int) -> None:
        trace.scalars[Key(step, row)] = mean_loss(model, held_out[:size], compute_type, piece)

    def gradients_of(step: int, consumed: int, rows: tuple[str, str, str]) -> tuple[float, int]:
        """Leave a step's gradients in the parameters, and keep them; their norm, and the samples consumed by then."""
        if watch is not None:
            watch(step, model)
        batch_size = batch_size_at(config, consumed)
        batch = samples.first(batch_size, start=consumed).to(device)
        num_tokens = (batch[:, 1] != IGNORED).sum()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        pieces = batch.split(piece)
        for part in reversed(pieces) if is_reversed else pieces:
            part_loss = summed_loss(model, part, compute_type) / num_tokens
            (part_loss * scale).backward()
            loss += part_loss.detach()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for gradient in gradients.values():
            gradient /= scale
        grad_norm = math.sqrt(sum(norm(gradient) ** 2 for gradient in gradients.values()))
        trace.scalars[Key(step, rows[0])] = loss.item()
        if step not in bad_steps(good_steps):
            trace.keep(step, rows[1], gradients)
            trace.scalars[Key(step, rows[2])] = grad_norm
        return grad_norm, consumed + batch_size

    consumed = 0
    for step in range(1, total + 1):
        grad_norm, consumed = gradients_of(step, consumed, (record.LOSS, record.GRADIENT, record.NORM))
        if step in bad_steps(good_steps):
            scale = scale / 2 if dtype == "float16" else scale
        else:
            if config.training.max_norm:
                factor = min(1.0, config.training.max_norm / (grad_norm + 1e-6))
                for parameter in parameters.values():
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, config.training.steps or 0)
            optimizer.step()
        optimizer.zero_grad()
        trace.keep(step, record.WEIGHT, parameters)
        if step % config.evaluation.interval == 0:
            validate(step, record.VALIDATION, config.evaluation.steps * config.training.global_batch_size)
    validate(total, record.WHOLE_VALIDATION, len(held_out))
    if dtype == EXACT:
        with torch.no_grad():
            for parameter in model.norm.parameters():
                parameter.mul_(LARGE)
        gradients_of(total + 1, consumed, (record.LARGE_LOSS, record.LARGE_GRADIENT, record.LARGE_NORM))
    return trace


def summed_loss(model: Transformer, batch: torch.Tensor, compute_type: torch.dtype) -> torch.Tensor:
    """Sum of token losses of samples [n, 2, seq], at least float32."""
    weights = {name: parameter.to(compute_type) for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, weights, (batch[:, 0],))
    logits = logits[..., : model.config.vocab_size]  # whatever the model does to the padding
    logits = logits.to(torch.promote_types(compute_type, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1].flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def mean_loss(model: Transformer, batch: torch.Tensor, compute_type: torch.dtype, piece: int) -> float:
    """Mean over the valid tokens of held-out samples, without dropout."""
    model.eval()
    total = sum(summed_loss(model, part, compute_type).double() for part in batch.split(piece))
    model.train()
    return (total / (batch[:, 1] != IGNORED).sum()).item()


def build_optimizer(parameters: list[torch.nn.Parameter], config: JobConfig) -> torch.optim.Optimizer:
    """The update rule; weight decay for matrices alone."""
    section = config.optimizer
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, foreach=False)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, foreach=False)


def learning_rate(config: JobConfig, step: int, total: int) -> float:
    """The learning rate of a step, counted from 1, of a run of ``total`` steps."""
    section: LRScheduler = config.lr_scheduler
    peak, floor, warmup = config.optimizer.lr, section.min_lr_ratio, section.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if section.decay == "constant":
        return peak
    if section.decay == "inverse_sqrt":
        return peak * max(floor, math.sqrt(max(warmup, 1) / step))
    if section.decay == "wsd":
        length = section.decay_steps or max(1, total // 10)
        done = max(0.0, (step - (total - length)) / length)
    else:
        done = min(1.0, (step - warmup) / max(1, (section.decay_steps or total) - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if section.decay == "cosine" else 1 - done
    return peak * (floor + (1 - floor) * left)


def batch_size_at(config: JobConfig, consumed: int) -> int:
    """Samples of the step after so many samples."""
    full, rampup = config.training.global_batch_size, config.training.batch_size_rampup
    if rampup is None:
        return full
    start, increment, samples = rampup
    steps_up = (full - start) // increment
    return min(full, start + increment * (consumed * steps_up // samples))


def count_zeros(exact: Trace, other: Trace, step: int) -> tuple[float, float]:
    """(elements of a step's gradients that are zero, how far off a layout may be).

    ``other`` is the same run in another order of summation: elements that are zero but for rounding are uncertain.
    """
    zeros = uncertain = 0
    for name in exact.names:
        gradient, second = (trace.tensors[Key(step, record.GRADIENT, name)] for trace in (exact, other))
        small = torch.maximum(gradient.abs(), second.abs()) < _ROUNDING * gradient.abs().max()
        surely = (gradient == 0) & (second == 0)
        zeros += int((gradient == 0).sum())
        uncertain += int((small & ~surely).sum())
    return float(zeros), 2.0 * uncertain


def sizes_of(exact: Trace) -> dict[Key, float]:
    """What differences are relative to."""
    sizes = {key: abs(value) or 1.0 for key, value in exact.scalars.items()}
    norms = {record.GRADIENT: record.NORM, record.LARGE_GRADIENT: record.LARGE_NORM}
    for key, tensor in exact.tensors.items():
        least = NEGLIGIBLE * exact.scalars[Key(key.step, norms[key.row])] if key.row in norms else 0.0
        sizes[key] = max(norm(tensor), least) or 1.0
    return sizes


def allowances(
    config: JobConfig, dtype: str, sizes: dict[Key, float], exact: Trace, traces: list[Trace]
) -> dict[Key, float]:
    """How far a layout that computes in a type may be from the exact result, given runs of one process in that type."""
    allowed = {}
    tips = tipped(config, traces[0], exact)
    for key in traces[0].scalars:
        error = max(abs(trace.scalars[key] - exact.scalars[key]) for trace in traces) / sizes[key]
        allowed[key] = max(MARGIN * error, FLOOR[dtype], REPORTED if key.row in _LOSSES else 0.0)
    for key in traces[0].tensors:
        if key.row == record.WEIGHT and dtype in HALF:
            continue  # rounding tips AdamW's steps too far: updates are compared with what gradients make them
        error = max(norm(trace.tensors[key] - exact.tensors[key]) for trace in traces) / sizes[key]
        allowed[key] = max(MARGIN * error, FLOOR[dtype])
        if key.row == record.WEIGHT:
            allowed[key] = max(allowed[key], WEIGHTS_FLOOR, tips[key] / sizes[key])
    return allowed


def tipped(config: JobConfig, trace: Trace, exact: Trace) -> dict[Key, float]:
    """How far rounding may move each parameter's weights apart that AdamW updates, after each step.

    It divides an element's gradient by that gradient's own size and its eps: what the rounding of a layout is of them
    is the share of two steps that it can move the weight by. All of it where rounding decides on the sign.
    """
    distances = {key: 0.0 for key in exact.tensors if key.row == record.WEIGHT}
    if config.optimizer.name == "sgd":
        return distances
    for name in exact.names:
        share = torch.zeros_like(exact.tensors[Key(0, record.INITIAL, name)])
        moved = 0.0
        for step in range(1, max(key.step for key in distances) + 1):
            key = Key(step, record.GRADIENT, name)
            if key in exact.tensors:
                wanted, seen = exact.tensors[key], trace.tensors[key]
                grad_norm = exact.scalars[Key(step, record.NORM)]
                rounding = MARGIN * norm(seen - wanted) / math.sqrt(wanted.numel())
                clipping = min(1.0, config.training.max_norm / grad_norm) if config.training.max_norm else 1.0
                of_size = rounding * clipping / (wanted.abs() * clipping + config.optimizer.eps)
                share = torch.maximum(share, (seen != 0) * of_size.clamp(max=1))
                moved += 2 * learning_rate(config, step, config.training.steps or 0)
            distances[Key(step, record.WEIGHT, name)] = moved * norm(share)
    return distances


def norm(tensor: torch.Tensor) -> float:
    """L2 norm, summed in float64."""
    return tensor.detach().double().norm().item()
