"""What a search measures: the layouts of a grid or the planner's best ones, and its profile of a CPU."""

import itertools
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from titan_like.config.errors import ConfigError, RunError, first_line, require, unknown
from titan_like.config.load import edit, load_config, setting
from titan_like.config.paths import read_toml
from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import DEGREES
from titan_like.planner.profile import Profile, load_profile
from titan_like.planner.search import search
from titan_like.planner.search_space import SEARCHED, divisors
from titan_like.planner.trace.key import default_folder
from titan_like.search.trial import Place, Plan, arguments
from titan_like.train.rules import resolve_settings

MICRO, GLOBAL = "training.micro_batch_size", "training.global_batch_size"
KEYS = {**SEARCHED, GLOBAL: "global_batch_size"}  # what a grid may list, each with its column in the results
LARGEST = "largest"
_SHARD, _VIRTUAL = "parallelism.data_parallel_shard_degree", "parallelism.virtual_stages_per_rank"
_WORSE = 0.8  # of the best rate so far: larger microbatches are not tried any more
_SHORT = {f"parallelism.{degree.key}": degree.short for degree in DEGREES}  # in a layout's name, or the value alone
_SHORT |= {_VIRTUAL: "v", "parallelism.sequence_parallel": "sp", "parallelism.zero_stage": "z"}
_SHORT |= {MICRO: "mbs", GLOBAL: "gbs", "activation_checkpoint.every_n_layers": "every"}
_DEFAULTS = JobConfig()


@dataclass(frozen=True)
class Case:
    """A layout to measure, with one or several microbatch sizes to try; with none, a rule forbids it."""

    config: JobConfig  # the whole run in this layout, with the first size
    processes: int
    sizes: tuple[int, ...]  # ascending
    reason: str = ""  # the rule's sentence

    def with_size(self, size: int) -> JobConfig:
        """The run with another microbatch size."""
        return edit(self.config, {MICRO: size})


def layout_name(config: JobConfig, processes: int) -> str:
    """A short name of a layout that no other layout of the run has."""
    parts = [f"n{processes}"]
    for key in KEYS:
        value, short = setting(config, key), _SHORT.get(key, "")
        if key in (MICRO, GLOBAL) or (value != setting(_DEFAULTS, key) and (key, value) != (_SHARD, 1)):
            parts.append(short if value is True else f"{short}{value}")
    return "-".join(parts)


