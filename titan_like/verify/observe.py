"""One process of a layout: trains with the real Trainer and notes what it saw."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_like.config.schema import JobConfig
from titan_like.data.gpt import PackedDataset
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.train.batch_size import total_steps
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.dropout import observe_dropout
from titan_like.verify.reference import (
    FLOAT16_SCALE,
    Tensors,
    load_gradients,
    load_tensors,
    norm,
    validation_size,
)
from titan_like.verify.results import BadStepSeen, DropoutSeen, RunSeen, StepSeen, Truth
from titan_like.verify.samples import IGNORED, fingerprint, training_samples, validation_samples
from titan_like.verify.server import Place
from titan_like.verify.shrink import edit

DROPOUT = "dropout"
_OVERFLOWING_SCALE = 2.0**80  # of a float16 loss


class ObservedTrainer(Trainer):
    """Shows each step's gradients, complete and not yet clipped."""

    exact: list[Tensors]
    same_type: Tensors | None
    seen: StepSeen | None = None

    def _update(self, grad_norm: float, lr: float) -> None:
        if self.seen is not None:
            scale = self.scaler.scale
            expected, same_type = self.exact[self.step], self.same_type if self.step == 0 else None
            for name, parameter in self.model.named_parameters():
                if parameter.grad is None:
                    self.seen.gradients[name] = None
                    continue
                value = whole(parameter.grad) / scale
                distance = norm(value - expected[name].to(value.device))
                so_far = self.seen.gradients.get(name, 0.0)
                self.seen.gradients[name] = None if so_far is None else max_or_nan(so_far, distance)
                if same_type is not None:
                    self.seen.same_type[name] = norm(value - same_type[name].to(value.device))
        super()._update(grad_norm, lr)


class Watched:
    """Passes microbatches on and notes which samples they are of."""

    def __init__(self, data: Iterator[torch.Tensor], known: dict[bytes, int]) -> None:
        self.data, self.known = data, known
        self.samples: list[list[int]] = []
        self.valid_tokens = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self.data)
        self.samples.append([self.known.get(fingerprint(sample), -1) for sample in batch])
        self.valid_tokens += int((batch[:, 1] != IGNORED).sum())
        return batch


def observe(
    place: Place, config: JobConfig, truth: Truth, kinds: list[str], dropout: float | None, timeout: float
) -> Iterator[RunSeen | DropoutSeen]:
    """Run the layout in each of the kinds: types, or dropout."""
    join(place, timeout)
    for kind in kinds:
        started = time.perf_counter()
        seen: RunSeen | DropoutSeen
        if kind == DROPOUT:
            seen = observe_dropout(place.rank, lambda changed: prepare_run(place, changed), config, dropout)
        else:
            changed = edit(
                config, {"training.dtype": kind, **({} if kind in _HALF else {"training.reduce_dtype": "float32"})}
            )
            seen = observe_training(prepare_run(place, changed), truth, kind, place.rank)
        seen.seconds = time.perf_counter() - started
        yield seen
    dist.barrier()  # the process whose store the others use leaves last
    dist.destroy_process_group()


_HALF = ("bfloat16", "float16")


def join(place: Place, timeout: float) -> None:
    """Meet the other processes."""
    store, patience, device = open_store(place), timedelta(seconds=timeout), torch.device(place.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store, rank=place.rank, world_size=place.world_size, timeout=patience,
        device_id=device if on_gpu else None,
    )  # fmt: skip


def open_store(place: Place) -> dist.Store:
    """A store that the first process holds; its port is in a file."""
    file = place.folder / "port"
    if place.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, place.world_size, is_master=True, wait_for_workers=False)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(str(store.port))
        os.replace(unfinished, file)
        return store
    while not file.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), place.world_size, is_master=False)


def prepare_run(place: Place, config: JobConfig) -> Run:
    """A run on the verification's own data."""
    config = edit(config, {"job.dump_folder": str(place.folder)})
    shape = model_config(config.model)
    seed, seq_len, vocabulary = config.job.seed, config.training.seq_len, shape.vocab_size
    return Run(
        config=config,
        model=shape,
        layout=resolve_layout(config.parallelism, place.world_size),
        total_steps=total_steps(config.training),
        device=torch.device(place.device),
        datasets={
            "train": cast(PackedDataset, training_samples(seed, seq_len, vocabulary)),
            "validation": cast(PackedDataset, validation_samples(seed, seq_len, vocabulary, validation_size(config))),
        },
        checkpoint_folder=Path(place.folder) / "checkpoint",
    )


