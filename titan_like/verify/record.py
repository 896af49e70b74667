"""What is compared: measured numbers and exact facts, each of a step, a row of the table and, often, a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

EXACT, SINGLE, DROPOUT, RESUME = "float64", "float32", "dropout", "resume"  # kinds of runs, besides the half types
HALF = ("bfloat16", "float16")

# Rows of the table, in the order in which things happen within a step.
INITIAL = "initial weights"
REPLICAS = "copies equal on all ranks"
SCHEDULE = "length and learning rates of the whole run"
SAMPLES = "samples, each exactly once"
BATCH = "batch size, samples and tokens"
RATE = "learning rate"
LOSS = "loss"
MISSING = "missing gradients"
GRADIENT = "gradients"
SAME_TYPE = "gradients of one process in this type"
EQUAL = "losses and norms equal on all ranks"
NORM = "gradient norm"
ZEROS = "gradient elements that are zero"
SKIPPED = "steps that are not finite are skipped on all ranks"
LOSS_SCALE = "loss scale"
CLIPPED = "gradients after clipping"
TYPES = "types of weights and optimizer state"
UPDATE = "updates from these gradients"
WEIGHT = "weights"
VALIDATION = "validation loss"
WHOLE_VALIDATION = "validation loss on the whole split"
LARGE_LOSS, LARGE_GRADIENT, LARGE_NORM = (f"{row} with large logits" for row in (LOSS, GRADIENT, NORM))
MASKS_EVERYWHERE = "dropout in every layer and microbatch"
MASKS_EQUAL = "dropout equal where activations are"
MASKS_DIFFER = "dropout different where activations are"
MASKS_AGAIN = "dropout drawn again in recomputation"
KEPT = "share that dropout keeps"
DROPOUT_LOSS = "loss of one process with these masks"
DROPOUT_GRADIENT = "gradients of one process with these masks"
DROPOUT_VALIDATION = "no dropout in validation"
DROPOUT_RESUMED = "a resumed run draws the same dropout"
RUNS, ENDS = "the layout runs", "the layout ends"
ROWS = (
    *(INITIAL, REPLICAS, SCHEDULE, SAMPLES, BATCH, RATE, LOSS_SCALE, LOSS, SKIPPED, MISSING, GRADIENT, SAME_TYPE),
    *(NORM, EQUAL, ZEROS, CLIPPED, TYPES, UPDATE, WEIGHT, VALIDATION, WHOLE_VALIDATION),
    *(LARGE_LOSS, LARGE_NORM, LARGE_GRADIENT),
    *(MASKS_EVERYWHERE, KEPT, MASKS_EQUAL, MASKS_DIFFER, MASKS_AGAIN, DROPOUT_LOSS, DROPOUT_GRADIENT),
    *(DROPOUT_VALIDATION, DROPOUT_RESUMED, RUNS, ENDS),
)

Tensors = dict[str, torch.Tensor]


def bad_steps(good_steps: int) -> dict[int, bool]:
    """Steps whose gradients are not finite, each between two good ones: step → whether it is the model's end that is.

    In one the last element of the last matrix is infinite, in the other the first element of the first is NaN: what
    one stage or shard alone can know, all must heed.
    """
    return {2: True} if good_steps < 3 else {2: True, 4: False}


def num_steps(good_steps: int) -> int:
    """Steps of a run, bad ones included."""
    return good_steps + len(bad_steps(good_steps))


class Key(NamedTuple):
    """What a number or a fact is of."""

    step: int  # from 1; 0 is before the first
    row: str
    name: str = ""  # a parameter, where there is one number for each

    @property
    def order(self) -> tuple[int, int]:
        """Sorts keys by the time at which things happen."""
        return self.step, ROWS.index(self.row)

    def __str__(self) -> str:
        return "|".join(map(str, self))


@dataclass(frozen=True)
class Measure:
    """How far one number of one rank is from what it should be, relative to its size."""

    difference: float
    allowed: float  # 0: must be equal; then the difference is how many things are wrong
    detail: str = ""

    @property
    def ok(self) -> bool:
        """NaN is not."""
        return self.difference <= self.allowed

    @property
    def nearness(self) -> float:
        """Sorts measures: above 1 (or any, where nothing is allowed) is wrong."""
        if math.isnan(self.difference):
            return math.inf
        return self.difference / self.allowed if self.allowed else self.difference * math.inf if self.difference else 0


@dataclass(frozen=True)
class Truth:
    """The training that every layout has to reproduce. Its tensors are in a file that the processes share."""

    file: Path
    names: list[str]  # of all parameters, in the model's order
    alike: list[tuple[str, str]]  # parameters that begin with the same random numbers
    max_norm: float  # that gradients are clipped at, in every step; 0 where the configuration does not clip
    micro_batch_size: int  # samples that half types round together
    data_parallel: int  # processes that the samples are laid out for
    sizes: dict[Key, float]  # L2 norm that a difference is relative to
    allowed: dict[str, dict[Key, float]]  # relative difference, by type
    facts: dict[Key, object]

    def samples_of(self, step: int) -> tuple[int, int]:
        """(samples of a step, samples consumed by its end)."""
        numbers = self.facts[Key(step, BATCH)]
        assert isinstance(numbers, tuple)
        return numbers[0], numbers[1]


@dataclass
class Seen:
    """What one process of a layout reports of one kind of run."""

    kind: str
    rank: int
    coordinates: dict[str, int] = field(default_factory=dict)  # by dimension of the mesh
    seconds: float = 0.0
    measures: dict[Key, Measure] = field(default_factory=dict)
    samples: dict[int, list[list[int]]] = field(default_factory=dict)  # step → of each microbatch, index of each sample
    scalars: dict[Key, float] = field(default_factory=dict)  # that must be equal on all ranks
    digests: dict[Key, str] = field(default_factory=dict)  # of parts of tensors; equal keys must have equal digests

    def add(self, key: Key, measure: Measure) -> None:
        """Keep the worse of two measures: a process may hold a tied table twice."""
        known = self.measures.get(key)
        if known is None or measure.nearness > known.nearness:
            self.measures[key] = measure

    def wrong(self, key: Key, problem: str | None) -> None:
        """Something that must hold exactly, and what is wrong with it (None: nothing)."""
        self.add(key, Measure(float(problem is not None), 0.0, problem or ""))


class Comparison:
    """Compares what one process sees with the reference."""

    def __init__(self, truth: Truth, seen: Seen, kind: str) -> None:
        """``kind`` names the tolerances to use, a floating-point type."""
        self.truth, self.seen, self.kind = truth, seen, kind
        self._file = safe_open(truth.file, framework="pt")

    def part(self, key: Key, offset: tuple[int, ...], shape: torch.Size) -> torch.Tensor:
        """Part of a tensor of the reference, float64."""
        if not shape:
            return self._file.get_tensor(str(key))
        slices = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        return self._file.get_slice(str(key))[slices]

    def scalar(self, key: Key, value: float) -> None:
        """Compare a number."""
        expected = self.truth.facts[key]
        assert isinstance(expected, float)
        self.seen.scalars[key] = value
        detail = f"{value:.9g}, not {expected:.9g}"
        size = self.truth.sizes[key]
        self.seen.add(key, Measure(abs(value - expected) / size, self.truth.allowed[self.kind][key], detail))

    def tensor(self, key: Key, local: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Compare the part of a tensor that is here: its distance counts against the whole tensor's size."""
        if local.numel() == 0:
            return
        expected = self.part(key, offset, local.shape).to(local.device)
        distance = (local.detach().double() - expected).norm().item()
        self.seen.add(key, Measure(distance / self.truth.sizes[key], self.truth.allowed[self.kind][key]))

    def fact(self, key: Key, value: object) -> None:
        """Compare something that must be equal."""
        expected = self.truth.facts[key]
        self.seen.wrong(key, None if value == expected else f"{value}, not {expected}")
