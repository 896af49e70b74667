"""Pipeline stages as sequences of traced segments, and who shares their parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.parallel.schedules.tables import stage_ranks
from titan_like.parallel.split import balanced_layers, units_of_layers
from titan_like.planner.trace import TraceKey, trace
from titan_like.planner.trace.program import Parameter, Program, Segment
from titan_like.planner.workload import BYTES, Workload, stored_dtype

Source = Callable[[TraceKey], Program]  # `trace`, or `estimate`
Kinds = tuple[int, ...]  # of successive layers, as in `TransformerConfig.layer_kinds`


def stages_of_rank(work: Workload, rank: int) -> dict[int, StageProgram]:
    """The stages of a pipeline rank by their number."""
    owners = zip(pipeline_program(work).stages, pipeline_of(work).ranks, strict=True)
    return {number: stage for number, (stage, owner) in enumerate(owners) if owner == rank}


def pipeline_program(work: Workload, source: Source = trace) -> PipelineProgram:
    """The stages of a run's pipeline on their ranks."""
    return _pipeline_program(TraceKey.of(work), pipeline_of(work), source)


@lru_cache(maxsize=65536)
def _pipeline_program(key: TraceKey, alike: PipelineKinds, source: Source) -> PipelineProgram:
    return PipelineProgram(alike, [_stage_program(key, kind.place, alike.every, source) for kind in alike.kinds])


def pipeline_of(work: Workload) -> PipelineKinds:
    """How the ranks of a run's pipeline share its layers. Layouts with the same stages share one cached result."""
    every = 1 if work.recompute == "none" else work.recompute_every
    return _pipeline(work.stage_layers, work.model, work.schedule, work.pipeline, work.virtual_stages, every)


@lru_cache(maxsize=65536)
def _pipeline(
    counts: tuple[int, ...] | None, model: TransformerConfig, schedule: str, pipeline: int, virtual: int, every: int
) -> PipelineKinds:
    ranks, kinds = stage_ranks(schedule, pipeline, virtual), iter(model.layer_kinds)
    sizes = counts or balanced_layers(len(model.layer_kinds), len(ranks), 0.0)
    return PipelineKinds([tuple(islice(kinds, size)) for size in sizes], ranks, every)


class PipelineKinds:
    """How a pipeline's ranks share the layers, and which stages, and which ranks, are equal."""

    def __init__(self, stages: list[Kinds], ranks: list[int], every: int) -> None:
        """Arguments: kinds of the layers by stage, the stages' ranks, and which layers are recomputed."""
        self.ranks, self.every = ranks, every
        self.crosses = [rank != following for rank, following in pairwise(ranks)]  # which boundaries messages cross
        before = [layers % every for layers in accumulate(map(len, stages), initial=0)]
        first, last = [n == 0 for n in range(len(stages))], [n == len(stages) - 1 for n in range(len(stages))]
        places = [StagePlace(*fields) for fields in zip(stages, before[:-1], first, last, strict=True)]
        sends = [False, *self.crosses], [*self.crosses, False]
        stage_kinds = [StageKind(*fields) for fields in zip(places, *sends, strict=True)]
        self.kinds = list(dict.fromkeys(stage_kinds))
        self.kind_of = [self.kinds.index(kind) for kind in stage_kinds]
        of_rank: list[list[int]] = [[] for _ in range(max(ranks) + 1)]
        for stage, rank in enumerate(ranks):
            of_rank[rank].append(stage)
        # The kinds of a rank's stages, and the first stage of the last rank that has them.
        first_stages = {tuple([self.kind_of[stage] for stage in numbers]): numbers[0] for numbers in of_rank}
        self.rank_kinds = list(first_stages.items())
        layers = [[(stages[stage], before[stage]) for stage in numbers] for numbers in of_rank]
        # Of each rank, over all its stages.
        self.num_layers = [sum(len(of_stage) for of_stage, _ in of_stages) for of_stages in layers]
        # Ranks that may hold most: both ends, and the first with each combination of layers and of recomputed ones.
        self.may_be_fullest = sorted({0, len(layers) - 1, *map(layers.index, layers)})


