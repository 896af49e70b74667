"""Writers of step records: metrics.jsonl, TensorBoard, Weights & Biases. Only one process of a job writes."""

from __future__ import annotations

import json
import math
import netrc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig, Metrics
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


class JsonLinesWriter:
    """Writes one JSON object per line; NaN and infinity, which JSON lacks, become null.

    `own_file` says what becomes of the file of another run. Where the disk is full, lines wait in memory. No other job
    writes to the folder, because this job holds its lock.
    """

    def __init__(self, path: Path, start_step: int, run_id: str, goes_back: bool = False) -> None:
        self._path, self._of_run = path, (start_step, run_id, goes_back)
        self._file: FileIO | None = None  # None as long as it cannot be opened
        self._size, self._step = 0, start_step  # of the last line
        self._waiting = b""  # lines that could not be written yet
        self._is_waiting = False
        self._append(b"")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the step, or add to the last line if that is the step's.

        A line that cannot be written is kept and written with a later one.
        """
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
        line = f"{json.dumps(finite)}\n".encode()
        if step == self._step:
            line = b", " + line[1:]
            self._reopen_last_line()
        self._step = step
        self._append(line)

    def _reopen_last_line(self) -> None:
        """Take away the end of the last line, a brace and a newline."""
        if self._file is not None and not self._waiting:
            with suppress(OSError):
                self._file.truncate(self._size - 2)
                self._size -= 2
        self._waiting = self._waiting[:-2]

    def close(self) -> None:
        """Write the waiting lines and close the file. A line on stderr says if they could not be written."""
        problem = self._written(self._waiting)
        if problem is not None and self._waiting:
            print(f"{self._path} lacks its last lines ({problem})", file=sys.stderr, flush=True)
        if self._file is not None:
            self._file.close()

    def _append(self, line: bytes) -> None:
        was_waiting, self._waiting = self._is_waiting, self._waiting + line
        problem = self._written(self._waiting)
        self._is_waiting = problem is not None
        if problem is None:
            self._waiting = b""
        elif not was_waiting:
            print(f"{self._path} cannot be written ({problem}); its lines wait until it can", flush=True)

    def _written(self, lines: bytes) -> str | None:
        """Append lines. Returns the reason if that fails, and then leaves no part of them."""
        try:
            if self._file is None:
                own_file(self._path, *self._of_run)
                self._file = open(self._path, "ab", buffering=0)
                self._size = self._path.stat().st_size
            done = 0
            while done < len(lines):  # where not all fits, the next call says why
                done += self._file.write(lines[done:])
        except OSError as error:
            with suppress(OSError):
                if self._file is not None:
                    self._file.truncate(self._size)
            return error.strerror or str(error)
        self._size += len(lines)
        return None


class TensorBoardWriter:
    """Writes TensorBoard scalars under the same keys, as long as its files can be written."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer: Any = None
        with self._until_it_fails():
            self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of the step."""
        if self._writer is not None:
            with self._until_it_fails():
                for key, value in values.items():
                    if value is not None:
                        self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush to disk."""
        if self._writer is not None:
            with self._until_it_fails():
                self._writer.close()

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """Writes nothing more after an error of the file system, of which one line tells."""
        try:
            yield
        except OSError as error:
            told = f"{self._folder} cannot be written ({error.strerror or error}) and gets no more figures"
            print(f"{told}; metrics.jsonl has them", flush=True)
            self._writer = None


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
