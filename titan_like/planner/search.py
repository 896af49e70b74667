"""A best-first search for the fastest layout that fits, among all that the trainer accepts, and the best of each kind.

Layouts wait in a heap in the order of a lower bound of their step time: first groups of them, by what their operators
must take at least, then by what the ranks of a pipeline compute; then each pipeline of a group, by the shortest way
through it; then each layout, with its sums of gradients. Only a layout that nothing in the heap can beat is followed
pass by pass. So layouts come out in the exact order of their times, and the many that cannot be among the first are
never computed.
"""

import gc
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config
from titan_like.parallel.schedules.tables import SCHEDULES, SPLIT_BACKWARD
from titan_like.planner.bounds import BREADTH_FIRST, least_bytes, least_group_seconds, least_step_seconds
from titan_like.planner.memory import MEMORY_MARGIN, largest_memory, usable_bytes
from titan_like.planner.profile import Profile
from titan_like.planner.search_space import MODES, Space, Split
from titan_like.planner.stack import checked_profile
from titan_like.planner.step_time import StepTime, step_time, steps_of
from titan_like.planner.trace import estimate
from titan_like.planner.workload import Workload
from titan_like.train.environment import cluster_size

_ROUNDING = 0.997  # bounds come from estimates of larger microbatches, whose losses are up to 0.3 % of a step off


@dataclass(frozen=True)
class Candidate:
    """One layout with its prediction."""

    work: Workload
    time: StepTime
    memory_bytes: float  # on the fullest GPU


@dataclass
class Counts:
    """What became of the valid layouts. By a bound on their time, the rest is slower than all that are reported."""

    valid: int = 0
    too_large: int = 0  # known not to fit; layouts that were passed over may not fit either
    computed: int = 0  # layouts and pipelines for which a bound was computed


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    space: Space
    profile: Profile
    ranked: list[Candidate]  # the fastest of every kind, fastest first
    too_large: list[Candidate]  # faster than the best but too large; for each pair of degrees, the nearest to fitting
    counts: Counts
    usable_bytes: float  # of a GPU's memory, without the margin

    @property
    def config(self) -> JobConfig:
        """The run in its best layout."""
        return self.space.configured(self.best.work)

    @property
    def best(self) -> Candidate:
        """The simplest of the ranked layouts that predictions cannot tell from the fastest."""
        slowest = self.fastest.time.total * (1 + self.profile.error_median)
        tied = [candidate for candidate in self.ranked if candidate.time.total <= slowest]
        return min(tied, key=lambda candidate: (_complexity(candidate.work), candidate.time.total))

    @property
    def fastest(self) -> Candidate:
        """The fastest layout that fits."""
        return self.ranked[0]


def search(
    config: JobConfig,
    num_gpus: int | None = None,
    profile: Profile | None = None,
    fixed: frozenset[str] = frozenset(),
    kinds: int = 10,
    progress: Callable[[Counts], None] = lambda _: None,
) -> SearchResult:
    """Find the best layouts of a run. Raises a `ConfigError` if the GPU is unknown, no layout is valid, or none fits.

    Args:
        config: the run. The keys of `search_space.SEARCHED` are chosen anew, except those in ``fixed``.
        num_gpus: GPUs of the job (default: all of the run's cluster).
        profile: the stack (default: the GPU's).
        fixed: keys that stay as they are.
        kinds: how many combinations of tensor and pipeline degree to find the best layout of.
        progress: called now and then with the counts so far.
    """
    num_gpus = num_gpus or cluster_size(config)
    profile = checked_profile(config, num_gpus, profile)
    space = Space(config, model_config(config.model), num_gpus, fixed)
    collects = gc.isenabled()
    gc.disable()  # it would scan hundreds of thousands of tuples over and over, none of them in a cycle
    try:
        return BestFirst(space, profile, kinds, progress).run()
    finally:
        if collects:
            gc.enable()


