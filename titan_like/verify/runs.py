"""Runs on the verification's own data: of a layout, or of the product alone on one process, which is the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import rampup_batch_sizes
from titan_like.models.registry import model_config
from titan_like.parallel.axes import on_one_process
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.tuning import Tuning
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import EXACT, HALF, Key, Row
from titan_like.verify.dropout import RATE, Recorder, with_dropout
from titan_like.verify.places import Outputs, key_of
from titan_like.verify.processes import Member
from titan_like.verify.samples import masks_of_run, training_samples, validation_samples
from titan_like.verify.shrink import Small
from titan_like.verify.watch import StepWatch, steps_alone

EPS = {EXACT: 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_CLIPPED_SHARE = 0.1  # of the first gradient norm: with this max_norm every step is clipped
_LOGITS = 1024  # of a chunk of the loss: small samples then take several chunks, as large ones do
_GRADIENT_BYTES = 4096  # in a half type that wait to be added up, for the same reason
_ELEMENTS = 64  # of initial weights that one generator draws, so that some shards begin after the first block


@dataclass
class Trace:
    """The numbers and tensors of one run on one process, which serve as the reference for others."""

    names: list[str] = field(default_factory=list)  # of parameters
    values: dict[Key, torch.Tensor] = field(default_factory=dict)  # float64; a number has no dimensions
    outputs: Outputs | None = None  # of modules in the last step, if they are recorded; their tensors are in `values`

    def keep(self, key: Key, value: torch.Tensor | float) -> None:
        """Copy a number or a tensor to the CPU."""
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        self.values[key] = tensor.detach().to("cpu", torch.float64, copy=True)

    def number(self, step: int, row: Row) -> float:
        """A number that was kept."""
        return self.values[Key(step, row)].item()


class _Alone(StepWatch):
    """Watches the product on one process."""

    def __init__(self, small: Small, trace: Trace, seed: int | None) -> None:
        """``seed`` of the perturbation of the initial weights; None: there is none."""
        super().__init__(small, trace.keep)
        self.trace, self.seed = trace, seed

    def attach(self, trainer: Trainer) -> None:
        """Perturb the initial weights."""
        (stage,) = trainer.model.stages
        names = [name for name, _ in trainer.model.named_parameters()]
        self.names = self.trace.names = sorted(names, key=lambda name: not name.startswith(stage.module.entry))
        super().attach(trainer)
        if self.seed is not None:
            perturb(trainer.model.parameters(), trainer.config.training.dtype, self.seed)

    def complete_gradients(self) -> None:
        """Keep what modules have computed, if it is recorded."""
        super().complete_gradients()
        if self.outputs is not None and self.outputs.order:
            for place, value in self.outputs.whole(self.trainer.loss_scale).items():
                self.note(key_of(self.at_step, place), value)
            self.outputs.tensors.clear()
            self.trace.outputs = self.outputs


def perturb(parameters: Iterable[torch.Tensor], dtype: str, seed: int) -> None:
    """Change each weight by the rounding error of a sum over the longer side of its matrix.

    In a half type, change it by a part of its own rounding, so that it is often rounded the other way.
    """
    for parameter in parameters:
        noise = torch.Generator(parameter.device).manual_seed(seed)
        size = EPS[dtype] * (1 / 4 if dtype in HALF else math.sqrt(max(parameter.shape)))
        signs = torch.rand(parameter.shape, generator=noise, device=parameter.device, dtype=parameter.dtype)
        parameter.data.mul_(1 + size * signs.sub_(0.5).sign_())
        seed += 1000


def train_alone(member: Member, small: Small, dtype: str, seed: int | None = None, with_outputs: bool = False) -> Trace:
    """Train in whole batches. With ``with_outputs``, keep what modules compute in the last step.

    Otherwise float64 ends with the step with large logits, from the same initial weights.
    """
    trace, config = Trace(), alone(small, dtype)
    run = run_of(member, small, config, member.folder)
    run = replace(run, tuning=replace(run.tuning, loss_logits=None))
    watch = _Alone(small, trace, seed)
    watch.outputs = Outputs() if with_outputs else None
    run_through(Trainer(run, observer=watch), watch)
    if dtype == EXACT and small.num_steps and not with_outputs:
        trace.values |= train_alone(member, small.large, dtype, seed).values
    return trace


def alone(small: Small, dtype: str) -> JobConfig:
    """The small run on one process, in whole batches. Float8 scales are a microbatch's, so those stay."""
    config = on_one_process(small.config)
    if not config.float8.enable:
        config = edit(config, {"training.micro_batch_size": min(rampup_batch_sizes(config.training))})
    return in_type(config, dtype)


def in_type(config: JobConfig, dtype: str) -> JobConfig:
    """The configuration in another type."""
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
        tuning=Tuning(small.unit_bytes, _GRADIENT_BYTES, _LOGITS, _ELEMENTS),
    )


def run_through(trainer: Trainer, watch: StepWatch) -> None:
    """Train, and validate on all held-out samples; or take the step with large logits."""
    if watch.small.num_steps == 0:
        steps_alone(trainer, 1)
        return
    trainer.train()
    if watch.outputs is None:
        watch.validation = Row.WHOLE_VALIDATION
        trainer.config = edit(trainer.config, {"evaluation.steps": 2})
        trainer.validate()


def dropout_sites(member: Member, small: Small) -> set[str]:
    """The modules after which one process drops."""
    config = edit(with_dropout(alone(small, "float32"), RATE), {"compile.enable": False})
    trainer = Trainer(run_of(member, small, config, member.folder))
    recorder = Recorder(trainer)
    with recorder.installed():
        steps_alone(trainer, 1)
    return {draw.where.site for draw in recorder.draws}
