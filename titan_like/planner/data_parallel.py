"""What data parallelism gathers, reduces and frees in each pass of a stage. Memory, traffic and time read it here.

FSDP2 gathers a unit when a pass needs it and it is not gathered yet. ZeRO 1 and 2 keep all units until the stage's last
backward pass in a step. ZeRO 3 frees all units but the root after each pass, and the root after backward passes.
Gradients are reduced in every backward pass under ZeRO 2 and 3, otherwise in the last one (arXiv 1910.02054,
2304.11277). Without FSDP2, a process in a 16-bit type computes with `ComputeCopies` of its weights.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from titan_like.parallel.split import GRADIENT_UNIT_BYTES
from titan_like.planner.stages import StageProgram, Unit
from titan_like.planner.trace.program import Parameter, Segment
from titan_like.planner.workload import BYTES, Workload, element_bytes
from titan_like.torch_private.fsdp import HeldLonger, held_longer


class Weights:
    """What a stage has of gathered weights between passes."""

    NOT_GATHERED, AFTER_FORWARD, AFTER_BACKWARD = range(3)


class Gradients:
    """What a stage has of gradients between passes: of one backward pass, or sums.

    Gradients of a split backward pass's first part may wait for the second part. After a second part without such, the
    matrices' gradients were the last to be summed. `SUMS_AND_ONE_PASS`: of matrices of one pass, of others sums.
    """

    NONE, FIRST_PARTS, SUMS_OF_FIRST_PARTS, OF_ONE_PASS, ONE_PASS_AND_FIRST_PARTS, SUMS_AND_ONE_PASS = range(6)
    SUMS, SUMS_AND_FIRST_PARTS, MATRICES, MATRICES_AND_FIRST_PARTS, FINISHED = range(6, 11)
    ONLY_FIRST_PARTS = frozenset((FIRST_PARTS, SUMS_OF_FIRST_PARTS))
    WAITING = ONLY_FIRST_PARTS | {ONE_PASS_AND_FIRST_PARTS, SUMS_AND_FIRST_PARTS, MATRICES_AND_FIRST_PARTS}
    FRESH = frozenset((FIRST_PARTS, OF_ONE_PASS))  # nothing has been summed
    FRESH_MATRICES = frozenset((OF_ONE_PASS, ONE_PASS_AND_FIRST_PARTS, SUMS_AND_ONE_PASS))


_WITH_FIRST_PARTS = {
    Gradients.NONE: Gradients.FIRST_PARTS,
    Gradients.FIRST_PARTS: Gradients.SUMS_OF_FIRST_PARTS,
    Gradients.OF_ONE_PASS: Gradients.ONE_PASS_AND_FIRST_PARTS,
    Gradients.SUMS_AND_ONE_PASS: Gradients.ONE_PASS_AND_FIRST_PARTS,
    Gradients.SUMS: Gradients.SUMS_AND_FIRST_PARTS,
    Gradients.MATRICES: Gradients.MATRICES_AND_FIRST_PARTS,
}


class PassKind(NamedTuple):
    """All that a stage's memory during a pass depends on, apart from what it holds."""

    kind: str  # F, B, I or W
    is_first: bool  # first forward pass of the step, or no gradients are summed up yet
    is_last: bool  # the stage's last backward pass
    gradients: int  # state of the stage's gradients before the pass
    gathers_root: bool = False  # under ZeRO 3: a backward pass after another, which has freed the root's weights