class BestFirst:
    """The state of a running search."""

    def __init__(self, space: Space, profile: Profile, kinds: int, progress: Callable[[Counts], None]) -> None:
        self.space, self.profile, self.kinds, self.progress = space, profile, kinds, progress
        self.usable = usable_bytes(profile.device)
        self.counts = Counts()
        # (bound, depth, order, arguments). Depths 0 and 1 have groups, 2 pipelines, 3 layouts, 4 followed layouts.
        # Orders are unique, so comparisons stop there; among equally fast layouts, plainer settings come first.
        self.heap: list[tuple[float, int, tuple[int, ...], Any]] = []
        self.numbers = itertools.count()
        self.ranked: list[Candidate] = []
        self.cells: set[tuple[int, int]] = set()
        self.too_large: dict[tuple[int, int], tuple[Workload, float]] = {}

    def run(self) -> SearchResult:
        """Search to the end. Raises a `ConfigError` if no layout is valid, or none fits."""
        for turn, group in enumerate(self.space.groups()):
            if turn % 16 == 0:
                self.progress(self.counts)
            self._add_group(group)
        for turn in itertools.count():
            if not self.heap or len(self.ranked) == self.kinds:
                break
            if turn % 64 == 0:
                self.progress(self.counts)
            # Whatever comes out first is replaced by its parts with closer bounds, until a followed layout comes out.
            _, depth, _, arguments = heapq.heappop(self.heap)
            if _cell(arguments[0]) not in self.cells:  # only the best of each kind counts
                (self._weigh, self._add_pipelines, self._add_layouts, self._follow, self._take)[depth](*arguments)
        if not self.ranked:
            raise self._nothing_fits()
        # Layouts that would win if they fitted are worth reporting.
        too_large = [Candidate(work, step_time(work, self.profile), used) for work, used in self.too_large.values()]
        too_large = [candidate for candidate in too_large if candidate.time.total < self.ranked[0].time.total]
        too_large.sort(key=lambda candidate: candidate.memory_bytes)
        return SearchResult(self.space, self.profile, self.ranked, too_large, self.counts, self.usable)

    def _add_group(self, group: Workload) -> None:
        """Put a group into the heap, unless none of its layouts can fit."""
        layouts = len(self.space.pipelines(group)) * len(self.space.splits(group))
        if not layouts:
            return
        self.counts.valid += layouts
        if not self._may_fit(group, self.space.splits(group)[0]):
            self.counts.too_large += layouts
            return
        self._push(least_group_seconds(group, self.profile), 0, (group,))

    def _may_fit(self, group: Workload, split: Split) -> bool:
        works = [self.space.member(group, *choice, *split) for choice in _smallest(self.space.pipelines(group))]
        return min(least_bytes(work, self.profile) for work in works) <= self.usable

    def _weigh(self, group: Workload) -> None:
        """Put a group back by the mean work of a pipeline's ranks, which none of its pipelines can share better."""
        pipelines, splits = self.space.pipelines(group), self.space.splits(group)
        fitting = [split for split in splits if self._may_fit(group, split)]
        self.counts.too_large += len(pipelines) * (len(splits) - len(fitting))
        if not fitting:
            return
        plain = _plainest(pipelines)

        def mean(split: Split) -> float:
            passes = steps_of(self.space.member(group, *plain, *split), self.profile, estimate).stages
            return group.microbatches / group.pipeline * sum([stage.F + stage.B for stage in passes])

        means = {split: mean(split) for split in fitting}
        fitting = sorted(means, key=means.__getitem__)
        self._push(means[fitting[0]], 1, (group, fitting, means[fitting[0]]))

    def _add_pipelines(self, group: Workload, splits: list[Split], mean: float) -> None:
        """Put a group's pipelines into the heap. With split backward passes they have no bound of their own."""
        for choice in self.space.pipelines(group):
            if choice[0] in SPLIT_BACKWARD:
                self._push(mean, 2, (group, choice, splits))
            else:
                self._push_ways(group, choice, splits)

    def _push_ways(self, group: Workload, choice: tuple[str, int], splits: list[Split]) -> None:
        """Put some ways of splitting a pipeline into the heap, of which the first has the fastest passes."""
        # Sums of gradients, which differ between them, are left out.
        work = self.space.member(group, *choice, *splits[0])
        self.counts.computed += 1
        self._push(least_step_seconds(work, self.profile, True, estimate), 2, (group, choice, splits))

    def _push(self, bound: float, depth: int, arguments: tuple[Any, ...]) -> None:
        heapq.heappush(self.heap, (bound * _ROUNDING, depth, (next(self.numbers),), arguments))

    def _add_layouts(self, group: Workload, choice: tuple[str, int], splits: list[Split]) -> None:
        """Put a pipeline's layouts into the heap by the shortest way through it, ZeRO 3's together at first."""
        gathering = [split for split in splits if split[0] == 3]
        if 1 < len(gathering) < len(splits):
            self._push_ways(group, choice, gathering)
            splits = [split for split in splits if split[0] < 3]
        for split in splits:
            work = self.space.member(group, *choice, *split)
            self.counts.computed += 1
            bound = least_step_seconds(work, self.profile, source=estimate) * _ROUNDING
            heapq.heappush(self.heap, (bound, 3, _order(work), (work,)))

    def _follow(self, work: Workload) -> None:
        """If a layout may fit, find the time that it is ranked by."""
        used = largest_memory(work, self.profile, self.usable, messages=False)
        if used > self.usable:
            self._remember(work, used)
            return
        time = step_time(work, self.profile)
        heapq.heappush(self.heap, (time.total, 4, _order(work), (work, time)))

    def _remember(self, work: Workload, used: float) -> None:
        """Count a layout that is too large. For every pair of degrees, keep the one nearest to fitting."""
        self.counts.too_large += 1
        key = work.tensor, work.pipeline
        if key not in self.too_large or used < self.too_large[key][1]:
            self.too_large[key] = work, used

    def _take(self, work: Workload, time: StepTime) -> None:
        """Rank the next layout in the order of time, if it fits."""
        used = largest_memory(work, self.profile, self.usable)
        if used > self.usable:
            self._remember(work, used)
        else:
            self.cells.add(_cell(work))
            self.ranked.append(Candidate(work, time, used))

    def _nothing_fits(self) -> ConfigError:
        if not self.counts.valid:
            return self.space.no_layout()
        smallest = min((used for _, used in self.too_large.values()), default=None)
        need = f"; the smallest found needs {smallest / 2**30:.0f} GiB" if smallest else ""
        reason = (
            f"no layout of {self.counts.valid:,} on {self.space.num_gpus} GPUs fits into {self.usable / 2**30:.0f} GiB "
            f"({100 * MEMORY_MARGIN:.0f} % kept free){need}; use more or larger GPUs"
        )
        return ConfigError("cluster.gpu", self.profile.device.name, reason)


