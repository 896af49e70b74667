"""A best-first search for the fastest layout that fits, among all that the trainer accepts, and the best of each kind.

Groups of layouts wait in a heap in the order of a lower bound of their step time. A layout's own time is computed when
nothing in the heap can be faster. So layouts come out in the exact order of their times by closed forms, and the many
that cannot be among the first are never computed. For every kind and schedule, the first few layouts are then simulated
pass by pass and ranked by the simulated time.
"""

from __future__ import annotations

import gc
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from operator import add
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config
from titan_like.parallel.schedules.tables import SCHEDULES, SPLIT_BACKWARD, V_SHAPED, stages_per_rank
from titan_like.planner.activations import kept_of
from titan_like.planner.layer_time import layer_cost
from titan_like.planner.memory import MEMORY_MARGIN, in_flight, largest_memory, usable_bytes
from titan_like.planner.predict import checked_profile, profile_and_device
from titan_like.planner.profile import Profile
from titan_like.planner.search_space import Space
from titan_like.planner.simulator import simulated_step_time
from titan_like.planner.step_time import Passes, Sharding, StepTime, passes, sharded_step_time, sharding, step_time
from titan_like.planner.workload import BYTES, Workload, pipeline_of
from titan_like.train.environment import cluster_size

_ROUNDING = 1 - 1e-9  # a bound and what it bounds are sums in different orders

