"""Which run each file of metrics in a folder belongs to.

``metrics.jsonl`` is the current run's. Those of earlier runs are ``metrics.1.jsonl``, ``metrics.2.jsonl`` and so on.
``metrics.runs.json`` has the id of each file's run.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from titan_like.data.unfinished import removed_unless_renamed

METRICS_FILE, RUNS_FILE = "metrics.jsonl", "metrics.runs.json"


def run_ids(folder: Path) -> dict[str, str]:
    """The id of each file's run, by the file's name; of a damaged or missing ``metrics.runs.json``, none."""
    try:
        return {str(name): str(run_id) for name, run_id in json.loads((folder / RUNS_FILE).read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def lacks_validation(path: Path, run_id: str, step: int) -> bool:
    """Whether ``path`` is the run's file and has a line of ``step`` without a validation's figures."""
    is_own = run_ids(path.parent).get(path.name) == run_id and path.exists()
    return is_own and any(
        number == step and "validation_loss" not in json.loads(line) for number, line in complete_lines(path)
    )


def own_file(path: Path, start_step: int, run_id: str, goes_back: bool = False) -> None:
    """Let ``path`` be the file of a run that begins after ``start_step``, with its lines up to there, or no file.

    The file of another run is renamed, the first one to metrics.1.jsonl. A run that resumes takes its own file back if
    another run had renamed it. If the run ``goes_back`` at its user's wish, the file with later lines is kept too.

    Raises:
        OSError: files cannot be written or renamed. On a full disk each run still has its file.
    """
    ids = run_ids(path.parent)
    # A file whose run is not known is taken for the run's own if the run resumes.
    is_own = start_step > 0 and ids.get(path.name, run_id) == run_id
    moves: list[tuple[Path, Path]] = []
    if not is_own and path.exists() and path.stat().st_size:
        aside = _next_aside(path)
        moves.append((path, aside))
        ids[aside.name] = ids.pop(path.name, "")
    earlier = [path.with_name(name) for name, owner in ids.items() if owner == run_id and name != path.name]
    if start_step > 0 and not is_own and earlier and earlier[-1].exists():
        moves.append((earlier[-1], path))
        del ids[earlier[-1].name]
    if ids.get(path.name) != run_id:
        index = path.with_name(RUNS_FILE)
        with removed_unless_renamed(index.with_suffix(".unfinished")) as unfinished:
            unfinished.write_bytes(json.dumps(ids | {path.name: run_id}, indent=2).encode())  # fails on a full disk
            for source, target in moves:
                os.rename(source, target)
            os.replace(unfinished, index)
    if path.exists():
        _drop_lines_after(start_step, path, goes_back)


def _drop_lines_after(step: int, path: Path, keeps_copy: bool) -> None:
    """Drop all but the complete lines of steps up to ``step``. A line that a crash cut off is dropped, too."""
    content, lines = path.read_bytes(), complete_lines(path)
    kept = "".join(line for number, line in lines if number <= step).encode()
    if keeps_copy and any(number > step for number, _ in lines):
        _replace(_next_aside(path), content)
    if not content.startswith(kept):
        _replace(path, kept)
    elif kept != content:
        os.truncate(path, len(kept))  # which needs no room on the disk


def complete_lines(path: Path) -> list[tuple[int, str]]:
    """Each complete line of a metrics.jsonl, with its step."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            found.append((int(json.loads(line)["step"]), f"{line}\n"))
    return found


def _replace(path: Path, content: bytes) -> None:
    with removed_unless_renamed(path.with_suffix(".unfinished")) as unfinished:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)


def _next_aside(path: Path) -> Path:
    """The name that the next file to be put aside gets."""
    numbers = [found.stem.removeprefix(f"{path.stem}.") for found in path.parent.glob(f"{path.stem}.*{path.suffix}")]
    number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