class StageState:
    """The states of a stage's weights and gradients in the course of a step."""

    def __init__(self, microbatches: int) -> None:
        self.weights, self.gradients = Weights.NOT_GATHERED, Gradients.NONE
        self._left = microbatches  # backward passes

    def advance(self, kind: str) -> PassKind:
        """Change the states as the stage's next pass does, and return that pass; ``kind`` is F, B, I or W."""
        before = self.gradients
        if kind == "F":
            is_first, self.weights = self.weights == Weights.NOT_GATHERED, Weights.AFTER_FORWARD
            return PassKind(kind, is_first, False, before)
        is_first = before in (Gradients.NONE, *Gradients.ONLY_FIRST_PARTS)
        gathers_root = kind != "W" and self.weights != Weights.AFTER_FORWARD
        if kind != "W":
            self.weights = Weights.AFTER_BACKWARD
        if kind == "I":
            self.gradients = _WITH_FIRST_PARTS.get(before, before)
            return PassKind(kind, is_first, False, before, gathers_root)
        self._left -= 1
        if self._left == 0:
            self.gradients, self.weights = Gradients.FINISHED, Weights.NOT_GATHERED
        elif self.gradients in (Gradients.NONE, Gradients.FIRST_PARTS):
            self.gradients = Gradients.OF_ONE_PASS
        elif self.gradients == Gradients.SUMS_OF_FIRST_PARTS:
            self.gradients = Gradients.SUMS_AND_ONE_PASS
        elif kind == "B" or self.gradients in Gradients.WAITING:
            self.gradients = Gradients.SUMS
        else:  # an earlier second part has also reduced what the first parts of later microbatches had left
            self.gradients = Gradients.MATRICES
        return PassKind(kind, is_first, self._left == 0, before, gathers_root)


class Rules(NamedTuple):
    """How data parallelism treats a stage's weights and gradients, whatever the number of shards."""

    zero_stage: int  # 0 if no other process has the same weights
    gathers_every_pass: bool
    reduces_every_pass: bool
    wrapped: bool  # FSDP2, or its `replicate`, gathers or casts weights before use
    copied: bool  # the model computes with `ComputeCopies`
    replicated: bool  # then gradients that are missing are summed as zeros
    single: tuple[str, ...]  # names in `Sharding.shards` that have one shard: gathers need no buffer
    compute: int  # bytes of an element in the forward and backward pass
    reduce: int  # in sums of gradients over processes
    master: int  # of master weights, and of sums over microbatches
    held_longer: HeldLonger

    def gathers(self, pass_: PassKind) -> bool:
        """Whether a pass gathers or casts weights."""
        if pass_.kind == "F":
            return self.wrapped and (pass_.is_first or self.gathers_every_pass)
        return pass_.kind != "W" and self.gathers_every_pass

    def reduces(self, pass_: PassKind) -> bool:
        """Whether a pass reduces gradients over processes."""
        return self.wrapped and pass_.kind in "BW" and (pass_.is_last or self.reduces_every_pass)

    def reduces_matrices_alone(self, pass_: PassKind) -> bool:
        """Whether gradients are missing for all parameters but matrices.

        That is so in the second part of a split backward pass, unless first parts wait. The first second part also
        reduces what several first parts have left. With replicas, `DataParallel` adds zeros for missing gradients.
        """
        has_first_parts = pass_.kind != "W" or pass_.gradients in Gradients.WAITING
        return self.reduces_every_pass and not self.replicated and not has_first_parts

    @property
    def adds_in_place(self) -> bool:
        """Whether autograd itself adds fresh gradients to sums over microbatches, so none of them waits for others."""
        if self.copied or self.reduces_every_pass:
            return False
        return self.compute == self.master == self.reduce or (self.wrapped and not self.held_longer.fresh_gradients)

    @property
    def results(self) -> int:
        """How many tensors of a unit's size its reduction needs at once if the unit has one shard."""
        return 3 if self.held_longer.quotient else 2

    def frees(self, pass_: PassKind) -> bool:
        """Whether a pass frees gathered weights. A backward pass does so unit by unit before it reduces gradients."""
        return self.wrapped and (self.gathers_every_pass or (pass_.is_last and pass_.kind in "BW"))

    def has_shards(self, gradients: int) -> bool:
        """Whether reduced gradients exist in this state between passes."""
        if gradients == Gradients.FINISHED:
            return self.wrapped
        return self.reduces_every_pass and gradients not in (Gradients.NONE, *Gradients.ONLY_FIRST_PARTS)

    def gathered_elements(self, unit: Unit) -> int:
        """Elements of a unit that are gathered, before ZeRO shards them. Only ZeRO 3 gathers frozen parameters."""
        return unit.elements + (unit.frozen_elements if self.gathers_every_pass else 0)

    def gathered_and_buffered(self, units: Iterable[Unit]) -> tuple[int, int]:
        """`gathered_elements` of some units, and how many of them are gathered through a buffer."""
        sizes = [(self.gathered_elements(unit), unit.sharers not in self.single) for unit in units]
        return sum([size for size, _ in sizes]), sum([size for size, is_buffered in sizes if is_buffered])


