"""The folder of a run's checkpoints: finding complete ones, and completing a checkpoint atomically.

``<folder>/step-<N>/`` has the sharded tensors that torch.distributed.checkpoint writes, and ``run.json``: the step,
the data cursor, the loss scaler, the configuration, and checksums of itself and of the tensors' metadata (each tensor
has its own, see `reader`). It is written as ``step-<N>.unfinished``, flushed to disk and renamed, so a crash at
any moment leaves earlier checkpoints intact.

On object storage, which has no rename, it is complete while it has ``run.json``, which is written last and removed
first. Hugging Face folders of a run are completed in the same way, with ``config.json``.
"""

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zlib import crc32

from pydantic import Field, TypeAdapter, ValidationError

from titan_like.checkpoint.best import VALIDATION_FILE, Validations, best_of, names_best, read_validations
from titan_like.config.errors import first_line
from titan_like.config.paths import check_folder, parse_json, unreadable_reason
from titan_like.config.schema import JobConfig, Training
from titan_like.config.urls import RemotePath, path_of
from titan_like.data.loading.batch_size import in_samples, total_steps
from titan_like.data.readers.unfinished import remove, removed_unless_renamed
from titan_like.optim.schedule import Schedule

RUN_FILE = "run.json"
_MARKERS = (RUN_FILE, "config.json")  # in a complete checkpoint, and in a complete Hugging Face folder
UNFINISHED = ".unfinished"
REPLACED = ".replaced"
_DESCRIPTION = ".metadata"  # torch's name for it

_STEP = r"step-(0|[1-9][0-9]*)"  # name of a complete checkpoint

_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class RunState:
    """Everything in a checkpoint except tensors: the content of `run.json`."""

    step: _Count
    consumed_samples: _Count  # the whole data cursor
    consumed_tokens: _Count
    skipped_steps: _Count  # steps whose update was skipped
    loss_scale: float
    loss_scale_good_steps: int
    model: dict[str, Any]  # the resolved shape
    config: dict[str, dict[str, Any]]  # the whole configuration
    recent_losses: list[float] = field(default_factory=list)  # the window that loss spikes are detected with
    consecutive_skips: _Count = 0
    data: str = ""  # fingerprint of the training tokens
    readers: dict[str, list[_Count]] = field(default_factory=dict)  # where a stream's readers continue
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries that wrote it
    run_id: str = ""  # the same in every checkpoint of a run, however often it was resumed
    schedule_batch_size: _Count = 0  # as the run began; older versions do not have it
    schedule: Schedule | None = None  # older versions do not have it
    epoch_samples: _Count = 0  # in the training data; older versions do not have it
    loss_levels: dict[str, float] = field(default_factory=dict)  # `titan_like.train.health.LossWatch.levels`
    phases: list[tuple[_Count, list[str], list[_Count]]] = field(default_factory=list)  # see `data.blend.Phase`
    base: dict[str, str] = field(default_factory=dict)  # "folder" and "fingerprint" under adapters; "adapters"
    validations: Validations | None = None  # up to this step, its own included if there was one; see `best`

    def progress(self, training: Training) -> tuple[int, int, int]:
        """The steps and samples so far, and the batch size in which a resumed run's schedule counts."""
        began, then = self.schedule_batch_size, self.config["training"].get("global_batch_size")
        batch_size = (began or then if self.consumed_samples else None) or training.global_batch_size
        return self.step, self.consumed_samples, batch_size


def checkpoint_folder(config: JobConfig) -> Path:
    """The folder of a run's checkpoints."""
    return folder_of_settings({"dump_folder": config.job.dump_folder}, {"folder": config.checkpoint.folder})


def folder_of_settings(job: dict[str, Any], checkpoint: dict[str, Any]) -> Path:
    """`checkpoint_folder` of a run that a `run.json` describes, by its sections [job] and [checkpoint]."""
    return path_of(str(checkpoint.get("folder") or Path(str(job.get("dump_folder"))) / "checkpoint"))


