"""Training by definition: one process, one plain loop, in float64 or in a type whose rounding is measured.

It shares no code with the trainer, its loss, its schedule, its attention masks, positions and experts. Layers and
adapters are compared with their definitions in tests/unit/test_decoder_pairs.py, and the other families with
transformers in tests/unit/test_hugging_face_files.py. Some steps are bad: their gradients are not finite, so they
consume samples and update nothing.
"""

import math
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, cast

import torch
import torch.nn.functional as F

from tests.reference.experts import PlainExperts
from tests.reference.masks import take_definitions
from titan_like.config.schema import JobConfig, Training
from titan_like.data.batch import Batch, collate, map_tensors
from titan_like.data.source import IGNORED_LABEL
from titan_like.models.batch import Context
from titan_like.models.config import NUM_OPTIONS
from titan_like.models.decoder.model import DecoderLayer
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.optim.optimizer import build_optimizer
from titan_like.parallel.lora import add_adapters, freeze
from titan_like.verify.compare import EXACT, HALF, Key, Row
from titan_like.verify.processes import Member
from titan_like.verify.reference import Trace, norm, perturb
from titan_like.verify.samples import Samples, masks_of_run, training_samples, validation_samples
from titan_like.verify.shrink import Small
from titan_like.verify.watch import FLOAT16_SCALE, enlarge

ELEMENTS = 64  # of initial weights that one generator draws
_TERMS = {"tokens": "lm_loss", "mtp": "mtp_loss", "pair": "sentence_loss", "choice": "choice_loss"}


def train_by_definition(
    _: Member | None, small: Small, dtype: str, seed: int | None = None, exact: Trace | None = None
) -> Trace:
    """As `titan_like.verify.reference.train_alone`."""
    compute_type, config, last, trace = getattr(torch, dtype), small.config, small.num_steps, Trace()
    training, max_norm = config.training, config.training.max_norm
    model = build_model(model_config(config.model), config.model.family)
    if config.lora.rank:
        add_adapters(model, config.lora)
    model.to(torch.promote_types(compute_type, torch.float32))
    model.initial_elements = ELEMENTS
    model.init_weights(config.job.seed)
    if config.lora.rank:
        freeze(model, torch.promote_types(compute_type, torch.float32))
    take_definitions(model, config, in_pairs=dtype == EXACT)
    look_ahead(model)
    experts = PlainExperts(model, config.float8)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    trace.names = sorted(parameters, key=lambda name: not name.startswith(model.entry))
    optimizer = build_optimizer(parameters.items(), config.optimizer)
    samples, validation, skipped = training_samples(config), validation_samples(config), 0
    held_out = batch_of(validation, range(len(validation)), config)
    scale = FLOAT16_SCALE if dtype == "float16" else 1.0

    def keep(step: int, row: Row, values: Iterable[tuple[str, torch.Tensor]] | float, what: str = "") -> None:
        for name, value in [(what, values)] if isinstance(values, float | int) else values:
            trace.keep(Key(step, row, name), value)

    def keep_losses(step: int, row: Row, losses: list[float]) -> None:
        factors = factors_of(model) if row in (Row.LOSS, Row.LARGE_LOSS) else [1.0] * len(losses)
        is_counted = [kind != "mtp" or row in (Row.LOSS, Row.LARGE_LOSS) for kind in model.config.predictions]
        keep(step, row, sum(map(math.prod, zip(losses, factors, is_counted, strict=True))))
        if model.config.predictions != ("tokens",) and row != Row.LARGE_LOSS:
            for kind, loss in zip(model.config.predictions, losses, strict=True):
                keep(step, row, loss, _TERMS[kind])

    keep(0, Row.INITIAL, parameters.items() if last else ())
    if seed is not None:
        perturb(model.parameters(), dtype, seed)
    rows = (Row.LOSS, Row.GRADIENT, Row.NORM)
    if last == 0:
        rows = (Row.LARGE_LOSS, Row.LARGE_GRADIENT, Row.LARGE_NORM)
        enlarge(model)
    for step, batch in batches(config, last or 1).items():
        is_bad, replayed = step in small.bad_steps, {} if exact is None or dtype not in HALF else exact.values
        experts.routed.clear()
        experts.replayed = {key.name: choice for key, choice in replayed.items() if key[:2] == (step, Row.CHOICE)}
        if last:
            keep(step, Row.BATCH, len(batch), "batch size")
            keep(step, Row.BATCH, batch.stop, "samples")
            keep(step, Row.BATCH, batch.stop * training.seq_len, "tokens")
            keep(step, Row.RATE, rate_of(small, step))
            keep(step, Row.SKIPPED, int(step - 1 in small.bad_steps), "steps in a row before")
            skipped += is_bad
            keep(step, Row.SKIPPED, int(is_bad))
            keep(step, Row.SKIPPED, skipped, "steps so far")
            if dtype == "float16":
                keep(step, Row.LOSS_SCALE, scale)
        size = training.micro_batch_size if config.float8.enable else len(batch)  # float8 scales are a microbatch's
        losses = add_gradients(model, batch_of(samples, batch, config), size, compute_type, scale, experts)
        is_noted = last > 0 and (exact is None or dtype in HALF)
        for name, pieces in experts.routed.items() if is_noted else ():
            for row, values in zip((Row.SCORES, Row.CHOICE), zip(*pieces, strict=True), strict=True):
                keep(step, row, [(name, torch.cat(values))])
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for gradient in gradients.values():
            gradient.div_(scale)
        grad_norm = math.sqrt(sum(norm(gradient) ** 2 for gradient in gradients.values()))
        keep_losses(step, rows[0], losses)
        if is_bad:
            scale = max(scale / 2, 1.0)
            experts.forget()
        else:
            keep(step, rows[2], grad_norm)
            keep(step, rows[1], gradients.items())
            factor = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0
            if last:
                keep(step, Row.FIGURES, experts.figures().items())
                keep(step, Row.ZEROS, sum(int((gradient == 0).sum()) for gradient in gradients.values()))
            for gradient in gradients.values():
                gradient.mul_(factor)
            for group in optimizer.param_groups:
                group["lr"] = rate_of(small, step)
            optimizer.step()
            experts.update()
            scale *= 2 if dtype == "float16" and step == 1 else 1  # as the watch has it
        optimizer.zero_grad()
        if not last:
            break
        keep(step, Row.WEIGHT, parameters.items())
        if step % config.evaluation.interval == 0:
            count = config.evaluation.steps * training.global_batch_size
            first = map_tensors(itemgetter(slice(count)), held_out)
            keep_losses(step, Row.VALIDATION, mean_losses(model, first, compute_type))
        if step == last:
            keep_losses(last, Row.WHOLE_VALIDATION, mean_losses(model, held_out, compute_type))
    if dtype == EXACT and last:
        trace.values |= train_by_definition(None, small.large, dtype, seed).values
    return trace


