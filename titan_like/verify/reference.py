"""What a layout is compared with: the product on one process in float64, and how far from it a layout may be.

There is one rule. One process that computes in a type is itself some way from float64. A layout adds the same numbers
in another order, which is another draw of the same rounding, so it may be `MARGIN` times as far away as the farthest
of the draws that are measured here, and always a few units of rounding.

Float8 matmuls are part of what is computed exactly. In float64 the numbers that they round differ too little to tip a
rounding, so layouts must agree as closely as without them. In narrower types some roundings tip, in one layout and not
in another, and their number is a matter of chance: there the tolerance is at least one rounding to float8, and one more
for every update, which passes on what has tipped before it.

In 16-bit dtypes rounding would also send tokens to other experts, so there the choice of the float64 run is replayed
(`titan_like.verify.routers`).
"""

import math
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.loading.batch_size import rampup_batch_sizes
from titan_like.models.registry import model_config
from titan_like.parallel.axes import on_one_process
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.tuning import Tuning
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import (
    DROPOUT,
    EPS,
    EXACT,
    GRADIENTS,
    HALF,
    ROUTERS,
    SINGLE,
    Key,
    Reference,
    Row,
    difference_in,
)
from titan_like.verify.dropout import RATE, recorded_draws
from titan_like.verify.places import Outputs
from titan_like.verify.processes import Member
from titan_like.verify.routers import Choices, replays
from titan_like.verify.samples import masks_of_run, training_samples, validation_samples
from titan_like.verify.shrink import Small
from titan_like.verify.watch import StepWatch, digest, steps_alone

MARGIN = 8.0
FLOOR = {EXACT: 1e-12, SINGLE: 8 * EPS[SINGLE], "bfloat16": EPS["bfloat16"], "float16": EPS["float16"]}
WEIGHTS_FLOOR = 1e-10  # optimizers magnify the rounding of small gradients
NEGLIGIBLE = 1e-8  # a gradient below this share of the norm of all gradients is measured against that share instead
# Such a gradient may be nothing but the rounding of numbers that cancel in it, as for a bias before a softmax. One
# process may even compute exactly zero, so its own distance from the exact result is no measure.
CANCELLED = {dtype: MARGIN * eps / NEGLIGIBLE for dtype, eps in EPS.items()}
TIPPED = 2.0**-3  # half the distance of neighbouring numbers of e5m2, which gradients become, relative to the smaller
FEW = 16  # elements: so few numbers may be right by chance in one step, but not in all

_LARGE_MODEL = 1_000_000  # parameters
# Tolerances
_FIXED = {Row.INITIAL: 0.0, Row.BATCH: 0.0, Row.SKIPPED: 0.0, Row.LOSS_SCALE: 0.0, Row.RATE: 1e-9, Row.CHOICE: 0.0}
_LOGITS = 1024  # in a chunk of the loss: small samples then take several chunks, as large ones do
_GRADIENT_BYTES = 4096  # in a 16-bit dtype that wait to be added up, for the same reason
_ELEMENTS = 64  # initial weights that one generator draws, so that some shards begin after the first block


@dataclass
class Trace:
    """The numbers and tensors of one run on one process, which serve as the reference for others."""

    names: list[str] = field(default_factory=list)  # all parameters' names
    values: dict[Key, torch.Tensor] = field(default_factory=dict)  # float64; a number has no dimensions
    outputs: Outputs | None = None  # records modules in the last step, if given; their tensors go to `values`

    def keep(self, key: Key, value: torch.Tensor | float) -> None:
        """Copy a number or a tensor to the CPU."""
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        self.values[key] = tensor.detach().to("cpu", torch.float64, copy=True)

    def keep_more(self, key: Key, value: torch.Tensor, _: torch.Tensor | None = None) -> None:
        """Append the next samples to a tensor."""
        earlier = [self.values[key]] if key in self.values else []
        self.keep(key, torch.cat([*earlier, value.detach().to("cpu", torch.float64)]))

    def number(self, step: int, row: Row) -> float:
        """A number that was kept."""
        return self.values[Key(step, row)].item()


