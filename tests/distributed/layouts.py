"""Layouts to hold against one process: the whole product, and small sets in which every pair of choices occurs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any

from titan_like.parallel.schedules.tables import SPLIT_BACKWARD

GLOBAL_BATCH = 8
# Virtual stages per rank, for the debug model's 4 layers on 2 pipeline ranks.
SCHEDULES = {"none": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "interleaved_zero_bubble": 2}
SCHEDULES |= {"zbv_zero_bubble": 2, "dualpipe_v": 2}


def sizes(seq: int, micro_batch: int, batch: int, steps: int = 1) -> dict[str, int]:
    """Settings of the lengths of samples, batches and a run."""
    values = {"seq_len": seq, "micro_batch_size": micro_batch, "global_batch_size": batch, "steps": steps}
    return {f"training.{key}": value for key, value in values.items()}


def pipeline(stages: int = 2, schedule: str = "1f1b", virtual: int | None = None) -> dict[str, Any]:
    """Settings of a pipeline; ``virtual``: stages per rank, if they are not those of `SCHEDULES`."""
    return {
        "parallelism.pipeline_parallel_degree": stages,
        "parallelism.pipeline_schedule": schedule,
        "parallelism.virtual_stages_per_rank": virtual or SCHEDULES[schedule],
    }


def tensor(size: int = 2, sequence_parallel: bool = False) -> dict[str, Any]:
    return {"parallelism.tensor_parallel_degree": size, "parallelism.sequence_parallel": sequence_parallel}


def zero(stage: int, replicas: int = 1) -> dict[str, Any]:
    return {"parallelism.zero_stage": stage, "parallelism.data_parallel_replicate_degree": replicas}


def recompute(mode: str, every: int = 1) -> dict[str, Any]:
    return {"activation_checkpoint.mode": mode, "activation_checkpoint.every_n_layers": every}


# Rules that look at whole matrices, whose shards are uneven: 30 rows in blocks of 8, and 257 in blocks of 65.
UNEVEN = {
    "gpt": {"num_layers": 2, "hidden_size": 30, "num_attention_heads": 2, "vocab_multiple": 1},
    "llama": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_multiple": 1},
    # ZeRO's shards cut experts: 2 · 24 rows of gate and up in blocks of 12, 6 · 24 of all experts in blocks of 36.
    "moe": {"num_layers": 2, "hidden_size": 32, "num_experts": 6, "expert_ffn_hidden_size": 24},
}
RULES: dict[tuple[str, str], dict[str, Any]] = {
    ("adafactor", "gpt"): {"optimizer.clip_threshold": 4.0},
    ("adafactor", "llama"): {"optimizer.scale_parameter": True, "optimizer.beta1": 0.9, "optimizer.lr": 0.3},
    ("adafactor", "moe"): {"optimizer.scale_parameter": True, "optimizer.lr": 0.3},
    ("muon", "gpt"): {},
    ("muon", "moe"): {},
    ("muon", "llama"): {"optimizer.adjust_lr": "original", "optimizer.matrix_lr": 5e-3},
}
RULE_NAMES = tuple(dict.fromkeys(rule for rule, _ in RULES))


def with_rule(rule: str, family: str, layers: int = 2) -> dict[str, Any]:
    """A small model of the family, trained by one of `RULES`."""
    model = {"model.family": family, "model.overrides": UNEVEN[family] | {"num_layers": layers}}
    return model | {"optimizer.name": rule, "lr_scheduler.warmup_steps": 1} | RULES[rule, family]


@dataclass(frozen=True)
class ParallelLayout:
    """One choice on every axis."""

    family: str
    schedule: str  # "none": no pipeline
    tensor: str  # "1", "2", or "2 sp": with sequence parallelism
    zero_stage: int
    data: str  # "1", "2", or "2 replicas": two replicas of shards of one (zero 0: of whole models)
    recompute: str
    microbatches: int

    @property
    def name(self) -> str:
        return (
            f"{self.family} {self.schedule} tp {self.tensor} zero {self.zero_stage} dp {self.data} "
            f"recompute {self.recompute} m {self.microbatches}"
        )

    @property
    def ranks(self) -> int:
        return (1 if self.schedule == "none" else 2) * int(self.tensor[0]) * int(self.data[0])

    def settings(self) -> dict[str, Any]:
        stages = {} if self.schedule == "none" else pipeline(2, self.schedule)
        splits = stages | tensor(int(self.tensor[0]), self.tensor.endswith("sp"))
        return (
            splits
            | zero(self.zero_stage, 2 if self.data == "2 replicas" else 1)
            | recompute(self.recompute)
            | {
                "model.family": self.family,
                "training.micro_batch_size": GLOBAL_BATCH // self.microbatches // int(self.data[0]),
                "training.global_batch_size": GLOBAL_BATCH,
            }
        )


def full_product() -> list[ParallelLayout]:
    """Every combination, on 2 to 8 ranks."""
    layouts = [
        ParallelLayout(*choices)
        for choices in product(
            ("gpt", "llama"),
            SCHEDULES,
            ("1", "2", "2 sp"),
            (0, 1, 2, 3),
            ("1", "2", "2 replicas"),
            ("none", "full", "selective"),
            (2, 4),
        )
    ]
    # One data-parallel rank has nothing to shard: one stage stands for all.
    return [layout for layout in layouts if layout.ranks > 1 and (layout.data != "1" or layout.zero_stage == 0)]


def every_pair(layout: ParallelLayout) -> set[tuple]:
    """Each two of the layout's choices."""
    choices = [(field.name, getattr(layout, field.name)) for field in fields(layout)]
    return set(combinations(choices, 2))


def pairs_of_kinds(layout: ParallelLayout) -> set[tuple]:
    """Each two choices, where schedules of one kind count as one, and the schedule itself.

    Tensor parallelism meets each kind and each ZeRO stage only with sequence parallelism, which splits more.
    """
    alike = replace(layout, schedule=kind(layout.schedule))
    pairs = every_pair(alike) | {(layout.schedule,)}
    left_out = {("schedule", alike.schedule), ("zero_stage", layout.zero_stage)}
    return {pair for pair in pairs if ("tensor", "2") not in pair or left_out.isdisjoint(pair)}


def kind(schedule: str) -> str:
    """What other axes see of a schedule: how many stages a rank has, and whether the backward pass is split."""
    if schedule in SPLIT_BACKWARD:
        return "split backward"
    return schedule if schedule == "none" else f"{SCHEDULES[schedule]} stages"


def covering_set(
    layouts: list[ParallelLayout], parts: Callable[[ParallelLayout], set[tuple]], most_ranks: int = 4
) -> list[ParallelLayout]:
    """Few of the layouts, such that each part that occurs in any of ``layouts`` occurs in one of these.

    Greedy: take the layout with the most new parts, then leave out those whose parts others have too. Candidates are
    shuffled, so that what is not prescribed varies. None has more than ``most_ranks``.
    """
    candidates = [(layout, parts(layout)) for layout in layouts if layout.ranks <= most_ranks]
    random.Random(0).shuffle(candidates)
    missing = set().union(*map(parts, layouts))
    chosen = []
    while missing:
        best = max(candidates, key=lambda each: (len(each[1] & missing), -each[0].ranks))
        chosen.append(best)
        missing -= best[1]
    for each in sorted(chosen, key=lambda each: -each[0].ranks):
        others = [other for other in chosen if other is not each]
        if each[1] <= set().union(*(parts for _, parts in others)):
            chosen = others
    return sorted((layout for layout, _ in chosen), key=lambda layout: layout.ranks)
