"""The same training written down plainly: one process, one loop, nothing of the trainer's, the optimizers' or the
loss's code. A mistake there cannot cancel out.

It runs in float64, which is taken for exact, and in the types whose rounding is to be measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from titan_like.config.schema import JobConfig, LRScheduler
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.verify.checks import MARGIN
from titan_like.verify.results import Errors, StepTruth, Truth
from titan_like.verify.samples import IGNORED, training_samples, validation_samples
from titan_like.verify.server import Place

FLOAT16_SCALE = 1024.0  # of the loss: raises small gradients, and overflows nowhere
_CLIPPED_SHARE = 0.1  # of the first gradient norm, that gradients are clipped at: every step is clipped
_LARGE = 1_000_000  # parameters
_COMPARED = 16  # elements of a matrix by which to tell it from others
_ROUNDING = 1e-12  # of a gradient's largest element: smaller ones are zero but for float64's rounding

Tensors = dict[str, torch.Tensor]


@dataclass
class Trace:
    """One run. Tensors are float64."""

    initial: Tensors
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)


def compute_truth(place: Place, config: JobConfig, steps: int, dtypes: list[str], folder: str) -> Iterator[Truth]:
    """Train in float64, then in each of ``dtypes`` to see how far their rounding leads away from it."""
    if model_config(config.model).num_parameters() > _LARGE:  # threads only slow a small model down
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    device, training = torch.device(place.device), config.training
    micro_batch = training.micro_batch_size
    if training.max_norm:
        whole_norm = train(config, 1, "float64", training.global_batch_size, device).grad_norms[0]
        max_norm = float(f"{_CLIPPED_SHARE * whole_norm:.3g}")
        config = config.model_copy(update={"training": training.model_copy(update={"max_norm": max_norm})})
    exact = train(config, steps, "float64", training.global_batch_size, device)
    errors = {}
    for dtype in dtypes:
        # The same samples in another order and in smaller pieces. Types that round more than they add do it piece by
        # piece as every layout does, since it is each piece's gradients that are rounded.
        is_half = dtype in ("bfloat16", "float16")
        traces = [train(config, steps, dtype, micro_batch, device, is_reversed=not is_half)]
        if dtype == "float32":
            traces.append(train(config, steps, dtype, training.global_batch_size, device))
        errors[dtype] = worst_errors(config, traces, exact)
        if is_half:
            save_file(traces[0].gradients[0], Path(folder) / f"gradients_{dtype}.safetensors")
    other = train(config, steps, "float64", micro_batch, device, is_reversed=True)
    errors["float64"] = worst_errors(config, [other], exact)
    save_file(exact.initial, Path(folder) / "initial.safetensors")
    for step, gradients in enumerate(exact.gradients):
        save_file(gradients, Path(folder) / f"gradients_{step}.safetensors")
    save_file(exact.weights, Path(folder) / "weights.safetensors")
    yield Truth(
        names=list(exact.initial),
        alike=alike(exact.initial),
        max_norm=config.training.max_norm,
        steps=[describe_step(config, exact, other, step) for step in range(steps)],
        validation=exact.validation,
        weights={name: norm(weight) for name, weight in exact.weights.items()},
        errors=errors,
        micro_batch_size=micro_batch,
        folder=folder,
    )


def load_tensors(truth: Truth) -> tuple[Tensors, list[Tensors], Tensors]:
    """Initial weights, gradients of each step before clipping, last weights; float64, in files that processes share."""
    folder = Path(truth.folder)
    gradients = [load_file(folder / f"gradients_{step}.safetensors") for step in range(len(truth.steps))]
    return load_file(folder / "initial.safetensors"), gradients, load_file(folder / "weights.safetensors")


def load_gradients(truth: Truth, dtype: str) -> Tensors:
    """Gradients of the first step of one process in bfloat16 or float16, as float64."""
    return load_file(Path(truth.folder) / f"gradients_{dtype}.safetensors")


def alike(initial: Tensors) -> list[tuple[str, str]]:
    """Pairs of matrices that begin with the same random numbers, but for their scale."""
    names = [name for name, tensor in initial.items() if tensor.ndim > 1 and tensor.numel() >= _COMPARED]
    starts = torch.stack([initial[name].flatten()[:_COMPARED] for name in names])
    starts /= starts.norm(dim=1, keepdim=True).clamp_min(1e-30)
    pairs = (starts @ starts.t()).triu(diagonal=1).gt(1 - 1e-6).nonzero().tolist()
    return [(names[first], names[second]) for first, second in pairs]


def train(
    config: JobConfig, steps: int, dtype: str, piece: int, device: torch.device, is_reversed: bool = False
) -> Trace:
    """Train ``steps`` steps, with at most ``piece`` samples in a forward pass."""
    compute_type = getattr(torch, dtype)
    shape = model_config(config.model)
    model = build_model(shape, config.model.family).to(torch.promote_types(compute_type, torch.float32))
    model.init_weights(config.job.seed)
    model.to(device)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(list(parameters.values()), config)
    samples = training_samples(config.job.seed, config.training.seq_len, shape.vocab_size)
    held_out = validation_batch(config, shape.vocab_size).to(device)
    scale = FLOAT16_SCALE if dtype == "float16" else 1.0
    trace = Trace(initial=copies(parameters))
    trace.validation.append(mean_loss(model, held_out, compute_type, piece))
    consumed = 0
    for step in range(steps):
        batch_size = batch_size_at(config, consumed)
        batch = samples.first(batch_size, start=consumed).to(device)
        consumed += batch_size
        num_tokens = (batch[:, 1] != IGNORED).sum()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        pieces = batch.split(piece)
        for part in reversed(pieces) if is_reversed else pieces:
            part_loss = summed_loss(model, part, compute_type) / num_tokens
            (part_loss * scale).backward()
            loss += part_loss.detach()
        gradients = {}
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad /= scale
            gradients[name] = parameter.grad
        trace.losses.append(loss.item())
        trace.gradients.append(copies(gradients))
        grad_norm = math.sqrt(sum(norm(gradient) ** 2 for gradient in gradients.values()))
        trace.grad_norms.append(grad_norm)
        if config.training.max_norm:
            factor = min(1.0, config.training.max_norm / (grad_norm + 1e-6))
            for gradient in gradients.values():
                gradient *= factor
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1):
            trace.validation.append(mean_loss(model, held_out, compute_type, piece))
    trace.weights = copies(parameters)
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


def validation_batch(config: JobConfig, vocab_size: int) -> torch.Tensor:
    """All held-out samples: more than a global batch and less than two, not a whole number of microbatches of ranks."""
    samples = validation_samples(config.job.seed, config.training.seq_len, vocab_size, validation_size(config))
    return samples.first(len(samples))


def validation_size(config: JobConfig) -> int:
    """Samples of the validation set, fewer than `evaluation.steps` global batches."""
    return config.training.global_batch_size + max(1, config.training.global_batch_size // 2 - 1)


def build_optimizer(parameters: list[torch.nn.Parameter], config: JobConfig) -> torch.optim.Optimizer:
    """The update rule; weight decay for matrices alone."""
    section = config.optimizer
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, foreach=False)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, foreach=False)


def learning_rate(config: JobConfig, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    section: LRScheduler = config.lr_scheduler
    peak, floor, warmup = config.optimizer.lr, section.min_lr_ratio, section.warmup_steps
    total = config.training.steps
    assert total is not None
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
        done = min(1.0, (step - warmup) / ((section.decay_steps or total) - warmup))
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


def describe_step(config: JobConfig, exact: Trace, other: Trace, step: int) -> StepTruth:
    """The numbers of a step; ``other`` is the same run in another order of summation."""
    shape = model_config(config.model)
    consumed = 0
    for _ in range(step):
        consumed += batch_size_at(config, consumed)
    batch_size = batch_size_at(config, consumed)
    batch = training_samples(config.job.seed, config.training.seq_len, shape.vocab_size).first(batch_size, consumed)
    zeros = uncertain = 0
    for name, gradient in exact.gradients[step].items():
        second = other.gradients[step][name]
        small = torch.maximum(gradient.abs(), second.abs()) < _ROUNDING * gradient.abs().max()
        surely = (gradient == 0) & (second == 0)
        zeros += int((gradient == 0).sum())
        uncertain += int((small & ~surely).sum())
    return StepTruth(
        loss=exact.losses[step],
        grad_norm=exact.grad_norms[step],
        lr=learning_rate(config, step + 1),
        batch_size=batch_size,
        consumed_samples=consumed + batch_size,
        valid_tokens=int((batch[:, 1] != IGNORED).sum()),
        num_zeros=zeros,
        uncertain_zeros=uncertain,
        gradients={name: norm(gradient) for name, gradient in exact.gradients[step].items()},
    )


def worst_errors(config: JobConfig, traces: list[Trace], exact: Trace) -> Errors:
    """The largest distances of several runs from the exact one."""

    def scalars(values: list[list[float]], expected: list[float]) -> list[float]:
        return [max(abs(v[i] - e) / abs(e) for v in values) for i, e in enumerate(expected)]

    def tensors(values: list[Tensors], expected: Tensors) -> dict[str, float]:
        return {name: max(norm(v[name] - e) for v in values) for name, e in expected.items()}

    return Errors(
        loss=scalars([trace.losses for trace in traces], exact.losses),
        grad_norm=scalars([trace.grad_norms for trace in traces], exact.grad_norms),
        validation=scalars([trace.validation for trace in traces], exact.validation),
        gradients=[
            tensors([trace.gradients[step] for trace in traces], expected)
            for step, expected in enumerate(exact.gradients)
        ],
        weights=tensors([trace.weights for trace in traces], exact.weights),
        tipped=tipped(config, traces[0], exact),
    )


def tipped(config: JobConfig, trace: Trace, exact: Trace) -> dict[str, float]:
    """How far rounding may move each parameter's weights apart that AdamW updates.

    It divides an element's gradient by that gradient's own size and its eps: what the rounding of a layout is of them
    is the share of two steps that it can move the weight by. All of it where rounding decides on the sign.
    """
    if config.optimizer.name == "sgd":
        return dict.fromkeys(exact.initial, 0.0)
    moved = 2 * sum(learning_rate(config, step + 1) for step in range(len(exact.gradients)))
    distances = {}
    for name, weight in exact.initial.items():
        share = torch.zeros_like(weight)
        for step, wanted in enumerate(exact.gradients):
            seen, grad_norm = trace.gradients[step][name], exact.grad_norms[step]
            rounding = MARGIN * norm(seen - wanted[name]) / math.sqrt(weight.numel())
            clipping = min(1.0, config.training.max_norm / grad_norm) if config.training.max_norm else 1.0
            of_size = rounding * clipping / (wanted[name].abs() * clipping + config.optimizer.eps)
            share = torch.maximum(share, (seen != 0) * of_size.clamp(max=1))
        distances[name] = moved * norm(share)
    return distances


def copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Copies in float64 on the CPU."""
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in tensors.items()}


def norm(tensor: torch.Tensor) -> float:
    """L2 norm, summed in float64."""
    return tensor.detach().double().norm().item()
