"""The same training in one process and one plain loop.

It shares no code with the trainer or its loss, so their mistakes cannot cancel out. It runs in float64, which counts as
exact, and in the types whose rounding is measured. Some steps are bad: their gradients are not finite, so they consume
samples and update nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, model_fields, to_device
from titan_like.models.config import NUM_OPTIONS
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.optim.optimizer import build_optimizer
from titan_like.verify.compare import EXACT, SINGLE, Key, Row
from titan_like.verify.experts import PlainExperts, starve_an_expert
from titan_like.verify.float8 import take_float8
from titan_like.verify.masks import take_definitions
from titan_like.verify.places import Outputs
from titan_like.verify.samples import IGNORED, batches, part_of, training_samples, validation_samples
from titan_like.verify.shrink import Small
from titan_like.verify.token_ids import batch_of

EPS = {EXACT: 2.0**-52, SINGLE: 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
FLOAT16_SCALE = 1024.0  # of the loss: raises small gradients without any overflow
LARGE = 1e4  # multiplies the final norm's weights; the exponential of a logit then exceeds the range of float64
_LONG = {Row.LARGE_LOSS: Row.LONG_LOSS, Row.LARGE_GRADIENT: Row.LONG_GRADIENT, Row.LARGE_NORM: Row.LONG_NORM}
_TERMS = {"tokens": "lm_loss", "pair": "sentence_loss", "choice": "choice_loss"}


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
    optimizer = build_optimizer(parameters.items(), config.optimizer)
    samples, validation = training_samples(config), validation_samples(config)
    unit = config.training.micro_batch_size if config.float8.enable else 1
    filled = -(-len(validation) // unit) * unit  # the last microbatch is full, and float8 scales depend on all of it
    held_out = to_device(batch_of(validation, range(filled), config), device)
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
        pieces = split(to_device(batch_of(samples, batch, config), device), piece)
        counts = num_labels(pieces)
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
            if step <= last:
                trace.keep(step, Row.FIGURES, experts.figures())
            set_learning_rate(optimizer, small, step)
            optimizer.step()
            experts.update()
        optimizer.zero_grad()
        if step > last:
            break
        trace.keep(step, Row.WEIGHT, parameters)
        if step % config.evaluation.interval == 0:
            size = config.evaluation.steps * config.training.global_batch_size
            first = split(held_out, size)[0]
            trace.keep_losses(step, Row.VALIDATION, model, mean_losses(model, first, compute_type, piece))
        if step == last:
            trace.keep(last, Row.WHOLE_VALIDATION, sum(mean_losses(model, held_out, compute_type, piece)))
    if dtype == EXACT and small.longer:
        longer = replace(small, config=edit(config, small.longer), num_steps=0, longer={})
        found = train(longer, dtype, piece, device, is_reversed, is_perturbed, large=1.0).values.items()
        trace.values |= {Key(1, _LONG[row], name): value for (_, row, name), value in found if row in _LONG}
    return trace


def split(batch: Batch, size: int) -> list[Batch]:
    """Batches of at most ``size`` of a batch's samples."""
    return [part_of(batch, slice(at, at + size)) for at in range(0, len(batch.tokens), size)]


def labels_of(batch: Batch) -> list[torch.Tensor]:
    """The labels of each of a model's predictions."""
    of_tokens = [] if batch.labels is None else [batch.labels[:, batch.encoder_len or 0 :]]  # of a decoder's positions
    of_samples = [] if batch.sample_labels is None else [batch.sample_labels[:: 1 if of_tokens else NUM_OPTIONS]]
    return of_tokens + of_samples


def num_labels(pieces: Sequence[Batch]) -> torch.Tensor:
    """Number of labels of each prediction: [predictions]."""
    counts = [[(labels != IGNORED).sum() for labels in labels_of(piece)] for piece in pieces]
    return torch.tensor(counts).sum(0)


