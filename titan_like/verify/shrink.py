"""Shrink any configuration to a run that a few CPU processes train in a second and that shows the same bugs.

What stays: the model's family, weight ties, ratio of query to key heads and kind of vocabulary (padded or not,
divisible by the tensor-parallel degree or not); each degree above 1 stays above 1; the ZeRO stage, schedule,
recomputation, compilation, optimizer, shape of the learning rate and batch-size ramp-up. What shrinks: sizes, degrees
and numbers of microbatches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from titan_like.config.entry_points import DATASETS
from titan_like.config.errors import ConfigError, require
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig, Training
from titan_like.data.loading.lengths import sample_length, targets_length
from titan_like.models.config import NUM_OPTIONS, TransformerConfig
from titan_like.models.registry import model_config
from titan_like.models.small import small_fields
from titan_like.parallel.axes import fewest_microbatches, in_layout, num_microbatches
from titan_like.parallel.layout import FACTORS, Layout, method_of, resolve_layout
from titan_like.parallel.schedules.tables import V_SHAPED
from titan_like.parallel.split import LAYER_UNIT_BYTES, layers_per_stage
from titan_like.train.rules import check_rules

MOST_PROCESSES = 8
FLAVOR = "verify"
_LONG = 160  # positions of the longer sequences, at most: more than the 128 in a block of many kernels
_MOST_STAGES = 3  # on each rank
_LEFT_OUT = (
    "data.resume",
    "evaluation.sets",
    "evaluation.datasets",
    "checkpoint.hugging_face_interval",
    "checkpoint.initial_load_path",
    "health.skip_nonfinite",
    "health.loss_spike_factor",
    "health.max_consecutive_skips",
)


@dataclass(frozen=True)
class Options:
    """The options of `titan-verify`. Raises a `ConfigError` if a number is out of range."""

    steps: int = 4  # good ones, which are compared
    processes: int | None = None  # of the job, if a shard degree of -1 leaves their number open
    timeout: float = 120.0  # seconds that one run may take
    full_size: bool = False  # keeps the sizes of the model, sequences and microbatches
    keep_layout: bool = False  # keeps the degrees
    on_gpus: bool = False  # gives the model's heads a size that the kernels for GPUs accept

    def __post_init__(self) -> None:
        steps, processes, timeout = self.steps, self.processes, self.timeout
        require(steps >= 2, "--steps", steps, "must be at least 2: there is a bad step between two good ones")
        require(steps <= 100, "--steps", steps, "use at most 100; a few show every difference")
        require(processes is None or processes >= 1, "--processes", processes, "must be at least 1")
        require(timeout > 0, "--timeout", timeout, "must be above 0")


@dataclass(frozen=True)
class Small:
    """A run to verify.

    The gradients of bad steps, each between two good ones, are not finite. True: the last element of the model's last
    matrix is infinite. False: the first element of its first is NaN. One stage or shard alone sees it, and all must
    skip the step.
    """

    config: JobConfig
    num_steps: int  # bad ones included
    bad_steps: dict[int, bool]
    dropout: dict[str, float]  # the run's rates, by the setting that changes them; empty: nothing can be dropped
    longer: dict[str, Any]  # settings of the step with large logits, which may make its sequences longer
    limits: list[str]  # the sizes that are smaller than the original's
    own_data: JobConfig | None  # the run's configuration, if its dataset is another package's, which is read as it is
    left_out: list[str]  # settings of the run that no small run has
    unit_bytes: int  # `LAYER_UNIT_BYTES` here: small layers share a unit of communication only if the original's do

    def dropping(self, config: JobConfig, rate: float) -> JobConfig:
        """The configuration with this rate of dropout wherever the run can have any."""
        values = {"model.overrides": {"dropout": rate}, "lora.dropout": rate}
        return edit(config, {key: values[key] for key in self.dropout})

    @property
    def large(self) -> Small:
        """The run of one step with large logits."""
        return replace(self, config=edit(self.config, self.longer), num_steps=0, bad_steps={})


def resolve(config: JobConfig, processes: int | None) -> Layout:
    """The layout of a configuration, checked against all rules.

    A shard degree of -1 takes what the other degrees leave of ``processes``. Without ``processes`` it becomes 2, which
    brings data parallelism into use, or else the smallest valid degree. Raises a `ConfigError` if no layout is chosen
    yet, or no degree is valid; then the message is about shard degree 1.
    """
    reason = "there is no layout to verify yet; scripts/plan.py search --out writes the one that is chosen"
    require(not config.parallelism.auto, "parallelism.auto", True, reason)
    model, section = model_config(config.model), config.parallelism
    given, errors = Layout.of(section), list[ConfigError]()
    shards = [given.shard] if given.shard > 0 else [2, 1, *range(3, 9)]
    for world in [replace(given, shard=shard).num_processes for shard in shards] if processes is None else [processes]:
        try:
            layout = resolve_layout(section, world)
            check_rules(config, model, layout)
            return layout
        except ConfigError as error:
            errors.append(error)
    raise errors[:2][-1]


def shrink(config: JobConfig, layout: Layout, options: Options) -> Small:
    """The small run of a configuration in a layout."""
    training, model, steps = config.training, model_config(config.model), options.steps
    degrees = layout if options.keep_layout else shrink_degrees(layout)
    unit = degrees.tensor * degrees.context_chunks  # sequences are multiples of it
    method = method_of(config, model).name  # the original's: `auto` could choose another for a small model
    fields, seq_len, micro_batch = model.model_dump(), training.seq_len, training.micro_batch_size
    if options.full_size:
        per_stage = config.parallelism.pipeline_layers if options.keep_layout else None
    else:
        micro_batch = min(micro_batch, 2 * NUM_OPTIONS if "choice" in model.predictions else 3)
        seq_len = unit * max(4 if degrees.context == 1 else 2, 16 // unit)  # several tokens in each part of it
        groups = degrees.context if method == "ulysses" else 1
        fields |= small_fields(model, layout.tensor, degrees.tensor, groups, options.on_gpus, config.float8.enable)
        fields |= fields_of_length(model, training.seq_len, seq_len, degrees.expert)
        fields, per_stage = small_layers(config, fields, len(layout.stage_ranks), len(degrees.stage_ranks))
    dropout = dict[str, float]()
    if "dropout" in fields and degrees.context == 1:
        dropout["model.overrides"] = fields["dropout"]
    if config.lora.dropout:
        dropout["lora.dropout"] = config.lora.dropout
    fields |= {"dropout": 0.0} if "dropout" in fields else {}
    bad_steps = {2: True} if steps < 3 else {2: True, min(steps + 1, 5): False}
    num_steps = steps + len(bad_steps)
    total = steps + 4  # a signal ends the run before its last step
    batch = micro_batch * degrees.data_parallel * shrink_microbatches(training, layout, degrees)
    decay_steps = config.lr_scheduler.decay_steps
    if config.lr_scheduler.decay == "wsd":
        decay_steps = total - 2  # here it is the length of the decay
    elif decay_steps is not None:
        decay_steps = max(config.lr_scheduler.small().warmup_steps + 1, total - 3)  # the decay ends before the run
    values: dict[str, Any] = {
        "model.from_": None,
        "model.flavor": FLAVOR,
        "model.flavors": {FLAVOR: fields},
        "model.overrides": {},
        "training.seq_len": seq_len,
        "training.micro_batch_size": micro_batch,
        **small_batches(training, batch, seq_len, total, num_steps - 1),
        "lr_scheduler.decay_steps": decay_steps,
        "parallelism.context_parallel_method": method,
        "parallelism.pipeline_layers": per_stage,
        "compile.cudagraphs": config.compile.cudagraphs and options.on_gpus,
    }
    if config.lora.rank and config.optimizer.name == "adamw":
        # Half of the adapters begin at 0. A smaller epsilon would make whole steps of their gradients' rounding.
        values["optimizer.eps"] = max(config.optimizer.eps, 1e-3)
    # Compiling the step with large logits would take as long as all else.
    longer, long = dict[str, Any]({"compile.enable": False}), min(training.seq_len, _LONG) // unit * unit
    if not options.full_size:
        values["float8.filter"] = small_filter(config.float8.filter, model.num_layers, fields["num_layers"])
        values |= small_spans(config, model, seq_len, unit)
        if long > seq_len:
            lengths = {"seq_len": long, "steps": total, "samples": None, "tokens": None}
            longer |= {f"training.{key}": value for key, value in lengths.items()}
            of_length = fields_of_length(model, training.seq_len, long, degrees.expert)
            longer |= {"model.flavors": {FLAVOR: fields | of_length}} | small_spans(config, model, long, unit)
    small = in_layout(edit(config.small(), values), degrees)
    original, kept = sizes_of(config, layout), sizes_of(small, degrees)
    kept["positions"] = longer.get("training.seq_len", seq_len)
    limits = [f"{kept[name]} of {size} {name}" for name, size in original.items() if kept[name] < size]
    two_layers = 2 * min(kind.parameters for kind in model.parts.kinds) // layout.tensor
    element = {"float64": 8, "float32": 4}.get(training.dtype, 2)
    unit_bytes = LAYER_UNIT_BYTES if element * two_layers <= LAYER_UNIT_BYTES else 0
    own_data = config if config.data.dataset not in DATASETS else None
    left_out = [key for key in _LEFT_OUT if attrgetter(key)(config) != attrgetter(key)(JobConfig())]
    return Small(small, num_steps, bad_steps, dropout, longer, limits, own_data, left_out, unit_bytes)


def small_layers(
    config: JobConfig, fields: dict[str, Any], original_stages: int, stages: int
) -> tuple[dict[str, Any], list[int] | None]:
    """The small model's ``fields`` with few layers, and the layers of each stage if they are not balanced."""
    model, per_stage = model_config(config.model), None
    if stages > 1 and model.has_decoder:
        original = layers_per_stage(config, model, original_stages)
        per_stage = two_kinds(original, sum(model.layer_counts[:-1]), stages)
    kinds = len(set(model.layer_kinds))  # with one kind, two layers suffice for one stage
    fields = fields | model.with_layers(sum(per_stage) if per_stage else stages + kinds)
    recur = list(model.layer_kinds) != sorted(model.layer_kinds)
    if stages > 1 and not model.has_decoder and (recur or config.parallelism.pipeline_layers):
        for num_layers in range(stages + kinds, max(stages + kinds, 2 * stages) + 1):
            fields = fields | model.with_layers(num_layers)
            in_step, per_stage = out_of_step(type(model).model_validate(fields).layer_kinds, stages)
            if in_step == 0 or not recur:
                break
    return fields, per_stage