def next_size(sizes: Sequence[int], rates: dict[int, float | None]) -> int | None:
    """The microbatch size to try next, given the rates of the sizes tried; None if the largest that fits is known.

    Sizes double, as far as there are such sizes, until one runs out of memory (its rate is None) or the rate falls
    clearly below the best. Sizes between the largest that fits and the smallest that does not are then bisected.
    """
    largest = max((size for size, rate in rates.items() if rate is not None), default=0)
    too_large = min((size for size, rate in rates.items() if rate is None), default=None)
    larger = [size for size in sizes if size > largest]
    if too_large is not None:
        between = [size for size in larger if size < too_large]
        return between[len(between) // 2] if between else None
    best = max((rate for rate in rates.values() if rate is not None), default=0.0)
    if not larger or (rates.get(largest) or 0.0) < _WORSE * best:
        return None
    return next((size for size in larger if size >= 2 * largest), larger[-1])


def read_grid(path: str, given: list[str]) -> dict[str, list[Any]]:
    """The values of each key that a grid's TOML lists, and of ``processes``; ``given`` are the run's settings.

    Raises a `ConfigError` if a key is unknown or set on the command line too, or a value is not valid.
    """
    values: dict[str, list[Any]] = {"processes": []}
    for section, table in read_toml(path, "--grid").items():
        keys = {f"{section}.{key}": val for key, val in table.items()} if isinstance(table, dict) else {section: table}
        values |= {key: value if isinstance(value, list) else [value] for key, value in keys.items()}
    words = {word.partition("=")[0] for word in given}
    for key, listed in values.items():
        name, is_setting = f"{path}: {key}", key != "processes"
        require(key in {*KEYS, "processes"}, name, str(listed), unknown("key of a grid", key, ["processes", *KEYS]))
        require(f"--{key}" not in words, f"--{key}", None, f"{path} lists it too; remove one of them")
        require(listed or not is_setting, name, "[]", "lists nothing; give at least one value, or leave it out")
        for index, value in enumerate(listed):
            is_count = type(value) is int and value > 0
            require(is_setting or is_count, name, value, "must be whole numbers of at least 1, such as 1, 2, 4")
            if is_setting and (key, value) != (MICRO, LARGEST):
                listed[index] = setting(load_config([*given, *arguments(key, value)]), key)  # as it is understood
    return values


def grid_cases(config: JobConfig, counts: Sequence[int], values: dict[str, list[Any]]) -> list[Case]:
    """All combinations of a grid that differ. What it does not list is the configuration's.

    An unlisted shard degree is what the other degrees leave.
    """
    base = edit(config, {_SHARD: -1, "parallelism.auto": False})
    products = itertools.product(counts, *values.values())
    return _distinct(_case(base, count, dict(zip(values, chosen, strict=True))) for count, *chosen in products)


def _case(base: JobConfig, processes: int, chosen: dict[str, Any]) -> Case:
    config, configs, reason = edit(base, chosen), dict[int, JobConfig](), ""
    batch, given = config.training.global_batch_size, config.training.micro_batch_size
    sizes = divisors(batch) if given == LARGEST else [given]
    for size in sizes:
        try:
            configs[size] = _effective(edit(config, {MICRO: size}), processes)
        except ConfigError as error:
            reason = reason or first_line(error)
    if not configs:
        return Case(edit(config, {MICRO: sizes[0]}), processes, (), reason)
    return Case(next(iter(configs.values())), processes, tuple(configs))


def _effective(config: JobConfig, processes: int) -> JobConfig:
    """A run without open degrees, and with plain values of keys that have no effect in its layout."""
    layout = resolve_settings(config, processes).layout
    schedule: dict[str, Any] = {_VIRTUAL: layout.virtual_stages, "parallelism.pipeline_schedule": layout.schedule}
    plain = {_SHARD: layout.shard, **schedule}
    if layout.weight_shards == 1 and not (layout.splits_experts and layout.expert_shards > 1):
        plain["parallelism.zero_stage"] = 0  # there is nothing to share out
    if config.activation_checkpoint.mode == "none":
        plain["activation_checkpoint.every_n_layers"] = 1
    return edit(config, plain)


def own_profile(processes: int, place: Place) -> Profile:
    """This CPU's profile for a number of processes, from the user's cache, or measured by the titan-plan of ``place``.

    Raises a `RunError` if the measurement failed.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or ("all" if processes == 1 else "1")  # torchrun's default
    stack = f"{len(os.sched_getaffinity(0))}cores_{threads}threads_torch{version('torch')}"
    path = default_folder().with_name("profiles") / f"{platform.node()}_{stack}_{processes}.toml"
    if not path.is_file():
        print(f"measuring this CPU for the planner, once for {processes} processes: about a minute", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        began, words = time.monotonic(), ["microbenchmark", f"--out={path}"]
        done = subprocess.run(place.command(processes, words, 0, Plan(0, 0, 0.0, None)), stdout=subprocess.DEVNULL)
        if done.returncode or not path.is_file():
            raise RunError("the CPU could not be measured, see above; give --profile or --grid to search without")
        print(f"measured in {time.monotonic() - began:.0f} s and kept in {path}", flush=True)
    return load_profile(str(path))


def planned_cases(
    config: JobConfig, profiles: Mapping[int, Profile | None], fixed: frozenset[str], top: int
) -> list[Case]:
    """The planner's best layouts for each number of processes, with its profile (None: the GPU's own).

    Keys in ``fixed`` stay as the configuration has them.
    """
    cases = []
    for count, profile in profiles.items():
        try:
            result = search(config, count, profile, fixed, top)
        except ConfigError as error:
            cases.append(Case(config, count, (), first_line(error)))
            continue
        for candidate in result.ranked:
            run = _effective(result.space.configured(candidate.work), count)
            cases.append(Case(run, count, (candidate.work.micro_batch_size,)))
    return _distinct(cases)


def _distinct(cases: Iterable[Case]) -> list[Case]:
    return list({(layout_name(case.config, case.processes), case.sizes): case for case in cases}.values())
