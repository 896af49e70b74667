"""Every layout that the trainer accepts for a model, a batch and a number of GPUs.

The trainer's own rules decide what is valid. They are checked in parts, each once for all layouts that it is the same
for. One part depends on tensor parallelism, batch and recomputation, another one on the pipeline's schedule. Experts
are shared by any number of processes that their rules allow. Processes share long sequences only: each has at least
4,096 tokens of one, and fewer where the configuration says so.
"""

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from math import gcd, prod
from typing import Any

from titan_like.config.errors import ConfigError, require
from titan_like.config.load import edit, setting
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.parallel.layout import FACTORS, Layout, method_of
from titan_like.parallel.schedules.tables import SCHEDULES, stages_per_rank
from titan_like.parallel.split import layers_per_stage
from titan_like.planner.stages import pipeline_of
from titan_like.planner.workload import Workload, workload_of
from titan_like.train import layout_rules as rules
from titan_like.train.rules import check_rules

# The keys that a search chooses, each with its name in `Workload`.
SEARCHED = {
    "parallelism.tensor_parallel_degree": "tensor",
    "parallelism.sequence_parallel": "sequence_parallel",
    "parallelism.pipeline_parallel_degree": "pipeline",
    "parallelism.pipeline_schedule": "schedule",
    "parallelism.virtual_stages_per_rank": "virtual_stages",
    "parallelism.data_parallel_replicate_degree": "replicate",
    "parallelism.data_parallel_shard_degree": "shard",
    "parallelism.zero_stage": "zero_stage",
    "training.micro_batch_size": "micro_batch_size",
    "activation_checkpoint.mode": "recompute",
    "activation_checkpoint.every_n_layers": "recompute_every",
    "parallelism.context_parallel_degree": "context",
    "parallelism.expert_parallel_degree": "expert",
}
STAGE_SIZES = "parallelism.pipeline_layers"

Split = tuple[int, int, int]  # ZeRO stage, replicas and shards

SLICE = 4096  # the fewest tokens of a sequence that a process gets unasked
MODES = ("none", "experts", "selective", "full")  # of recomputation
_EVERY = (1, 2, 4)  # recompute every n-th layer


def set_keys(config: JobConfig) -> frozenset[str]:
    """The keys that a search could choose, but that the file or the command line sets."""
    keys = ((key, *key.split(".")) for key in (*SEARCHED, STAGE_SIZES))
    return frozenset(key for key, section, name in keys if name in getattr(config, section).model_fields_set)


