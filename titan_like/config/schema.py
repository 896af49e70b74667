"""Every setting of a run: its name, type, default, unit and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from titan_like.config.paths import expanded

# Every number has a limit, far above what anyone trains with: a slip of the keyboard is refused at once, where it would
# fill the memory or overflow later. What a number means for the machine at hand is checked with the machine.
_MOST_STEPS = 10**12
_MOST_SAMPLES = 10**15
_MOST_TOKENS = 10**18  # below 2⁶³
_MOST_SEED = 2**63 - 1  # generators take 64 bits, and each process adds its own number
_MOST_SEQ_LEN = 2**27
_MOST_LAYERS = 2048
_MOST_PROCESSES = 2**20
_MOST_NODES = 2**15
_MOST_SECONDS = 10**6  # sockets count milliseconds in 32 bits


def _as_list(value: Any) -> Any:
    """A single command-line value given to a list setting."""
    return [value] if isinstance(value, str | int | float) else value


def _expanded_or_none(path: str | None) -> str | None:
    return None if path is None else expanded(path)


def _expanded_list(paths: list[str]) -> list[str]:
    return [expanded(path) for path in paths]


def _expanded_tokenizer(spec: str) -> str:
    """Its path, or the two after "gpt2:"."""
    if not spec.startswith("gpt2:"):
        return expanded(spec)
    return "gpt2:" + ",".join(expanded(path) if path else path for path in spec.removeprefix("gpt2:").split(","))


def utf8_text(text: str) -> str:
    """Text of the command line, read as UTF-8 whatever the locale: Python keeps bytes that its locale lacks apart.

    Raises:
        ValueError: its bytes are not UTF-8.
    """
    try:
        return text.encode("utf-8", errors="surrogateescape").decode("utf-8")
    except UnicodeError:
        raise ValueError("is not valid UTF-8; write it in a UTF-8 terminal") from None


Text = Annotated[str, AfterValidator(utf8_text)]
PathText = Annotated[str, AfterValidator(expanded)]
OptionalPath = Annotated[str | None, AfterValidator(_expanded_or_none)]
PathList = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_expanded_list)]
StepList = Annotated[list[Annotated[int, Field(gt=0, le=_MOST_STEPS)]], BeforeValidator(_as_list)]


def options_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a table as TOML has them (`async` is no name in Python)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


class Section(BaseModel):
    """Base of every table: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), serialize_by_alias=True
    )


class Job(Section):
    """The run as a whole."""

    config_file: OptionalPath = Field(None, description="TOML file that the settings were read from")
    description: Text = Field("", description="one line about the run, shown in logs and in wandb")
    dump_folder: PathText = Field("outputs", description="folder that receives checkpoints, metrics and caches")
    seed: int = Field(1234, ge=0, le=_MOST_SEED, description="seed of initial weights, data order and dropout")
    deterministic: bool = Field(False, description="use deterministic kernels only (slower)")
    dry_run: bool = Field(
        False,
        description="check everything, print what one process of the job would hold, send and compute, and stop; "
        "nothing is allocated. With --json PATH it is also written there",
    )
    dry_run_rank: int = Field(
        0,
        ge=0,
        lt=_MOST_PROCESSES,
        description="the process that a dry run describes, of cluster.nodes × cluster.gpus_per_node ones (else "
        "WORLD_SIZE, else the product of the degrees)",
    )


class Model(Section):
    """Which transformer to train."""

    family: Text = Field(
        "gpt", examples=["gpt", "llama"], description="model family: gpt, llama, or one that an installed package has"
    )
    flavor: Text = Field("debug", description="named shape in the family's flavors.toml or in [model.flavors.NAME]")
    flavors: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="your own flavors, one table of model fields each"
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="fields of the flavor to change")


class Data(Section):
    """What to train on."""

    dataset: Literal["stdlib", "text"] = Field(
        "stdlib",
        description="stdlib: the source files of the Python standard library; text: the files named by paths",
    )
    paths: PathList = Field(
        default_factory=list, description="files or glob patterns of text; .jsonl files hold one document a line"
    )
    text_key: Text = Field("text", description="key of the text in JSONL documents")
    split: Text = Field("969,30,1", description="weights of the train, validation and test splits")
    tokenizer: Annotated[str, AfterValidator(_expanded_tokenizer)] = Field(
        "byte", description='"byte", the path of a Hugging Face tokenizer.json, or "gpt2:vocab.json,merges.txt"'
    )
    num_workers: int = Field(
        0, ge=0, le=1024, description="data loader processes per rank; 0 loads in a background thread"
    )


