"""Random valid workloads for the planner's tests, and the training state of a model in one stage."""

import random

from titan_like.models.registry import config_class, flavors
from titan_like.parallel.schedules.tables import Action, check_schedule, stages_per_rank
from titan_like.parallel.split import StageLayers
from titan_like.planner.shapes import ParameterSplit, ShardOf, stage_units
from titan_like.planner.training_state import Storage, peak_state, rank_state
from titan_like.planner.workload import Workload


def flavor(family, name, **changes):
    return config_class(family).model_validate(flavors(family)[name] | changes)


MODELS = [
    flavor("gpt", "gpt2_124m"),
    flavor("gpt", "7.5b"),
    flavor("gpt", "gpt3_175b"),
    flavor("llama", "llama3.1_8b"),
    flavor("llama", "llama3.1_70b"),
    flavor("llama", "llama3.2_1b"),
]


def random_workloads(count, seed):
    """Valid ones: what the configuration's rules refuse is not drawn."""
    generator = random.Random(seed)
    pick = generator.choice
    found = []
    while len(found) < count:
        model, tensor = pick(MODELS), pick([1, 2, 4, 8])
        pipeline = pick([1, 1, 2, 4, 8])
        schedule = pick(["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "dualpipe_v"])
        virtual = 1 if schedule in ("1f1b", "gpipe") else 2
        if pipeline == 1:
            schedule, virtual = "1f1b", 1
        microbatches, shard, replicate = pick([1, 2, 4, 8, 32]) * pipeline, pick([1, 2, 8, 64]), pick([1, 1, 2])
        micro = pick([1, 2, 4])
        stages = pipeline * stages_per_rank(schedule, virtual)
        if check_schedule(schedule, pipeline, virtual, microbatches) or stages > model.num_layers:
            continue
        if model.num_kv_heads % tensor or model.num_attention_heads % tensor:
            continue
        work = Workload(
            model,
            seq_len=pick([1024, 4096]),
            micro_batch_size=micro,
            global_batch_size=micro * microbatches * shard * replicate,
            tensor=tensor,
            pipeline=pipeline,
            replicate=replicate,
            shard=shard,
            context=pick([1, 1, 1, 2]),
            schedule=schedule,
            virtual_stages=virtual,
            sequence_parallel=tensor > 1 and pick([True, False]),
            zero_stage=pick([0, 1, 2, 3]),
            recompute=pick(["none", "full", "selective"]),
            recompute_every=pick([1, 1, 3]),
            flash=pick([True, False]),
            dtype="float16",
            dropout=pick([True, False]),
        )
        found.append(work)
    return found


def state_bytes(model, zero_stage, shard_degree, compute_bytes=4):
    """Bytes on the first process that shards the model: between steps, and at most in one with two microbatches."""
    units = stage_units(model, StageLayers(range(model.num_layers), is_first=True, is_last=True))
    split = ParameterSplit(shard=ShardOf(shard_degree if zero_stage else 1))
    storage = Storage(zero_stage, split, shard_degree, compute=compute_bytes)
    state = rank_state(units, storage)
    passes = [Action(kind, 0, microbatch) for microbatch in range(2) for kind in "FB"]
    return state.parameters + state.optimizer + state.copies, peak_state({0: units}, passes, storage)