def perturb(parameters: Iterable[torch.Tensor], dtype: str, seed: int) -> None:
    """Change each weight by the rounding error of a sum over the longer side of its matrix.

    In a 16-bit dtype, change it by a part of its own rounding, so that it is often rounded the other way.
    """
    for parameter in parameters:
        noise = torch.Generator(parameter.device).manual_seed(seed)
        size = EPS[dtype] * (1 / 4 if dtype in HALF else math.sqrt(max(parameter.shape)))
        signs = torch.rand(parameter.shape, generator=noise, device=parameter.device, dtype=parameter.dtype)
        parameter.data.mul_(1 + size * signs.sub_(0.5).sign_())
        seed += 1000


def train_alone(
    member: Member,
    small: Small,
    dtype: str,
    seed: int | None = None,
    exact: Trace | None = None,
    with_outputs: bool = False,
) -> Trace:
    """Train in whole batches, from initial weights that are perturbed if there is a ``seed``.

    In 16-bit dtypes routers replay the choice of the ``exact`` run. With ``with_outputs``, keep what modules compute in
    the last step. Otherwise float64 ends with the step with large logits, from the same initial weights.
    """
    trace = Trace(outputs=Outputs() if with_outputs else None)
    run = run_of(member, small, alone(small, dtype), member.folder)
    watch = StepWatch(small, trace.keep)
    trainer = Trainer(replace(run, tuning=replace(run.tuning, loss_logits=None)), observer=watch)
    (stage,), names = trainer.model.stages, [name for name, _ in trainer.model.named_parameters()]
    trace.names = sorted(names, key=lambda name: not name.startswith(stage.module.entry))
    watch.names, watch.outputs = trace.names, trace.outputs
    if seed is not None:
        perturb(stage.module.parameters(), dtype, seed)
    is_replayed = replays(small) and (dtype in HALF or exact is None)
    whole = None if exact is None else exact.values.__getitem__
    with Choices(watch, trace.keep_more, whole) if is_replayed else nullcontext():
        run_through(trainer, watch)
    if trace.outputs is not None:
        for place, value in trace.outputs.whole(trainer.state.loss_scale).items():
            trace.keep(Key(watch.at_step, Row.PLACE, "/".join(place)), value)
        trace.outputs.tensors.clear()
    elif dtype == EXACT and small.num_steps:
        trace.values |= train_alone(member, small.large, dtype, seed).values
    return trace


def alone(small: Small, dtype: str) -> JobConfig:
    """The small run on one process, in whole batches. Float8 scales are a microbatch's, so microbatches stay."""
    config = on_one_process(small.config)
    if not config.float8.enable:
        config = edit(config, {"training.micro_batch_size": min(rampup_batch_sizes(config.training))})
    return in_type(config, dtype)


def in_type(config: JobConfig, dtype: str) -> JobConfig:
    """The configuration in another dtype."""
    values = {"training.dtype": dtype}
    return edit(config, values if dtype in HALF else values | {"training.reduce_dtype": "float32"})


def run_of(member: Member, small: Small, config: JobConfig, folder: Path) -> Run:
    """A run on the small run's data."""
    folder.mkdir(parents=True, exist_ok=True)
    return Run(
        config=edit(config, {"job.dump_folder": str(folder)}),
        model=model_config(config.model),
        layout=resolve_layout(config.parallelism, member.world_size),
        device=torch.device(member.device),
        datasets={"train": training_samples(small.config), "validation": validation_samples(small.config)},
        masks=masks_of_run(config),
        tuning=Tuning(small.unit_bytes, _GRADIENT_BYTES, _LOGITS, 1, 0, _ELEMENTS),
    )


def run_through(trainer: Trainer, watch: StepWatch) -> None:
    """Train, and validate on all held-out samples; or take the step with large logits."""
    if watch.small.num_steps == 0:
        steps_alone(trainer, 1)
        return
    trainer.train()
    if watch.outputs is None:
        watch.validation = Row.WHOLE_VALIDATION
        validator = trainer.validator
        validator.config = edit(validator.config, {"evaluation.steps": 2})
        validator.validate()


def dropout_sites(member: Member, small: Small) -> set[str]:
    """The modules after which one process drops."""
    config = small.dropping(alone(small, "float32"), RATE)
    trainer = Trainer(run_of(member, small, config, member.folder))
    with recorded_draws(trainer) as draws:
        steps_alone(trainer, 1)
    return {draw.site for draw in draws}


