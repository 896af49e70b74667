"""What a search measures: the layouts of a grid, or those that the planner finds best."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from titan_like.config.errors import ConfigError, first_line
from titan_like.config.load import edit, load_config, setting
from titan_like.config.paths import read_toml
from titan_like.config.schema import JobConfig
from titan_like.parallel.layout import Layout
from titan_like.parallel.schedules.tables import stages_per_rank
from titan_like.planner.profile import Profile
from titan_like.planner.search import search
from titan_like.planner.search_space import SEARCHED, divisors
from titan_like.search.settings import argument
from titan_like.train.rules import Settings, resolve_settings

MICRO, GLOBAL, SHARD = (
    "training.micro_batch_size",
    "training.global_batch_size",
    "parallelism.data_parallel_shard_degree",
)
KEYS = (*SEARCHED, GLOBAL)  # what a grid may list, and what tells one layout from another
LARGEST = "largest"
_MOST = 10_000  # combinations
_WORSE = 0.9  # of the best rate so far: larger microbatches are not tried any more

# Parts of a layout's name, each with its key and the value that goes without saying.
_NAMES = (
    ("tp", "parallelism.tensor_parallel_degree", 1),
    ("sp", "parallelism.sequence_parallel", False),
    ("pp", "parallelism.pipeline_parallel_degree", 1),
    ("", "parallelism.pipeline_schedule", "1f1b"),
    ("v", "parallelism.virtual_stages_per_rank", 1),
    ("cp", "parallelism.context_parallel_degree", 1),
    ("ep", "parallelism.expert_parallel_degree", 1),
    ("rep", "parallelism.data_parallel_replicate_degree", 1),
    ("dp", SHARD, 1),
    ("z", "parallelism.zero_stage", 0),
    ("mbs", MICRO, None),
    ("gbs", GLOBAL, None),
    ("", "activation_checkpoint.mode", "none"),
    ("every", "activation_checkpoint.every_n_layers", 1),
)


@dataclass(frozen=True)
class Case:
    """One layout to measure, or the largest microbatch with which it fits."""

    settings: Settings  # of the whole run, whose rules hold; with the first size if there are several
    sizes: tuple[int, ...]  # microbatch sizes to try, ascending

    @property
    def processes(self) -> int:
        """Processes of the job."""
        return self.settings.layout.num_processes

    def with_size(self, size: int) -> Settings:
        """The run with another microbatch size."""
        return Settings(edit(self.settings.config, {MICRO: size}), self.settings.model, self.settings.layout)


@dataclass(frozen=True)
class Refused:
    """A combination that is not measured."""

    config: JobConfig
    processes: int
    reason: str


def layout_name(settings: Settings) -> str:
    """A name for a layout's folder. Two layouts have the same name only if they are the same."""
    parts = [f"n{settings.layout.num_processes}"]
    for short, key, plain in _NAMES:
        value = setting(settings.config, key)
        if value != plain:
            parts.append(short if value is True else f"{short}{value}")
    return "-".join(parts)


