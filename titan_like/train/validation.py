"""Validation during training: the mean loss of held-out samples, and tasks. A signal ends it between two batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.errors import ConfigError, first_line, require
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, num_labels, to_device
from titan_like.data.lengths import sample_length
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.masks import Masks
from titan_like.data.source import Source
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.tasks import run_tasks
from titan_like.metrics.console import format_validation
from titan_like.metrics.record import named_losses
from titan_like.metrics.writers import RunEnd, Writer
from titan_like.models.config import TransformerConfig
from titan_like.parallel.apply import run_batches
from titan_like.parallel.layout import Layout
from titan_like.parallel.mesh import one_dimension
from titan_like.parallel.model import ModelOutput, ParallelModel, WholeModel
from titan_like.train.observer import Observer
from titan_like.train.setup import Run, open_run_data
from titan_like.train.signals import StopSignals
from titan_like.train.training_state import TrainingState

if TYPE_CHECKING:
    from titan_like.parallel.pipeline import Pipeline

NO_LABELS = "have no labels: all of their tokens are special tokens, padding or prompts"


class Stopped(Exception):  # noqa: N818  # it is no error
    """A signal asks the run to stop in the middle of a validation. All ranks raise it together."""


def _load(
    config: JobConfig, dataset: Source, masks: Masks, ranks: tuple[int, int], device: torch.device, repeats: bool
) -> BackgroundLoader:
    """A rank's part of the first `evaluation.steps` global batches; ``ranks``: its own and all data-parallel ones."""
    rows, wanted = config.training.micro_batch_size, config.evaluation.steps * config.training.global_batch_size
    unit = rows * ranks[1]
    sampler = GlobalSampler(0, rows, *ranks, last_sample=-(-min(len(dataset), wanted) // unit) * unit)
    return BackgroundLoader(masks.over(dataset), sampler, config.data.num_workers, device, repeats=repeats)


@torch.no_grad()
def _add_losses(
    pipeline: Pipeline | WholeModel, predictions: Sequence[str], batches: Iterable[list[Batch]], total: torch.Tensor
) -> None:
    """Add this process's summed losses, with dropout off, and its numbers of labels to ``total``, [2, predictions]."""
    ones = torch.ones_like(total[0])
    pipeline.model.train(False)
    for microbatches in batches:

        def add_loss(output: ModelOutput, number: int, microbatches: Sequence[Batch] = microbatches) -> torch.Tensor:
            assert isinstance(output, torch.Tensor)
            total[0] += output
            total[1] += num_labels(microbatches[number], predictions)
            return total[0].sum()

        pipeline.forward([batch._replace(loss_factors=ones) for batch in microbatches], add_loss)
    pipeline.model.train()
    pipeline.model.free_gathered_parameters()


def _means(predictions: Sequence[str], total: torch.Tensor) -> dict[str, float]:
    """The loss, without that of multi-token prediction, which is a loss of training, and its terms by name."""
    losses = (total[0] / total[1]).tolist()
    loss = sum(loss for prediction, loss in zip(predictions, losses, strict=True) if prediction != "mtp")
    return {"loss": loss, **named_losses(predictions, losses)}


def score_held_out(
    config: JobConfig, shape: TransformerConfig, layout: Layout, model: ParallelModel, mesh: DeviceMesh
) -> dict[str, dict[str, float]]:
    """The losses that a run logs for its validation split and for `evaluation.sets`, of a model without a run.

    All processes that hold a part of the model call it. New data is tokenized.
    """
    datasets, masks = open_run_data(config, shape, trains=False)
    device, training, results = next(model.parameters()).device, config.training, dict[str, dict[str, float]]()
    positions = sample_length(config, shape).positions
    pipeline = run_batches(config, model, mesh, device, training.micro_batch_size, positions)
    ranks = layout.data_rank(mesh.get_rank()), layout.data_parallel
    microbatches = max(1, training.global_batch_size // (training.micro_batch_size * layout.data_parallel))
    groups = one_dimension(mesh, "dp", "dp_replicate", "dp_shard").get_group(), mesh.get_group("pp")
    dtype = torch.promote_types(getattr(torch, training.dtype), torch.float32)
    for split, dataset in datasets.items():
        if len(dataset) > 0:
            total = torch.zeros(2, len(shape.predictions), device=device, dtype=dtype)
            with closing(_load(config, dataset, masks, ranks, device, repeats=False)) as data:
                taken = iter(lambda: [to_device(batch, device) for batch in islice(data, microbatches)], [])
                _add_losses(pipeline, shape.predictions, taken, total)
            for group in groups:
                dist.all_reduce(total, group=group)
            results[split] = _means(shape.predictions, total)
    problem = "leaves no whole sample for validation; give it more weight, or name evaluation.sets"
    require(results, "data.split", config.data.split, problem)
    return results


class ValidatedState(TrainingState):
    """A run's state, and how well its model does on held-out samples and on tasks."""

    def __init__(self, run: Run, observer: Observer) -> None:
        super().__init__(run)
        self.observer = observer
        self.signals = StopSignals()  # inactive until the caller replaces it by one that handles signals
        self.stop_signal = 0  # the signal that any rank had received when ranks last told each other
        self.validation_is_finite = True  # the summed losses of the last one
        self.validation_data: BackgroundLoader | None = None  # its processes are started once
        self.scorer = Scorer(self.config, self.model, self.mesh, run.device, one_length=self.config.compile.enable)
        self.writers: list[Writer] = []

    def _close_writers(self, error: BaseException | None) -> RunEnd:
        """Close the writers of a run that ends, because of the ``error`` if there is one, and return how it ends."""
        validation = None if self.validation_is_finite else "the loss of the last validation is not finite"
        reasons = filter(None, (self.losses.described(), validation))
        end = RunEnd(0, self.stop_signal if self.step < self.total_steps else 0, "; ".join(reasons))
        if error is not None:
            end = RunEnd(2 if isinstance(error, ConfigError) else 1, 0, f"{type(error).__name__}: {first_line(error)}")
        for writer in self.writers:
            writer.close(end)
        return end

    @property
    def num_actions(self) -> int:
        """Passes, sends and receives so far, which grow as long as training and evaluation make progress."""
        return self.pipeline.num_actions + self.scorer.num_actions

    def _validates(self) -> bool:
        interval = self.config.evaluation.interval
        return interval > 0 and (self.step % interval == 0 or self.step == self.total_steps)

    def _log_validation(self) -> None:
        """Validate and add the figures to what is logged about the step. A signal that asks to stop ends this."""
        try:
            self._leave_if_stopped()
            splits = [name for name, source in self.run.datasets.items() if name != "train" and len(source) > 0]
            self.validation_is_finite = True
            losses = {split: self.validate(split) for split in splits}
            evaluation = self.evaluate()
        except Stopped:
            self.model.train()
            self.model.free_gathered_parameters()
            self.console.print(f" a signal leaves the validation at step {self.step} to the resumed run")
            return
        values = dict(evaluation)
        for split, terms in losses.items():
            results = {f"validation_{name}{split.removeprefix('validation')}": loss for name, loss in terms.items()}
            self.console.print(format_validation(self.step, results))
            values |= results
        if evaluation:
            self.console.print(format_validation(self.step, evaluation))
        for writer in self.writers:
            writer.write(self.step, values)

    def _leave_if_stopped(self) -> None:
        """Raise `Stopped` if any rank has received a signal. All ranks call it between two batches of a validation."""
        self.stop_signal = self._largest(self.signals.received)
        if self.stop_signal:
            raise Stopped

    def _largest(self, number: int) -> int:
        """The largest of all ranks' numbers. This waits for the device."""
        numbers = torch.tensor([number], device=self.run.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return int(numbers.item())

    def validate(self, split: str = "validation") -> dict[str, float]:
        """Mean loss and its terms, in nats per token, over the first `evaluation.steps` global batches of a ``split``.

        Raises:
            Stopped: a rank has received a signal that asks to stop.
        """
        repeats = split == "validation"  # the processes that read sets, which may be many, end with each validation
        data = self.validation_data if repeats else None
        if data is None:
            ranks = self.dp_rank, self.dp_size
            data = _load(self.config, self.run.datasets[split], self.run.masks, ranks, self.run.device, repeats)
            self.validation_data = data if repeats else self.validation_data
        else:
            data.start()
        training, predictions = self.config.training, self.run.model.predictions
        microbatches = training.global_batch_size // (training.micro_batch_size * self.dp_size)

        def batches() -> Iterator[list[Batch]]:
            while shards := self._take(data, microbatches):
                self._leave_if_stopped()
                yield shards

        total = torch.zeros(2, len(predictions), device=self.run.device, dtype=self.loss_dtype)
        with closing(data):
            _add_losses(self.pipeline, predictions, batches(), total)
        self._sum_over_samples(total)
        self.validation_is_finite &= bool(total[0].isfinite().all())
        if 0 in total[1]:
            self.console.print(f" the samples for validation {NO_LABELS}")
        losses = _means(predictions, total)
        self.observer.end_validation(losses)
        return losses

    def evaluate(self) -> dict[str, float]:
        """Score the tasks of `evaluation.datasets`: TASK/FIGURE → value, without counts, which never change.

        Raises `Stopped` as `validate` does.
        """
        results = run_tasks(self.run.tasks, self.scorer, lambda _task: lambda _done, _all: self._leave_if_stopped())
        return {
            f"{task}/{figure}": value
            for task, figures in results.items()
            for figure, value in figures.items()
            if isinstance(value, float)
        }

    def _take(self, data: Iterator[Batch], count: int) -> list[Batch]:
        """The next microbatches, up to ``count``: this process's CP shards, on its device."""
        shards = []
        for batch in islice(data, count):
            self.observer.take_batch(batch)
            shards.append(self.cp_shard.shard(to_device(batch, self.run.device)))
        return shards

    def _sum_over_samples(self, value: torch.Tensor) -> None:
        """Sum in place over samples, their CP shards and stages. Only the last stage's ranks have values but zero."""
        if self.token_group.size() > 1:
            dist.all_reduce(value, group=self.token_group)
        if self.pp_group.size() > 1:
            dist.all_reduce(value, group=self.pp_group)
