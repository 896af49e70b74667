"""Writers of step records: metrics.jsonl, TensorBoard, Weights & Biases. Only one process of a job writes."""

from __future__ import annotations

import json
import math
import netrc
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig, Metrics
from titan_like.data.unfinished import removed_unless_renamed
from titan_like.metrics.record import StepRecord


class Writer(Protocol):
    """Receives each step once, in order."""

    def write(self, record: StepRecord) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


def build_writers(config: JobConfig, start_step: int, run_id: str) -> list[Writer]:
    """The writers that [metrics] enables; they drop records after ``start_step`` from an earlier attempt of the run."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    writers: list[Writer] = [JsonLinesWriter(folder / "metrics.jsonl", start_step, run_id)]
    if config.metrics.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", start_step))
    if config.metrics.wandb:
        writers.append(WandbWriter(config, folder, run_id))
    return writers


def check_wandb(metrics: Metrics) -> None:
    """Refuse a run in which wandb would prompt for a key.

    Raises:
        ConfigError: wandb is set to online, but no key is configured.
    """
    if metrics.wandb and metrics.wandb_mode == "online" and not _wandb_key_configured():
        problem = 'no wandb key is configured; run "wandb login", set WANDB_API_KEY or use "offline"'
        raise ConfigError("metrics.wandb_mode", metrics.wandb_mode, problem)


class JsonLinesWriter:
    """Writes one JSON object per line; NaN and infinity, which JSON lacks, become null.

    The file of another run is renamed, the first one to metrics.1.jsonl. A run that resumes goes on with its own file
    and takes it back if another run had renamed it. No other job writes to the folder, because this job holds its lock.
    """

    def __init__(self, path: Path, start_step: int, run_id: str) -> None:
        _make_current(path, start_step, run_id)
        kept = "".join(_lines_up_to(path, start_step)).encode() if path.exists() else b""
        if path.exists() and kept != path.read_bytes():
            _replace(path, kept)
        self._path, self._file = path, open(path, "ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting = b""  # lines that could not be written yet

    def write(self, record: StepRecord) -> None:
        """Append the step. A line that cannot be written is kept and written with a later one."""
        line = json.dumps({key: _json_number(value) for key, value in record.as_dict().items()}) + "\n"
        was_waiting, self._waiting = bool(self._waiting), self._waiting + line.encode()
        try:
            if self._file.write(self._waiting) < len(self._waiting):
                raise OSError("the disk is full")
            self._size, self._waiting = self._size + len(self._waiting), b""
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)  # leave no partial line
            if not was_waiting:
                problem = error.strerror or error
                print(f"{self._path} cannot be written ({problem}); its lines wait until it can", flush=True)

    def close(self) -> None:
        """Write the waiting lines and close the file. A line on stderr says how many could not be written."""
        for line in self._waiting.splitlines(keepends=True):
            try:
                if self._file.write(line) < len(line):
                    raise OSError("the disk is full")
                self._size, self._waiting = self._size + len(line), self._waiting[len(line) :]
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(self._size)
                problem, missing = error.strerror or error, self._waiting.count(b"\n")
                lines = f"{missing:,} lines" if missing > 1 else "line"
                print(f"{self._path} lacks its last {lines} ({problem})", file=sys.stderr, flush=True)
                break
        self._file.close()


def _make_current(path: Path, start_step: int, run_id: str) -> None:
    """Let ``path`` be the run's own file, or none. ``metrics.runs.json`` says which run each file belongs to."""
    index = path.with_suffix(".runs.json")
    try:
        read = json.loads(index.read_bytes())
        owners = {str(name): str(owner) for name, owner in read.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        owners = {}
    # A file whose run is not known is taken for the run's own if the run resumes.
    is_own = start_step > 0 and owners.get(path.name, run_id) == run_id
    if not is_own and path.exists() and path.stat().st_size:
        aside = path.with_name(f"{path.stem}.{_runs_before(path) + 1}{path.suffix}")
        os.rename(path, aside)
        owners[aside.name] = owners.pop(path.name, "")
    earlier = [path.with_name(name) for name, owner in owners.items() if owner == run_id and name != path.name]
    if start_step > 0 and not is_own and earlier and earlier[-1].exists():
        os.rename(earlier[-1], path)
        del owners[earlier[-1].name]
    if owners.get(path.name) != run_id:
        owners[path.name] = run_id
        _replace(index, json.dumps(owners, indent=2).encode())


def _replace(path: Path, content: bytes) -> None:
    with removed_unless_renamed(path.with_suffix(".unfinished")) as unfinished:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)


def _runs_before(path: Path) -> int:
    """The highest number among the files of earlier runs next to ``path``; 0 if there are none."""
    numbers = [found.stem.removeprefix(f"{path.stem}.") for found in path.parent.glob(f"{path.stem}.*{path.suffix}")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The complete lines of steps up to ``step``; a line that a crash cut off is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    return kept


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardWriter:
    """Writes TensorBoard scalars under the same keys."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, record: StepRecord) -> None:
        """Record every number of the step."""
        for key, value in record.as_dict().items():
            if value is not None:
                self._writer.add_scalar(key, value, record.step)

    def close(self) -> None:
        """Flush to disk."""
        self._writer.close()


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

    def write(self, record: StepRecord) -> None:
        """Log the step."""
        self._run.log({key: value for key, value in record.as_dict().items() if value is not None}, step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb_key_configured() -> bool:
    """Whether wandb can go online without a prompt: a key is in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
