"""Bounds are never above what they bound, or a search would pass over the best layout; nor far below all of it."""

import random
from dataclasses import replace

import pytest

from titan_like.config import load_config
from titan_like.config.load import edit
from titan_like.models.registry import model_config
from titan_like.planner.bounds import least_bytes, least_group_seconds, least_step_seconds
from titan_like.planner.memory import MEMORY_MARGIN, largest_memory, memory
from titan_like.planner.search import _ROUNDING, search
from titan_like.planner.search_space import Space
from titan_like.planner.stack import checked_profile
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import estimate

DEEP = ["--model.overrides.num_layers=8", "--training.global_batch_size=24"]
LORA = ["--model.family=llama", "--lora.rank=8"]
RUNS = {
    "gpt in float16": [*DEEP, "--training.dtype=float16", "--model.overrides.hidden_size=2048"],
    "gradients reduced in bfloat16": [*DEEP, "--training.reduce_dtype=bfloat16", "--model.overrides.hidden_size=1024"],
    "uneven stages": [*DEEP, "--parallelism.pipeline_layers=[1,7]"],
    "llama compiled": [*DEEP, "--model.family=llama", "--compile.enable=true", "--training.seq_len=512"],
    "adapters": [*DEEP, *LORA],
    "bert": [*DEEP, "--model.family=bert"],
    "t5": [*DEEP, "--model.family=t5", "--model.overrides.num_decoder_layers=2", "--training.decoder_seq_len=128"],
    "experts": [*DEEP, "--model.family=moe"],
    "split experts": [*DEEP, "--model.family=moe", "--parallelism.expert_tensor_parallel_degree=2",
                      "--parallelism.tensor_parallel_degree=2"],
    "one microbatch": ["--training.global_batch_size=4"],
}  # fmt: skip
FIXED = ("pipeline_layers", "expert_tensor_parallel_degree", "tensor_parallel_degree")


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [4, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_bounds_are_below_what_they_bound_and_near(settings: list[str], layouts: int) -> None:
    config = load_config(["--training.steps=1", "--training.seq_len=256", "--training.dtype=bfloat16",
                          "--cluster.gpu=A100", "--cluster.gpus_per_node=2", *settings])  # fmt: skip
    fixed = frozenset(f"parallelism.{key}" for key in FIXED if f"--parallelism.{key}=" in " ".join(settings))
    profile = checked_profile(config, 4, None).changed(overhead_bytes=0.0)  # which would hide how far a bound is off
    space, draw = Space(config, model_config(config.model), 4, fixed), random.Random(0)
    seconds, nbytes = list[float](), list[float]()
    groups = [group for group in space.groups() if space.pipelines(group)]
    for group in draw.choices(groups, k=layouts):
        work = space.member(group, *draw.choice(space.pipelines(group)), *draw.choice(space.splits(group)))
        exact = step_time(work, profile).total
        bounds = {
            "layout": least_step_seconds(work, profile),
            "layout, estimated": least_step_seconds(work, profile, source=estimate) * _ROUNDING,
            "passes": least_step_seconds(work, profile, True, estimate) * _ROUNDING,
            "group": least_group_seconds(group, profile) * _ROUNDING,
        }
        assert {name: bound / exact for name, bound in bounds.items() if bound > exact * (1 + 1e-9)} == {}, work
        seconds.append(bounds["layout"] / exact)
        fullest = memory(work, profile).largest  # of all ranks
        assert largest_memory(work, profile) == fullest, work
        nbytes.append(least_bytes(work, profile) / fullest)
        assert nbytes[-1] <= 1, work
    assert max(seconds) > 0.9 and max(nbytes) > 0.4


def test_a_breadth_first_layout_that_just_fits_is_found() -> None:
    """Its stages sum their gradients one after the other, so it needs less than others of its group."""
    config = load_config(["--training.steps=1", "--training.seq_len=64", "--training.dtype=bfloat16",
                          "--training.global_batch_size=12", "--training.micro_batch_size=1", "--cluster.gpu=A100",
                          "--cluster.gpus_per_node=4", "--model.overrides.hidden_size=1024",
                          "--model.overrides.num_layers=8", "--parallelism.pipeline_parallel_degree=2",
                          "--parallelism.zero_stage=1"])  # fmt: skip
    fixed = frozenset({"training.micro_batch_size", "parallelism.pipeline_parallel_degree", "parallelism.zero_stage"})
    fixed |= {"parallelism.tensor_parallel_degree", "activation_checkpoint.mode"}
    space, profile = Space(config, model_config(config.model), 4, fixed), checked_profile(config, 4, None)
    (group,) = (group for group in space.groups() if group.context == 1)
    works = [space.member(group, *choice, *split) for choice in space.pipelines(group) for split in space.splits(group)]
    needed = {work: largest_memory(work, profile) for work in works}
    least = min(works, key=needed.__getitem__)
    size = round(needed[least] / (1 - MEMORY_MARGIN)) + 1
    device = replace(profile.device, name="small", memory_bytes=size)
    config = edit(config, {"cluster.gpu": None})
    assert (least.schedule, search(config, 4, profile.changed(device=device), fixed).fastest.work) == (
        "looped_bfs",
        least,
    )