def hugging_face_folder(config: JobConfig) -> Path:
    """The folder that `checkpoint.hugging_face_interval` writes to."""
    return path_of(config.checkpoint.folder or config.job.dump_folder) / "hugging_face"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of one checkpoint."""
    return folder / f"step-{step}"


def unfinished_path(folder: Path, step: int) -> Path:
    """Folder that a checkpoint is written to before it is complete."""
    return folder / (f"step-{step}" if isinstance(folder, RemotePath) else f"step-{step}{UNFINISHED}")


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    paths = folder.iterdir() if isinstance(folder, RemotePath) or os.path.isdir(folder) else ()
    steps = {step_of(path): path for path in paths}
    return sorted(step for step, path in steps.items() if step is not None and is_complete(path))


def newest_in(path: Path) -> Path:
    """The newest checkpoint of a run's dump folder or folder of checkpoints; any other path itself.

    For either folder followed by /best, it is the one with the lowest validation loss, if there is one.
    """
    if names_best(path):
        for folder in (path.parent, path.parent / "checkpoint"):
            if best := best_of(checkpoint_path(folder, step) for step in complete_steps(folder)):
                return best
        return path
    is_run = all(unreadable_reason(path / marker) == "does not exist" for marker in _MARKERS)
    for folder in (path, path / "checkpoint") if is_run else ():
        if steps := complete_steps(folder):
            return checkpoint_path(folder, steps[-1])
    return path


def is_complete(path: Path) -> bool:
    """Whether a checkpoint's folder exists with all its files."""
    if isinstance(path, RemotePath):
        return any((path / marker).is_file() for marker in _MARKERS)
    return path.is_dir()


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for another name."""
    match = re.fullmatch(_STEP, path.name)
    return int(match[1]) if match else None


def read_run_state(path: Path) -> RunState:
    """Read `run.json`. Missing checksums, for example after an edit by hand, are not compared.

    Raises an `OSError` if a file is missing, and a `ValueError` if this file is not JSON, it or the tensors' metadata
    does not match its checksum, it does not describe a run or belongs to another step than the folder's, or the folder
    has a pipe or a device.
    """
    if not isinstance(path, RemotePath):
        check_folder("checkpoint", path.glob("*"))
    try:
        numbers = parse_json((path / RUN_FILE).read_bytes())
    except ValueError as error:
        raise ValueError(f"{RUN_FILE} is not JSON: {error}") from None
    if isinstance(numbers, dict):
        of_itself, of_description = numbers.pop("crc32", None), numbers.get("metadata_crc32")
        if of_itself is not None and of_itself != crc32(_as_json(numbers).encode()):
            raise ValueError(f'{RUN_FILE} does not match its checksum; if you edited it, delete its line "crc32"')
        if of_description is not None and of_description != crc32((path / _DESCRIPTION).read_bytes()):
            raise ValueError(f"{_DESCRIPTION} does not match its checksum")
    try:
        run = TypeAdapter(RunState).validate_python(numbers)
    except ValidationError as error:
        raise ValueError(f"{RUN_FILE} is not a run's: {first_line(error)}") from None
    for section in ("job", "model", "data", "training", "optimizer", "parallelism", "checkpoint"):
        if section not in run.config or (section == "model" and "family" not in run.config["model"]):
            raise ValueError(f"{RUN_FILE} is not a run's: its config lacks what [{section}] was")
    if step_of(path) not in (None, run.step):
        raise ValueError(f"{RUN_FILE} is of step {run.step}, and its folder is {path.name}")
    return replace(run, validations=read_validations(path) or run.validations)


def write_run_state(path: Path, run: RunState) -> None:
    """Write `run.json` of a checkpoint whose tensors are on disk."""
    numbers = asdict(run) | {"metadata_crc32": crc32((path / _DESCRIPTION).read_bytes())}
    write_durably(path / RUN_FILE, _as_json(numbers | {"crc32": crc32(_as_json(numbers).encode())}))


def write_validations(path: Path, validations: Validations) -> None:
    """Add the validation of its step to a complete checkpoint; a crash leaves either nothing of it or all."""
    text = json.dumps(asdict(validations))
    if isinstance(path, RemotePath):
        (path / VALIDATION_FILE).write_bytes(text.encode())
        return
    with removed_unless_renamed(path / f"{VALIDATION_FILE}{UNFINISHED}") as unfinished:
        write_durably(unfinished, text)
        os.rename(unfinished, path / VALIDATION_FILE)
    flush(path)


def _as_json(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers, indent=2, default=Schedule.model_dump)


def begin_checkpoint(folder: Path, step: int) -> None:
    """Create the folder of an unfinished checkpoint. One process calls this while no other writes to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = unfinished_path(folder, step)
    if isinstance(path, RemotePath) and is_complete(path):  # the run went back and repeats this step
        _withdraw(path)
    sweep(folder)
    path.mkdir(exist_ok=True)


