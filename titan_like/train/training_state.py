"""The state of a run (weights, optimizer, counters, data cursor), and how it is saved and resumed."""

import json
import math
import os
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.checkpoint.best import BEST, Validations, read_validations
from titan_like.checkpoint.changes import schedule_of
from titan_like.checkpoint.checks import saved_state
from titan_like.checkpoint.loader import (
    CheckpointWeights,
    agree,
    from_first_rank,
    model_tensors,
    optimizer_tensors,
    resume,
)
from titan_like.checkpoint.saver import SaveError, Saver
from titan_like.checkpoint.step_folders import (
    RunState,
    checkpoint_path,
    folder_of_settings,
    hugging_face_folder,
    newest_in,
    prune,
    write_validations,
)
from titan_like.config.errors import RunError, first_line
from titan_like.data.loading.batch_size import total_steps
from titan_like.data.loading.blend import Phase
from titan_like.data.loading.loader import BackgroundLoader, merge_states
from titan_like.data.loading.open_source import continue_after, phases_of
from titan_like.hugging_face.convert import write_folder
from titan_like.hugging_face.origin import origin_files
from titan_like.metrics.console import Console
from titan_like.metrics.record import StepRecord
from titan_like.metrics.run_files import run_of
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.optimizer import LossScaler, build_optimizer
from titan_like.optim.schedule import Schedule
from titan_like.parallel.model import ParallelModel
from titan_like.train.health import LossWatch
from titan_like.train.initial_weights import base_state, initial_folder, load_adapters, load_initial_weights
from titan_like.train.setup import Run

_MOST_REWINDS = 3  # to the same checkpoint