def batch_of(samples: Samples, indices: Iterable[int], config: JobConfig) -> Batch:
    """Samples as the trainer reads them, in one batch."""
    masked = masks_of_run(config).over(samples)
    return collate([masked[index] for index in indices])


def batches(config: JobConfig, last: int) -> dict[int, range]:
    """The samples of each step from 1 to ``last``. During a ramp-up the batch grows by equal increments."""
    taken, consumed = {}, 0
    for step in range(1, last + 1):
        taken[step] = range(consumed, consumed + batch_size(config.training, consumed))
        consumed = taken[step].stop
    return taken


def batch_size(training: Training, consumed: int) -> int:
    """Samples of the step that begins after ``consumed`` samples."""
    full, rampup = training.global_batch_size, training.batch_size_rampup
    if rampup is None:
        return full
    start, increment, samples = rampup
    return min(full, start + increment * (consumed * ((full - start) // increment) // samples))


def labels_of(batch: Batch) -> list[torch.Tensor]:
    """The labels of each of a model's predictions."""
    of_tokens = [] if batch.labels is None else [batch.labels[:, batch.encoder_len or 0 :]]  # of a decoder's positions
    of_samples = [] if batch.sample_labels is None else [batch.sample_labels[:: 1 if of_tokens else NUM_OPTIONS]]
    of_next = [
        F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) for labels in of_tokens if batch.next_labels is not None
    ]
    return of_tokens + of_next + of_samples


def num_labels(batch: Batch) -> torch.Tensor:
    """Number of labels of each prediction: [predictions]."""
    return torch.tensor([(labels != IGNORED_LABEL).sum() for labels in labels_of(batch)])


def add_gradients(
    model: Transformer, batch: Batch, size: int, dtype: torch.dtype, scale: float, experts: PlainExperts
) -> list[float]:
    """Add the gradients of ``scale`` × the loss, ``size`` samples at a time. Losses that balance ``experts`` count too.

    Returns the loss of each prediction; their sum is the loss without those of experts.
    """
    padding = 0 if batch.padding_mask is None else int(batch.padding_mask.sum())
    losses = torch.zeros(len(num_labels(batch)), dtype=torch.float64)
    for start in range(0, len(batch.tokens), size):
        piece = map_tensors(itemgetter(slice(start, start + size)), batch)
        means = torch.stack(summed_losses(model, piece, dtype)) / num_labels(batch)
        factors = torch.tensor(factors_of(model), dtype=means.dtype)
        (((means * factors).sum() + experts.loss_of_piece(batch.tokens.numel() - padding)) * scale).backward()
        losses += means.detach()
    return losses.tolist()


def summed_losses(model: Transformer, batch: Batch, compute_type: torch.dtype) -> list[torch.Tensor]:
    """Sums of the losses of each prediction, at least float32."""
    weights = {name: parameter.to(compute_type) for name, parameter in model.named_parameters()}
    AHEAD["batch"] = batch
    found = torch.func.functional_call(model, weights, (batch,))
    outputs = list(found) if isinstance(found, tuple) else [found]
    outputs += [AHEAD.pop("logits")] if "logits" in AHEAD else []
    kind, labels = model.config.predictions, labels_of(batch)
    if "tokens" in kind:
        of_tokens = 1 + ("mtp" in kind)
        outputs[:of_tokens] = [x[..., : model.config.vocab_size] for x in outputs[:of_tokens]]  # padding as it may be
    if "choice" in kind:
        outputs[0] = outputs[0].unflatten(0, (-1, NUM_OPTIONS)).flatten(1)
    accumulator = torch.promote_types(compute_type, torch.float32)
    return [
        F.cross_entropy(
            output.to(accumulator).reshape(-1, output.shape[-1]),
            own.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        for output, own in zip(outputs, labels, strict=True)
    ]


AHEAD: dict[str, Any] = {}  # the batch, and the logits of tokens after the next


def look_ahead(model: Transformer) -> None:
    """Let a layer for multi-token prediction leave its logits in `AHEAD`, from the tokens and labels themselves."""
    if "mtp" not in model.config.predictions:
        return
    *_, layer = cast(Any, model.layers.values())

    def forward(x: torch.Tensor, context: Context) -> torch.Tensor:
        batch = AHEAD["batch"]
        following = model.embedding(F.pad(batch.tokens[:, 1:], (0, 1)))  # nothing comes of the last one
        joined = layer.eh_proj(torch.cat((layer.enorm(following), layer.hnorm(model.norm(x))), 2))
        context = context._replace(padding_mask=labels_of(batch)[1] == IGNORED_LABEL)
        AHEAD["logits"] = model.logits(layer.norm(DecoderLayer.forward(layer, joined, context)))
        return x

    layer.forward = forward


def factors_of(model: Transformer) -> list[float]:
    """Of the means of each prediction in the loss."""
    return [
        getattr(model.config, "mtp_coefficient", 1.0) if kind == "mtp" else 1.0 for kind in model.config.predictions
    ]


@torch.no_grad()
def mean_losses(model: Transformer, batch: Batch, compute_type: torch.dtype) -> list[float]:
    """The losses of held-out samples: the mean of each prediction's."""
    model.eval()
    losses = torch.stack(summed_losses(model, batch, compute_type)).double()
    model.train()
    return (losses / num_labels(batch)).tolist()


def rate_of(small: Small, step: int) -> float:
    """The learning rate of a step, counted from 1. If the run's length is not in steps, it is a function of samples."""
    training, batch = small.config.training, small.config.training.global_batch_size
    if training.steps is not None:
        return learning_rate(small.config, step, training.steps)
    samples = training.samples or (training.tokens or 0) // training.seq_len
    return learning_rate(small.config, batches(small.config, step)[step].stop / batch, samples / batch)


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