def add_gradients(
    model: Transformer, pieces: Sequence[Batch], counts: torch.Tensor, dtype: torch.dtype, scale: float = 1.0,
    experts: PlainExperts | None = None,
) -> list[float]:  # fmt: skip
    """Add the gradients of ``scale`` × the loss of pieces, given all their `num_labels`.

    Losses that balance ``experts`` are part of it, but not of what is returned.

    Returns the loss of each prediction; their sum is the loss.
    """
    total = torch.zeros(len(counts), dtype=torch.float64)
    padding = sum(int(piece.padding_mask.sum()) for piece in pieces if piece.padding_mask is not None)
    num_tokens = sum(piece.tokens.numel() for piece in pieces) - padding
    for piece in pieces:
        losses = summed_losses(model, piece, dtype)
        means = torch.stack([loss / count for loss, count in zip(losses, counts, strict=True)])
        balance = 0.0 if experts is None else experts.loss_of_piece(num_tokens)
        ((means.sum() + balance) * scale).backward()
        total += means.detach().double().cpu()
    return total.tolist()


def summed_losses(model: Transformer, batch: Batch, compute_type: torch.dtype) -> list[torch.Tensor]:
    """Sums of the losses of each prediction, at least float32."""
    weights = {name: parameter.to(compute_type) for name, parameter in model.named_parameters()}
    found = torch.func.functional_call(model, weights, (batch.tokens,), model_fields(batch))
    outputs = list(found) if isinstance(found, tuple) else [found]
    kind, labels = model.config.predictions, labels_of(batch)
    if "tokens" in kind:
        outputs[0] = outputs[0][..., : model.config.vocab_size]  # whatever the model does to the padding
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
def mean_losses(model: Transformer, batch: Batch, compute_type: torch.dtype, piece: int) -> list[float]:
    """The losses of held-out samples, without dropout: the mean of each prediction's."""
    model.eval()
    parts = [torch.stack(summed_losses(model, part, compute_type)).double() for part in split(batch, piece)]
    model.train()
    return (torch.stack(parts).sum(0).cpu() / num_labels([batch])).tolist()


def clip_factor(max_norm: float, grad_norm: float) -> float:
    """The factor by which clipping multiplies gradients. A ``max_norm`` of 0 does not clip."""
    return min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0


def set_learning_rate(optimizer: torch.optim.Optimizer, small: Small, step: int) -> None:
    """Set an optimizer's learning rate for a step."""
    for group in optimizer.param_groups:
        group["lr"] = rate_of(small, step)


def rate_of(small: Small, step: int) -> float:
    """The learning rate of a step, counted from 1. If the run's length is not in steps, it is a function of samples."""
    training, batch = small.config.training, small.config.training.global_batch_size
    if training.steps is not None:
        return learning_rate(small.config, step, small.total)
    return learning_rate(small.config, batches(small.config, step)[step].stop / batch, small.samples / batch)


def learning_rate(config: JobConfig, step: float, total: float) -> float:
    """The learning rate of a step, counted from 1, of a schedule of ``total`` steps."""
    section = config.lr_scheduler
    peak, floor = config.optimizer.lr, section.min_lr_ratio
    length = (section.decay_steps or max(1, total // 10)) if section.decay == "wsd" else 0  # of the final decay
    warmup = min(section.warmup_steps, max(0, total - length))
    if step <= warmup:
        return peak * step / warmup
    if section.decay == "constant":
        return peak
    if section.decay == "inverse_sqrt":
        return peak * max(floor, min(1.0, math.sqrt(max(warmup, 1) / step)))
    if section.decay == "wsd":
        done = max(0.0, (step - (total - length)) / length)
    else:
        done = min(1.0, (step - warmup) / max(1, (section.decay_steps or total) - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if section.decay == "cosine" else 1 - done
    return peak * (floor + (1 - floor) * left)


def norm(tensor: torch.Tensor) -> float:
    """L2 norm, summed in float64."""
    return tensor.detach().double().norm().item()