def _plainest(pipelines: list[tuple[str, int]]) -> tuple[str, int]:
    """1F1B with one stage a rank, unless the schedule or the stages are fixed."""
    return min(pipelines, key=("1f1b", 1).__ne__)


def _smallest(pipelines: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The choices that may have the least bound on memory: the plainest, and a breadth-first one if there is any."""
    return [_plainest(pipelines), *[choice for choice in pipelines if choice[0] == BREADTH_FIRST][:1]]


def _cell(work: Workload) -> tuple[int, int]:
    """A layout's kind: tensor and pipeline degree."""
    return work.tensor, work.pipeline


def _complexity(work: Workload) -> int:
    """The number of things in a layout to understand, each of which can go wrong."""
    splits = (work.tensor, work.pipeline, work.context, work.expert, work.replicate, work.virtual_stages)
    is_usual = work.pipeline == 1 or work.schedule in ("1f1b", "interleaved_1f1b")
    return sum(degree > 1 for degree in splits) + (not is_usual) + (work.recompute_every > 1)


_SCHEDULES = {name: number for number, name in enumerate(dict.fromkeys(("1f1b", "interleaved_1f1b", *SCHEDULES)))}


def _order(work: Workload) -> tuple[int, ...]:
    return (
        work.context,
        work.expert,
        work.pipeline,
        work.tensor,
        MODES.index(work.recompute),
        -work.recompute_every,
        _SCHEDULES[work.schedule],
        work.virtual_stages,
        work.zero_stage,
        work.replicate,
        -work.micro_batch_size,
        work.sequence_parallel,
    )