_CLOSED_FORMS = {True: 0.95, False: 0.98}  # least simulated time, relative to the closed form; True: V-shaped
_SIMULATED = 6  # layouts per kind and schedule
_UNSURE = (0.9, 1.25)  # in this range, the estimate for split backward passes cannot tell what fits


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
    computed: int = 0  # layouts, and pipelines of a group, whose step time was computed
    simulated: int = 0  # layouts whose pipeline was simulated


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    space: Space
    profile: Profile
    ranked: list[Candidate]  # the fastest of every kind, fastest first
    too_large: list[Candidate]  # faster than the best but too large; for each pair of degrees, the nearest to fitting
    counts: Counts
    usable_bytes: float  # of a GPU's memory, without the margin

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits."""
        return self.ranked[0]

    @property
    def config(self) -> JobConfig:
        """The run in its best layout."""
        return self.space.configured(self.best.work)


def search(
    config: JobConfig,
    num_gpus: int | None = None,
    profile: Profile | None = None,
    fixed: frozenset[str] = frozenset(),
    kinds: int = 10,
    progress: Callable[[Counts], None] = lambda _: None,
) -> Found:
    """Find the best layouts of a run.

    Args:
        config: the run. The keys of `search_space.SEARCHED` are chosen anew, except those in ``fixed``.
        num_gpus: GPUs of the job (default: those of the run's cluster).
        profile: the stack (default: that of the GPU).
        fixed: keys that stay as they are.
        kinds: how many combinations of tensor degree, pipeline degree and ZeRO stage to find the best layout of.
        progress: called now and then with the counts so far.

    Raises:
        ConfigError: the GPU is unknown, no layout is valid, or none fits.
    """
    num_gpus = num_gpus or cluster_size(config)
    stack = profile_and_device(config, profile)
    profile = checked_profile(config, num_gpus, *stack)
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
        # (bound, depth, order, what). Depth 0 has groups, 1 the pipelines of a group, 2 layouts, 3 simulated layouts.
        # Orders are unique, so comparisons stop there; among equally fast layouts, plainer settings come first.
        self.heap: list[tuple[float, int, tuple[int, ...], Any]] = []
        self.numbers = itertools.count()
        self.ranked: list[Candidate] = []
        self.cells: set[tuple[int, int, int]] = set()
        self.too_large: dict[tuple[int, int], Candidate] = {}
        self.tried: Counter[tuple[tuple[int, int, int], str]] = Counter()
        self._held: dict[tuple[int, int], float] = {}

    def run(self) -> Found:
        """Search to the end.

        Raises:
            ConfigError: no layout is valid, or none fits.
        """
        for group in self.space.groups():
            self._add_group(group)
        for turn in itertools.count():
            if not self.heap or len(self.ranked) == self.kinds:
                break
            if turn % 256 == 0:
                self.progress(self.counts)
            # Whatever comes out first is replaced by its parts with closer bounds, until a simulated layout comes out.
            _, depth, _, what = heapq.heappop(self.heap)
            (self._add_pipelines, self._add_layouts, self._simulate, self._take)[depth](*what)
        if not self.ranked:
            raise self._nothing_fits()
        self.ranked.sort(key=lambda one: one.time.total)  # needed where a bound was above what it bounds
        # Layouts that would win if they fitted are worth reporting. Their times are known from closed forms so far.
        too_large = [self._predicted(one.work) for one in self.too_large.values() if self._may_be_best(one)]
        too_large = [one for one in too_large if one.time.total < self.ranked[0].time.total]
        too_large.sort(key=lambda one: one.memory_bytes)
        return Found(self.space, self.profile, self.ranked, too_large, self.counts, self.usable)

    def _add_group(self, group: Workload) -> None:
        """Put a group into the heap, unless none of its layouts can fit."""
        layouts = len(self.space.pipelines(group)) * len(self.space.splits(group))
        self.counts.valid += layouts
        if self.least_memory(group) > self.usable:
            self.counts.too_large += layouts
            return
        self._push(least_group_time(group, self.profile), 0, (group,))

    def _push(self, bound: float, depth: int, what: tuple[Any, ...]) -> None:
        heapq.heappush(self.heap, (bound * _ROUNDING, depth, (next(self.numbers),), what))

    def least_memory(self, group: Workload) -> float:
        """A lower bound in bytes on a group's layouts: activations, and an equal share of weights and gradients."""
        key = group.pipeline, group.microbatches
        if key not in self._held:
            pipelines = self.space.pipelines(group)
            self._held[key] = min(self._held_layers(group, *choice) for choice in pipelines)
        # Master weights and their gradients.
        state = 2 * BYTES["float32"] * group.model.num_parameters() / group.num_gpus
        layer = min(kept_of(group, self.profile.device).layers)
        return self._held[key] * layer + state + self.profile.overhead_bytes

    def _held_layers(self, group: Workload, schedule: str, virtual: int) -> float:
        """The most layers times microbatches whose activations a rank holds."""
        work = self.space.member(group, schedule, virtual, 0, 1, group.shard)
        p, per_rank, layers = group.pipeline, stages_per_rank(schedule, virtual), pipeline_of(work).layers
        held = (in_flight(schedule, p, per_rank, group.microbatches, rank) * sum(layers[rank]) for rank in range(p))
        return max(held) / per_rank

    def _add_pipelines(self, group: Workload) -> None:
        if self._done(group):
            return
        for choice, bound in pipeline_bounds(self.space, group, self.profile):
            self.counts.computed += 1
            self._push(bound * _least_part(group.pipeline, choice[0]), 1, (group, choice))

    def _add_layouts(self, group: Workload, choice: tuple[str, int]) -> None:
        """Put a pipeline's layouts into the heap by their step times, except those known not to fit.

        The most sharded layouts come first. With fewer shards, memory only grows. In 16-bit types it also grows with a
        lower ZeRO stage, if backward passes are whole. Layouts with split backward passes are judged when their turn
        comes, because the exact judgement, needed where the estimate does not decide, takes long.
        """
        if self._done(group):
            return
        nothing_lower_fits = False
        pipeline = self.space.member(group, *choice, 0, 1, group.shard)
        found: dict[bool, Passes] = {}
        for zero, splits in itertools.groupby(self.space.splits(group), key=lambda split: split[0]):
            may_fit = not nothing_lower_fits
            known = (group.tensor, group.pipeline, zero) in self.cells
            for index, (_, replicas, shards) in enumerate(splits):
                if not may_fit:
                    self.counts.too_large += 1
                elif not known:
                    work = pipeline._replace(zero_stage=zero, replicate=replicas, shard=shards)
                    if zero == 3 and choice[0] not in SPLIT_BACKWARD:
                        may_fit = self._fits(work)
                        # Not so in float32, where ZeRO 0 has its weights once and ZeRO 3 gathers a copy of that type.
                        nothing_lower_fits = not may_fit and index == 0 and work.dtype != "float32"
                    if may_fit:
                        whole = work.gradients_are_whole
                        if whole not in found:
                            found[whole] = passes(work, self.profile)
                        self._add_layout(work, found[whole])

    def _fits(self, work: Workload, exact: bool = False) -> bool:
        """Whether a layout fits, by an estimate; if ``exact`` and that is too rough, by following every pass."""
        used = needed = largest_memory(work, self.profile, exact=False)
        if exact and work.schedule in SPLIT_BACKWARD and _UNSURE[0] < used / self.usable < _UNSURE[1]:
            needed = largest_memory(work, self.profile)
        if needed > self.usable:
            self._remember(work, used)
        return needed <= self.usable

    def _add_layout(self, work: Workload, found: Passes) -> None:
        time = sharded_step_time(work, self.profile, found)
        self.counts.computed += 1
        heapq.heappush(self.heap, (time.total * _least_part(work.pipeline, work.schedule), 2, _order(work), (work,)))

    def _remember(self, work: Workload, used: float) -> None:
        """Count a layout that is too large. For every pair of degrees, keep the one nearest to fitting."""
        self.counts.too_large += 1
        key = work.tensor, work.pipeline
        if key not in self.too_large or used < self.too_large[key].memory_bytes:
            self.too_large[key] = Candidate(work, step_time(work, self.profile), used)

    def _done(self, group: Workload) -> bool:
        """Whether the best layouts of all the group's kinds are known."""
        zeros = {zero for zero, _, _ in self.space.splits(group)}
        return all((group.tensor, group.pipeline, zero) in self.cells for zero in zeros)

    def _simulate(self, work: Workload) -> None:
        """If a layout fits and may be the first of its kind, find the time that it is ranked by."""
        is_known_to_fit = work.zero_stage == 3 and work.schedule not in SPLIT_BACKWARD
        tried = self.tried[_cell(work), work.schedule]
        if _cell(work) in self.cells or tried == _SIMULATED or (tried and work.pipeline == 1):
            return
        if is_known_to_fit or self._fits(work, exact=True):
            self.counts.simulated += 1
            self.tried[_cell(work), work.schedule] += 1
            time = simulated_step_time(work, self.profile)
            heapq.heappush(self.heap, (time.total, 3, _order(work), (work, time)))

    def _take(self, work: Workload, time: StepTime) -> None:
        """Rank the next layout in the order of time, if it is the first of its kind."""
        if _cell(work) not in self.cells:
            self.cells.add(_cell(work))
            self.ranked.append(Candidate(work, time, largest_memory(work, self.profile)))

    def _may_be_best(self, one: Candidate) -> bool:
        return one.time.total * _least_part(one.work.pipeline, one.work.schedule) < self.ranked[0].time.total

    def _predicted(self, work: Workload) -> Candidate:
        return Candidate(work, simulated_step_time(work, self.profile), largest_memory(work, self.profile))

    def _nothing_fits(self) -> ConfigError:
        if not self.counts.valid:
            return self.space.no_layout()
        least = min(self.too_large.values(), key=lambda one: one.memory_bytes, default=None)
        need = f"; the smallest found needs {least.memory_bytes / 2**30:.0f} GiB" if least else ""
        problem = (
            f"no layout of {self.counts.valid:,} on {self.space.num_gpus} GPUs fits into {self.usable / 2**30:.0f} GiB "
            f"({100 * MEMORY_MARGIN:.0f} % kept free){need}; use more or larger GPUs"
        )
        return ConfigError("cluster.gpu", self.profile.device.name, problem)


def least_group_time(group: Workload, profile: Profile) -> float:
    """A lower bound in seconds on a group's layouts: the passes of a rank with at least the mean number of layers."""
    work = group._replace(zero_stage=_least_zero(group))
    one = work.one_microbatch()
    costs = [layer_cost(one, profile, kind) for kind, count in enumerate(work.model.layer_counts) if count]
    once = [cost.forward + cost.backward + cost.forward_tensor + cost.backward_tensor for cost in costs]
    recomputed = [(cost.recomputed + cost.recomputed_tensor) / work.recompute_every for cost in costs]
    return work.microbatches * ceil(work.model.num_layers / work.pipeline) * min(map(add, once, recomputed))


def pipeline_bounds(space: Space, group: Workload, profile: Profile) -> Iterator[tuple[tuple[str, int], float]]:
    """A group's pipelines, each with a lower bound in seconds over all ways in which ZeRO can split it.

    Pipelines with the same slowest rank share what data parallelism adds. For ZeRO 0 and 1, the passes are those of
    ZeRO 2: they are shorter, and by more than the communication that they would hide less.
    """
    known: dict[tuple[Any, ...], list[Sharding]] = {}
    for choice in space.pipelines(group):
        work = space.member(group, *choice, _least_zero(group), 1, group.shard)
        found = passes(work, profile)
        key = found[:5]  # everything that `sharding` depends on
        if key not in known:
            layouts = (space.member(group, *choice, *split) for split in space.splits(group))
            known[key] = [sharding(layout, profile, found) for layout in layouts]
        m = work.microbatches
        added = [m * one.gathered + one.data + one.update + found.bubble * one.elsewhere for one in known[key]]
        yield choice, found.seconds + min(added)


def _least_zero(work: Workload) -> int:
    """The ZeRO stage with the fastest microbatches: 2 accumulates only shards of gradients and gathers only once."""
    return 2 if work.data_parallel * work.context > 1 else 0


def _cell(work: Workload) -> tuple[int, int, int]:
    """A layout's kind: tensor degree, pipeline degree and ZeRO stage."""
    return work.tensor, work.pipeline, work.zero_stage


def _least_part(pipeline: int, schedule: str) -> float:
    return _CLOSED_FORMS[pipeline > 1 and schedule in V_SHAPED]


_MODES = {"none": 0, "experts": 1, "selective": 2, "full": 3}
_SCHEDULES = {name: number for number, name in enumerate(dict.fromkeys(("1f1b", "interleaved_1f1b", *SCHEDULES)))}


def _order(work: Workload) -> tuple[int, ...]:
    return (
        work.context,
        work.expert,
        work.pipeline,
        work.tensor,
        _MODES[work.recompute],
        -work.recompute_every,
        _SCHEDULES[work.schedule],
        work.virtual_stages,
        work.zero_stage,
        work.replicate,
        -work.micro_batch_size,
        work.sequence_parallel,
    )