def next_size(sizes: Sequence[int], rates: dict[int, float | None]) -> int | None:
    """The microbatch size to try next; None if the largest that fits is known.

    Sizes are doubled, as far as there are such sizes, until one runs out of memory, whose rate is None, or until the
    rate falls clearly below the best one. The sizes between the last that fits and the first that does not are then
    bisected.
    """
    fits = [size for size, rate in rates.items() if rate is not None]
    largest = max(fits, default=0)
    if len(fits) < len(rates):
        too_large = min(size for size, rate in rates.items() if rate is None)
        between = [size for size in sizes if largest < size < too_large]
        return between[len(between) // 2] if between else None
    larger = [size for size in sizes if size > largest]
    best = max((rate for rate in rates.values() if rate), default=0.0)
    if not larger or (fits and (rates[largest] or 0.0) < _WORSE * best):
        return None
    return next((size for size in larger if size >= 2 * largest), larger[-1])


def read_grid(path: str, given: list[str]) -> tuple[list[int], dict[str, list[Any]]]:
    """The process counts and the values of each key that a grid's TOML lists; ``given`` are the run's settings.

    Raises:
        ConfigError: a key is unknown or set on the command line too, or a value is not valid.
    """
    tree, values = read_toml(path, "--grid"), dict[str, list[Any]]()
    counts = tree.pop("processes", [])
    for section, table in tree.items():
        found = table.items() if isinstance(table, dict) else [("", table)]
        values |= {f"{section}.{key}".rstrip("."): one if isinstance(one, list) else [one] for key, one in found}
    for key, listed in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            known = f"did you mean {near[0]}?" if near else f"a grid has processes and {', '.join(KEYS)}"
            raise ConfigError(f"{path}: {key}", str(listed), f"not a key of a grid; {known}")
        if any(word.partition("=")[0] == f"--{key}" for word in given):
            raise ConfigError(f"--{key}", None, f"{path} lists it too; remove one of them")
        if not listed:
            raise ConfigError(f"{path}: {key}", "[]", "lists nothing; give at least one value, or leave it out")
        for value in listed:
            if (key, value) != (MICRO, LARGEST):
                load_config([*given, argument(key, value)])
    return check_counts(counts if isinstance(counts, list) else [counts], f"{path}: processes"), values


def check_counts(counts: list[Any], key: str) -> list[int]:
    """Numbers of processes, without repetitions.

    Raises:
        ConfigError: one is not a whole number of at least 1.
    """
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(key, count, "must be whole numbers of at least 1, such as 1, 2, 4")
    return list(dict.fromkeys(counts))


def grid_cases(config: JobConfig, counts: list[int], values: dict[str, list[Any]]) -> list[Case | Refused]:
    """All combinations of a grid that differ, and those that the trainer's rules forbid.

    Keys that the grid does not list are the configuration's. An unlisted shard degree is what the others leave.

    Raises:
        ConfigError: there are too many combinations.
    """
    total = len(counts) * prod(map(len, values.values()))
    if total > _MOST:
        raise ConfigError("--grid", f"{total:,} combinations", f"list fewer values; a search takes at most {_MOST:,}")
    base = edit(config, {SHARD: -1, "parallelism.auto": False})
    found: dict[tuple[str, int], Case | Refused] = {}
    for count, *choice in itertools.product(counts, *values.values()):
        chosen = dict(zip(values, choice, strict=True))
        case = _case(base, count, chosen)
        if isinstance(case, Case):
            found.setdefault((layout_name(case.settings), len(case.sizes)), case)
        else:
            found[str(chosen), count] = case
    return list(found.values())


def _case(base: JobConfig, count: int, chosen: dict[str, Any]) -> Case | Refused:
    is_open = chosen.get(MICRO) == LARGEST
    first = edit(base, chosen | ({MICRO: 1} if is_open else {}))
    try:
        if not is_open:
            settings = _effective(resolve_settings(first, count))
            return Case(settings, (settings.config.training.micro_batch_size,))
        return largest_case(first, count)
    except ConfigError as error:
        return Refused(edit(base, chosen), count, first_line(error))


def largest_case(config: JobConfig, count: int) -> Case:
    """A layout with all microbatch sizes that its rules allow.

    Raises:
        ConfigError: there is none; the error is that of microbatches of one sample.
    """
    refusal: ConfigError | None = None
    allowed: list[Settings] = []
    for size in divisors(config.training.global_batch_size):
        try:
            allowed.append(_effective(resolve_settings(edit(config, {MICRO: size}), count)))
        except ConfigError as error:
            refusal = refusal or error
    if not allowed:
        assert refusal is not None
        raise refusal
    return Case(allowed[0], tuple(one.config.training.micro_batch_size for one in allowed))


def _effective(settings: Settings) -> Settings:
    """A run's settings, with the plainest values of keys that have no effect in its layout, and no open degree."""
    config, layout = settings.config, settings.layout
    section = config.parallelism
    virtual = stages_per_rank(section.pipeline_schedule, section.virtual_stages_per_rank)
    plain: dict[str, Any] = {SHARD: layout.shard, "parallelism.virtual_stages_per_rank": virtual}
    if layout.pipeline == 1:
        plain |= {"parallelism.virtual_stages_per_rank": 1, "parallelism.pipeline_schedule": "1f1b"}
    if not _shards(layout):
        plain["parallelism.zero_stage"] = 0
    if config.activation_checkpoint.mode == "none":
        plain["activation_checkpoint.every_n_layers"] = 1
    return Settings(edit(config, plain), settings.model, layout)


def _shards(layout: Layout) -> bool:
    """Whether ZeRO has anything to share out."""
    return layout.weight_shards > 1 or (layout.splits_experts and layout.expert_shards > 1)


def planned_cases(
    config: JobConfig, counts: list[int], profile: Profile | None, fixed: frozenset[str], top: int
) -> Iterator[Case | Refused]:
    """The planner's best layouts for each number of processes. Keys in ``fixed`` stay as the configuration has them."""
    for count in counts:
        try:
            found = search(config, count, profile, fixed, top)
        except ConfigError as error:
            yield Refused(config, count, first_line(error))
            continue
        for candidate in found.ranked:
            settings = _effective(resolve_settings(found.space.configured(candidate.work), count))
            yield Case(settings, (settings.config.training.micro_batch_size,))
