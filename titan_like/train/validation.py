"""Validation during training: the mean loss of held-out samples, and tasks. A signal ends it between two batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.errors import RunError, require
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, num_labels, to_device
from titan_like.data.loading.lengths import sample_length
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.data.objectives.masks import Masks
from titan_like.data.source import Source
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.tasks import run_tasks
from titan_like.metrics.console import Console
from titan_like.metrics.record import named_losses
from titan_like.metrics.run_files import METRICS_FILE, lacks_validation
from titan_like.parallel.model import ModelOutput, WholeModel
from titan_like.train.microbatches import take_microbatches
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
    rows, num_samples = config.training.micro_batch_size, config.evaluation.steps * config.training.global_batch_size
    last_sample = -(-min(len(dataset), num_samples) // (rows * scorer.dp_size)) * rows * scorer.dp_size
    sampler = GlobalSampler(0, rows, scorer.dp_rank, scorer.dp_size, last_sample=last_sample)
    return BackgroundLoader(masks.over(dataset), sampler, config.data.num_workers, scorer.device, repeats=repeats)


@torch.no_grad()
def _mean_losses(
    scorer: Scorer, pipeline: Pipeline | WholeModel, take: Callable[[int], list[Batch]]
) -> tuple[dict[str, float], torch.Tensor]:
    """The mean loss and its terms, with dropout off, of the microbatches that ``take`` reads, up to a number at once.

    The loss leaves out multi-token prediction, which is only trained. The tensor, [2, predictions], has the sum of each
    prediction's losses and the number of its labels.
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


class Validator:
    """Evaluates a run's model on held-out samples and on tasks, in step with training."""

    def __init__(
        self, run: Run, pipeline: Pipeline | WholeModel, mesh: DeviceMesh,
        observer: Observer, signals: StopSignals, console: Console,
    ) -> None:  # fmt: skip
        self.run, self.config, self.pipeline, self.model = run, run.config, pipeline, pipeline.model
        self.observer, self.signals, self.console = observer, signals, console
        self.scorer = Scorer(self.config, self.model, mesh, run.device, one_length=self.config.compile.enable)
        self.is_finite = True  # whether the summed losses of the last validation are
        self._data: BackgroundLoader | None = None  # of the validation split; its processes are started once

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether the model is validated after ``step``."""
        interval = self.config.evaluation.interval
        return interval > 0 and (step % interval == 0 or step == total_steps)

    def is_overdue(self, state: TrainingState) -> bool:
        """Whether a signal or a failure ended the validation that was due after the checkpoint's step. All ranks agree.

        The metrics of that step then lack its figures.
        """
        if state.step == 0 or not self.is_due(state.step, state.total_steps):
            return False
        metrics = Path(self.config.job.dump_folder, METRICS_FILE)
        return self._largest(dist.get_rank() == 0 and lacks_validation(metrics, state.run_id, state.step)) > 0

    def run_all(self) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """The losses of every split, and the figures of the tasks. Raises `Stopped` if a rank has received a signal."""
        splits = [name for name, source in self.run.datasets.items() if name != "train" and len(source) > 0]
        try:
            self._leave_if_stopped()
            self.is_finite = True
            return {split: self.validate(split) for split in splits}, self.evaluate()
        except Stopped:
            self.model.train()
            self.model.free_gathered_parameters()
            raise

    def validate(self, split: str = "validation") -> dict[str, float]:
        """Mean loss, in nats per token, and its terms, of a split. Raises `Stopped` if a rank has received a signal."""
        is_kept = split == "validation"  # the processes that read sets, which may be many, end with each validation
        data = self._data if is_kept else None
        if data is None:
            data = self.load(split, repeats=is_kept)
        else:
            data.start()
        if is_kept:
            self._data = data

        def take(count: int) -> list[Batch]:
            self._leave_if_stopped()
            return take_microbatches(data, count, self.scorer.cp_shard, self.run.device, self.observer)

        with closing(data):
            losses, total = _mean_losses(self.scorer, self.pipeline, take)
        self.is_finite &= bool(total[0].isfinite().all())
        if 0 in total[1]:
            self.console.print(f" the samples for validation {NO_LABELS}")
        self.observer.end_validation(losses)
        return losses

    def load(self, split: str, repeats: bool = False) -> BackgroundLoader:
        """Read this rank's part of a split."""
        return _load(self.config, self.scorer, self.run.datasets[split], self.run.masks, repeats)

    def evaluate(self) -> dict[str, float]:
        """Score the tasks of `evaluation.datasets`: TASK/FIGURE → value, without counts, which never change."""
        results = run_tasks(self.run.tasks, self.scorer, lambda _task: lambda _done, _all: self._leave_if_stopped())
        return {
            f"{task}/{figure}": value
            for task, figures in results.items()
            for figure, value in figures.items()
            if isinstance(value, float)
        }

    def close(self) -> None:
        """End the processes that read data."""
        self._data = None

    def _leave_if_stopped(self) -> None:
        """Raise `Stopped` if any rank has received a signal. All ranks call it between two batches of a validation."""
        self.signals.agreed = self._largest(self.signals.received)
        if self.signals.agreed:
            raise Stopped

    def _largest(self, number: int) -> int:
        """The largest of all ranks' numbers. This waits for the device."""
        numbers = torch.tensor([number], device=self.run.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return int(numbers.item())
