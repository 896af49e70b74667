"""Measures one layout after the other, stores each result, and resumes a search that was interrupted."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError, require
from titan_like.config.options import json_text, write_output_file
from titan_like.config.paths import blaming, parse_json, user_file
from titan_like.config.schema import JobConfig
from titan_like.metrics.console import format_duration
from titan_like.planner.commands.search import run_as_toml
from titan_like.planner.predict import predict_layout
from titan_like.planner.profile import Profile
from titan_like.search.cases import Case, layout_name, next_size
from titan_like.search.results import HEAD, Row, as_csv, calibration_rows, draw, judgement, line, ranked, row_of
from titan_like.search.trial import OK, SKIPPED, TOO_LARGE, Place, Plan, run_trial, settings_of
from titan_like.train.rules import resolve_settings


class Search:
    """The state of a search in a folder: its cases, and what is known of each layout by its name."""

    def __init__(
        self, out: Path, cases: Sequence[Case], place: Place, plan: Plan, gpu: str, stacks: Mapping[int, Profile]
    ) -> None:
        """Read what the folder holds.

        ``gpu`` is what layouts are measured on. ``stacks`` is what they are predicted with, by their processes. Raises
        a `ConfigError` if it holds another search, a file cannot be read, or a layout cannot be predicted.
        """
        self.out, self.cases, self.place, self.plan, self.gpu, self.stacks = out, cases, place, plan, gpu, stacks
        self._predictions: dict[str, dict[str, float]] = {}
        for case in cases:
            if case.sizes:
                self._predicted(case.config, case.processes)
        names = {f"{layout_name(case.config, case.processes)} {case.sizes}": settings_of(case.config) for case in cases}
        identity = json.loads(json_text({"plan": asdict(plan), "layouts": names}))
        files = ("results.csv", "results.json", "rows.json", "best.toml", "throughput.png", "trials")
        foreign = [name for name in files if (out / name).exists()]
        if foreign and not (out / "search.json").exists():
            raise ConfigError("--dump_folder", str(out), f"has {foreign[0]}, but no search; name another folder")
        reason = "holds a search with other layouts, settings, steps or limits; give the same, or name another folder"
        require(_read(out / "search.json", identity) == identity, "--dump_folder", str(out), reason)
        write_output_file(out / "search.json", json_text(identity))
        self.results: dict[str, dict[str, Any]] = {
            path.parent.name: _read(path, {}) for path in sorted((out / "trials").glob("*/result.json"))
        }

    def run(self) -> list[Row]:
        """Measure the layouts that are not known yet, with a line for each, and write the files. Returns all rows.

        The files are written after each layout, and the picture at the end, also if the search is interrupted.
        """
        print(f"{len(self.results)} layouts are known already\n{HEAD}" if self.results else HEAD, flush=True)
        try:
            for case in self.cases:
                for config in self._unknown(case):
                    self._measure(config, case.processes)
        finally:
            rows = self._write()
            reason = draw(rows, self.out / "throughput.png") if ranked(rows) else None
        if reason:
            print(reason, flush=True)
        return rows

    def runs(self) -> list[tuple[JobConfig, Row]]:
        """All layouts that are known, in the order of the cases; layouts that rules forbid come last."""
        rows: dict[str, tuple[JobConfig, Row]] = {}
        for case in self.cases:
            for config in map(case.with_size, case.sizes):
                name = layout_name(config, case.processes)
                if name in self.results:
                    row = row_of(config, case.processes, self.results[name] | self._predicted(config, case.processes))
                    rows[name] = config, row
        refused = ((case, {"outcome": SKIPPED, "reason": case.reason}) for case in self.cases if not case.sizes)
        return [*rows.values(), *((case.config, row_of(case.config, case.processes, why)) for case, why in refused)]

    def _unknown(self, case: Case) -> Iterator[JobConfig]:
        """The run with each microbatch size to try next, until the largest that fits is known or a trial fails."""
        rates: dict[int, float | None] = {}
        while (size := next_size(case.sizes, rates)) is not None:
            config = case.with_size(size)
            name = layout_name(config, case.processes)
            if name not in self.results:
                yield config
            if self.results[name]["outcome"] not in (OK, TOO_LARGE):
                return
            rates[size] = self.results[name].get("samples_per_second")

    def _measure(self, config: JobConfig, processes: int) -> None:
        name, started = layout_name(config, processes), time.monotonic()
        folder = self.out / "trials" / name
        result = run_trial(folder, config, processes, self.place, self.plan, len(self.results))
        self.results[name] = result | {"processes": processes, "seconds": time.monotonic() - started}
        write_output_file(folder / "result.json", json_text(self.results[name]))
        row = next(row for row in self._write() if row["layout"] == name)
        left = self._seconds_left()
        print(line(row) + (f"  time left {format_duration(left)}" if left else ""), flush=True)

    def _seconds_left(self) -> float:
        """Seconds left, if each case takes as long as the last trial with the same number of processes."""
        took = {result["processes"]: result["seconds"] for result in self.results.values()}
        left = [case.processes for case in self.cases if next(self._unknown(case), None)]
        return sum(took.get(processes, max(took.values())) for processes in left)

    def _predicted(self, config: JobConfig, processes: int) -> dict[str, float]:
        """The planner's figures; none without a profile."""
        name = layout_name(config, processes)
        if processes in self.stacks and name not in self._predictions:
            settings, profile = resolve_settings(config, processes), self.stacks[processes]
            forecast = predict_layout(config, settings.model, settings.layout, profile)
            first = forecast.memory.ranks[0]  # measured memory is the tensors', on a CPU the process's
            memory = first.total - (0 if profile.device.is_cpu else first.overhead)
            figures = {"predicted_step_time_s": forecast.time.total, "predicted_memory_bytes": memory}
            self._predictions[name] = figures
        return self._predictions.get(name, {})

    def _write(self) -> list[Row]:
        runs = self.runs()
        rows, steps = [row for _, row in runs], self.plan.warmup + self.plan.steps
        files = {
            "results.csv": as_csv(rows),
            "results.json": json_text({"layouts": rows, "planner": judgement(rows)}),
            "rows.json": json_text(calibration_rows(runs, steps, self.gpu)),
        }
        for best in ranked(rows)[:1]:
            config = next(config for config, row in runs if row is best)
            head = f"{config.job.config_file or 'A run'} in the fastest layout that scripts/search.py measured: "
            head += f"{best['tokens_per_second']:,.0f} tokens/s on {best['processes']} processes"
            files["best.toml"] = run_as_toml(config, best["processes"], self.out / "best.toml", [head])
        for name, text in files.items():
            write_output_file(self.out / name, text)
        return rows


def _read(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """What a JSON file of the search holds."""
    if not path.exists():
        return default
    with user_file(path, blaming("--dump_folder", str(path), "move it away")):
        return dict(parse_json(path.read_text(encoding="utf-8")))
