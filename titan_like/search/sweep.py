"""Whole runs with every combination of some settings, ranked by validation loss."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from titan_like.config.errors import require
from titan_like.config.load import edit, load_config
from titan_like.config.options import json_text, write_output_file
from titan_like.config.paths import parse_json, read_toml
from titan_like.config.schema import JobConfig
from titan_like.metrics.loss_curve import compare_runs
from titan_like.metrics.run_files import METRICS_FILE
from titan_like.search.trial import OK, arguments, failure
from titan_like.train.rules import resolve_settings

_DONE, _SETTINGS = "outcome.json", "sweep.json"
_STOPPED = re.compile(r"^ stopped by SIG|^ended by SIG|SignalException", re.MULTILINE)  # the last are torchrun's words


@dataclass
class Member:
    """A run of a sweep."""

    name: str
    settings: list[str]  # arguments of train.py
    config: JobConfig
    folder: Path


def members(path: str, given: list[str], out: Path, processes: int) -> list[Member]:
    """The runs of a grid, a TOML that lists values of any keys. ``given`` are the settings of all of them.

    Raises a `ConfigError` if a key is unknown, or the settings of a run contradict each other.
    """
    values = dict(_flat(read_toml(path, "--grid")))
    require(all(values.values()), "--grid", path, "lists no value for a key; give at least one, or leave it out")
    result = []
    for chosen in itertools.product(*values.values()):
        pairs = dict(zip(values, chosen, strict=True))
        parts = (f"{key.rpartition('.')[2]}={value}" for key, value in pairs.items() if len(values[key]) > 1)
        name = re.sub(r"[^\w.=+-]+", "_", "_".join(parts))[:150] or "run"
        settings = [*given, *(word for key, value in pairs.items() for word in arguments(key, value))]
        config = load_config(settings)
        require(config.checkpoint.folder is None, "checkpoint.folder", config.checkpoint.folder, "each run has its own")
        resolve_settings(config, processes)
        result.append(Member(name, [*settings, f"--job.dump_folder={out / name}"], config, out / name))
    names = [member.name for member in result]
    require(len({*names}) == len(names), "--grid", path, "lists a value twice; leave one out")
    return result


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, list) else [value]


@dataclass
class Sweep:
    """Trains the members that are not done yet; those that were interrupted resume from their checkpoints."""

    command: Sequence[str]  # to which a member's settings are added
    gpus: Sequence[str] = ()  # CUDA_VISIBLE_DEVICES of runs side by side; one run at a time without
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, runs: Sequence[Member]) -> None:
        """Train. Ctrl-C ends the runs, which save first.

        Raises a `ConfigError` before, if a folder has a run with other settings.
        """
        for member in runs:
            _note_settings(member)
        places = SimpleQueue[str]()
        for gpu in self.gpus or [""]:
            places.put(gpu)
        with ThreadPoolExecutor(max(1, len(self.gpus))) as pool:
            try:
                for _ in pool.map(lambda member: self._train(member, places), runs):
                    pass
            finally:
                self._is_over.set()
                for process in list(self._running):
                    process.terminate()

    def _train(self, member: Member, places: SimpleQueue[str]) -> None:
        if (member.folder / _DONE).exists() or self._is_over.is_set():
            return
        if not self.gpus:  # else two runs would tokenize the same at the same time
            cache = member.folder.parent.resolve() / "data_cache"
            cache.mkdir(exist_ok=True)
            if not (member.folder / "data_cache").exists():
                (member.folder / "data_cache").symlink_to(cache)
        gpu, log = places.get(), member.folder / "log.txt"
        size = log.stat().st_size if log.exists() else 0
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        try:
            with open(log, "ab") as output:
                command = [*self.command, *member.settings]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
                self._running.add(process)
                code = process.wait()
                self._running.discard(process)
        finally:
            places.put(gpu)
        if self._is_over.is_set():
            return
        text = log.read_bytes()[size:].decode(errors="replace")
        outcome = {"outcome": OK} if code == 0 else failure(text, code)
        if code == -signal.SIGTERM or _STOPPED.search(text):  # from outside, as at the end of a Slurm job
            outcome = {"outcome": "stopped by a signal; the same command continues it"}
        else:
            write_output_file(member.folder / _DONE, json_text(outcome))
        print(f"{member.name}: {outcome.get('reason') or outcome['outcome']}", flush=True)


def ranking(runs: Sequence[Member]) -> tuple[list[Member], dict[str, dict[str, Any]]]:
    """The runs with a loss, the best first and those that are not done last, and the table of `compare_runs`.

    The best has the lowest validation loss (of the first set without a validation split) or, without any, final loss.
    """
    folders = {run.name: run.folder for run in runs if (run.folder / METRICS_FILE).is_file()}
    table = compare_runs(folders)
    keys = [row for row in table if row.startswith("best validation_loss")] or ["final loss"]
    known = {name: loss for name, loss in table.get(keys[0], {}).items() if loss is not None and loss == loss}
    ranked = sorted((run for run in runs if run.name in known), key=lambda run: (not is_done(run), known[run.name]))
    return ranked, table


def is_done(run: Member) -> bool:
    """Whether a run has trained to its end."""
    path = run.folder / _DONE
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["outcome"] == OK


def _note_settings(member: Member) -> None:
    """Write a new run's settings to its folder. Raises a `ConfigError` if it has a run with others."""
    path, settings = member.folder / _SETTINGS, edit(member.config, {"job.config_file": None}).model_dump(mode="json")
    known = parse_json(path.read_text(encoding="utf-8")) if path.exists() else settings
    changed = [f"{s}.{key}" for s in settings for key in settings[s] if known.get(s, {}).get(key) != settings[s][key]]
    reason = f"has a run {member.name} with another {', '.join(changed)}; name another folder, or remove that run's"
    require(not changed, "--dump_folder", str(member.folder.parent), reason)
    member.folder.mkdir(parents=True, exist_ok=True)
    write_output_file(path, json_text(settings))