def gathers_every_pass(zero_stage: int) -> bool:
    """Whether every forward and every backward pass gathers weights, and frees them."""
    return zero_stage == 3


def reduces_every_pass(zero_stage: int) -> bool:
    """Whether every backward pass reduces gradients, and not only the last one."""
    return zero_stage >= 2


class Sharding(NamedTuple):
    """The rules for a run, and the sizes of its groups."""

    rules: Rules
    holders: dict[str, int]  # by mesh dimension over which ZeRO would shard: processes with the same weights
    shards: dict[str, int]  # how many of these processes it shards over
    replicate: int


def sharding_of(work: Workload) -> Sharding:
    """A run's sharding."""
    sizes = {name: size for name, (size, _) in shard_groups(work).items()}
    holders = {name: work.replicate * size for name, size in sizes.items()}
    # Other processes may hold the experts than hold the rest of a layer.
    shares_experts = work.has_experts and (work.expert > 1 or work.tensor > 1)
    shared = max(holders.values() if shares_experts else [holders["dp_shard"]]) > 1
    compute, zero = element_bytes(work.dtype), work.zero_stage if shared else 0
    master = max(compute, BYTES["float32"])
    in_half = compute < master
    shards = sizes if zero else dict.fromkeys(sizes, 1)
    rules = Rules(
        zero_stage=zero,
        gathers_every_pass=gathers_every_pass(zero),
        reduces_every_pass=reduces_every_pass(zero),
        wrapped=shared and (in_half or zero > 0),
        copied=in_half and not shared,
        replicated=work.replicate > 1,
        single=tuple([name for name, size in shards.items() if size == 1]),
        compute=compute,
        reduce=BYTES[work.reduce_dtype] if in_half else master,
        master=master,
        held_longer=held_longer(),
    )
    return Sharding(rules, holders, shards, work.replicate)


