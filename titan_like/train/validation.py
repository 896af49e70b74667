"""Validation during training: the mean loss of held-out samples, and tasks. A signal ends it between two batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_like.config.errors import ConfigError, RunError, first_line, require
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, num_labels, to_device
from titan_like.data.loading.lengths import sample_length
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.data.objectives.masks import Masks
from titan_like.data.source import Source
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.tasks import run_tasks
from titan_like.metrics.console import format_validation
from titan_like.metrics.record import named_losses
from titan_like.metrics.writers import RunEnd, Writer
from titan_like.parallel.model import ModelOutput, WholeModel
from titan_like.train.observer import Observer
from titan_like.train.setup import Run, open_run_data
from titan_like.train.signals import StopSignals
from titan_like.train.training_state import TrainingState

if TYPE_CHECKING:
    from titan_like.parallel.pipeline import Pipeline

NO_LABELS = "have no labels: all of their tokens are special tokens, padding or prompts"


class Stopped(Exception):  # noqa: N818  # it is no error
    """A signal asks the run to stop in the middle of a validation. All ranks raise it together."""


def _load(config: JobConfig, scorer: Scorer, dataset: Source, masks: Masks, repeats: bool = False) -> BackgroundLoader:
    """This rank's part of the first `evaluation.steps` global batches."""
    rows, wanted = config.training.micro_batch_size, config.evaluation.steps * config.training.global_batch_size
    last_sample = -(-min(len(dataset), wanted) // (rows * scorer.dp_size)) * rows * scorer.dp_size
    sampler = GlobalSampler(0, rows, scorer.dp_rank, scorer.dp_size, last_sample=last_sample)
    return BackgroundLoader(masks.over(dataset), sampler, config.data.num_workers, scorer.device, repeats=repeats)


@torch.no_grad()
def _mean_losses(
    scorer: Scorer, pipeline: Pipeline | WholeModel, take: Callable[[int], list[Batch]]
) -> tuple[dict[str, float], torch.Tensor]:
    """The mean loss and its terms, with dropout off, of the microbatches that ``take`` reads, up to a number at once.

    The loss leaves out that of multi-token prediction, which is a loss of training. The tensor, [2, predictions], has
    the sum of each prediction's losses and the number of its labels.
    """
    training, predictions = scorer.config.training, scorer.shape.predictions
    dtype = torch.promote_types(getattr(torch, training.dtype), torch.float32)
    total = torch.zeros(2, len(predictions), device=scorer.device, dtype=dtype)
    ones, microbatches = torch.ones_like(total[0]), training.global_batch_size // training.micro_batch_size
    pipeline.model.train(False)
    while batches := take(max(1, microbatches // scorer.dp_size)):

        def add_loss(output: ModelOutput, number: int, batches: Sequence[Batch] = batches) -> torch.Tensor:
            assert isinstance(output, torch.Tensor)
            total[0] += output
            total[1] += num_labels(batches[number], predictions)
            return total[0].sum()

        pipeline.forward([batch._replace(loss_factors=ones) for batch in batches], add_loss)
    pipeline.model.train()
    pipeline.model.free_gathered_parameters()
    for group in scorer.groups:
        dist.all_reduce(total, group=group)
    losses = (total[0] / total[1]).tolist()
    loss = sum(loss for prediction, loss in zip(predictions, losses, strict=True) if prediction != "mtp")
    return {"loss": loss, **named_losses(predictions, losses)}, total


def score_held_out(scorer: Scorer) -> dict[str, dict[str, float]]:
    """The losses that a run logs for its validation split and for `evaluation.sets`. New data is tokenized."""
    config, results = scorer.config, dict[str, dict[str, float]]()
    datasets, masks = open_run_data(config, scorer.shape, trains=False)
    pipeline = scorer.pipeline(sample_length(config, scorer.shape).positions)
    for split, dataset in datasets.items():
        if len(dataset) > 0:
            with closing(_load(config, scorer, dataset, masks)) as data:

                def take(count: int, data: BackgroundLoader = data) -> list[Batch]:
                    return [to_device(batch, scorer.device) for batch in islice(data, count)]

                results[split], total = _mean_losses(scorer, pipeline, take)
            if 0 in total[1].tolist():
                raise RunError(f"the samples of {split} {NO_LABELS}; look at the data")
    reason = "leaves no whole sample for validation; give it more weight, or name evaluation.sets"
    require(results, "data.split", config.data.split, reason)
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
        """Mean loss, in nats per token, and its terms, of a split. Raises `Stopped` if a rank has received a signal."""
        repeats = split == "validation"  # the processes that read sets, which may be many, end with each validation
        data = self.validation_data if repeats else None
        if data is None:
            data = _load(self.config, self.scorer, self.run.datasets[split], self.run.masks, repeats)
            self.validation_data = data if repeats else self.validation_data
        else:
            data.start()

        def take(count: int) -> list[Batch]:
            self._leave_if_stopped()
            return self._take(data, count)

        with closing(data):
            losses, total = _mean_losses(self.scorer, self.pipeline, take)
        self.validation_is_finite &= bool(total[0].isfinite().all())
        if 0 in total[1]:
            self.console.print(f" the samples for validation {NO_LABELS}")
        self.observer.end_validation(losses)
        return losses

    def evaluate(self) -> dict[str, float]:
        """Score the tasks of `evaluation.datasets`: TASK/FIGURE → value, without counts, which never change."""
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
        for group in self.scorer.groups:
            dist.all_reduce(value, group=group)