def compute_reference(
    member: Member, small: Small, kinds: list[str], file: Path, train: Callable[..., Trace] = train_alone
) -> Reference | str:
    """Train in float64, then in each other type among ``kinds`` to measure how far its rounding leads away.

    ``train`` may be definitions, which show what the product on one process gets wrong. Returns a sentence instead if
    the training diverges, and so cannot be compared with any other.
    """
    config = small.config
    if model_config(config.model).num_parameters() > _LARGE_MODEL:  # threads only slow a small model down
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    exact = train(member, small, EXACT)
    sizes, allowed = dict[Key, float](), dict[str, dict[Key, float]]()
    for key, value in exact.values.items():
        least = NEGLIGIBLE * exact.number(key.step, GRADIENTS[key.row]) if key.row in GRADIENTS else 0.0
        size = value.abs().max().item() if key.row in ROUTERS else max(norm(value), least)
        sizes[key] = 1.0 if key.row == Row.ZEROS else size or 1.0
    for dtype in [EXACT, *(kind for kind in kinds if kind in (SINGLE, *HALF))]:
        # Another run in float64 would round almost exactly as the first does, which a layout does not, so weights are
        # perturbed. All take the whole batch at once, so that no bug of accumulation passes for rounding.
        draws = [train(member, small, dtype, seed=seed, exact=exact) for seed in (1, 2)]
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
    num_samples = (small.num_steps + 2) * config.training.global_batch_size
    indices = {digest(samples[index]): index for index in range(num_samples)}
    return Reference(small, file, indices, exact.names, sizes, allowed, exact.outputs)


def is_cancelled(gradient: torch.Tensor, total_norm: float) -> bool:
    """Whether a gradient may be nothing but rounding, given the norm of all gradients."""
    return norm(gradient) < NEGLIGIBLE * total_norm


def allowances(small: Small, dtype: str, sizes: dict[Key, float], exact: Trace, draws: list[Trace]) -> dict[Key, float]:
    """How far a layout may be from the exact result in a type, given runs of one process in that type."""
    rounding = TIPPED if small.config.float8.enable and dtype != EXACT else 0.0
    allowed: dict[Key, float] = {}
    shares: dict[Key, float] = {}
    worst: dict[Key, float] = {}
    tips = tipped(exact, draws[0]) if dtype == EXACT and small.num_steps else {}
    for key in draws[-1].values.keys() & exact.values.keys():
        shares[key] = max(difference_in(key.row, draw.values[key], exact.values[key]) for draw in draws) / sizes[key]
        in_all_steps = key._replace(step=0)
        worst[in_all_steps] = max(shares[key], worst.get(in_all_steps, 0.0))
    for key, share in shares.items():
        if dtype != EXACT and key.row in (Row.WEIGHT, Row.ZEROS):  # rounding moves optimizers' steps too far
            continue
        if key.row in _FIXED:
            allowed[key] = _FIXED[key.row]
            continue
        if key.row == Row.ZEROS:
            gradients = [Key(key.step, Row.GRADIENT, name) for name in exact.names]
            allowed[key] = 2.0 * sum(int(uncertain(exact, draws[0], gradient).sum()) for gradient in gradients)
            continue
        if exact.values[key].numel() < FEW:
            share = worst[key._replace(step=0)]
        least = max(FLOOR[dtype], rounding * key.step)
        if key.row in (Row.WEIGHT, Row.PLACE):
            least = max(least, WEIGHTS_FLOOR)
        if key.row in GRADIENTS and is_cancelled(exact.values[key], exact.number(key.step, GRADIENTS[key.row])):
            least = max(least, CANCELLED[dtype])
        allowed[key] = max(MARGIN * share, least, tips.get(key, 0.0) / sizes[key])
    return allowed


def uncertain(exact: Trace, draw: Trace, key: Key) -> torch.Tensor:
    """Which elements of a gradient may be nothing but rounding, which need not be the same in two runs."""
    gradient, drawn = exact.values[key], draw.values[key]
    total_norm = exact.number(key.step, Row.NORM)
    is_small = torch.maximum(gradient.abs(), drawn.abs()) < NEGLIGIBLE * total_norm
    return is_small & ((gradient != 0) | (drawn != 0) | is_cancelled(gradient, total_norm))


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