def small_batches(training: Training, batch: int, seq_len: int, total: int, ramping: int) -> dict[str, Any]:
    """Settings of a run of ``total`` steps of ``batch`` samples, in the original's unit of length.

    If the original's batch size ramps up, so does this one's: it doubles after ``ramping`` steps, so that resumed runs
    still have some before them.
    """
    ramps = training.batch_size_rampup is not None
    samples = (2 * total - ramping if ramps else total) * batch
    lengths = {"steps": total, "samples": samples, "tokens": samples * seq_len}
    lengths = {unit: number for unit, number in lengths.items() if getattr(training, unit) is not None}
    values = {
        "global_batch_size": 2 * batch if ramps else batch,
        "batch_size_rampup": [batch, batch, ramping * batch] if ramps else None,
        **(lengths if training.epochs is None else {"epochs": None, "samples": samples}),
    }
    return {f"training.{key}": value for key, value in values.items()}


def sizes_of(config: JobConfig, layout: Layout) -> dict[str, int]:
    """The sizes that a small run may limit."""
    model, training = model_config(config.model), config.training
    return {
        "processes": layout.num_processes,
        "layers": model.num_layers,
        "virtual stages": layout.virtual_stages,
        "microbatches": num_microbatches(training, layout),
        "samples in a microbatch": training.micro_batch_size,
        "positions": training.seq_len,
        "heads": model.num_attention_heads,
        "experts": getattr(model, "num_experts", 0),
        "hidden units": model.hidden_size,
        "tokens of the vocabulary": model.vocab_size,
        "CUDA graphs": int(config.compile.cudagraphs),
    }