class Training(Section):
    """How much to train, in what batches and precision."""

    seq_len: int = Field(256, gt=0, le=_MOST_SEQ_LEN, description="tokens per sample")
    micro_batch_size: int = Field(8, gt=0, le=2**16, description="samples per forward pass on one data-parallel rank")
    global_batch_size: int = Field(16, gt=0, le=2**20, description="samples per optimizer step over the whole job")
    steps: int | None = Field(None, gt=0, le=_MOST_STEPS, description="length of the run in optimizer steps")
    samples: int | None = Field(None, gt=0, le=_MOST_SAMPLES, description="length of the run in samples")
    tokens: int | None = Field(None, gt=0, le=_MOST_TOKENS, description="length of the run in tokens")
    batch_size_rampup: list[Annotated[int, Field(le=_MOST_SAMPLES)]] | None = Field(
        None,
        description="[start, increment, samples]: grow the global batch size linearly from start to "
        "global_batch_size over this many samples",
    )
    max_norm: float = Field(1.0, ge=0, description="gradient norm to clip at; 0 does not clip")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32",
        description="type of compute and of gathered weights; master weights are float32. float64, in everything, is "
        "for exact comparisons",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type in which gradients are summed over ranks and microbatches"
    )


class Optimizer(Section):
    """The update rule."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="adamw, or plain sgd without momentum")
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of matrices; vectors are not decayed")
    implementation: Literal["for-loop", "foreach", "fused"] = Field(
        "fused", description="kernel of the update; sgd has none that is fused and takes foreach"
    )


class LRScheduler(Section):
    """The learning rate over the run."""

    warmup_steps: int = Field(0, ge=0, le=_MOST_STEPS, description="steps of linear warm-up from 0")
    decay: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = Field(
        "cosine", description="shape of the decay after warm-up; wsd: constant, then linear at the end of the run"
    )
    decay_steps: int | None = Field(
        None,
        gt=0,
        le=_MOST_STEPS,
        description="cosine, linear: step at which the decay ends, counted from the start (default: the run's length); "
        "wsd: length of the final decay (default: a tenth of the run)",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="floor of the learning rate as a share of optimizer.lr")


class Parallelism(Section):
    """How the job is laid out over its processes."""

    auto: bool = Field(
        False,
        description="let the planner choose, for the GPU and as many processes as are started, what of this section, "
        "of [activation_checkpoint] and of training.micro_batch_size is not set",
    )
    tensor_parallel_degree: int = Field(
        1, gt=0, le=_MOST_PROCESSES, description="processes that share each layer's matrices"
    )
    sequence_parallel: bool = Field(False, description="shard activations between tensor-parallel regions")
    pipeline_parallel_degree: int = Field(
        1, gt=0, le=_MOST_PROCESSES, description="groups of processes that hold consecutive layers"
    )
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
    ] = Field("1f1b", description="order of the pipeline's forward and backward passes")
    virtual_stages_per_rank: int = Field(
        1,
        gt=0,
        le=_MOST_LAYERS,
        description="stages per pipeline rank, for interleaved schedules; zbv_zero_bubble and dualpipe_v have 2",
    )
    pipeline_layers: list[Annotated[int, Field(le=_MOST_LAYERS)]] | None = Field(
        None, description="layers of each stage, first to last (default: balanced, the output matrix counted in)"
    )
    context_parallel_degree: int = Field(1, gt=0, le=_MOST_PROCESSES, description="processes that share each sequence")
    expert_parallel_degree: int = Field(
        1, gt=0, le=_MOST_PROCESSES, description="processes that share a layer's experts"
    )
    data_parallel_replicate_degree: int = Field(
        1, gt=0, le=_MOST_PROCESSES, description="full replicas of the ZeRO-sharded group"
    )
    data_parallel_shard_degree: int = Field(
        -1,
        ge=-1,
        le=_MOST_PROCESSES,
        description="processes that ZeRO shards over; -1 takes what the other degrees leave",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="shard nothing (0), optimizer state (1), also gradients (2), also parameters (3)"
    )


class ActivationCheckpoint(Section):
    """Recompute activations in the backward pass to save memory."""

    mode: Literal["none", "full", "selective"] = Field(
        "none", description="full recomputes whole layers; selective keeps matrix products and recomputes the rest"
    )
    every_n_layers: int = Field(1, gt=0, le=_MOST_LAYERS, description="checkpoint every n-th layer")


class Compile(Section):
    """torch.compile of the transformer layers."""

    enable: bool = Field(False, description="compile each transformer layer")


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = Field(False, description="save checkpoints, and resume from the newest one in the folder")
    interval: int = Field(
        500, gt=0, le=_MOST_STEPS, description="steps between checkpoints; the last step is always saved"
    )
    async_: bool = Field(
        False,
        alias="async",
        description="write checkpoints while training goes on, from copies in host memory of what each process holds",
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="what to do when a checkpoint cannot be written, as on a full disk; the last one always stops",
    )
    keep_latest: int = Field(0, ge=0, le=_MOST_STEPS, description="checkpoints to keep; 0 keeps all")
    load_step: int | None = Field(
        None, ge=0, le=_MOST_STEPS, description="step to resume from (default: the newest complete one)"
    )
    folder: OptionalPath = Field(None, description="folder of the checkpoints (default: <job.dump_folder>/checkpoint)")
    initial_load_path: OptionalPath = Field(
        None,
        description="Hugging Face folder, or a checkpoint's step-N folder, whose weights a new run begins with",
    )


class Metrics(Section):
    """What is logged, and where."""

    log_interval: int = Field(
        10, gt=0, le=_MOST_STEPS, description="steps between console lines; metrics.jsonl has every step"
    )
    tensorboard: bool = Field(False, description="write TensorBoard events to <job.dump_folder>/tensorboard")
    wandb: bool = Field(False, description="log to Weights & Biases")
    wandb_project: Text = Field("titan_like", description="wandb project")
    wandb_mode: Literal["auto", "online", "offline"] = Field(
        "auto",
        description="auto is what WANDB_MODE says, else online when a wandb key is configured and offline otherwise",
    )


class Health(Section):
    """What to do about bad steps."""

    skip_nonfinite: bool = Field(
        True,
        description="skip the update of a step whose gradient norm is not finite; false stops the run (gradients that "
        "overflow float16 are always skipped)",
    )
    loss_spike_factor: float = Field(
        0.0,
        ge=0,
        description="robust standard deviations above the median of recent losses that make a loss a spike; 0 never",
    )
    loss_spike_window: int = Field(128, gt=1, le=10**6, description="losses that the next one is compared with")
    loss_spike_action: Literal["skip", "rewind"] = Field(
        "skip",
        description="skip the update of a step with a loss spike, or go back to the newest checkpoint and on with the "
        "samples after it",
    )
    max_consecutive_skips: int = Field(
        100,
        gt=0,
        le=_MOST_STEPS,
        description="steps without an update in a row (bad gradients, overflow, spikes) that end the run",
    )
    hang_timeout_seconds: float = Field(
        600.0,
        ge=0,
        le=_MOST_SECONDS,
        description="seconds without progress after which the process that hangs, or has died, is named and the job "
        "ends; 0 waits for ever",
    )


class Profiling(Section):
    """Where the time of single steps goes."""

    timeline_steps: StepList = Field(
        default_factory=list,
        description="steps whose passes are timed on every pipeline rank, for bubble, slowest stage and exposed "
        "communication, and <job.dump_folder>/timeline/step-N.json (for ui.perfetto.dev), .png and .txt",
    )
    timeline_interval: int = Field(
        0, ge=0, le=_MOST_STEPS, description="time the passes of every so many steps too; 0 does not"
    )
    trace_steps: StepList = Field(
        default_factory=list,
        description="steps to record with torch.profiler, as <job.dump_folder>/trace/step-N-rank-R.json",
    )


class Evaluation(Section):
    """Validation on held-out data."""

    interval: int = Field(0, ge=0, le=_MOST_STEPS, description="steps between validations; 0 never validates")
    steps: int = Field(10, gt=0, le=_MOST_STEPS, description="global batches per validation")


class Cluster(Section):
    """The machine that the run is meant for."""

    gpu: str | None = Field(
        None, description='GPU whose peak MFU is measured against, for example "A100" (default: the one found)'
    )
    gpus_per_node: int | None = Field(None, gt=0, le=1024, description="GPUs in one node, one process each")
    nodes: int | None = Field(None, gt=0, le=_MOST_NODES, description="nodes that a dry run and the planner describe")
    node_bandwidth: float | None = Field(
        None,
        ge=0.001,
        le=1e5,
        description="what all network cards of a node carry together in one direction, in GB/s (1e9 bytes), for the "
        "planner: 200 for eight cards of 200 Gb/s (default: that of the stack profile)",
    )
    profile: OptionalPath = Field(
        None,
        description="stack profile that steps are predicted with: a shipped one, or a TOML file such as plan.py "
        "microbenchmark and calibrate write (default: that of the GPU)",
    )


class JobConfig(Section):
    """The whole configuration of a run."""

    job: Job = Field(default_factory=Job)
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    compile: Compile = Field(default_factory=Compile)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    health: Health = Field(default_factory=Health)
    profiling: Profiling = Field(default_factory=Profiling)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    cluster: Cluster = Field(default_factory=Cluster)