def observe_training(run: Run, truth: Truth, kind: str, rank: int) -> RunSeen:
    """Train as many steps as the reference did, and one more whose gradients are not finite."""
    initial, gradients, weights = load_tensors(truth)
    trainer = ObservedTrainer(run)
    trainer.exact, trainer.same_type = gradients, load_gradients(truth, kind) if kind in _HALF else None
    if kind == "float16":
        trainer.scaler.scale = FLOAT16_SCALE
    seen = RunSeen(kind, rank, coordinates(trainer))
    for name, tensor in whole_parameters(trainer):
        expected = initial.get(name)
        differ = tensor.numel() if expected is None else int((tensor.double().cpu() != expected).sum())
        seen.initial[name] = max(seen.initial.get(name, 0), differ)
        seen.initial_digests.setdefault(name, []).append(digest(tensor))
    last = truth.steps[-1].consumed_samples
    data_set = training_samples(run.config.job.seed, run.config.training.seq_len, run.model.vocab_size)
    known = {fingerprint(data_set[index]): index for index in range(last + run.config.training.global_batch_size)}
    data = trainer._load_data()
    seen.validation.append(trainer.validate())
    for step in range(len(truth.steps)):
        watched = Watched(data, known)
        trainer.seen = now = StepSeen(0, 0, 0, 0, 0, 0, None, False, watched.samples, 0, {})
        record = trainer.train_step(watched)
        now.loss, now.grad_norm, now.lr = record.loss, record.grad_norm, record.lr
        now.batch_size, now.consumed_samples = record.global_batch_size, record.consumed_samples
        now.consumed_tokens, now.num_zeros = record.consumed_tokens, record.num_zeros
        now.is_skipped = bool(record.skipped or record.nan)
        now.valid_tokens = watched.valid_tokens
        seen.steps.append(now)
        if step in (0, len(truth.steps) - 1):
            seen.validation.append(trainer.validate())
    trainer.seen = None
    for name, tensor in whole_parameters(trainer):
        distance = norm(tensor.cpu() - weights[name]) if name in weights else math.inf
        seen.weights[name] = max_or_nan(seen.weights.get(name, 0.0), distance)
        seen.digests.setdefault(name, []).append(digest(tensor))
    seen.bad_step = observe_bad_step(trainer, data)
    data.close()
    return seen


def observe_bad_step(trainer: Trainer, data: Iterator[torch.Tensor]) -> BadStepSeen:
    """A step whose gradients are not finite: float16 overflows, otherwise a weight on the last process alone is NaN."""
    before = [part(parameter).detach().clone() for parameter in trainer.model.parameters()]
    consumed, skipped = trainer.consumed_samples, trainer.skipped_steps
    poisoned = None
    scale = trainer.scaler.scale
    if trainer.config.training.dtype == "float16":
        trainer.scaler.scale = _OVERFLOWING_SCALE
    elif dist.get_rank() == dist.get_world_size() - 1:
        norms = (part(p).detach() for name, p in trainer.model.named_parameters() if name.endswith("norm.weight"))
        poisoned = next((weight[:1] for weight in norms if weight.numel()), None)
    if poisoned is not None:
        value = poisoned.clone()
        poisoned.fill_(math.nan)
    record = trainer.train_step(data)
    if poisoned is not None:
        poisoned.copy_(value)
    names = [name for name, _ in trainer.model.named_parameters()]
    after = [part(parameter).detach() for parameter in trainer.model.parameters()]
    changed = [name for name, old, new in zip(names, before, after, strict=True) if not torch.equal(old, new)]
    counted = bool(record.skipped or record.nan) and trainer.skipped_steps == skipped + 1
    counted = counted and trainer.consumed_samples == consumed + record.global_batch_size
    if trainer.config.training.dtype == "float16":
        counted = counted and bool(record.skipped) and trainer.scaler.scale == _OVERFLOWING_SCALE / 2
        trainer.scaler.scale = scale
    return BadStepSeen(changed, counted)


def coordinates(trainer: Trainer) -> dict[str, int]:
    """Where in the mesh this process is."""
    return {name: trainer.mesh[name].get_local_rank() for name in trainer.mesh.mesh_dim_names or ()}


def whole_parameters(trainer: Trainer) -> Iterable[tuple[str, torch.Tensor]]:
    """Every parameter held here, put together from the processes that have parts of it. A table may come twice."""
    for name, parameter in trainer.model.named_parameters():
        yield name, whole(parameter)


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this process may hold a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(tensor: torch.Tensor) -> str:
    """Equal for tensors that are equal to the bit."""
    return hashlib.blake2b(tensor.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def max_or_nan(a: float, b: float) -> float:
    """The larger; NaN if either is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