def complete_checkpoint(folder: Path, run: RunState, keep_latest: int, files: dict[str, bytes]) -> None:
    """Give a checkpoint whose tensors are on disk its final name, as `complete` does, after adding ``files``."""
    unfinished = unfinished_path(folder, run.step)
    if run.validations is not None and run.validations.step == run.step:
        files = files | {VALIDATION_FILE: json.dumps(asdict(run.validations)).encode()}
    for name, content in files.items():
        (unfinished / name).parent.mkdir(exist_ok=True)
        (unfinished / name).write_bytes(content)
        flush(unfinished / name)
        flush((unfinished / name).parent)
    write_run_state(unfinished, run)
    complete(folder, run.step, keep_latest, keep_best=run.config.get("checkpoint", {}).get("keep_best", False))


def complete(folder: Path, step: int, keep_latest: int, keep_best: bool = False) -> None:
    """Give a folder whose files are on disk its final name. One process calls this.

    If ``keep_latest`` is above 0, keep only the newest folders up to this one, that many in total, and with
    ``keep_best`` also the one with the lowest validation loss.
    """
    final, unfinished = checkpoint_path(folder, step), unfinished_path(folder, step)
    flush(unfinished)
    if not isinstance(folder, RemotePath):
        if final.exists():  # the run went back and repeats this step
            os.rename(final, final.with_name(final.name + REPLACED))
        os.rename(unfinished, final)
        flush(folder)
    prune(folder, step, keep_latest, keep_best)


def prune(folder: Path, step: int, keep_latest: int, keep_best: bool) -> None:
    """Remove what `complete` does not keep, and leftovers. One process calls this while no other writes there."""
    steps = complete_steps(folder)
    earlier = [older for older in steps if older <= step]  # the run may have gone back
    kept = {checkpoint_path(folder, newest) for newest in earlier[-keep_latest:]}
    if keep_latest and keep_best:
        kept.add(best_of(checkpoint_path(folder, older) for older in earlier) or checkpoint_path(folder, step))
    for old in sorted(steps) if keep_latest else []:
        if checkpoint_path(folder, old) not in kept:
            _withdraw(checkpoint_path(folder, old))
    sweep(folder)


def _withdraw(path: Path) -> None:
    """Turn a complete checkpoint into an unfinished one, which `sweep` removes."""
    if isinstance(path, RemotePath):
        for marker in _MARKERS:
            (path / marker).unlink(missing_ok=True)
    else:
        os.rename(path, path.with_name(path.name + UNFINISHED))


def sweep(folder: Path) -> list[str]:
    """Remove leftovers of interrupted saves. A checkpoint whose replacement was never completed gets its name back.

    Returns the names of removed incomplete checkpoints. One process calls this while no other writes to the folder.
    """
    removed = []
    for path in _leftovers(folder, REPLACED):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if original.exists():
            remove(path)
        else:
            os.rename(path, original)
    for path in _leftovers(folder, UNFINISHED):
        remove(path)
        removed.append(path.name)
    return removed


