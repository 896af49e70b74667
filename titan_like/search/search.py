"""Measures one layout after the other, keeps each result, and goes on where a search that was ended left off."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError, shortened
from titan_like.config.options import json_text, write_output_file
from titan_like.config.schema import JobConfig
from titan_like.metrics.console import format_duration
from titan_like.metrics.devices import Device
from titan_like.planner.predict import predict_layout
from titan_like.planner.profile import Profile
from titan_like.search import results
from titan_like.search.cases import Case, Refused, layout_name, next_size
from titan_like.search.results import Row
from titan_like.search.settings import arguments
from titan_like.search.trial import OK, TOO_LARGE, Place, Plan, run_trial
from titan_like.train.rules import Settings

_STATE = "search.json"


class Search:
    """The state of a search: the cases, and what is known of each layout by its name."""

    def __init__(
        self,
        config: JobConfig,
        cases: Sequence[Case | Refused],
        place: Place,
        plan: Plan,
        gpu: str = "CPU",
        stack: tuple[Profile, Device] | None = None,
    ) -> None:
        """Prepare a search, or read what one has found.

        Args:
            config: the run, before its layout is changed.
            cases: the layouts.
            place: where they run.
            plan: how they are measured.
            gpu: the name of the device that they are measured on.
            stack: what they are predicted with; None for no predictions.

        Raises:
            ConfigError: the folder holds another search, or the stack cannot predict a layout.
        """
        self.cases, self.place, self.plan, self.gpu, self.stack = cases, place, plan, gpu, stack
        self.found: dict[str, dict[str, Any]] = {}
        self._configs: dict[str, JobConfig] = {}
        self._rows: dict[str, Row] = {}
        for case in cases:
            if isinstance(case, Case):
                self._predicted(case.settings)
        self._resume(config)

    def _resume(self, config: JobConfig) -> None:
        """Read the results of the search that the folder holds, which must be this one.

        Raises:
            ConfigError: it holds another one, or a file of it cannot be read.
        """
        plan, file = asdict(self.plan), self.plan.out / _STATE
        here = {
            "settings": arguments(config),
            "layouts": [f"{layout_name(case.settings)} {case.sizes}" for case in self.cases if isinstance(case, Case)],
        } | {name: plan[name] for name in ("warmup", "steps", "timeout", "memory_bytes")}
        here = json.loads(json_text(here))
        there = _read(file)
        for name, value in here.items() if there is not None else ():
            before = there.get(name) if isinstance(there, dict) else None
            if before != value:
                if isinstance(value, list) and isinstance(before, list):
                    value, before = ([one for one in a if one not in b] for a, b in ((value, before), (before, value)))
                told = f"{shortened(str(before))} there, {shortened(str(value))} here"
                problem = f"holds a search with other {name} ({told}); name another folder, or give the same"
                raise ConfigError("--dump_folder", str(self.plan.out), problem)
        if there is None:
            write_output_file("--dump_folder", file, json_text(here))
        for path in sorted((self.plan.out / "trials").glob("*/result.json")):
            self.found[path.parent.name] = _read(path)

    def run(self) -> list[Row]:
        """Measure all layouts that are not known yet, printing a line for each. Returns the rows of all.

        The files are written after each layout, and also if the search is interrupted.
        """
        print(
            f"{len(self.found)} layouts are known already\n{results.HEAD}" if self.found else results.HEAD, flush=True
        )
        try:
            self._write()
            for case in self.cases:
                for settings in self._sizes(case) if isinstance(case, Case) else ():
                    self._measure(settings)
        finally:
            self._write()
            problem = results.draw(self.rows, self.plan.out / "throughput.png")
        if problem:
            print(problem, flush=True)
        return self.rows

    @property
    def rows(self) -> list[Row]:
        """All layouts that are known, in the order of the cases; those that the rules forbid come last."""
        rows: dict[str, Row] = {}
        for case in self.cases:
            for settings in self._known(case) if isinstance(case, Case) else ():
                name = layout_name(settings)
                if name not in self._rows:
                    found = self.found[name] | self._predicted(settings)
                    self._configs[name] = settings.config
                    self._rows[name] = results.row_of(settings.config, settings.layout.num_processes, found)
                rows[name] = self._rows[name]
        refused = [case for case in self.cases if isinstance(case, Refused)]
        skipped = [
            results.row_of(one.config, one.processes, {"outcome": "skipped", "reason": one.reason}) for one in refused
        ]
        return [*rows.values(), *skipped]

    def _known(self, case: Case) -> Iterator[Settings]:
        for size in case.sizes:
            settings = case.with_size(size)
            if layout_name(settings) in self.found:
                yield settings

    def _sizes(self, case: Case) -> Iterator[Settings]:
        """The run with each microbatch size that is to be tried next, until the largest that fits is known."""
        rates: dict[int, float | None] = {}
        while (size := next_size(case.sizes, rates)) is not None:
            settings = case.with_size(size)
            if layout_name(settings) not in self.found:
                yield settings
            found = self.found[layout_name(settings)]
            if found["outcome"] not in (OK, TOO_LARGE):
                return
            rates[size] = found.get("samples_per_second")

    def _measure(self, settings: Settings) -> None:
        name, processes = layout_name(settings), settings.layout.num_processes
        found = run_trial(name, settings.config, processes, self.place, self.plan, len(self.found))
        write_output_file("--dump_folder", self.plan.out / "trials" / name / "result.json", json_text(found))
        self.found[name] = found
        self._write()
        left = f"  time left {format_duration(self._seconds_left())}" if self._left() else ""
        print(f"{results.line(len(self.found), self._rows[name])}{left}", flush=True)

    def _write(self) -> None:
        rows, plan = self.rows, self.plan
        results.write_files(rows, self._configs, plan.out, plan.warmup + plan.steps, self.gpu)

    def _left(self) -> list[int]:
        """Processes of each trial that is known to be left. More may follow where the largest microbatch is sought."""
        cases = [case for case in self.cases if isinstance(case, Case)]
        return [case.processes for case in cases if next(self._sizes(case), None) is not None]

    def _seconds_left(self) -> float:
        """Seconds for the trials that are left, each as long as those with as many processes took."""
        took: dict[int, list[float]] = {}
        for row in self._rows.values():
            took.setdefault(row["processes"], []).append(self.found[row["trial"]]["seconds"])
        everywhere = [seconds for times in took.values() for seconds in times]
        return sum(statistics.mean(took.get(processes, everywhere)) for processes in self._left())

    def _predicted(self, settings: Settings) -> dict[str, Any]:
        """The planner's figures of a layout; none without a profile."""
        if self.stack is None:
            return {}
        profile, device = self.stack
        found = predict_layout(settings.config, settings.model, settings.layout, profile, device)
        first = found.memory.ranks[0]  # on a GPU the measured memory is that of tensors, on a CPU the whole process's
        memory = first.total if device.is_cpu else first.total - first.overhead
        return {"predicted_step_time_s": found.time.total, "predicted_memory_bytes": memory}


def _read(path: Path) -> Any:
    """What a JSON file of the search holds; None if there is no such file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError("--dump_folder", str(path.parent), f"{path.name} cannot be read ({error})") from None