def shrink_degrees(layout: Layout) -> Layout:
    """Smaller degrees; each that is above 1 stays above 1.

    A degree becomes its largest divisor up to 4, or 2 if it has none. While the layout needs more than
    `MOST_PROCESSES`, degrees become 2, in the order of `FACTORS` with pipeline last: a pipeline of 2 has no middle
    stage, while groups of 2 show most bugs of the other axes. Four degrees above 1 still need twice as many.
    """
    degrees = dict[str, Any]()
    for factor in FACTORS:
        degree = getattr(layout, factor.name)
        degrees[factor.name] = max((d for d in (2, 3, 4) if degree % d == 0), default=2) if degree > 1 else 1
    for factor in (*FACTORS[1:], FACTORS[0]):
        if math.prod(degrees.values()) > MOST_PROCESSES:
            degrees[factor.name] = min(degrees[factor.name], 2)
    small = replace(layout, **degrees, virtual_stages=min(layout.virtual_stages, _MOST_STAGES))
    return replace(small, expert=small_expert_degree(layout, small))


def small_expert_degree(layout: Layout, small: Layout) -> int:
    """A degree for the small layout that leaves several ranks with the same experts exactly if the original's does."""
    ranks = small.token_shards // small.expert_tensor
    if layout.expert == 1 or ranks == 1:
        return 1
    if layout.expert_shards == 1:
        return ranks
    divisors = [degree for degree in (2, 3, 4) if ranks % degree == 0 and ranks > degree]
    aligned = [degree for degree in divisors if degree % small.tensor == 0 or small.tensor % degree == 0]
    return max(aligned, default=ranks)  # float8 experts need an aligned one


