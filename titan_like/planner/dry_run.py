"""What one process of a job of any size would hold, send and compute, found by a single process without a GPU.

The settings pass the checks of a real run. The process's stages are built by the real recipe on the meta device and in
torch's fake process group, where tensors have shapes but no memory. What happens in a step is composed from a trace.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_like.checkpoint.checks import OtherRunError
from titan_like.checkpoint.loader import materialise_optimizer_state
from titan_like.config.errors import ConfigError, require
from titan_like.config.schema import JobConfig
from titan_like.data.loading.batch_size import total_samples, total_steps
from titan_like.data.loading.describe import describe_data
from titan_like.data.text.tokenizer import describe_vocabulary, is_on_hub
from titan_like.evaluate.tasks import named_tasks
from titan_like.metrics.hardware import peak_tflops
from titan_like.models.config import TransformerConfig
from titan_like.optim.optimizer import build_optimizer
from titan_like.optim.schedule import describe_warmup, schedule_length
from titan_like.optim.shards import ShardedOptimizer, local, local_bytes, sharded_dimensions
from titan_like.parallel.apply import build_parallel_model
from titan_like.parallel.layout import method_of
from titan_like.parallel.lora import adapter_parameters
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel, Stage
from titan_like.parallel.schedules.simulate import bubble_fraction, max_in_flight, simulate, unit_time
from titan_like.parallel.schedules.tables import Action
from titan_like.planner.auto import with_chosen_layout
from titan_like.planner.data_parallel import sharding_of
from titan_like.planner.memory import StepMemory, rank_moments
from titan_like.planner.stack import named_profile
from titan_like.planner.stages import pipeline_program
from titan_like.planner.trace.program import HOST
from titan_like.planner.trace.run import fake_process_group
from titan_like.planner.traffic import Amount, Message, step_traffic
from titan_like.planner.workload import Workload, workload_of
from titan_like.train.environment import dry_run_world
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import check_folders


class RankState(NamedTuple):
    """Bytes on one process between the backward pass and the optimizer's update, without padding of uneven shards."""

    num_parameters: int
    parameters: int
    gradients: int  # freed after the update
    optimizer: int


@dataclass(frozen=True)
class ParameterReport:
    """One parameter as the process has it."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    split: dict[str, int]  # mesh dimension → dimension of the parameter


@dataclass(frozen=True)
class StageReport:
    """One pipeline stage of the process."""

    index: int
    layers: tuple[int, int]  # first and last
    parameters: list[ParameterReport]


@dataclass(frozen=True)
class Schedule:
    """What the process computes. Bubbles are idle time over compute time and leave out the time of messages."""

    name: str
    num_stages: int  # in the whole pipeline
    microbatches: int
    counts: dict[str, int]  # of F, B, I and W
    bubble: float  # if F, I and W take equally long in every stage
    bubble_by_flops: float  # if they take as long as the stage's GEMMs and attention
    in_flight: int  # the most chunks (one microbatch in one stage) whose activations the process holds
    actions: list[Action]


@dataclass(frozen=True)
class DryRun:
    """Everything that a dry run reports."""

    family: str
    flavor: str
    num_parameters: int  # in the whole model, adapters included
    adapters: int  # of these
    trained: int  # elements of parameters that this process trains
    active_parameters: int  # parameters that a token uses
    zero_stage: int
    world_size: int
    rank: int
    mesh: dict[str, tuple[int, int]]  # mesh dimension → this process's coordinate, size
    node: tuple[int, int] | None  # this process's node, and its index on that node
    steps: int  # 0 if the length is in epochs and the data is not counted
    samples: int
    global_batch_size: int
    seq_len: int
    stages: list[StageReport]
    state: RankState  # of the stages as built, and of their optimizer after one step
    copies: int  # bytes of weights in a 16-bit type that stay between steps
    peak: StepMemory  # fullest moment of a step, on the first process that shards these stages
    in_passes: int  # bytes at the fullest moment of the passes, most often as a backward pass starts
    in_update: int  # and at the fullest moment of the optimizer's step
    schedule: Schedule
    traffic: dict[Message, Amount]  # of one step
    groups: dict[str, int]  # process group → number of its processes
    data: str
    notes: list[str]  # settings that the run changes, and what is wrong on this machine

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON. Actions become short words: F2:0 is the forward pass of microbatch 2 in stage 0."""
        tree = asdict(self) | {"state": self.state._asdict(), "peak": self.peak._asdict()}
        tree["schedule"]["actions"] = [f"{step.kind}{step.microbatch}:{step.stage}" for step in self.schedule.actions]
        tree["traffic"] = [message._asdict() | amount._asdict() for message, amount in self.traffic.items()]
        return tree