def _leftovers(folder: Path, ending: str) -> list[Path]:
    """Folders of interrupted saves, whose names have this ending; on object storage, no ending."""
    if not isinstance(folder, RemotePath):
        return list(folder.glob(f"step-*{ending}"))
    paths = folder.iterdir() if ending == UNFINISHED else ()
    return [path for path in paths if step_of(path) is not None and not is_complete(path)]


def leftover_bytes(folder: Path) -> int:
    """Total size in bytes of the files that `sweep` would remove."""
    leftovers = [*folder.glob(f"step-*{UNFINISHED}"), *folder.glob(f"step-*{REPLACED}")]
    return sum(file.stat().st_size for path in leftovers for file in path.rglob("*") if file.is_file())


@contextmanager
def written_aside(final: Path) -> Iterator[Path]:
    """A folder to write to, renamed to ``final`` when everything in it is on disk, or removed after an exception.

    One process writes it. ``final`` must not exist or must be an empty folder. Files are copied to object storage, the
    one that makes the folder complete last.
    """
    if isinstance(final, RemotePath):
        with TemporaryDirectory() as name:
            yield Path(name)
            upload(Path(name), final)
        return
    final = Path(os.path.abspath(final))  # "." has no name
    aside = final.with_name(f".{final.name}{UNFINISHED}")
    with removed_unless_renamed(aside):
        aside.mkdir(parents=True)
        yield aside
        flush(aside)
        os.rename(aside, final)
    flush(final.parent)


def upload(folder: Path, final: RemotePath) -> None:
    """Copy a folder to object storage, the file that makes it complete there last."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: str(file) in _MARKERS):
        with (final / file).storage() as (system, path):
            system.put_file(str(folder / file), path)


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on disk."""
    path.write_bytes(text.encode("utf-8"))
    flush(path)


def flush(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk. Does nothing on object storage."""
    if isinstance(path, RemotePath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_resumable(config: JobConfig) -> tuple[bool, str]:
    """Whether an ended run has steps left and a checkpoint to resume from, and a sentence for the user."""
    if not config.checkpoint.enable:
        return False, "not resumable: checkpoint.enable is false"
    if config.checkpoint.load_step is not None:
        return False, f"not resumable: every start goes back to checkpoint.load_step = {config.checkpoint.load_step}"
    folder, training = checkpoint_folder(config), config.training
    so_far = (0, 0)  # steps and samples
    newest = max(complete_steps(folder), default=0)
    with suppress(OSError, ValueError):
        state = read_run_state(checkpoint_path(folder, newest))
        if state.validations and state.validations.used_up(config.evaluation.patience):
            return False, f"finished: stopped early at step {newest}, which is in {folder}"
        so_far = state.progress(training)[:2]
        training = in_samples(training, state.epoch_samples)
    total = total_steps(training, *so_far)
    # Looked up by name, because the listing of a network file system may lag behind.
    newest = total if is_complete(checkpoint_path(folder, total)) else newest
    if newest >= total:
        return False, f"finished: a checkpoint of step {newest} of {total} is in {folder}"
    if newest == 0:
        return False, f"not resumable: no checkpoint in {folder}"
    return True, f"resumable: step {newest} of {total} is in {folder}"


_locks: list[int] = []  # descriptors; the system releases the locks when the process ends, for whatever reason


def hold(folder: Path, taken: str, patience: float) -> str | None:
    """Lock the folder until `release` or the end of this process, waiting at most ``patience`` seconds. The lock file
    is next to the folder.

    Returns None if this process has the lock; ``taken`` if another one has it; or a sentence about a lock file that
    cannot be used. On a file system without locks and on object storage it returns None without locking.
    """
    if isinstance(folder, RemotePath):
        return None
    path = folder.with_name(folder.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}), and runs lock it; name another folder"
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                if time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                os.close(descriptor)
                return taken
        _locks.append(descriptor)
        return None


def release() -> None:
    """Unlock every folder that this process has locked."""
    while _locks:
        os.close(_locks.pop())
