"""The state of a run (weights, optimizer, counters, data cursor), and how it is saved and resumed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import uuid
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_like.checkpoint.changes import changes, schedule_of
from titan_like.checkpoint.checks import newest_state, usable_steps
from titan_like.checkpoint.loader import CheckpointWeights, agree, model_tensors, optimizer_tensors, resume
from titan_like.checkpoint.saver import SaveError, Saver
from titan_like.checkpoint.step_folders import RunState, checkpoint_path, folder_of_settings, hugging_face_folder
from titan_like.config.errors import RunError, first_line
from titan_like.data.loading.batch_size import total_samples, total_steps
from titan_like.data.loading.blend import Phase
from titan_like.data.loading.loader import BackgroundLoader, merge_states
from titan_like.data.loading.open_source import continue_after, phases_of
from titan_like.hugging_face.convert import write_folder
from titan_like.hugging_face.origin import origin_files
from titan_like.metrics.console import Console
from titan_like.metrics.run_files import run_of
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.optimizer import Gradients, LossScaler, build_optimizer
from titan_like.optim.schedule import Schedule
from titan_like.parallel.apply import build_pipeline
from titan_like.parallel.context import cp_shard_of
from titan_like.parallel.expert_balance import ExpertBalance
from titan_like.parallel.layout import Layout
from titan_like.parallel.lora import adapter_parameters
from titan_like.parallel.mesh import build_mesh, one_dimension
from titan_like.parallel.tensor import partial_parameters
from titan_like.train.health import LossWatch
from titan_like.train.initial_weights import base_state, initial_folder, load_adapters, load_initial_weights
from titan_like.train.setup import Run


def dropout_stream(layout: Layout, rank: int) -> int:
    """Number of the random stream from which a rank draws dropout.

    Ranks with different activations need different streams. Tensor-parallel ranks have the same activations between
    layers, except under sequence parallelism.
    """
    return rank if layout.sequence_parallel else rank // layout.tensor


def seed_everything(seed: int, stream: int, deterministic: bool) -> None:
    """Seed Python's, NumPy's and torch's generators; ``deterministic`` also selects deterministic kernels."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_step(seed: int, step: int, stream: int) -> None:
    """Seed torch's generators for the dropout of one step, from these numbers alone.

    No checkpoint then holds random state: a run that goes on in any layout draws what it would have drawn there.
    """
    digest = hashlib.sha256(f"dropout/{seed}/{step}/{stream}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _of_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class TrainingState:
    """This process's part of a run's state, either new or from a checkpoint. Needs a process group."""

    def __init__(self, run: Run) -> None:
        """Build the model and its optimizer, and resume from a checkpoint if there is one that may be used."""
        self.run = run
        self.config = config = run.config
        self.mesh = mesh = build_mesh(run.layout, run.device.type)
        # Of the ranks with other samples, or other CP shards of the same ones.
        self.token_group = one_dimension(mesh, "dp", "dp_replicate", "dp_shard").get_group()
        self.dp_rank, self.dp_size = run.layout.data_rank(dist.get_rank()), run.layout.data_parallel
        self.cp_shard = cp_shard_of(config, run.model, mesh)
        self.pp_group = mesh.get_group("pp")

        self.dropout_stream = dropout_stream(run.layout, dist.get_rank())
        seed_everything(config.job.seed, self.dropout_stream, config.job.deterministic)
        self.pipeline = build_pipeline(config, run.model, mesh, run.device, run.tuning)
        self.model = self.pipeline.model
        self.experts = ExpertBalance(self.model, mesh)
        self.loss_dtype = torch.promote_types(getattr(torch, config.training.dtype), torch.float32)
        self.kept_schedule, rule = self._kept_schedule(), config.optimizer
        if kept := self.kept_schedule:
            rule = rule.model_copy(update={"lr": kept.lr, "matrix_lr": kept.matrix_lr})
        self.optimizer = build_optimizer(self.model.named_parameters(), rule)
        if type(self.optimizer) is FusedAdamW:  # and not Muon, which updates matrices in its own way
            self.optimizer.write_copies(self.model.copied_units())
        self.partial_parameters = [p for stage in self.model.stages for p in partial_parameters(stage.module)]
        self.gradients_held = Gradients(self.model.parameters(), mesh, self.model.expert_mesh)
        self.gradients_counted = Gradients(self.model.counted_parameters(), mesh, self.model.expert_mesh)
        self.scaler = LossScaler(run.device) if config.training.dtype == "float16" else None
        self.run_id = uuid.uuid4().hex[:8]  # replaced by the run's own if it resumes; that of rank 0 counts
        self.step = self.consumed_samples = self.consumed_tokens = self.skipped_steps = 0
        self.schedule_batch_size = config.training.global_batch_size  # with which the run began
        self.new_watch = partial(LossWatch, config.health, run.device, guess=math.log(run.model.vocab_size))
        self.losses = self.new_watch()
        self.saver = Saver(run.checkpoint_folder, config.checkpoint, hugging_face_folder(config), self._export)
        self.save_is_due = self.export_is_due = False
        self.saved_steps: set[int] = set()  # saved by this process since it started
        self.data: BackgroundLoader | None = None  # of this process's part of the training samples
        self.resumed: RunState | None = None  # the checkpoint from which this process went on
        # The source run may have just saved a newer checkpoint, so rank 0's choice of initial weights counts.
        self.base, initial = dict[str, str](), _of_rank_0(config.checkpoint.initial_load_path)
        self.num_adapted = adapter_parameters(run.model, config.lora)
        if self.num_adapted and initial is not None:
            load_initial_weights(initial, self.model, config.model.ignore_fields)
            self.base = base_state(initial) if dist.get_rank() == 0 else {}
        if config.checkpoint.enable:
            self._resume(lambda step: config.checkpoint.load_step in (None, step))
        self.base = (self.resumed.base if self.resumed and self.base else {}) | self.base
        if self.resumed is None and initial is not None:
            if self.num_adapted:
                load_adapters(initial, self.model, config.lora)
            else:
                load_initial_weights(initial, self.model, config.model.ignore_fields)
        if config.checkpoint.enable or config.checkpoint.hugging_face_interval:
            agree(self._keep_origin(initial))
        self.start_step = self.step
        self.find_end()
        now = config.training, self.step, self.consumed_samples
        self.console = Console(dist.get_rank() == 0, self.total_steps, total_samples(*now))
        if self.resumed is not None and self.step < self.total_steps:
            for line in changes(self.resumed, config, run.model, self.schedule):
                self.console.print(f" {line}")

    def _kept_schedule(self) -> Schedule | None:
        """The newest checkpoint's schedule, if the run goes on with that. The same on all ranks."""
        config, folder = self.config, self.run.checkpoint_folder
        if not config.checkpoint.enable or config.lr_scheduler.resume == "recompute":
            return None
        is_first = dist.get_rank() == 0
        newest = newest_state(folder, usable_steps(folder, config.checkpoint.load_step)) if is_first else None
        return schedule_of(config, _of_rank_0(newest))

    def find_end(self) -> None:
        """Work out where the run ends from what it has consumed, whatever batch sizes led here."""
        now = self.config.training, self.step, self.consumed_samples
        self.total_steps = total_steps(*now)
        self.schedule = self.kept_schedule or Schedule.of(self.config, *now[1:], self.schedule_batch_size)

    def _keep_origin(self, initial: str | None) -> str | None:
        """Let checkpoints hold what this run's source says besides weights. Returns the reason if that fails."""
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
        )
        self.saver.save(tensors, state, saves, exports)
        if is_last or not section.async_:
            self.finish_save(is_last)

    def _readers(self) -> dict[str, list[int]]:
        """Where the dataset's readers go on, of all ranks."""
        source, state = self.run.datasets["train"], self.data.state if self.data is not None else {}
        if source.state_dict() is None:
            return {}
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

    def _is_of_this_run(self, step: int) -> bool:
        """Whether a checkpoint is in this run's past, not on a branch that `checkpoint.load_step` abandoned."""
        return step <= self.start_step or step in self.saved_steps

    def _resume(self, is_usable: Callable[[int], bool]) -> bool:
        """Continue from the newest usable checkpoint that loads. Returns whether there was one.

        Raises:
            RunError: checkpoints exist but none loads, or the checkpoint was trained on other data.
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
        if self.scaler is not None:
            self.scaler = LossScaler(self.run.device, state.loss_scale, good_steps=state.loss_scale_good_steps)
        self.losses = self.new_watch(state.recent_losses, state.consecutive_skips, levels=state.loss_levels)
        return True

    def _resume_data(self, state: RunState) -> None:
        """Let the training data go on where a checkpoint's run was, if need be in another blend."""
        source, phases = self.run.datasets["train"], [Phase(*phase) for phase in state.phases]
        is_same = state.data in ("", source.fingerprint)
        if not is_same and not (phases and self.config.data.resume == "new_blend"):
            reason = f"the checkpoint of step {state.step} in {self.run.checkpoint_folder} was trained on other data"
            changed = "".join(f" (data.{key} was {value})" for key, value in self._changed_data(state))
            hint = 'restore it, set checkpoint.folder to a new one, or data.resume to "new_blend" to go on with this'
            if not phases:  # CHANGELOG.md says what makes tokens and order others
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
        job, then = self.config.job, state.config
        saves, saved = self.run.checkpoint_folder, folder_of_settings(then["job"], then.get("checkpoint", {}))
        if saves == saved:
            return True
        inside = os.path.relpath(str(saved), str(then["job"].get("dump_folder")))
        is_inside_too = os.path.relpath(str(saves), job.dump_folder) == inside
        return is_inside_too and state.run_id in map(run_of, Path(job.dump_folder).glob("metrics*.jsonl"))

    def _changed_data(self, state: RunState) -> list[tuple[str, str]]:
        """The settings of [data] that differ from those of a checkpoint's run, with their values in that run."""
        then, now = state.config["data"], self.config.data.model_dump(mode="json")
        return [(key, json.dumps(then[key])) for key, value in now.items() if key in then and then[key] != value]
