"""Metrics files of the runs in a folder: metrics.jsonl of the current run, metrics.1.jsonl, … of earlier ones."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_like.config.paths import blaming, parse_json, user_file
from titan_like.config.schema import JobConfig
from titan_like.data.readers.unfinished import removed_unless_renamed

METRICS_FILE, SETTINGS_FILE, FORECAST_FILE = "metrics.jsonl", "settings.json", "forecast.json"


def run_of(path: Path) -> str | None:
    """The id of the run that wrote the last complete line of a file; None without such a line or id."""
    lines = complete_lines(path) if path.exists() else []
    return json.loads(lines[-1][1]).get("run_id") if lines else None


def lacks_validation(path: Path, run_id: str, step: int) -> bool:
    """Whether ``path`` is the run's file and has a line of ``step`` without a validation's figures."""
    return run_of(path) == run_id and any(
        number == step and not any(key.startswith("validation_loss") for key in json.loads(line))
        for number, line in complete_lines(path)
    )


def own_file(path: Path, start_step: int, run_id: str, goes_back: bool = False) -> int:
    """Prepare ``path`` for a run that begins after ``start_step``: its own lines up to there, or no file.

    Another run's file is renamed to metrics.1.jsonl or the next number. A resumed run gets back its own file if another
    run renamed it. If the run ``goes_back`` because of `checkpoint.load_step`, the file with later lines is kept too.
    Returns the last step in the run's own lines.
    """
    resumes = start_step > 0
    # A resumed run keeps a file without an id.
    is_own = resumes and run_of(path) in (run_id, None)
    if not is_own and path.exists() and path.stat().st_size:
        os.rename(path, _next_aside(path))
    earlier = [other for _, other in sorted(_aside(path).items()) if resumes and run_of(other) == run_id]
    if earlier and not (path.exists() and complete_lines(path)):  # another run may have died before its first line
        os.replace(earlier[-1], path)
    return _drop_lines_after(start_step, path, goes_back) if path.exists() else start_step


def _drop_lines_after(step: int, path: Path, keeps_copy: bool) -> int:
    """Keep only complete lines of steps up to ``step``. Returns the last step of the file before."""
    content, lines = path.read_bytes(), complete_lines(path)
    kept = "".join(line for number, line in lines if number <= step).encode()
    if keeps_copy and any(number > step for number, _ in lines):
        _replace(_next_aside(path), content)
    if not content.startswith(kept):
        _replace(path, kept)
    elif kept != content:
        os.truncate(path, len(kept))  # this needs no room on the disk
    return max((number for number, _ in lines), default=step)


def complete_lines(path: Path) -> list[tuple[int, str]]:
    """Each complete line of a metrics.jsonl, with its step. Raises a `ConfigError` if the file cannot be read."""
    lines = []
    with user_file(path, blaming("job.dump_folder", str(path), "move it away")):
        content = path.read_text(encoding="utf-8", errors="replace")
    for line in content.splitlines():
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            step = int(parse_json(line)["step"])
            lines += [(step, f"{line}\n")] if 0 <= step < 2**63 else []
    return lines


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl as dictionaries; a value that is not a number of float64's range is None."""
    records = []
    for step, line in complete_lines(path):
        values = json.loads(line).items()
        numbers = {key: x if isinstance(x, int | float) and abs(x) < 1e300 else None for key, x in values}
        records.append(numbers | {"step": step})
    return records


def write_settings(folder: Path, config: JobConfig, facts: Mapping[str, Any]) -> None:
    """Write the settings of the latest run to its folder, with ``facts`` about it as a section [run].

    A full disk does not end the run.
    """
    with suppress(OSError):
        _replace(folder / SETTINGS_FILE, json.dumps(config.model_dump(mode="json") | {"run": facts}, indent=2).encode())


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the latest run in a folder by ``section.key``; empty if there is no settings.json."""
    path = folder / SETTINGS_FILE
    if not path.exists():
        return {}
    with user_file(path, blaming("run", str(path), "move it away"), "is damaged"):
        sections = parse_json(path.read_text(encoding="utf-8")).items()
        return {f"{section}.{key}": value for section, table in sections for key, value in table.items()}


def write_forecast(folder: Path, comparison: Mapping[str, Any]) -> None:
    """Write the planner's prediction of a run next to what was measured. A full disk does not end the run."""
    with suppress(OSError):
        _replace(folder / FORECAST_FILE, json.dumps(comparison, indent=2).encode())


def read_forecast(folder: Path) -> dict[str, Any] | None:
    """What `write_forecast` has written; None without it."""
    path = folder / FORECAST_FILE
    if not path.exists():
        return None
    with user_file(path, blaming("run", str(path), "move it away"), "is damaged"):
        content: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        return content


def _replace(path: Path, content: bytes) -> None:
    with removed_unless_renamed(path.with_suffix(".unfinished")) as unfinished:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)


def _next_aside(path: Path) -> Path:
    """The new name of the next file to rename."""
    return path.with_name(f"{path.stem}.{1 + max(_aside(path), default=0)}{path.suffix}")


def _aside(path: Path) -> dict[int, Path]:
    """The renamed files of earlier runs, by number."""
    by_number = {path.stem.removeprefix("metrics."): path for path in path.parent.glob(f"{path.stem}.*{path.suffix}")}
    return {int(number): path for number, path in by_number.items() if number.isdecimal()}
