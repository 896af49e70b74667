"""Writers of step records: metrics.jsonl, TensorBoard, Weights & Biases, MLflow. Only one process of a job writes."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from titan_like.config.errors import ConfigError, first_line, printable, require, shortened
from titan_like.config.monitoring import Metrics
from titan_like.config.schema import JobConfig
from titan_like.metrics.flops import Throughput
from titan_like.metrics.run_facts import measured_facts, run_facts, run_name
from titan_like.metrics.run_files import METRICS_FILE, own_file, write_settings
from titan_like.models.config import TransformerConfig
from titan_like.parallel.layout import Layout


class RunEnd(NamedTuple):
    """The end of a run, as trackers show it."""

    exit_code: int = 0
    signal: int = 0  # the signal that stopped it before its last step, or 0
    reason: str = ""  # of a failure

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signal).name}" if self.signal else ""
        return "; ".join(filter(None, (stopped, self.reason))) or "finished"


FINISHED = RunEnd()


def build_writers(
    config: JobConfig, model: TransformerConfig, layout: Layout, start_step: int, run_id: str
) -> list[Writer]:
    """The writers that [metrics] enables, without an earlier attempt's records after ``start_step``; see `go_back`."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder, config, measured_facts(model, layout))
    goes_back = start_step == config.checkpoint.load_step
    writers: list[Writer] = [JsonLinesWriter(folder / METRICS_FILE, start_step, run_id, goes_back)]
    trackers = config.metrics.tensorboard or config.metrics.wandb or config.metrics.mlflow
    name, facts = run_name(config, layout), run_facts(config, model, layout) if trackers else {}
    if config.metrics.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", start_step, facts))
    if config.metrics.wandb:
        writers.append(WandbWriter(config, folder, run_id, name, facts))
    if config.metrics.mlflow:
        writers.append(MLflowWriter(config, run_id, name, facts))
    _name_append_only(writers, start_step)
    return writers


def go_back(writers: Sequence[Writer], step: int) -> None:
    """Drop the writers' records after ``step``, from which the run trains again. A line names append-only writers."""
    for writer in writers:
        writer.go_back(step)
    _name_append_only(writers, step)


def _name_append_only(writers: Sequence[Writer], step: int) -> None:
    names = [writer.name for writer in writers if writer.is_append_only]
    last = max((writer.last_step for writer in writers), default=step)
    if names and last > step:
        steps = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
        print(f" the earlier figures of {steps} stay in {' and '.join(names)}", flush=True)


def grouped(key: str) -> str:
    """The name of a figure in trackers, such as train/loss, validation/loss and throughput/mfu_model."""
    if key.startswith("validation_"):
        return key.replace("_", "/", 1)
    return key if "/" in key else f"{_groups().get(key, 'train')}/{key}"


@cache
def _groups() -> dict[str, str]:
    # These import torch, which is not needed to check settings.
    from titan_like.metrics.timeline_report import TimelineFigures
    from titan_like.parallel.expert_balance import FIGURES

    rates = "step_time_s", "data_time_s", "host_lead_s", *(field.name for field in fields(Throughput))
    timeline = [field.name for field in fields(TimelineFigures)]
    groups = {"throughput": rates, "timeline": timeline, "experts": FIGURES, "memory": ["peak_memory_bytes"]}
    return {key: group for group, keys in groups.items() for key in keys}


def check_trackers(metrics: Metrics) -> None:
    """Refuse a run in which wandb would prompt for a key, or MLflow cannot be used."""
    if metrics.mlflow:
        require(find_spec("mlflow"), "metrics.mlflow", True, "needs MLflow: pip install 'titan_like[mlflow]'")
        from mlflow.tracking import MlflowClient

        try:
            MlflowClient()
        except Exception as error:  # MLflow has many kinds
            hint = "set MLFLOW_TRACKING_URI to a server's address, or install the package mlflow for local files"
            raise ConfigError("metrics.mlflow", True, f"{first_line(error)[:100]}…; {hint}") from None
    needs_key = metrics.wandb and metrics.wandb_mode == "online"
    reason = 'no wandb key is configured; run "wandb login", set WANDB_API_KEY or use "offline"'
    require(not needs_key or _wandb_key_configured(), "metrics.wandb_mode", metrics.wandb_mode, reason)