def dry_run(config: JobConfig) -> DryRun:
    """Check a run and report on one of its processes. Raises a `ConfigError` if the user has to change something."""
    # Every check that a real run makes before it starts.
    world_size, rank = dry_run_world(config), config.job.dry_run_rank
    config = with_chosen_layout(config, world_size)
    named_profile(config)  # refuses one that cannot be read
    settings = resolve_settings(config, world_size)
    model, layout = settings.model, settings.layout
    training, gpu, gpus = config.training, config.cluster.gpu, config.cluster.gpus_per_node
    lacks_type = gpu is not None and training.dtype == "bfloat16" and peak_tflops(gpu, "bfloat16") is None
    hint = f'{gpu} has no bfloat16 arithmetic; use "float16" or "float32"'  # a real run asks the GPU itself
    require(not lacks_type, "training.dtype", training.dtype, hint)
    config, data = describe_data(config, model)
    training, warmup = config.training, None
    if has_length := training.epochs is None or training.samples is not None:
        warmup = describe_warmup(config.lr_scheduler, schedule_length(training))
    vocabulary = None if is_on_hub(config.data.tokenizer) else describe_vocabulary(config, model.vocab_size)
    notes = [*filter(None, (warmup, vocabulary)), *_check_this_machine(config, model)]
    notes += [method_of(config, model).message] if layout.context > 1 else []
    # The process's part of the model, as the real recipe builds it.
    with fake_process_group(rank, world_size):
        mesh = build_mesh(layout, "cpu")
        parallel_model = build_parallel_model(config, model, mesh, torch.device("meta"))
        stages = [describe_stage(stage) for stage in parallel_model.stages]
        optimizer = built_optimizer(config, parallel_model)
        state = built_state(parallel_model, optimizer)
        trained = sum(local(parameter).numel() for parameter in parallel_model.parameters())
        coordinates = _coordinates(mesh)
        if parallel_model.expert_mesh is not None:
            coordinates = _coordinates(parallel_model.expert_mesh) | coordinates
    # What it does in a step. float64 is computed as it is, while forecasts of time take it for float32.
    work = workload_of(config, model, layout)._replace(dtype=training.dtype)
    pipeline_rank, rules = coordinates["pp"][0], sharding_of(work).rules
    shards = {name: coordinate for name, (coordinate, _) in coordinates.items()}
    traffic = step_traffic(work, pipeline_rank, shards)
    groups = {name: size for name, (_, size) in coordinates.items()} | {"cp": layout.context, "dp": layout.weight_ranks}
    groups["kv"] = layout.ranks_per_kv_head(model.num_kv_heads)
    groups |= {"expert_dp": layout.replicate * layout.expert_shards, HOST: 1}
    # Rules of other packages are taken to send nothing.
    for names, kind, calls, size in optimizer.traffic() if isinstance(optimizer, ShardedOptimizer) else ():
        group = "_".join(names)
        traffic[Message(group, kind, "optimizer")] = Amount(calls, size)
        groups[group] = prod(coordinates[name][1] for name in names)
    moments, adapters = rank_moments(work, pipeline_rank), adapter_parameters(model, config.lora)
    steps, samples = (total_steps(training), total_samples(training)) if has_length else (0, 0)
    return DryRun(
        family=config.model.family,
        flavor=config.model.flavor,
        num_parameters=model.num_parameters() + adapters,
        adapters=adapters,
        trained=trained,
        active_parameters=model.active_parameters + adapters,
        zero_stage=config.parallelism.zero_stage,
        world_size=world_size,
        rank=rank,
        mesh=coordinates,
        node=divmod(rank, gpus) if gpus else None,
        steps=steps,
        samples=samples,
        global_batch_size=training.global_batch_size,
        seq_len=training.seq_len,
        stages=stages,
        state=state,
        copies=trained * rules.compute * rules.copied,
        peak=max(moments, key=lambda moment: moment.total),
        in_passes=moments[0].total,
        in_update=moments[1].total,
        schedule=schedule_of(work, pipeline_rank),
        traffic=traffic,
        groups=groups,
        data=data,
        notes=notes,
    )