class Space:
    """The valid layouts of one run on ``num_gpus`` GPUs. Keys in ``fixed`` stay as the configuration has them."""

    def __init__(
        self, config: JobConfig, model: TransformerConfig, num_gpus: int, fixed: frozenset[str] = frozenset()
    ) -> None:
        """Collect the choices. Raises a `ConfigError` for multiple choice; `groups` does if no layout is left."""
        hint = 'layouts are not searched for multiple choice; search with "pair" (data.sentence_objective) instead'
        require("choice" not in model.predictions, "model.overrides.sentence_head", "choice", hint)
        self.model, self.num_gpus, self.fixed = model, num_gpus, fixed
        if STAGE_SIZES not in fixed:
            config = edit(config, {STAGE_SIZES: None})
        if _KEY["recompute"] not in fixed:
            config = edit(config, {_KEY["recompute"]: "none", "activation_checkpoint.budget": None})
        if config.parallelism.data_parallel_shard_degree == -1:
            self.fixed = fixed - {"parallelism.data_parallel_shard_degree"}
        self.config = config
        self._base = workload_of(config, model, Layout(1, 1, 1, 1, 1))._replace(
            recompute="none", recompute_every=1, sequence_parallel=False, zero_stage=0
        )
        self._pipelines: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._splits = cache(self._splits_of)
        experts = getattr(model, "num_experts", 0)
        self._experts = divisors(experts) if experts else [1]
        self._modes = [mode for mode in MODES if experts or mode != "experts"]
        self._stage_layers = cache(lambda stages: tuple(layers_per_stage(self.config, model, stages)))
        self.refusals: list[ConfigError] = []

    def groups(self) -> Iterator[Workload]:
        """One layout for each group. Members of a group differ only in the pipeline's schedule and in how ZeRO splits.

        Raises the `ConfigError` of `no_layout` if no layout is valid.
        """
        self._check_fixed()
        has_layout = False
        for context in self._contexts():
            for tensor in self._choices("tensor", divisors(self.num_gpus)):
                # With tensor parallelism, sequence parallelism costs nothing and takes less memory.
                for sequence in self._choices("sequence_parallel", [True, False] if tensor > 1 else [False]):
                    is_valid = False
                    for work in self._with_tensor(context, tensor, sequence):
                        has_layout = is_valid = True
                        yield work
                    if is_valid:
                        break
        if not has_layout:
            raise self.no_layout()

    def _check_fixed(self) -> None:
        """Refuse degrees that the GPUs cannot have, by the last of the fixed ones, and stages that do not fit."""
        # Fixed degrees must divide the GPUs, and all together must use every GPU.
        choices = {"context": self._contexts()}
        choices |= {degree.name: self._choices(degree.name, []) for degree in FACTORS if degree.name not in choices}
        degrees = {_KEY[name]: values[0] for name, values in choices.items() if len(values) == 1}
        reason = "must be at least 1, or -1 for what the other degrees leave"
        require(0 not in degrees.values(), _KEY["shard"], 0, reason)
        product = prod(degrees.values())
        if self.num_gpus % product or (len(degrees) == len(FACTORS) and product != self.num_gpus):
            key = list(degrees)[-1]
            given = {name: degree for name, degree in degrees.items() if degree != 1 or name == key}
            factors = " × ".join(f"{name.partition('.')[2]} {degree}" for name, degree in given.items())
            reason = f"does not {'divide' if self.num_gpus % product else 'equal'} the {self.num_gpus} GPUs"
            raise ConfigError(key, degrees[key], f"{factors} = {product} {reason}" if len(given) > 1 else reason)
        counts = self.config.parallelism.pipeline_layers
        if counts is None:
            return
        num_layers, degrees_of_pipelines = len(self.model.layer_kinds), divisors(self.num_gpus)[1:]
        reason = f"must be numbers of at least 1 that sum to the {num_layers} layers"
        require(min(counts, default=0) >= 1 and sum(counts) == num_layers, STAGE_SIZES, counts, reason)
        reason = f"no number of ranks that divides the {self.num_gpus} GPUs can share {len(counts)} stages evenly"
        require(any(len(counts) % degree == 0 for degree in degrees_of_pipelines), STAGE_SIZES, counts, reason)

    def no_layout(self) -> ConfigError:
        """Why there is no layout: the first refusal of a fixed setting, else of a setting that is not chosen here."""
        chosen = {*SEARCHED, STAGE_SIZES} if self.fixed else set()
        of_fixed = [refusal for refusal in self.refusals if refusal.key in self.fixed]
        of_unsearched = [refusal for refusal in self.refusals if refusal.key not in chosen]
        for refusal in (*of_fixed, *of_unsearched):
            return refusal
        fixed = ", ".join(sorted(self.fixed))
        reason = f"no layout of this many is valid with {fixed} fixed; fix fewer settings, or fix them differently"
        return ConfigError("number of GPUs", self.num_gpus, reason)

    def _contexts(self) -> list[int]:
        """The context degrees to try: the fixed one, or the configuration's and all with long enough CP shards."""
        given, length = self.config.parallelism.context_parallel_degree, self._base.seq_len
        long = [n for n in divisors(self.num_gpus) if length >= SLICE * n and length % (2 * n) == 0]
        return self._choices("context", sorted({1, given, *long}))

    def _with_tensor(self, context: int, tensor: int, sequence: bool) -> Iterator[Workload]:
        # The trainer's rules are asked as early as they can be decided, so that each refusal prunes most layouts.
        split = self.config.parallelism.expert_tensor_parallel_degree
        work = self._base._replace(context=context, tensor=tensor, sequence_parallel=sequence, expert_tensor=split)
        work = work._replace(context_method=method_of(self.configured(work), self.model).name)
        left, rest = divmod(self.num_gpus, tensor * context)
        if rest or not all(self._accepts(rule, work) for rule in _RULES_OF_TENSOR):
            return
        for pipeline in self._choices("pipeline", [p for p in divisors(left) if p <= len(self.model.layer_kinds)]):
            if left % pipeline:
                continue
            shard = left // pipeline
            samples, rest = divmod(self._base.global_batch_size, shard)
            batches = self._choices("micro_batch_size", divisors(samples) if samples and not rest else [1])
            ranks = shard * context * tensor // work.expert_tensor
            degrees = self._choices("expert", [n for n in self._experts if ranks % n == 0])
            for micro, expert in itertools.product(batches, degrees):
                of_batch = work._replace(pipeline=pipeline, shard=shard, micro_batch_size=micro, expert=expert)
                for mode in self._choices("recompute", self._modes):
                    every = [n for n in _EVERY if n <= len(self.model.layer_kinds)] if mode == "full" else [1]
                    if not self._accepts(_check_but_pipeline, of_batch._replace(recompute=mode)):
                        continue
                    if not self.pipelines(of_batch):
                        continue
                    for n in self._choices("recompute_every", every):
                        yield of_batch._replace(recompute=mode, recompute_every=n)

    def pipelines(self, group: Workload) -> list[tuple[str, int]]:
        """Pairs of schedule and stages per rank that are valid for a group and share the layers as evenly as any."""
        key = group.pipeline, group.micro_batch_size * group.data_parallel
        if key not in self._pipelines:
            choices = self._schedules(group.pipeline)
            works = [group._replace(schedule=schedule, virtual_stages=virtual) for schedule, virtual in choices]
            accepted = [self._accepts(rules.check_pipeline, work) for work in works]
            valid = [choice for choice, is_valid in zip(choices, accepted, strict=True) if is_valid]
            # Layers of the rank that has the most.
            fullest = [max(pipeline_of(self.member(group, *choice, 0, 1, group.shard)).num_layers) for choice in valid]
            self._pipelines[key] = [choice for choice, size in zip(valid, fullest, strict=True) if size == min(fullest)]
        return self._pipelines[key]

    def _schedules(self, pipeline: int) -> list[tuple[str, int]]:
        if pipeline == 1:
            return [("1f1b", virtual) for virtual in self._choices("virtual_stages", [1])]
        schedules = []
        for schedule in self._choices("schedule", list(SCHEDULES)):
            fewest = stages_per_rank(schedule, 2)
            most = max(fewest, len(self.model.layer_kinds) // pipeline) if stages_per_rank(schedule, 3) == 3 else fewest
            schedules += [(schedule, n) for n in self._choices("virtual_stages", list(range(fewest, most + 1)))]
        return schedules

    def splits(self, group: Workload) -> list[Split]:
        """Triples of ZeRO stage, replicas and shards, most sharded first.

        Replicas help only ZeRO 3, which otherwise gathers weights over all nodes. Each is a node, or 2, 4, … of them.
        Experts are shared within each.
        """
        # The processes that share experts are a multiple of this number of shards.
        multiple = group.expert // gcd(group.expert, group.context * group.tensor // group.expert_tensor)
        innermost = group.context * group.tensor
        return self._splits(group.data_parallel, innermost, multiple)

    def _splits_of(self, size: int, innermost: int, multiple: int) -> list[Split]:
        stages = sorted(self._choices("zero_stage", [0, 1, 2, 3]), reverse=True)
        shapes = [(n, size // n) for n in divisors(size) if size // n % multiple == 0]
        if not self.fixed.isdisjoint({_KEY["replicate"], _KEY["shard"]}):
            shapes = [shape for shape in shapes if shape[0] in self._choices("replicate", [shape[0]])]
            shapes = [shape for shape in shapes if shape[1] in self._choices("shard", [shape[1]])]
            return [(zero, *shape) for zero in stages for shape in shapes]
        node = self.config.cluster.gpus_per_node or self.num_gpus
        sizes = {node << exponent for exponent in range(self.num_gpus.bit_length())}  # of replicas, in GPUs
        shapes = [(n, shards) for n, shards in shapes if n == 1 or shards * innermost in sizes]
        return [(zero, *shape) for zero in stages for shape in (shapes if zero == 3 else shapes[:1])]

    def member(self, group: Workload, schedule: str, virtual: int, zero: int, replicas: int, shards: int) -> Workload:
        """One layout of a group."""
        stages = group.pipeline * stages_per_rank(schedule, virtual)
        return group._replace(
            schedule=schedule,
            virtual_stages=virtual,
            zero_stage=zero,
            replicate=replicas,
            shard=shards,
            stage_layers=self._stage_layers(stages) if group.pipeline > 1 else None,
        )

    def configured(self, work: Workload) -> JobConfig:
        """The configuration in a layout."""
        return edit(self.config, self.settings(work) | {"parallelism.auto": False})

    def settings(self, work: Workload) -> dict[str, Any]:
        """A layout as keys of the configuration."""
        values = {key: getattr(work, name) for key, name in SEARCHED.items()}
        if work.pipeline == 1 and _KEY["schedule"] in self.fixed:
            values[_KEY["schedule"]] = self.config.parallelism.pipeline_schedule
        if work.recompute != "full" and _KEY["recompute_every"] in self.fixed:
            values[_KEY["recompute_every"]] = self.config.activation_checkpoint.every_n_layers
        return values

    def _choices(self, name: str, free: list[Any]) -> list[Any]:
        """The values to try for a setting: ``free``, or the one that it is fixed to."""
        return [setting(self.config, _KEY[name])] if _KEY[name] in self.fixed else free

    def _accepts(self, rule: Any, work: Workload) -> bool:
        try:
            rule(self.configured(work), self.model, layout_of(work))
        except ConfigError as error:
            if all(error.key != known.key for known in self.refusals):
                self.refusals.append(error)
            return False
        return True


_RULES_OF_TENSOR = (rules.check_tensor_parallel, rules.check_context_parallel, rules.check_expert_parallel)
_KEY = {name: key for key, name in SEARCHED.items()}


def layout_of(work: Workload) -> Layout:
    """The layout of a workload."""
    return Layout(**{field.name: getattr(work, field.name) for field in fields(Layout)})


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _check_but_pipeline(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Check all rules, with the plainest of pipelines."""
    plain = {_KEY["schedule"]: "1f1b", _KEY["virtual_stages"]: 1, STAGE_SIZES: None}
    check_rules(edit(config, plain), model, replace(layout, schedule="1f1b", virtual_stages=1))
