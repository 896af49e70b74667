"""What the reference and the processes of a layout report. Plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Errors:
    """How far one process, computing in some type, is from the exact result. Scalars relatively, tensors in L2 norm."""

    loss: list[float]  # of each step
    grad_norm: list[float]
    validation: list[float]  # before the first step, after it, after the last
    gradients: list[dict[str, float]]
    weights: dict[str, float]  # after the last step
    tipped: dict[str, float]  # what AdamW can make of gradients' rounding, after the last step


@dataclass(frozen=True)
class StepTruth:
    """One step of the reference, in float64."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    batch_size: int  # samples
    consumed_samples: int  # after the step
    valid_tokens: int
    num_zeros: int
    uncertain_zeros: int  # elements of the gradient that are zero but for rounding
    gradients: dict[str, float]  # L2 norm of each parameter's


@dataclass(frozen=True)
class Truth:
    """The training that every layout has to reproduce."""

    names: list[str]  # of all parameters, in the model's order
    alike: list[tuple[str, str]]  # parameters that begin with the same random numbers
    max_norm: float  # that gradients are clipped at, in every step; 0 where the configuration does not clip
    steps: list[StepTruth]
    validation: list[float]  # before the first step, after it, after the last
    weights: dict[str, float]  # L2 norm of each parameter after the last step
    errors: dict[str, Errors]  # by type
    micro_batch_size: int  # samples that half types round together
    folder: str  # of the tensors: see `titan_like.verify.reference.load_tensors`


@dataclass
class StepSeen:
    """One step of one process."""

    loss: float
    grad_norm: float
    lr: float
    batch_size: int
    consumed_samples: int
    consumed_tokens: int
    num_zeros: float | None
    is_skipped: bool
    samples: list[list[int]]  # index of each sample of each microbatch; -1 is none of the data set
    valid_tokens: int  # in the microbatches of this process
    gradients: dict[str, float | None]  # distance from the exact gradient in L2 norm; None: there was no gradient
    same_type: dict[str, float] = field(default_factory=dict)  # distance from the gradient of one process in this type


@dataclass
class RunSeen:
    """One run of one process."""

    kind: str  # float64, float32, bfloat16, float16
    rank: int
    coordinates: dict[str, int]  # by dimension of the mesh
    seconds: float = 0.0
    initial: dict[str, int] = field(default_factory=dict)  # elements that are not those of the reference
    initial_digests: dict[str, list[str]] = field(default_factory=dict)  # of every copy held here
    digests: dict[str, list[str]] = field(default_factory=dict)  # after the last step
    steps: list[StepSeen] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)  # distance from the exact weights after the last step
    bad_step: BadStepSeen | None = None


@dataclass
class BadStepSeen:
    """A step whose gradients are not finite."""

    changed: list[str]  # parameters that it changed
    counted: bool  # as skipped, with its samples consumed


@dataclass(frozen=True)
class Mask:
    """One draw of dropout on one process, as digests of its parts: one a sample, or one a sample and attention head."""

    site: str  # the module after whose start it was drawn
    is_attention: bool
    is_recomputed: bool
    step: int
    microbatch: int  # in the order of drawing at this site
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    stream: str  # of the random generator before the draw


@dataclass
class DropoutSeen:
    """The run with dropout of one process."""

    rank: int
    coordinates: dict[str, int]
    seconds: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)  # before the first step
    # Gradients with recomputation against those without, from the same random numbers: relative distances.
    recompute: dict[str, float] = field(default_factory=dict)
