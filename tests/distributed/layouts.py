"""Layouts to hold against one process: the whole product, and a small set in which every pair of choices occurs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import combinations, product
from typing import Any

GLOBAL_BATCH = 8
SCHEDULES = {  # virtual stages per rank, for the debug model's 4 layers on 2 pipeline ranks
    "none": 1,
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
    "dualpipe_v": 2,
}


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
        pipeline: dict[str, Any] = {}
        if self.schedule != "none":
            pipeline = {
                "parallelism.pipeline_parallel_degree": 2,
                "parallelism.pipeline_schedule": self.schedule,
                "parallelism.virtual_stages_per_rank": SCHEDULES[self.schedule],
            }
        return pipeline | {
            "model.family": self.family,
            "parallelism.tensor_parallel_degree": int(self.tensor[0]),
            "parallelism.sequence_parallel": self.tensor.endswith("sp"),
            "parallelism.zero_stage": self.zero_stage,
            "parallelism.data_parallel_replicate_degree": 2 if self.data == "2 replicas" else 1,
            "activation_checkpoint.mode": self.recompute,
            "training.micro_batch_size": GLOBAL_BATCH // self.microbatches // int(self.data[0]),
            "training.global_batch_size": GLOBAL_BATCH,
        }


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


def covering_set(layouts: list[ParallelLayout], most_ranks: int = 4) -> list[ParallelLayout]:
    """Few of the layouts, such that any two choices that occur together in one of all occur together in one of these.

    Greedy; among equally good ones the one with the fewest ranks and microbatches, none with more than ``most_ranks``.
    """
    missing = set().union(*map(_pairs, layouts))
    small = [layout for layout in layouts if layout.ranks <= most_ranks]
    chosen = []
    while missing:
        best = max(small, key=lambda layout: (len(_pairs(layout) & missing), -layout.ranks, -layout.microbatches))
        chosen.append(best)
        missing -= _pairs(best)
    return sorted(chosen, key=lambda layout: layout.ranks)


def _pairs(layout: ParallelLayout) -> set[tuple]:
    choices = asdict(layout)
    names = [field.name for field in fields(layout)]
    return {(a, choices[a], b, choices[b]) for a, b in combinations(names, 2)}
