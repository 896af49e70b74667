"""What the processes of a verification do: generators that `titan_like.verify.processes` runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.config.schema import JobConfig
from titan_like.models.layers import init
from titan_like.verify import record
from titan_like.verify.dropout import observe_dropout
from titan_like.verify.observe import ObservedTrainer, in_type, observe_training, prepare_run
from titan_like.verify.places import PlaceRecorder, PlaceSeen, PlaceWatch
from titan_like.verify.processes import Member
from titan_like.verify.record import DROPOUT, EXACT, HALF, RESUME, Seen, Truth, num_steps
from titan_like.verify.reference import compute_truth, train
from titan_like.verify.samples import training_samples
from titan_like.verify.shrink import Small, edit

# Elements that are drawn from one generator: so few that small matrices have many such blocks, as large ones have.
_BLOCK_ELEMENTS = 64


def make_truth(place: Member, small: Small, kinds: list[str], file: Path) -> Iterator[Truth]:
    """The reference, in float64 and in what other types there are among the kinds of runs."""
    init.BLOCK_ELEMENTS = _BLOCK_ELEMENTS
    dtypes = [kind for kind in kinds if kind == record.SINGLE or kind in HALF]
    yield compute_truth(small.config, small.steps, dtypes, file, torch.device(place.device))


def run_layout(place: Member, small: Small, config: JobConfig, truth: Truth, kinds: list[str]) -> Iterator[Seen]:
    """Runs of some kinds, types or dropout, one after the other."""
    init.BLOCK_ELEMENTS = _BLOCK_ELEMENTS
    for kind in kinds:
        started, seen = time.perf_counter(), Seen(kind, place.rank)
        run = prepare_run(place, small, in_type(config, EXACT if kind == DROPOUT else kind), truth, place.folder / kind)
        if kind == DROPOUT:
            observe_dropout(run, seen, small)
        else:
            observe_training(ObservedTrainer(run, truth, seen, small.steps, num_steps(small.steps)), small)
        seen.seconds = time.perf_counter() - started
        yield seen
    dist.barrier()


def run_leg(
    place: Member,
    small: Small,
    config: JobConfig,
    truth: Truth,
    load_step: int | None,
    last_step: int,
    folder: Path,
) -> Iterator[Seen]:
    """One leg of a relay: go on from a checkpoint in the folder, and save after every good step up to ``last_step``."""
    init.BLOCK_ELEMENTS = _BLOCK_ELEMENTS
    seen = Seen(RESUME, place.rank)
    saves = {"checkpoint.enable": True, "checkpoint.interval": 1, "checkpoint.load_step": load_step}
    config = edit(in_type(config, EXACT), saves)
    run = prepare_run(place, small, config, truth, folder)
    ObservedTrainer(run, truth, seen, small.steps, last_step).train()
    yield seen


def record_places(place: Member, small: Small, truth: Truth, step: int, file: Path) -> Iterator[list[str]]:
    """What the reference's modules compute in a step; their names in the order of the forward pass."""
    init.BLOCK_ELEMENTS = _BLOCK_ELEMENTS
    recorder = PlaceRecorder(step)
    config = edit(small.config, {"training.max_norm": truth.max_norm})
    samples = training_samples(small.config, truth.micro_batch_size, truth.data_parallel)
    batch = config.training.global_batch_size
    train(config, samples, small.steps, EXACT, batch, torch.device(place.device), watch=recorder.watch)
    yield recorder.save(file)


def compare_places(
    place: Member, small: Small, config: JobConfig, truth: Truth, step: int, file: Path
) -> Iterator[PlaceSeen]:
    """Which of the layout's modules compute something else in a step."""
    init.BLOCK_ELEMENTS = _BLOCK_ELEMENTS
    config = edit(in_type(config, EXACT), {"compile.enable": False})  # compiled layers call no modules
    run = prepare_run(place, small, config, truth, place.folder / EXACT)
    trainer = ObservedTrainer(run, truth, Seen(EXACT, place.rank), small.steps, step)
    trainer.places = PlaceWatch(trainer, truth, step, file)
    trainer.train()
    yield PlaceSeen(place.rank, trainer.places.differing)