class StageKind(NamedTuple):
    """What pipeline stages that take equally long have in common."""

    place: StagePlace
    sends_back: bool  # to another rank
    sends_on: bool


class StagePlace(NamedTuple):
    """What a stage's program depends on besides its trace."""

    layers: Kinds
    before: int  # layers of earlier stages, modulo n where every n-th layer is recomputed
    is_first: bool
    is_last: bool


@lru_cache(maxsize=65536)
def _stage_program(key: TraceKey, place: StagePlace, every: int, source: Source) -> StageProgram:
    """A stage, where every n-th of the model's layers is recomputed."""
    kinds, before, is_first, is_last = place
    program = source(key)
    plain = program if every == 1 else source(key._replace(recompute="none"))
    layers = [(plain if (before + n) % every else program).layers[kind] for n, kind in enumerate(kinds)]
    if key.lora.rank and is_first and kinds:
        frozen = source(key._replace(frozen_input=True))
        # The first layer's input is freed once later segments have begun.
        less = sum(a.kept - b.kept for a, b in zip(program.segments(), frozen.segments(), strict=True))
        layers[0] = replace(frozen.layers[kinds[0]], kept=layers[0].kept - less)
    if key.offload and is_last:  # whose last layer keeps its tensors
        last = len(kinds) - 1
        recompute = "none" if (before + last) % every else key.recompute
        on_device = source(key._replace(offload=False, recompute=recompute))
        layers[last] = on_device.layers[kinds[last]]
    element = BYTES[stored_dtype(key.dtype)]
    sizes = [sum((*layer.elements.values(), *layer.frozen_elements.values())) for layer in program.layers]
    head = program.head
    return StageProgram(
        segments=(*[program.entry] * is_first, program.inputs, *layers, *[head] * is_last),
        first_layer=is_first + 1,
        num_layers=len(layers),
        ends=tuple(_ends(program, place)),
        layers_per_unit=tuple(units_of_layers([element * sizes[kind] for kind in kinds])),
        is_first=is_first,
        is_last=is_last,
        message=program.entry.output,
        sharers=(head.parameters or head.frozen)[0].sharers,
        groups=program.groups,
    )


def _ends(program: Program, place: StagePlace) -> Iterator[Unit]:
    """Units of the parameters outside layers."""
    segments = program.entry, program.inputs, program.head
    parts = [segment.parameters for segment in segments], [segment.frozen for segment in segments]
    trained, frozen = (_of_ends(place, *lists) for lists in parts)
    for name, sharers in {parameter.unit: parameter.sharers for parameter in (*trained, *frozen)}.items():
        yield Unit(name, sharers, *(tuple(p for p in part if p.unit == name) for part in (trained, frozen)))


def _of_ends(
    place: StagePlace, entry: list[Parameter], inputs: list[Parameter], head: list[Parameter]
) -> list[Parameter]:
    """The parameters that a stage has of these segments."""
    shared = [parameter for parameter in inputs if {*parameter.kinds} & {*place.layers}]
    return [*(entry if place.is_first else ()), *shared, *(head if place.is_last else ())]


