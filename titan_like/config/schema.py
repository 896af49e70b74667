"""Every setting of a run: its name, type, default, unit and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from titan_like.config.section import (
    MOST_LAYERS,
    MOST_NODES,
    MOST_PROCESSES,
    MOST_SAMPLES,
    MOST_SEED,
    MOST_SEQ_LEN,
    MOST_TOKENS,
    Degree,
    OffOrSeconds,
    OptionalPath,
    PathList,
    PathText,
    Section,
    StepCount,
    StepList,
    StepNumber,
    TextList,
    TokenizerText,
    ZeroStage,
)


class Job(Section):
    """The run as a whole."""

    config_file: OptionalPath = Field(
        None, description="TOML file to read the settings from, or a shipped one's name: debug_gpt"
    )
    description: str = Field("", description="one line about the run, shown in logs and in wandb")
    dump_folder: PathText = Field("outputs", description="folder for checkpoints, metrics and caches")
    seed: int = Field(1234, ge=0, le=MOST_SEED, description="seed of initial weights, data order and dropout")
    deterministic: bool = Field(False, description="use deterministic kernels only (slower)")
    dry_run: bool = Field(
        False,
        description="check everything, print what one process of the job would hold, send and compute, and stop "
        "without allocating anything; --json PATH also writes it to a file",
    )
    dry_run_rank: int = Field(
        0,
        ge=0,
        lt=MOST_PROCESSES,
        description="rank of the process that a dry run describes, in a job of cluster.nodes × cluster.gpus_per_node "
        "processes (else WORLD_SIZE, else the product of the degrees)",
    )


class Model(Section):
    """Which transformer to train."""

    family: str = Field(
        "gpt",
        examples=["gpt", "llama", "bert", "t5"],
        description="model family: gpt, llama, bert, t5, or one that an installed package adds",
    )
    flavor: str = Field("debug", description="named shape in the family's flavors.toml or in [model.flavors.NAME]")
    flavors: dict[str, dict[str, Any]] = Field({}, description="your own flavors, each a table of model fields")
    overrides: dict[str, Any] = Field({}, description="fields of the flavor to override")


class TokenOptions(NamedTuple):
    """What else than the tokenizer decides the tokens that a text becomes; the fields of `[data]` of the same names."""

    bos: str = "auto"
    eod_token: str = ""
    split_special_tokens: bool = True


DEFAULT_TOKENS = TokenOptions()


class Data(Section):
    """The dataset, its tokenizer and its splits."""

    dataset: str = Field(
        "stdlib",
        description="stdlib: the source files of the Python standard library; text: the files named by paths; indexed: "
        "Megatron-LM's .bin and .idx files; hf: files or a Hugging Face dataset, tokenized as the run reads them; "
        "conversations: records of messages or of prompts and answers, to fine-tune on the answers "
        "(docs/fine_tuning.md); race: the folder of RACE, for bert with sentence_head choice; or a dataset of your own "
        "package (docs/data.md)",
        examples=["stdlib", "text", "indexed", "hf", "conversations", "race"],
    )
    paths: PathList = Field(
        [],
        description="files, folders or glob patterns of text, JSON, parquet, …, indexed datasets without .bin and "
        '.idx, or for hf also names such as "org/name:config"; weights and paths in turn make a blend: '
        '[0.7, "web", 0.3, "books"]',
    )
    options: dict[str, Any] = Field({}, description="settings of a dataset of your own package")
    text_key: str = Field("text", description="key or column of the text in documents of JSONL, parquet and arrow")
    bad_lines: Literal["stop", "skip"] = Field(
        "stop",
        description="text, hf and conversations: stop at a record that cannot be learned, or skip and count it",
    )
    split: str = Field("969,30,1", description="weights of the train, validation and test splits")
    tokenizer: TokenizerText = Field(
        "byte",
        description='"byte", the path of a Hugging Face tokenizer.json or of its folder, "gpt2:vocab.json,merges.txt", '
        "or the name of a repository of the Hugging Face hub that has one",
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether documents, prompts and evaluated texts begin with the tokenizer's bos_token; auto: with "
        "what the tokenizer itself puts before a text",
    )
    eod_token: str = Field(
        "", description="token that ends every document (default: eos_token of tokenizer_config.json)"
    )
    split_special_tokens: bool = Field(
        True,
        description="whether special tokens such as <|endoftext|> that are written in a document are text; if false, "
        "they become those tokens",
    )
    reset_position_ids: bool = Field(False, description="count positions from 0 in each document of a sample")
    reset_attention_mask: bool = Field(False, description="let tokens attend to their own document only")
    eod_mask_loss: bool = Field(
        False, description="no loss where the input is an end-of-document token, which cannot know what comes next"
    )
    prefix_lm: bool = Field(
        False,
        description="prefix language model: the first tokens of a sample, a random number of them, see each other",
    )
    prefix_lm_loss: Literal["targets", "all"] = Field(
        "targets", description="tokens that carry a loss with prefix_lm: those after the prefix, or all"
    )
    mlm_probability: float = Field(
        0.15, gt=0, le=1, description="share of the tokens that a model of masked tokens, such as bert, has to name"
    )
    mlm_whole_words: bool = Field(
        False, description="mask whole words, as the tokenizer divides text, instead of tokens"
    )
    mlm_max_ngram: int = Field(
        1,
        ge=1,
        le=16,
        description="mask up to this many neighbouring tokens or words together, n of them with weight 1/n",
    )
    noise_density: float = Field(
        0.15, gt=0, lt=1, description="span corruption, the objective of t5: share of the tokens that are taken out"
    )
    mean_noise_span_length: float = Field(
        3.0, ge=1, le=10**6, description="span corruption: mean length of the spans that are taken out, tokens"
    )
    sentence_objective: Literal["none", "next_sentence", "sentence_order"] = Field(
        "none",
        description="for bert with sentence_head pair, in addition to masked tokens: tell whether the second of two "
        "sentences follows the first or is of another text (next_sentence), or whether the two are swapped "
        "(sentence_order)",
    )
    num_workers: int = Field(
        0, ge=0, le=1024, description="data loader processes per rank; 0 loads in a background thread"
    )

    @property
    def token_options(self) -> TokenOptions:
        """What else than the tokenizer decides the tokens that a text becomes."""
        return TokenOptions(self.bos, self.eod_token, self.split_special_tokens)

    @property
    def learns_bytes(self) -> bool:
        """Whether the run's tokens are bytes. Data that is tokenized already may be of any tokenizer."""
        return self.tokenizer == "byte" and self.dataset != "indexed"

    @property
    def tells_documents_apart(self) -> bool:
        """Whether a setting depends on where the documents of a sample end."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    num_readers: int = Field(
        16,
        ge=1,
        le=2**16,
        description="for hf: sample i of the run comes from reader i mod num_readers. A multiple of micro_batch_size × "
        "data-parallel ranks × num_workers tokenizes nothing twice; another number gives other samples",
    )


class Training(Section):
    """How much to train, in what batches and precision."""

    seq_len: int = Field(256, gt=0, le=MOST_SEQ_LEN, description="tokens per sample; for t5, the encoder's positions")
    decoder_seq_len: int = Field(
        0, ge=0, le=MOST_SEQ_LEN, description="t5: the decoder's positions; 0 means as many as the targets take"
    )
    micro_batch_size: int = Field(8, gt=0, le=2**16, description="samples per forward pass on one data-parallel rank")
    global_batch_size: int = Field(16, gt=0, le=2**20, description="samples per optimizer step over the whole job")
    steps: StepNumber | None = Field(None, description="length of the run in optimizer steps")
    samples: int | None = Field(None, gt=0, le=MOST_SAMPLES, description="length of the run in samples")
    tokens: int | None = Field(None, gt=0, le=MOST_TOKENS, description="length of the run in tokens")
    batch_size_rampup: list[Annotated[int, Field(le=MOST_SAMPLES)]] | None = Field(
        None,
        description="[start, increment, samples]: grow the global batch size linearly from start to "
        "global_batch_size over this many samples",
    )
    max_norm: float = Field(1.0, ge=0, le=1e30, description="gradient norm to clip at; 0 turns clipping off")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32",
        description="type of compute and of gathered weights; master weights are float32. float64 applies to "
        "everything, for exact comparisons",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type in which gradients are summed over ranks and microbatches"
    )


class Optimizer(Section):
    """The update rule."""

    name: str = Field(
        "adamw",
        description="adamw, adafactor, muon (with AdamW for all but the layers' matrices), plain sgd without momentum, "
        "or the name of an installed package's optimizer",
    )
    lr: float = Field(3e-4, gt=0, le=1e6, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-8, ge=1e-30, le=1e6, description="AdamW's epsilon")
    weight_decay: float = Field(
        0.1, ge=0, le=1e6, description="decoupled weight decay of matrices; vectors are not decayed"
    )
    implementation: Literal["for-loop", "foreach", "fused"] = Field(
        "fused", description="kernel of adamw and sgd; sgd has no fused one and uses foreach"
    )
    relative_step: bool = Field(
        False,
        description="adafactor: at the t-th update use the rate min(0.01, 1/√t) in place of optimizer.lr, times the "
        "schedule's share of the peak",
    )
    scale_parameter: bool = Field(
        False, description="adafactor: multiply the rate by the parameter's root mean square, at least 0.001"
    )
    clip_threshold: float = Field(
        1.0, gt=0, le=1e6, description="adafactor: largest root mean square of a parameter's update, before the rate"
    )
    decay_rate: float = Field(
        0.8, gt=0, le=1, description="adafactor: the second moment's decay rate at the t-th update is 1 - t^-decay_rate"
    )
    beta1: float | None = Field(
        None, ge=0, lt=1, description="adafactor: decay rate of a first moment (default: there is none)"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="muon: decay rate of the momentum, which is Nesterov's")
    matrix_lr: float | None = Field(
        None, gt=0, le=1e6, description="muon: peak learning rate of the layers' matrices (default: optimizer.lr)"
    )
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="muon: factor of a matrix's rate: 0.2·√max(rows, columns), so that AdamW's rates fit, or "
        "√max(1, rows/columns)",
    )
    newton_schulz_steps: int = Field(5, gt=0, lt=100, description="muon: steps of the iteration that orthogonalises")
    newton_schulz_dtype: Literal["bfloat16", "float32"] | None = Field(
        None,
        description="muon: type of that iteration (default: bfloat16, on a CPU float32); float64 training always uses "
        "float64",
    )
    options: dict[str, Any] = Field({}, description="settings of an installed package's optimizer")


class LRScheduler(Section):
    """The learning rate over the run."""

    warmup_steps: StepCount = Field(
        0,
        description="steps of linear warm-up from 0; for a length in samples or tokens, a step of this section is "
        "global_batch_size samples, as they were when the run began",
    )
    decay: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = Field(
        "cosine", description="shape of the decay after warm-up; wsd: constant, then linear at the end of the run"
    )
    decay_steps: StepNumber | None = Field(
        None,
        description="cosine, linear: step at which the decay ends, counted from the start (default: the run's length); "
        "wsd: length of the final decay (default: a tenth of the run)",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="floor of the learning rate as a share of optimizer.lr")


class Parallelism(Section):
    """How the job is laid out over its processes."""

    auto: bool = Field(
        False,
        description="let the planner choose whatever is left unset of this section, [activation_checkpoint] and "
        "training.micro_batch_size, to suit the GPU and the number of processes",
    )
    tensor_parallel_degree: Degree = Field(1, description="ranks that split each layer's matrices")
    sequence_parallel: bool = Field(False, description="shard activations between tensor-parallel regions")
    pipeline_parallel_degree: Degree = Field(1, description="pipeline ranks, each of which holds a share of the layers")
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
    ] = Field("1f1b", description="order of the pipeline's forward and backward passes")
    virtual_stages_per_rank: int = Field(
        1,
        gt=0,
        le=MOST_LAYERS,
        description="stages per pipeline rank for interleaved schedules; zbv_zero_bubble and dualpipe_v always have 2",
    )
    pipeline_layers: list[Annotated[int, Field(le=MOST_LAYERS)]] | None = Field(
        None, description="layers of each stage, first to last (default: balanced, counting the output matrix)"
    )
    context_parallel_degree: Degree = Field(1, description="ranks of a context-parallel (CP) group")
    context_parallel_method: Literal["auto", "all_gather", "ulysses", "ring"] = Field(
        "auto", description="how a CP group attends to whole sequences (docs/long_context.md)"
    )
    expert_parallel_degree: Degree = Field(1, description="ranks of an expert-parallel (EP) group")
    data_parallel_replicate_degree: Degree = Field(1, description="full replicas of the ZeRO-sharded group")
    data_parallel_shard_degree: int = Field(
        -1,
        ge=-1,
        le=MOST_PROCESSES,
        description="processes that ZeRO shards over; -1 uses all that the other degrees leave",
    )
    zero_stage: ZeroStage = Field(
        0, description="what is sharded: nothing (0), optimizer state (1), also gradients (2), also parameters (3)"
    )


class ActivationCheckpoint(Section):
    """Recomputation of activations in the backward pass, which saves memory."""

    mode: Literal["none", "full", "selective", "experts"] = Field(
        "none",
        description="full recomputes whole layers; selective keeps matrix products and recomputes the rest; experts "
        "recomputes routers and experts alone",
    )
    every_n_layers: int = Field(1, gt=0, le=MOST_LAYERS, description="checkpoint every n-th layer")


class Compile(Section):
    """torch.compile of the transformer layers."""

    enable: bool = Field(False, description="compile each transformer layer")


class Float8(Section):
    """Float8 products in the linear modules of the transformer layers (docs/float8.md)."""

    enable: bool = Field(
        False, description="multiply in float8: on CUDA from compute capability 8.9 on; on a CPU it is emulated"
    )
    recipe: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise",
        description="scale each tensor by one number, or each row or column that a product sums over by its own, which "
        "is slower and more accurate",
    )
    filter: TextList = Field(
        [],
        description="modules of the layers that stay in training.dtype, by name, with * for any one part between dots: "
        '"layers.0", "layers.*.attention", "layers.*.mlp.fc2". The output matrix, and modules whose sides are no '
        "multiples of 16, always stay",
    )


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = Field(False, description="save checkpoints, and resume from the newest one in the folder")
    interval: StepNumber = Field(500, description="steps between checkpoints; the last step is always saved")
    async_: bool = Field(
        False, alias="async", description="write checkpoints while training continues, from copies in host memory"
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="what to do if a checkpoint cannot be written, as on a full disk; a failure of the "
        "last one always stops the run",
    )
    keep_latest: StepCount = Field(0, description="checkpoints to keep; 0 keeps all")
    load_step: StepCount | None = Field(None, description="step to resume from (default: the newest complete one)")
    folder: OptionalPath = Field(None, description="folder of the checkpoints (default: <job.dump_folder>/checkpoint)")
    initial_load_path: OptionalPath = Field(
        None,
        description="Hugging Face folder or name of the hub, or a checkpoint's step-N folder, whose weights a new run "
        "starts from",
    )


class Metrics(Section):
    """The log line's interval and the writers of metrics."""

    log_interval: StepNumber = Field(10, description="steps between console lines; metrics.jsonl has every step")
    tensorboard: bool = Field(False, description="write TensorBoard events to <job.dump_folder>/tensorboard")
    wandb: bool = Field(False, description="log to Weights & Biases")
    wandb_project: str = Field("titan_like", description="wandb project")
    wandb_mode: Literal["auto", "online", "offline"] = Field(
        "auto",
        description="auto uses WANDB_MODE if it is set, else online if a wandb key is configured, else offline",
    )


