"""Writers of step records: metrics.jsonl, TensorBoard, Weights & Biases. Only one process of a job writes."""

from __future__ import annotations

import errno
import json
import math
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from titan_like.config.errors import ConfigError
from titan_like.config.monitoring import Metrics
from titan_like.config.schema import JobConfig
from titan_like.metrics.run_files import METRICS_FILE, own_file


def build_writers(config: JobConfig, start_step: int, run_id: str) -> list[Writer]:
    """The writers that [metrics] enables; they drop records after ``start_step`` from an earlier attempt of the run."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    goes_back = start_step == config.checkpoint.load_step
    writers: list[Writer] = [JsonLinesWriter(folder / METRICS_FILE, start_step, run_id, goes_back)]
    if config.metrics.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", start_step))
    if config.metrics.wandb:
        writers.append(WandbWriter(config, folder, run_id))
    return writers


def check_wandb(metrics: Metrics) -> None:
    """Refuse a run in which wandb would prompt for a key."""
    if metrics.wandb and metrics.wandb_mode == "online" and not _wandb_key_configured():
        problem = 'no wandb key is configured; run "wandb login", set WANDB_API_KEY or use "offline"'
        raise ConfigError("metrics.wandb_mode", metrics.wandb_mode, problem)


@contextmanager
def _reported_once(problems: list[str], what: Path, consequence: str) -> Iterator[None]:
    """Suppress errors of the file system, and print a line about the first. Their reasons are added to ``problems``."""
    try:
        yield
    except OSError as error:
        problems.append(error.strerror or str(error))
        if len(problems) == 1:
            print(f"{what} cannot be written ({problems[0]}) and {consequence}", flush=True)


class JsonLinesWriter:
    """Writes one JSON object per line; NaN and infinity, which JSON lacks, become null.

    `own_file` says what becomes of the file of another run. Steps for which a full disk has no room are left out. No
    other job writes to the folder, because this job holds its lock.
    """

    def __init__(self, path: Path, start_step: int, run_id: str, goes_back: bool = False) -> None:
        self._path, self._run_id, self._of_run = path, run_id, (start_step, run_id, goes_back)
        self._file: FileIO | None = None  # None as long as it cannot be opened
        self._step: int | None = start_step  # of the last line
        self._problems: list[str] = []
        with self._reported():
            self._opened()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the step, or add to the last line if that is the step's."""
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
        adds, self._step = step == self._step, None
        line = json.dumps(finite if adds else {"step": step} | finite | {"run_id": self._run_id})
        with self._reported():
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

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _opened(self) -> FileIO:
        if self._file is None:
            own_file(self._path, *self._of_run)
            self._path.touch()
            self._file = open(self._path, "r+b", buffering=0)
        return self._file

    def _reported(self) -> AbstractContextManager[None]:
        return _reported_once(self._problems, self._path, "lacks steps")


class TensorBoardWriter:
    """Writes TensorBoard scalars under the same keys, as long as its files can be written."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._problems = folder, list[str]()
        self._writer: Any = None
        with self._reported():
            self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of the step."""
        with self._reported():
            for key, value in values.items() if self._writer is not None and not self._problems else ():
                if value is not None:
                    self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush to disk."""
        with self._reported():
            if self._writer is not None and not self._problems:
                self._writer.close()

    def _reported(self) -> AbstractContextManager[None]:
        return _reported_once(self._problems, self._folder, "gets no more figures; metrics.jsonl has them")


class WandbWriter:
    """Logs to wandb under the run's own id, so that a resumed job continues the same run there."""

    def __init__(self, config: JobConfig, folder: Path, run_id: str) -> None:
        import wandb

        mode: Literal["online", "offline"] | None
        if config.metrics.wandb_mode != "auto":
            mode = config.metrics.wandb_mode
        elif "WANDB_MODE" in os.environ:
            mode = None  # wandb reads the variable itself
        else:
            mode = "online" if _wandb_key_configured() else "offline"
        self._run = wandb.init(
            project=config.metrics.wandb_project,
            name=config.job.description or None,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log values of the step."""
        self._run.log({key: value for key, value in values.items() if value is not None}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


Writer = (
    JsonLinesWriter | TensorBoardWriter | WandbWriter
)  # each receives the steps in order; a validation adds values to the last


def _wandb_key_configured() -> bool:
    """Whether wandb can go online without a prompt: a key is in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