def built_optimizer(config: JobConfig, model: ParallelModel) -> torch.optim.Optimizer:
    """The model's optimizer with the state that it has after its first step."""
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    materialise_optimizer_state(optimizer)
    return optimizer


def built_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> RankState:
    """Count the model's local parameters, and what their optimizer keeps."""
    parameters = [parameter for stage in model.stages for parameter in stage.module.parameters()]
    values = (value for state in optimizer.state.values() for value in state.values() if value.ndim)
    number = sum(local(parameter).numel() for parameter in parameters)
    # Gradients have the shapes and types of parameters.
    return RankState(number, local_bytes(parameters), local_bytes(model.parameters()), local_bytes(values))


def schedule_of(work: Workload, rank: int) -> Schedule:
    """What a pipeline rank computes in a step."""
    schedule = work.pipeline_schedule
    table, stages = schedule.table, pipeline_program(work).stages
    passes = (zip(*(segment.passes for segment in stage.segments), strict=True) for stage in stages)
    flops = [[sum(pass_.flops for pass_ in segments) for segments in of_stage] for of_stage in passes]
    parts = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}  # of `Segment.passes`

    def by_flops(action: Action) -> float:
        return sum(flops[action.stage][part] for part in parts[action.kind])

    equal, real = (simulate(table, schedule.ranks, duration) for duration in (unit_time, by_flops))
    return Schedule(
        name=schedule.name,
        num_stages=len(flops),
        microbatches=work.microbatches,
        counts=dict(Counter(action.kind for action in table[rank])),
        bubble=bubble_fraction(equal, schedule.pipeline),
        bubble_by_flops=bubble_fraction(real, schedule.pipeline),
        in_flight=max_in_flight(table)[rank],
        actions=table[rank],
    )


def _coordinates(mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    names, coordinates = mesh.mesh_dim_names, mesh.get_coordinate()
    assert names is not None and coordinates is not None
    return {name: (coordinates[i], mesh.size(i)) for i, name in enumerate(names)}


def describe_stage(stage: Stage) -> StageReport:
    """A stage's layers and parameters as built."""
    layers = [int(name) for name in stage.module.layers]
    parameters = []
    for name, parameter in stage.module.named_parameters():
        split = {mesh: dim for dim in range(parameter.ndim) for mesh in sharded_dimensions(parameter, dim)}
        parameters.append(ParameterReport(name, tuple(parameter.shape), tuple(local(parameter).shape), split))
    return StageReport(stage.index, (layers[0], layers[-1]), parameters)


def _check_this_machine(config: JobConfig, model: TransformerConfig) -> list[str]:
    """Check folders, checkpoints and tasks. If the run is for another machine, only report what is missing on this one.

    A checkpoint of another run is reported too: the dry run does not touch it. Raises a `ConfigError` if the run is for
    this machine, and something is wrong.
    """
    try:
        named_tasks("evaluation.datasets", config.evaluation.datasets, model)
        check_folders(config, model, make=False)
    except OtherRunError as error:
        return [f"the run itself will not start: {error}"]
    except ConfigError as error:
        if config.cluster.nodes is None:
            raise
        return [f"not checked on this machine: {error}"]
    return []