class TrainingState:
    """This process's part of what a checkpoint holds of a run: weights, optimizer, counters and data cursor.

    It is new or from a checkpoint, saves itself, and goes back to its last checkpoint. Needs a process group.
    """

    def __init__(self, run: Run, model: ParallelModel, console: Console) -> None:
        """Build the optimizer of ``model``, and resume from a checkpoint if there is one that may be used."""
        self.run, self.model, self.console = run, model, console
        self.config = config = run.config
        self.kept_schedule, rule = self._kept_schedule(), config.optimizer
        if kept := self.kept_schedule:
            rule = rule.model_copy(update={"lr": kept.lr, "matrix_lr": kept.matrix_lr})
        self.optimizer = build_optimizer(model.named_parameters(), rule)
        if type(self.optimizer) is FusedAdamW:  # and not Muon, which updates matrices in its own way
            self.optimizer.write_copies(model.copied_units())
        self.scaler = LossScaler(run.device) if config.training.dtype == "float16" else None
        self.run_id = uuid.uuid4().hex[:8]  # replaced by the run's own if it resumes; rank 0's counts
        self.step = self.consumed_samples = self.consumed_tokens = self.skipped_steps = 0
        self.schedule_batch_size = config.training.global_batch_size  # with which the run began
        self.new_watch = partial(LossWatch, config.health, run.device, guess=math.log(run.model.vocab_size))
        self.losses = self.new_watch()
        self.saver = Saver(run.checkpoint_folder, config.checkpoint, hugging_face_folder(config), self._export)
        self.save_is_due = self.export_is_due = False
        self.validations: Validations | None = None  # counted only if a setting depends on them
        self.saved_steps: set[int] = set()  # saved by this process since it started
        self.rewinds: Counter[int] = Counter()  # step of a checkpoint → how often the run went back to it
        self.data: BackgroundLoader | None = None  # of this process's part of the training samples
        self.resumed: RunState | None = None  # the checkpoint from which this process resumed
        # The source run may have just saved a newer checkpoint, so rank 0's choice of initial weights counts.
        self.base, initial = dict[str, str](), from_first_rank(config.checkpoint.initial_load_path)
        adapts = config.lora.rank > 0
        if adapts and initial is not None:
            load_initial_weights(initial, model, config.model.ignore_fields)
            self.base = base_state(initial) if dist.get_rank() == 0 else {}
        if config.checkpoint.enable:
            self._resume(lambda step: config.checkpoint.load_step in (None, step))
        self.base = (self.resumed.base if self.resumed and self.base else {}) | self.base
        if self.resumed is None and initial is not None:
            if adapts:
                load_adapters(initial, model, config.lora)
            else:
                load_initial_weights(initial, model, config.model.ignore_fields)
        if config.checkpoint.enable or config.checkpoint.hugging_face_interval:
            agree(self._keep_origin(initial))
        self.start_step = self.step
        self._find_end()

    @property
    def is_complete(self) -> bool:
        """Whether the run's last step has been taken, or it has stopped early."""
        return self.step >= self.total_steps or self.stops_early

    @property
    def stops_early(self) -> bool:
        """Whether validations without a lower loss have used up `evaluation.patience`."""
        return self.validations is not None and self.validations.used_up(self.config.evaluation.patience)

    def described_end(self) -> str:
        """Why a run whose checkpoint is complete has nothing left to train, as a clause."""
        training = self.config.training
        if self.stops_early:
            return f"the run {self.described_stop()}"
        message = f"the checkpoint is at step {self.step} of {self.total_steps}"
        if training.steps is None:
            message += f", {self.consumed_samples} samples; a batch of {training.global_batch_size} is not left"
        return message

    def described_stop(self) -> str:
        """Why the run stops early, as a predicate."""
        assert self.validations is not None
        loss, patience = self.validations.best_loss, self.config.evaluation.patience
        best = "none" if loss is None else f"{loss:.4f}, of step {self.validations.best_step}"
        known = f"{self.validations.since} validations without a loss below the best ({best})"
        return f"stopped early at step {self.step}: {known}, and evaluation.patience is {patience}"

    def described_best(self) -> str | None:
        """Where the best checkpoint is, as a sentence; None if none is kept, and on other ranks than 0."""
        folder = self.saver.folder
        if dist.get_rank() > 0 or not self.config.checkpoint.keep_best:
            return None
        if (path := newest_in(folder / BEST)) == folder / BEST:
            return None
        best = read_validations(path)
        assert best is not None and best.loss is not None
        return f"lowest validation loss: {best.loss:.4f}, in {path}; read it as --checkpoint {folder / BEST}"

    @property
    def loss_scale(self) -> torch.Tensor | float:
        """The factor that multiplies the loss: 1, or the loss scaler's scalar in float16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def _kept_schedule(self) -> Schedule | None:
        """The newest checkpoint's schedule, if the run continues it. The same on all ranks."""
        config = self.config
        if not config.checkpoint.enable or config.lr_scheduler.resume == "recompute":
            return None
        newest = saved_state(config) if dist.get_rank() == 0 else None
        return schedule_of(config, from_first_rank(newest))

    def _find_end(self) -> None:
        """Work out where the run ends from what it has consumed, whatever batch sizes led here."""
        now = self.config.training, self.step, self.consumed_samples
        self.total_steps = total_steps(*now)
        self.schedule = self.kept_schedule or Schedule.of(self.config, *now[1:], self.schedule_batch_size)

    def _keep_origin(self, initial: str | None) -> str | None:
        """Let checkpoints include the source's other files, such as its tokenizer. Returns the reason if that fails."""
        source: Path | None = None
        if self.resumed is not None:
            source = checkpoint_path(self.run.checkpoint_folder, self.step)
        elif initial is not None:
            source = initial_folder(initial)
        try:
            ignore = self.config.model.ignore_fields
            self.saver.files = origin_files(source, self.config.data, ignore) if dist.get_rank() == 0 else {}
        except (OSError, ValueError) as error:
            return f"{source or self.config.data.tokenizer}: {first_line(error)}"
        return None

    def _export(self, checkpoint: Path, folder: Path, share: tuple[int, int]) -> None:
        dtype = getattr(torch, self.config.training.dtype)
        write_folder(CheckpointWeights(checkpoint), folder, dtype, share=share)

    def note_due_saves(self) -> bool:
        """Whether a checkpoint or an export is due after this step. It stays due while updates are skipped."""
        section = self.config.checkpoint
        self.save_is_due |= section.enable and self.step % section.interval == 0
        if section.hugging_face_interval > 0:
            self.export_is_due |= self.is_complete or self.step % section.hugging_face_interval == 0
        return self.save_is_due or self.export_is_due

    def save_if_due(self, is_last: bool) -> None:
        """Save what is due. The run's last step is saved in any case.

        After a skipped update there is nothing new to save and the weights may be ruined, so a save must not displace
        a good checkpoint.
        """
        is_good = self.losses.consecutive_skips == 0
        if (is_last and self.config.checkpoint.enable) or (is_good and (self.save_is_due or self.export_is_due)):
            self.save(is_last)
            self.save_is_due = self.export_is_due = False

    def save(self, is_last: bool = False) -> None:
        """Save a checkpoint, and a Hugging Face folder if one is due, or that alone if only that is.

        With `checkpoint.async` it only starts here, unless it is the last one.
        """
        self.finish_save()
        section, tensors = self.config.checkpoint, model_tensors(self.model)
        exports = self.export_is_due and self.losses.consecutive_skips == 0
        saves = section.enable and (is_last or self.save_is_due or not exports)
        if saves:
            tensors |= optimizer_tensors(self.model, self.optimizer)
        state = RunState(
            step=self.step,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            skipped_steps=self.skipped_steps,
            loss_scale=1.0 if self.scaler is None else self.scaler.scale.item(),
            loss_scale_good_steps=0 if self.scaler is None else int(self.scaler.good_steps.item()),
            model=self.run.model.model_dump(mode="json"),
            config=self.config.model_dump(mode="json"),
            recent_losses=self.losses.recent,
            consecutive_skips=self.losses.consecutive_skips,
            loss_levels=dict(self.losses.levels),
            data=self.run.datasets["train"].fingerprint,
            readers=self._readers(),
            phases=[*phases_of(self.run.datasets["train"])],
            versions={name: version(name) for name in ("torch", "safetensors")},
            run_id=self.run_id,
            schedule_batch_size=self.schedule_batch_size,
            schedule=self.schedule,
            epoch_samples=len(self.run.datasets["train"]),
            base=self.base,
            validations=self.validations,
        )
        self.saver.save(tensors, state, saves, exports)
        if is_last or not section.async_:
            self.finish_save(is_last)

    def add_validation(self, loss: float) -> None:
        """Count the validation of this step, and keep it with the step's checkpoint, which is saved now if the ``loss``
        is the lowest so far and `checkpoint.keep_best` is set. A validation that is repeated after a crash counts once.
        """
        section = self.config.checkpoint
        before = self.validations or Validations()
        if before.step == self.step or not (section.keep_best or self.config.evaluation.patience):
            return
        self.validations = before.add(self.step, loss)
        self.finish_save()
        if self.step in self.saved_steps or (self.resumed is not None and self.step == self.resumed.step):
            self._write_validations(self.validations)
        elif section.keep_best and self.validations.since == 0:  # the weights are good, even if an update was skipped
            self.save()

    def _write_validations(self, validations: Validations) -> None:
        if dist.get_rank() == 0:
            path, section = checkpoint_path(self.saver.folder, self.step), self.config.checkpoint
            try:
                write_validations(path, validations)
                if section.keep_best and self.losses.consecutive_skips == 0:  # one is no longer the best
                    prune(self.saver.folder, self.step, section.keep_latest, keep_best=True)
            except OSError as error:
                self.console.print(f" {path} has no validation loss ({first_line(error)}); training goes on")

    def save_at_stop(self) -> None:
        """Save what is not saved yet of a run that ends after a validation: by a signal, or early."""
        self.finish_save()
        interval = self.config.checkpoint.hugging_face_interval
        self.export_is_due |= self.stops_early and interval > 0 and self.step % interval > 0
        if self.step not in self.saved_steps or self.export_is_due:
            self.save_if_due(is_last=True)

    def _readers(self) -> dict[str, list[int]]:
        """The offsets of the dataset's readers, of all ranks."""
        if self.run.datasets["train"].state_dict() is None:
            return {}
        state = self.data.state if self.data is not None else {}
        states: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(states, state)
        return merge_states(states)

    def finish_save(self, is_last: bool = False) -> None:
        """Wait for a save that is in progress, if any, and print its outcome, or raise it if that is to end the run."""
        try:
            saved = self.saver.finish()
        except SaveError as error:
            if is_last or self.config.checkpoint.on_failure == "stop":
                raise RunError(str(error)) from error
            self.console.print(f" {error}; training goes on")
            saved = error.saved
        for path in saved:
            if path.parent == self.saver.folder:
                self.saved_steps.add(int(path.name.removeprefix("step-")))
            self.console.print(f" saved {path}")

    def rewind(self, record: StepRecord) -> range | None:
        """Go back to the newest checkpoint and continue with the samples after the step whose loss is a spike.

        PaLM handled loss spikes in this way (arXiv 2204.02311, section 5.1). Returns the samples that are left out, or
        None if there is no checkpoint. Raises a `RunError` if the run went back to this checkpoint too often.
        """
        self.finish_save()
        samples, tokens, skips = self.consumed_samples, self.consumed_tokens, self.losses.consecutive_skips
        # Not to a checkpoint of a branch that `checkpoint.load_step` abandoned.
        if not self._resume(lambda step: step <= self.start_step or step in self.saved_steps):
            return None
        self.rewinds[self.step] += 1
        if self.rewinds[self.step] > _MOST_REWINDS:
            reason = f"went back to step {self.step} {_MOST_REWINDS} times, but the loss spikes again"
            raise RunError(f"{reason} ({record.loss:.6g} in step {record.step}); lower optimizer.lr")
        # Resuming has reset the counters to the checkpoint's. The data cursor stays where it was, past the bad samples.
        left_out = range(self.consumed_samples, samples)
        self.consumed_samples, self.consumed_tokens = samples, tokens
        self.losses.consecutive_skips = skips
        self._find_end()
        if self.is_complete:  # no batch is left, and the next start must not take those samples again
            self.save(is_last=True)
        self.losses.count(record.step, record.loss, skipped=True)
        return left_out

    def _resume(self, is_usable: Callable[[int], bool]) -> bool:
        """Continue from the newest usable checkpoint that loads. Returns whether there was one.

        Raises a `RunError` if checkpoints exist but none loads, or the checkpoint was trained on other data.
        """
        state = resume(self.run.checkpoint_folder, is_usable, self.model, self.optimizer)
        if state is None:
            return False
        self.model.mark_changed()
        if self.data is None:  # a run that goes back reads on
            self._resume_data(state)
        if self._is_same_run(state):
            self.run_id = state.run_id or self.run_id
        self.resumed = state
        self.step, self.consumed_samples, self.schedule_batch_size = state.progress(self.config.training)
        self.consumed_tokens, self.skipped_steps = state.consumed_tokens, state.skipped_steps
        self.validations = state.validations
        if self.scaler is not None:
            self.scaler = LossScaler(self.run.device, state.loss_scale, good_steps=state.loss_scale_good_steps)
        self.losses = self.new_watch(state.recent_losses, state.consecutive_skips, levels=state.loss_levels)
        return True

    def _resume_data(self, state: RunState) -> None:
        """Move the training data to a checkpoint's cursor, where it may continue in another blend."""
        source, phases = self.run.datasets["train"], [Phase(*phase) for phase in state.phases]
        is_same = state.data in ("", source.fingerprint)
        if not is_same and not (phases and self.config.data.resume == "new_blend"):
            reason = f"the checkpoint of step {state.step} in {self.run.checkpoint_folder} was trained on other data"
            changed = "".join(f" (data.{key} was {value})" for key, value in self._changed_data(state))
            hint = 'restore it, set checkpoint.folder to a new one, or data.resume to "new_blend" to go on with this'
            if not phases:  # CHANGELOG.md lists what has changed tokens and order
                hint = "an earlier version began this run: finish it with that one, or restore its data"
            raise RunError(f"{reason} than [data] now gives{changed}; {hint}")
        if not is_same:
            first = state.consumed_samples
            now = phases_of(source)[-1]._replace(first=first)
            phases = [*(phase for phase in phases if phase.first < first), now]
        if len(phases) > 1:
            source = self.run.datasets["train"] = continue_after(source, phases)
            if not is_same and dist.get_rank() == 0:
                print(f" from step {state.step + 1} on: {source.began()}", flush=True)
        source.load_state_dict(state.readers)

    def _is_same_run(self, state: RunState) -> bool:
        """Whether this is the run that saved a checkpoint, not another that begins with a copy of it.

        It is the same run if the checkpoints are where they were saved, or if the whole dump folder has been moved.
        """
        folder, dump_folder, saved_job = self.run.checkpoint_folder, self.config.job.dump_folder, state.config["job"]
        saved_folder = folder_of_settings(saved_job, state.config.get("checkpoint", {}))
        if folder == saved_folder:
            return True
        inside = os.path.relpath(str(saved_folder), str(saved_job.get("dump_folder")))
        was_moved = os.path.relpath(str(folder), dump_folder) == inside
        return was_moved and state.run_id in map(run_of, Path(dump_folder).glob("metrics*.jsonl"))

    def _changed_data(self, state: RunState) -> list[tuple[str, str]]:
        """The settings of [data] that differ from a checkpoint's run, with their values in that run."""
        saved, settings = state.config["data"], self.config.data.model_dump(mode="json")
        return [(key, json.dumps(saved[key])) for key, value in settings.items() if saved.get(key, value) != value]