class Writer:
    """Receives the steps in order; a validation adds values to the last. It prints its first error and raises none."""

    is_append_only = False  # whether records cannot be removed when their steps are trained again
    last_step = 0  # of an existing file
    errors: type[Exception] = Exception  # each tracker has its own types
    retries = False  # after an error
    consequence = "gets no more figures; metrics.jsonl has them"

    def __init__(self, name: str) -> None:
        self.name, self._has_failed = name, False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values of the step."""
        self._attempt(self._write, step, {grouped(key): x for key, x in values.items() if x is not None})

    def close(self, end: RunEnd = FINISHED) -> None:
        """Send pending records and the end of the run."""
        self._attempt(self._close, end)

    def go_back(self, step: int) -> None:
        """Drop the records after ``step``, unless the writer is append-only."""

    def _write(self, step: int, figures: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _close(self, end: RunEnd) -> None:
        raise NotImplementedError

    def _attempt(self, action: Callable[..., object], *arguments: Any) -> None:
        if self._has_failed and not self.retries:
            return
        try:
            action(*arguments)
        except self.errors as error:
            if not self._has_failed:
                reason = getattr(error, "strerror", None) or first_line(error)
                print(f"{self.name} cannot be written ({reason}) and {self.consequence}", flush=True)
            self._has_failed = True


class JsonLinesWriter(Writer):
    """Writes one JSON object per line; NaN and infinity, which JSON lacks, become null.

    `own_file` handles another run's file. Steps for which a full disk has no room are left out. No other job writes to
    the folder, because this job has locked it.
    """

    errors = OSError
    retries = True
    consequence = "lacks steps"

    def __init__(self, path: Path, start_step: int, run_id: str, goes_back: bool = False) -> None:
        super().__init__(str(path))
        self._path, self._run_id = path, run_id
        self._file: FileIO | None = None  # None as long as it cannot be opened
        self._begin(start_step, goes_back)

    def _begin(self, step: int, goes_back: bool = False) -> None:
        self._of_run = step, self._run_id, goes_back
        self._step: int | None = step  # the last line's
        self.last_step = step
        self._attempt(self._opened)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the step, or add to the last line if that is the step's."""
        self._attempt(self._write, step, values)

    def _write(self, step: int, figures: Mapping[str, Any]) -> None:
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in figures.items()}
        adds = step == self._step
        self._step = None  # in case the line cannot be written
        line = json.dumps(finite if adds else {"step": step} | finite | {"run_id": self._run_id})
        file = self._opened()
        size = file.seek(-2 if adds else 0, os.SEEK_END)  # a line ends with a brace and a newline
        data = f"{', ' + line[1:] if adds else line}\n".encode()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._step = step
        except OSError:
            file.truncate(size)
            file.seek(size)
            file.write(b"}\n" if adds else b"")
            raise

    def _close(self, end: RunEnd = FINISHED) -> None:
        if self._file is not None:
            self._file.close()

    def go_back(self, step: int) -> None:
        """Drop the lines after ``step``."""
        self._close()
        self._file = None
        self._begin(step)

    def _opened(self) -> FileIO:
        if self._file is None:
            self.last_step = own_file(self._path, *self._of_run)
            self._path.touch()
            self._file = open(self._path, "r+b", buffering=0)
        return self._file


class TensorBoardWriter(Writer):
    """Writes TensorBoard scalars, and the run's facts as text."""

    def __init__(self, folder: Path, start_step: int, facts: Mapping[str, Any]) -> None:
        super().__init__(str(folder))
        text = json.dumps(facts, indent=2, default=str)  # Markdown shows indented text as it is
        self._text = f"    {text}".replace("\n", "\n    ")
        self._attempt(self._begin, start_step)

    def _begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self.name, purge_step=step + 1)
        self._writer.add_text("configuration", self._text, step)

    def go_back(self, step: int) -> None:
        """Begin a file that makes TensorBoard drop the figures after ``step``."""
        self.close()
        self._attempt(self._begin, step)

    def _write(self, step: int, figures: Mapping[str, Any]) -> None:
        for key, value in figures.items():
            self._writer.add_scalar(key, value, step)

    def _close(self, end: RunEnd) -> None:
        self._writer.close()