class Health(Section):
    """Detection of bad steps and hangs, and what to do about them."""

    skip_nonfinite: bool = Field(
        True,
        description="skip the update of a step whose gradient norm is not finite; if false, such a step stops the run "
        "(steps that overflow float16 are always skipped)",
    )
    loss_spike_factor: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="robust standard deviations above the median of recent losses at which a loss counts as a spike; "
        "0 turns this off",
    )
    loss_spike_window: int = Field(
        128, gt=1, le=10**6, description="number of recent losses that the next one is compared with"
    )
    loss_spike_action: Literal["skip", "rewind"] = Field(
        "skip",
        description="on a loss spike, skip the update, or go back to the newest checkpoint and continue with the "
        "samples after the spike",
    )
    max_consecutive_skips: StepNumber = Field(
        100,
        description="consecutive steps without an update (bad gradients, overflow, spikes) after which the run ends",
    )
    hang_timeout_seconds: OffOrSeconds = Field(
        600.0,
        description="seconds without progress after which the job ends and names the process that hangs or has died; "
        "0 waits forever",
    )


class Profiling(Section):
    """Where the time of single steps goes."""

    timeline_steps: StepList = Field(
        [],
        description="steps whose passes are timed on every pipeline rank, to report the bubble, the slowest stage and "
        "exposed communication in <job.dump_folder>/timeline/step-N.json (for ui.perfetto.dev), .png and .txt",
    )
    timeline_interval: StepCount = Field(0, description="also time the passes of every n-th step; 0 turns this off")
    trace_steps: StepList = Field(
        [],
        description="steps to record with torch.profiler, in <job.dump_folder>/trace/step-N-rank-R.json",
    )