class PipelineProgram:
    """The programs of a pipeline's stages. Runs with equal pipelines share the object."""

    def __init__(self, alike: PipelineKinds, programs: list[StageProgram]) -> None:
        """``programs`` has one program for each kind of stage."""
        self.alike, self.programs = alike, programs
        sizes = [program.elements for program in programs]
        self.fullest = max((kinds for kinds, _ in alike.rank_kinds), key=lambda kinds: sum(sizes[n] for n in kinds))
        self.elements = Counter[str]()  # of the parameters of the rank with the most, as `elements_by_sharers`
        for kind in self.fullest:
            self.elements.update(programs[kind].elements_by_sharers)
        self.copied = 0  # elements of parameters that both ends hold, on different ranks
        if alike.ranks[0] != alike.ranks[-1]:
            ends = programs[alike.kind_of[0]], programs[alike.kind_of[-1]]
            first, last = ({p.name: p.elements for unit in end.ends for p in unit.parameters} for end in ends)
            self.copied = sum(first[name] for name in first.keys() & last.keys())

    @property
    def stages(self) -> tuple[StageProgram, ...]:
        """The program of each stage."""
        return tuple(self.programs[kind] for kind in self.alike.kind_of)


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One pipeline stage on one process. Runs with equal stages share the object, so it is compared by identity."""

    segments: tuple[Segment, ...]  # in the order of the forward pass, one for each layer
    first_layer: int  # position of the first layer among the segments
    num_layers: int
    ends: tuple[Unit, ...]  # units outside layers: a table that is freed right after use, and the root
    layers_per_unit: tuple[int, ...]
    is_first: bool
    is_last: bool
    message: int  # bytes of the hidden states between two stages
    sharers: str  # mesh dimension over which ZeRO shards dense parameters
    groups: dict[str, tuple[int, int]]  # as `Program.groups`

    @property
    def layers(self) -> tuple[Segment, ...]:
        """The layers' segments."""
        return self.segments[self.first_layer : self.first_layer + self.num_layers]

    @cached_property
    def counts(self) -> list[tuple[Segment, bool, int]]:
        """Each segment once, with whether it is a layer, and how often the stage has it."""
        layers = Counter(self.layers)
        ends = [segment for segment in self.segments if segment not in layers]
        return [*((end, False, 1) for end in ends), *((layer, True, count) for layer, count in layers.items())]

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units of communication, in the order of the forward pass, the root last."""
        tables = [unit for unit in self.ends if unit.name]
        layers = _layer_units(self.layers, self.layers_per_unit, self.sharers)
        return *tables, *layers, *(unit for unit in self.ends if not unit.name)

    @cached_property
    def elements_by_sharers(self) -> dict[str, int]:
        """Elements of all parameters before ZeRO shards them, by the mesh dimension over which it shards."""
        elements = Counter[str]()
        for segment, is_layer, count in self.counts:
            for sharers, size in segment.elements.items():
                elements[sharers] += size * count * is_layer
        for unit in self.ends:
            elements[unit.sharers] += unit.elements
        return dict(elements)

    @cached_property
    def elements(self) -> int:
        """Number of elements of all parameters, before ZeRO shards them."""
        return sum(self.elements_by_sharers.values())


class Unit(NamedTuple):
    """Parameters of one process that data parallelism gathers and reduces together."""

    name: str  # its first module; "" is the root
    sharers: str  # mesh dimension over which ZeRO shards them
    parameters: tuple[Parameter, ...]  # that are trained
    frozen: tuple[Parameter, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of the trained parameters, before ZeRO shards them."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def frozen_elements(self) -> int:
        """Number of elements of the frozen parameters, which only ZeRO 3 shards and gathers."""
        return sum(parameter.elements for parameter in self.frozen)

    @property
    def matrices(self) -> Unit:
        """The unit with only those trained parameters whose gradients a split backward pass defers."""
        return self._replace(parameters=tuple([parameter for parameter in self.parameters if parameter.deferred]))


def _layer_units(layers: Sequence[Segment], counts: Sequence[int], dense: str) -> Iterator[Unit]:
    """Yield a unit for each group of layers, then one for its parameters that other processes share (experts)."""
    remaining = iter(layers)
    for count in counts:
        members = [next(remaining) for _ in range(count)]
        lists = [p for layer in members for p in layer.parameters], [p for layer in members for p in layer.frozen]
        for sharers in dict.fromkeys([dense, *(parameter.sharers for parameter in (*lists[0], *lists[1]))]):
            yield Unit("layers", sharers, *(tuple(p for p in part if p.sharers == sharers) for part in lists))