class WandbWriter(Writer):
    """Logs to wandb under the run's own id, so that a resumed job continues the same run there.

    If the server refuses or does not answer, the run is logged offline.
    """

    is_append_only = True

    def __init__(self, config: JobConfig, folder: Path, run_id: str, name: str, facts: Mapping[str, Any]) -> None:
        super().__init__("wandb")
        self._step = 0  # the last one that was logged
        for wait in ("INIT", "FINISH"):  # both block the run
            os.environ.setdefault(f"WANDB_{wait}_TIMEOUT", "15")
        mode: Any = config.metrics.wandb_mode
        if mode == "auto":  # wandb reads the variable itself
            mode = None if "WANDB_MODE" in os.environ else "online" if _wandb_key_configured() else "offline"
        settings = {
            "project": config.metrics.wandb_project,
            "name": name,
            "notes": config.job.description or None,
            "id": run_id,
            "resume": "allow",
            "dir": str(folder),
            "config": dict(facts),
            "allow_val_change": True,  # a resumed run may have another layout
        }
        self._attempt(self._begin, mode, settings)

    def _begin(self, mode: Any, settings: dict[str, Any]) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(**settings, mode=mode)
        except Exception as error:
            wandb.teardown()  # its process still has the run open
            self._run = wandb.init(**settings, mode="offline")
            reason = shortened(printable(" ".join(str(error).split())))
            sync = f"upload them with: wandb sync {settings['dir']}/wandb/offline-run-*-{settings['id']}"
            print(f" wandb gets no figures ({reason}); they are kept offline, {sync}", flush=True)

    def _write(self, step: int, figures: Mapping[str, Any]) -> None:
        if step >= max(self._step, self._run.starting_step):  # wandb refuses steps before the last one
            self._run.log(figures, step=step)
            self._step = step

    def _close(self, end: RunEnd) -> None:
        """Finish the run: finished, failed, killed (255, as wandb itself does after Ctrl-C) or preempted."""
        self._run.summary["end"] = str(end)
        exit_code = 255 if end.signal else end.exit_code
        if end.signal in (signal.SIGTERM, signal.SIGUSR1):  # a cluster's
            self._run.mark_preempting()
            exit_code = 128 + end.signal
        self._run.finish(exit_code=exit_code)


class MLflowWriter(Writer):
    """Logs to MLflow. A resumed run continues the MLflow run with its id.

    Steps that are trained again appear twice, because MLflow's records cannot be removed.
    """

    is_append_only = True

    def __init__(self, config: JobConfig, run_id: str, name: str, facts: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        super().__init__("MLflow")
        for limit, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "10")):  # requests block a step
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{limit}", value)
        self._client, self._run = MlflowClient(), ""
        self._pending, self._sent = list[Any](), -math.inf  # metrics, and the time of the last request
        self._attempt(self._begin, config, run_id, name, facts)

    def _begin(self, config: JobConfig, run_id: str, name: str, facts: Mapping[str, Any]) -> None:
        """Create the run in MLflow, or continue it."""
        from mlflow.entities import Param

        client, title = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", "titan_like")
        existing = client.get_experiment_by_name(title)
        experiment = existing.experiment_id if existing else client.create_experiment(title)
        runs = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run_id}'")
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING", name=name)
            client.set_tag(self._run, "resumed_layout", str(facts["layout"]))  # parameters cannot change
            return
        tags = {_RUN_TAG: run_id, "mlflow.note.content": config.job.description}
        self._run = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        params = [Param(_INVALID.sub("_", key), str(value)) for key, value in _flat(facts)]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            client.log_batch(self._run, params=params[first : first + _MLFLOW_PARAMS])

    def _write(self, step: int, figures: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._pending += [Metric(_INVALID.sub("_", key), value, now, step) for key, value in figures.items()]
        if time.monotonic() - self._sent > _MLFLOW_SECONDS or len(self._pending) > _MLFLOW_METRICS:
            self._client.log_batch(self._run, metrics=self._pending)
            self._pending, self._sent = [], time.monotonic()

    def _close(self, end: RunEnd) -> None:
        """Send pending metrics, and end the run: finished, failed or killed."""
        from mlflow.entities import RunTag

        status = "KILLED" if end.signal else "FAILED" if end.exit_code else "FINISHED"
        tags = [RunTag("titan_like.exit_code", str(end.exit_code)), RunTag("titan_like.end", str(end))]
        self._client.log_batch(self._run, metrics=self._pending, tags=tags)
        self._client.set_terminated(self._run, status)


_RUN_TAG = "titan_like.run_id"
_MLFLOW_PARAMS, _MLFLOW_METRICS = 100, 500  # in one request, which may have twice as many metrics
_MLFLOW_SECONDS = 5.0  # between requests, which block the training loop
_INVALID = re.compile(r"[^\w\-. :/]")  # characters that MLflow refuses in names


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _wandb_key_configured() -> bool:
    """Whether wandb can go online without a prompt: a key is in the environment or in the netrc file."""
    from requests.utils import get_netrc_auth  # as wandb does

    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(url))