class Evaluation(Section):
    """Validation on held-out data."""

    interval: StepCount = Field(0, description="steps between validations; 0 turns validation off")
    steps: StepNumber = Field(10, description="global batches per validation")
    datasets: TextList = Field(
        [],
        description="tasks to score at each validation, each NAME=PATH, where NAME is text, wikitext103, "
        "lambada or race",
        examples=[["lambada=lambada_test.jsonl"]],
    )


class Cluster(Section):
    """The machine that the run is meant for."""

    gpu: str | None = Field(
        None, description='GPU against whose peak MFU is measured, for example "A100" (default: the one found)'
    )
    gpus_per_node: int | None = Field(None, gt=0, le=1024, description="GPUs per node, with one process each")
    nodes: int | None = Field(None, gt=0, le=MOST_NODES, description="number of nodes, for a dry run and the planner")
    node_bandwidth: float | None = Field(
        None,
        ge=0.001,
        le=1e5,
        description="bandwidth of all network cards of a node together, in one direction, in GB/s (1e9 bytes), for the "
        "planner: 200 for eight cards of 200 Gb/s (default: that of the stack profile)",
    )
    profile: OptionalPath = Field(
        None,
        description="stack profile for predictions: the name of a shipped one, or a TOML file that "
        "scripts/plan.py microbenchmark or calibrate wrote (default: that of the GPU)",
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
    float8: Float8 = Field(default_factory=Float8)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    health: Health = Field(default_factory=Health)
    profiling: Profiling = Field(default_factory=Profiling)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    cluster: Cluster = Field(default_factory=Cluster)