def shard_groups(work: Workload) -> dict[str, tuple[int, int]]:
    """Mesh dimension over which ZeRO shards → number of processes in it, and the stride of their ranks."""
    shards, inside = work.shard * work.context, work.expert * work.expert_tensor
    # Of experts as `Layout.expert_shards`.
    return {"dp_shard": (shards, work.tensor), "expert_shard": (shards * work.tensor // inside, inside)}


def shard_rows(rows: int, shards: int, rank: int = 0) -> int:
    """Rows of a parameter on one of ``shards`` processes, as `torch.chunk` divides them."""
    largest = -(-rows // shards)
    return max(0, min(largest, rows - rank * largest))


def shard_elements(parameter: Parameter, shards: int, rank: int = 0) -> int:
    """Elements of a parameter on one of ``shards`` processes."""
    rows, *_ = parameter.shape
    return parameter.elements // rows * shard_rows(rows, shards, rank)


def communication(
    stage: StageProgram, kinds: Sequence[str], sharding: Sharding
) -> Iterator[tuple[list[Unit], list[Unit], bool]]:
    """Yield the units that each pass of a stage gathers, those that it reduces, and whether it also sums over replicas.

    Units that are reduced have only the parameters whose gradients there are. ``kinds``: of the stage's passes in a
    step, in order.
    """
    rules = sharding.rules
    units = [unit for unit in stage.units if sharding.holders[unit.sharers] > 1]
    units = [unit for unit in units if unit.parameters or rules.gathers_every_pass]
    trained = [unit for unit in units if unit.parameters]
    state = StageState(sum(kind in "BW" for kind in kinds))
    for kind in kinds:
        weights, pass_ = state.weights, state.advance(kind)
        gathered, reduced = list[Unit](), list[Unit]()
        if rules.zero_stage and rules.gathers(pass_):
            # A backward pass needs no frozen table.
            needed = [unit for unit in units if kind == "F" or unit.parameters or unit.name in ("", "layers")]
            gathered = [unit for unit in needed if unit.name or weights != Weights.AFTER_FORWARD]
        if rules.reduces(pass_):
            reduced = [unit.matrices for unit in trained] if rules.reduces_matrices_alone(pass_) else trained
        # Without a root, FSDP2 also gathers what the forward pass of the microbatch before ended with, which ZeRO 3
        # does early instead (`StageMemory.prefetched`).
        lacks_root = len(units) > 1 and units[-1].name
        if pass_.is_last and 0 < rules.zero_stage < 3 and lacks_root and _follows_another(kinds):
            gathered.append(units[-1])
        yield gathered, reduced, pass_.is_last


def _follows_another(kinds: Sequence[str]) -> bool:
    """Whether a forward pass precedes the one that FSDP2, which takes back the newest first, takes back last."""
    forward, number, taken = list[int](), 0, 0
    for kind in kinds:
        if kind == "F":
            forward.append(number)
            number += 1
        elif kind in "BI":
            taken = forward.pop()
    return taken > 0


class LayerUnit(NamedTuple):
    """Layers that are gathered and reduced together, in elements before ZeRO shards them."""

    elements: int = 0
    frozen: int = 0  # that are gathered and have no gradients
    largest_parameter: int = 0
    last_parameter: int = 0
    experts: int = 0  # elements that other processes share, which are reduced first
    last_of_experts: int = 0  # elements of their last parameter
    experts_alone: bool = False  # whether no process shares them
    buffered: int = 0  # of the experts, or of the other elements, whichever are gathered through a buffer
    prefetched: int = 0  # gathered while the backward pass of the unit above runs: not yet the experts

    @property
    def gathered(self) -> int:
        """Elements that are gathered."""
        return self.elements + self.frozen


def layer_units(stage: StageProgram, single: tuple[str, ...], gathers_frozen: bool) -> list[LayerUnit]:
    """The units of a stage's layers, in the order of the forward pass.

    ``single`` as in `Rules`; ``gathers_frozen``: whether frozen parameters are gathered, as under ZeRO 3.
    """
    ends = pairwise(accumulate(stage.layers_per_unit, initial=0))
    return [_layer_unit(stage.layers[first:end], single, stage.sharers, gathers_frozen) for first, end in ends]


@lru_cache(maxsize=65536)
def _layer_unit(layers: tuple[Segment, ...], single: tuple[str, ...], dense: str, gathers_frozen: bool) -> LayerUnit:
    sizes, frozen = Counter[str](), Counter[str]()
    for segment in layers:
        sizes.update(segment.elements)
        frozen.update(segment.frozen_elements if gathers_frozen else {})
    of_experts = [sharers for sharers in sizes if sharers != dense]
    parameters = layers[-1].parameters
    return LayerUnit(
        elements=sum(sizes.values()),
        frozen=sum(frozen.values()),
        largest_parameter=max(segment.largest_parameter for segment in layers),
        last_parameter=parameters[-1].elements,
        experts=sum(sizes[sharers] for sharers in of_experts),
        last_of_experts=next((p.elements for p in parameters[::-1] if p.sharers != dense), 0),
        experts_alone=all(sharers in single for sharers in of_experts),
        buffered=max((size for sharers, size in (sizes + frozen).items() if sharers not in single), default=0),
        prefetched=0 if dense in single else sizes[dense] + frozen[dense],
    )


class CopiedUnit(NamedTuple):
    """Weights whose gradients `ComputeCopies` adds up together."""

    elements: int
    largest_parameter: int


def copied_units(stage: StageProgram, element: int) -> list[CopiedUnit]:
    """A stage's units of at least `GRADIENT_UNIT_BYTES`, from its end. ``element``: bytes of an element of a copy."""
    units, sizes = list[CopiedUnit](), list[int]()
    backwards = [parameter for segment in reversed(stage.segments) for parameter in reversed(segment.parameters)]
    for parameter in sorted(backwards, key=lambda parameter: parameter.precedes_layers):  # a tied table at the end too
        if element * sum(sizes) >= GRADIENT_UNIT_BYTES:
            units.append(CopiedUnit(sum(sizes), max(sizes)))
            sizes = []
        sizes.append(parameter.elements)
    return [*units, CopiedUnit(sum(sizes), max(sizes))]