def out_of_step(kinds: Sequence[int], stages: int) -> tuple[int, list[int]]:
    """Layers per stage, 1 to 3 each, so that few stages have the kinds that the model itself begins with.

    A stage that counts the pattern of its kinds from its own first layer would compute the same there. Returns the
    number of such stages too.
    """
    # For each number of layers: the best split of the first ones into the stages so far.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(stages):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (in_step, squares, counts) in best.items():
            for count in (1, 2, 3):
                same = int(stage > 0 and kinds[start : start + count] == kinds[:count])
                split = in_step + same, squares + count**2, (*counts, count)
                following[start + count] = min(split, following.get(start + count, split))
        best = following
    in_step, _, counts = best[len(kinds)]
    return in_step, list(counts)


def two_kinds(counts: list[int], encoder: int, stages: int) -> list[int]:
    """Layers per stage of a small model with two encoder layers.

    The encoder is split, or ends where a stage ends, exactly if the original's is and does, as far as there are stages.

    Args:
        counts: layers per stage of the original.
        encoder: its encoder layers.
        stages: of the small model, at least 2.
    """
    ends = list(itertools.accumulate(counts[:-1]))
    is_split, ends_with_stage = ends[0] < encoder, encoder in ends
    if is_split and not (ends_with_stage and stages > 2):
        return [1, 3] + [1] * (stages - 2)
    first = [1, 1] if is_split else [2] if ends_with_stage else [3]
    remaining = stages - len(first)
    return first + [1] * (remaining - 1) + [2]


def fields_of_length(model: TransformerConfig, original: int, seq_len: int, expert: int) -> dict[str, Any]:
    """Fields of the small model that depend on the length of its sequences, given the original's."""
    fields = {"max_seq_len": seq_len + 3 if model.max_seq_len > original else seq_len, **model.shrunk(seq_len)}
    if expert > 1:
        unit = math.lcm(expert, fields["router_groups"])
        fields["num_experts"] = unit * -(-fields["num_experts"] // unit)
    return fields


def small_spans(config: JobConfig, model: TransformerConfig, seq_len: int, unit: int) -> dict[str, Any]:
    """Settings of span corruption, if the model learns it, that leave several spans in a small sample.

    The decoder's input is filled up if the original's is, or to a multiple of ``unit``.
    """
    if model.objective != "span_corruption":
        return {}
    values = {"training.seq_len": seq_len, "data.noise_density": 0.3, "data.mean_noise_span_length": 1.8}
    small = edit(config, values | {"training.decoder_seq_len": 0})
    original, needed = sample_length(config, model), sample_length(small, model).decoder
    if original.decoder > targets_length(original.raw, config.data):
        needed += 1  # so that there is padding
    decoder = -(-needed // unit) * unit
    return values | {"training.decoder_seq_len": decoder}


def small_filter(patterns: list[str], layers: int, small_layers: int) -> list[str]:
    """Patterns of module names, in which the numbers of layers are scaled to the small model."""
    parts = [pattern.split(".") for pattern in patterns]
    for names in parts:
        if len(names) > 1 and names[1].isdecimal():
            names[1] = str(int(names[1]) * small_layers // layers)
    return [".".join(names) for names in parts]


def shrink_microbatches(training: Training, original: Layout, layout: Layout) -> int:
    """Microbatches per step: at least 2, and 3 if the original has 3 or more.

    They are enough for the schedule's steady state if the original reaches it.
    """
    microbatches = num_microbatches(training, original)
    warmup = layout.pipeline * (2 if layout.schedule in V_SHAPED else 1)
    enough = max(3, warmup + 1 if microbatches >= original.pipeline else layout.pipeline)
    return fewest_microbatches(layout, max(2, min(microbatches, enough)))
