"""Every setting of a run: its name, type, default, unit and meaning.

Limits are far above any real run. They refuse a typo before it fills the memory or overflows. Other modules check
whether this machine can run the job.
"""

from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from titan_like.config.entry_points import format_of
from titan_like.config.monitoring import Checkpoint, Evaluation, Health, Metrics, Profiling
from titan_like.config.section import (
    Degree,
    Layers,
    OptionalPath,
    OptionalUrl,
    PathList,
    PathText,
    Samples,
    Section,
    StepCount,
    StepNumber,
    Surroundings,
    TextList,
    TokenizerText,
    dtype_name,
    option,
)


class Job(Surroundings):
    """The run as a whole."""

    SMALL: ClassVar = {"seed": attrgetter("seed")}

    config_file: OptionalPath = option(None, "TOML file with the settings, or a shipped one's name: debug_gpt")
    description: str = option("", "one line about the run, shown in logs and in wandb")
    dump_folder: PathText = option("outputs", "folder for checkpoints, metrics and caches")
    seed: int = option(1234, "seed of initial weights, data order and dropout", ge=0, le=2**63 - 1)  # of 64 bits
    deterministic: bool = option(False, "use deterministic kernels only (slower)")
    dry_run: bool = option(False, "check everything, print one rank's memory, communication and computation, and stop")
    dry_run_rank: int = option(0, "rank of the process that a dry run describes", ge=0, lt=2**20)


class Model(Section):
    """Which transformer to train."""

    from_: OptionalUrl = option(
        None,
        "Hugging Face folder or hub name, a run's or a checkpoint's folder, or a PEFT folder; sets family, shape, "
        "tokenizer and initial weights; overrides may change settings that do not belong to the weights, such as "
        "dropout or rope_theta",
        alias="from",
    )
    ignore_fields: list[str] = option(
        [],
        "fields of that folder's config.json to ignore, such as rope_scaling.factor, if they are refused but make no "
        "difference to your run",
    )
    family: str = option(
        "gpt",
        "model family: gpt, llama, moe, bert, t5, or one that an installed package adds",
        examples=["gpt", "llama", "moe", "bert", "t5"],
    )
    flavor: str = option("debug", "named shape in the family's flavors.toml or in [model.flavors.NAME]")
    flavors: dict[str, dict[str, Any]] = option({}, "your own flavors, each a table of model fields")
    overrides: dict[str, Any] = option({}, "fields of the flavor to override")


class TokenOptions(NamedTuple):
    """The fields of `[data]` that, with the tokenizer, determine the tokens of a text."""

    bos: str = "auto"
    eod_token: str = ""
    split_special_tokens: bool = True


DEFAULT_TOKENS = TokenOptions()
HELD_OUT = "0,1,0"  # data.split of `evaluation.sets`


class Data(Section):
    """The dataset, its tokenizer and its splits."""

    SMALL: ClassVar = {"num_workers": lambda data: min(data.num_workers, 1)}

    dataset: str = option(
        "stdlib",
        "stdlib: the source files of the Python standard library; text: the files named by paths; indexed: "
        "Megatron-LM's .bin and .idx files; hf: files or a Hugging Face dataset, tokenized as the run reads them; "
        "conversations: messages, or prompts and answers, to fine-tune on the answers (docs/fine_tuning.md); race: "
        "the folder of RACE, for bert with sentence_head choice; or a dataset of your own package (docs/data.md)",
        examples=["stdlib", "text", "indexed", "hf", "conversations", "race"],
    )
    paths: PathList = option(
        [],
        "files, folders, glob patterns or URLs of text, JSON, CSV, parquet, … or indexed datasets, or for hf also "
        'names such as "org/name:config"; weights and paths in turn make a blend: [0.7, "web", 0.3, "books"]',
    )
    options: dict[str, Any] = option({}, "settings of a dataset of your own package")
    text_key: str = option("text", "key or column of the text in documents of JSON, CSV, parquet and arrow")
    bad_lines: Literal["stop", "skip"] = option("stop", "at a record that cannot be used, stop, or skip and count it")
    resume: Literal["same", "new_blend"] = option(
        "same",
        "same: a resumed run has to read the checkpoint's data; new_blend: from there on it reads what paths now name, "
        "and each source that stays continues at its next sample",
    )
    split: str = option("969,30,1", "weights of the train, validation and test splits")
    tokenizer: TokenizerText = option(
        "byte",
        '"byte", a Hugging Face tokenizer.json, "gpt2:vocab.json,merges.txt", a folder with either, or a '
        "repository of the Hugging Face hub that has one",
    )
    bos: Literal["auto", "always", "never"] = option(
        "auto", "whether texts begin with the tokenizer's bos_token; auto: as the tokenizer itself does"
    )
    eod_token: str = option("", "token that ends every document (default: eos_token of tokenizer_config.json)")
    split_special_tokens: bool = option(
        True, "read special tokens that are written in a document, such as <|endoftext|>, as text; if false, as tokens"
    )
    chat_template_kwargs: dict[str, Any] = option(
        {}, "conversations: variables for the chat template, such as enable_thinking; a record's own take precedence"
    )
    reset_position_ids: bool = option(False, "count positions from 0 in each document of a sample")
    reset_attention_mask: bool = option(False, "let tokens attend to their own document only")
    eod_mask_loss: bool = option(False, "no loss where the input is an end-of-document token")
    prefix_lm: bool = option(False, "prefix LM: the first tokens of a sample, a random number, attend to each other")
    prefix_lm_loss: Literal["targets", "all"] = option("targets", "prefix LM: loss on tokens after the prefix, or all")
    mlm_probability: float = option(0.15, "fraction of tokens masked (MLM)", gt=0, le=1)
    mlm_whole_words: bool = option(False, "MLM: mask whole words, as the tokenizer divides text, instead of tokens")
    mlm_max_ngram: int = option(1, "MLM: mask up to this many neighbours together, n with weight 1/n", ge=1, le=16)
    noise_density: float = option(0.15, "t5: fraction of the tokens in corrupted spans", gt=0, lt=1)
    mean_noise_span_length: float = option(3.0, "t5: mean length of corrupted spans, tokens", ge=1, le=10**6)
    sentence_objective: Literal["none", "next_sentence", "sentence_order"] = option(
        "none",
        "for bert with sentence_head pair, in addition to MLM: whether the second sentence follows the first "
        "(next_sentence), or whether the two are swapped (sentence_order)",
    )
    num_workers: int = option(0, "data loader processes per rank; 0 loads in a background thread", ge=0, le=1024)
    num_readers: int = option(
        16,
        "for hf: sample i of the run comes from reader i mod num_readers. A multiple of micro_batch_size × "
        "data-parallel ranks × num_workers tokenizes nothing twice; another number gives other samples",
        ge=1,
        le=2**16,
    )

    @property
    def token_options(self) -> TokenOptions:
        """The `TokenOptions` of this section."""
        return TokenOptions(self.bos, self.eod_token, self.split_special_tokens)

    @property
    def read_split(self) -> str:
        """The split to read of folders and hub datasets that have several."""
        return "validation" if self.split == HELD_OUT else "train"

    @property
    def learns_bytes(self) -> bool:
        """Whether the run's tokens are bytes. Tokenized data may come from any tokenizer."""
        return self.tokenizer == "byte" and not format_of(self.dataset).is_tokenized

    @property
    def separates_documents(self) -> bool:
        """Whether a setting depends on where the documents of a sample end."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class Training(Section):
    """Length, batches and precision of the training."""

    SMALL: ClassVar = {"max_norm": lambda training: min(training.max_norm, 0.05)}  # so that every step is clipped

    seq_len: int = option(256, "tokens per sample; for t5, the encoder's positions", gt=0, le=2**27)
    decoder_seq_len: int = option(0, "t5: decoder positions; 0: as many as the targets need", ge=0, le=2**27)
    micro_batch_size: int = option(8, "samples per forward pass on one data-parallel rank", gt=0, le=2**16)
    global_batch_size: int = option(16, "samples per optimizer step over the whole job", gt=0, le=2**20)
    steps: StepNumber | None = option(None, "length of the run in optimizer steps")
    samples: Samples | None = option(None, "length of the run in samples", gt=0)
    tokens: int | None = option(None, "length of the run in tokens", gt=0, le=10**18)  # below 2⁶³
    epochs: float | None = option(None, "length of the run in passes over its data, such as 1.5", gt=0, le=10**6)
    batch_size_rampup: list[Samples] | None = option(
        None, "[start, increment, samples]: grow the batch linearly from start to global_batch_size over these samples"
    )
    max_norm: float = option(1.0, "gradient norm to clip at; 0 turns clipping off", ge=0, le=1e30)
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"], BeforeValidator(dtype_name)] = option(
        "float32", "compute dtype, also of gathered weights; master weights are float32 (float64 for float64)"
    )
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(dtype_name)] = option(
        "float32", "dtype in which gradients are summed over ranks and microbatches"
    )


class Optimizer(Section):
    """The update rule."""

    SMALL: ClassVar = {
        "lr": 1e-3,
        "matrix_lr": lambda optimizer: optimizer.matrix_lr and optimizer.matrix_lr * 1e-3 / optimizer.lr,
        "newton_schulz_dtype": "float32",  # bfloat16 would hide differences
        # Every update is clipped, or rounding could decide whether one is: it is all that the biases of keys may have.
        "clip_threshold": lambda optimizer: min(optimizer.clip_threshold, 0.5),
    }

    name: str = option("adamw", "adamw, adafactor, muon (for the layers' matrices, else AdamW), sgd, or a package's")
    lr: float = option(3e-4, "peak learning rate", gt=0, le=1e6)
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW's decay rates of the two moments", strict=False)
    eps: float = option(1e-8, "AdamW's epsilon", ge=1e-30, le=1e6)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; vectors are not decayed", ge=0, le=1e6)
    implementation: Literal["for-loop", "foreach", "fused"] = option("fused", "kernel of adamw and sgd (foreach)")
    relative_step: bool = option(False, "adafactor: rate min(0.01, 1/√t) × the schedule's factor at update t, not lr")
    scale_parameter: bool = option(False, "adafactor: multiply the rate by the parameter's RMS, at least 0.001")
    clip_threshold: float = option(1.0, "adafactor: largest RMS of an update, before the rate", gt=0, le=1e6)
    decay_rate: float = option(0.8, "adafactor: at update t the second moment decays by 1 - t^-decay_rate", gt=0, le=1)
    beta1: float | None = option(None, "adafactor: decay rate of a first moment (default: there is none)", ge=0, lt=1)
    momentum: float = option(0.95, "muon: decay rate of its Nesterov momentum", ge=0, lt=1)
    matrix_lr: float | None = option(None, "muon: peak rate of the layers' matrices (default: lr)", gt=0, le=1e6)
    adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "muon: factor of a matrix's rate: 0.2·√max(rows, columns), so that AdamW's rates fit, or √max(1, rows/columns)",
    )
    newton_schulz_steps: int = option(5, "muon: Newton-Schulz iterations", gt=0, lt=100)
    newton_schulz_dtype: Annotated[Literal["bfloat16", "float32"] | None, BeforeValidator(dtype_name)] = option(
        None, "muon: dtype of that iteration (default: bfloat16, on a CPU float32); float64 training uses float64"
    )
    options: dict[str, Any] = option({}, "settings of an installed package's optimizer")


class LRScheduler(Section):
    """The learning rate over the run."""

    SMALL: ClassVar = {"warmup_steps": lambda scheduler: min(scheduler.warmup_steps, 2)}

    warmup_steps: StepCount = option(
        0,
        "steps of linear warm-up from 0; unless training.steps is set, a step of this section is global_batch_size "
        "samples, as they were when the run began",
    )
    decay: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = option(
        "cosine", "shape of the decay after warm-up; wsd: constant, then linear at the end of the run"
    )
    decay_steps: StepNumber | None = option(
        None, "cosine, linear: step at which the decay ends (default: the last); wsd: its length (default: a tenth)"
    )
    min_lr_ratio: float = option(0.0, "floor of the learning rate as a fraction of optimizer.lr", ge=0, le=1)
    resume: Literal["recompute", "continue"] = option(
        "recompute",
        "recompute: a resumed run computes its schedule from the settings; continue: it keeps the checkpoint's peak "
        "rates, shape and length, whatever the settings are now",
    )


class Parallelism(Section):
    """The layout of the job over its processes."""

    auto: bool = option(
        False,
        "let the planner choose every unset key of this section and [activation_checkpoint], and "
        "training.micro_batch_size, for this GPU and number of processes",
    )
    tensor_parallel_degree: Degree = option(1, "ranks that split each layer's matrices")
    sequence_parallel: bool = option(False, "shard activations between tensor-parallel blocks")
    pipeline_parallel_degree: Degree = option(1, "pipeline ranks, each with a share of the layers")
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
    ] = option("1f1b", "order of the pipeline's forward and backward passes")
    virtual_stages_per_rank: Layers = option(
        1, "stages per rank for interleaved schedules; zbv_zero_bubble and dualpipe_v always have 2", gt=0
    )
    pipeline_layers: list[Layers] | None = option(None, "layers of each stage in order (default: balanced by FLOPs)")
    context_parallel_degree: Degree = option(1, "ranks of a context-parallel (CP) group")
    context_parallel_method: Literal["auto", "all_gather", "ulysses", "ring"] = option(
        "auto", "how a CP group attends to whole sequences (docs/long_context.md)"
    )
    expert_parallel_degree: Degree = option(1, "ranks of an expert-parallel (EP) group")
    expert_tensor_parallel_degree: Degree = option(1, "ranks that split each expert: 1 or tensor_parallel_degree")
    data_parallel_replicate_degree: Degree = option(1, "full replicas of the ZeRO-sharded group")
    data_parallel_shard_degree: int = option(-1, "ranks that ZeRO shards over; -1: all that remain", ge=-1, le=2**20)
    zero_stage: int = option(0, "sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters", ge=0, le=3)


class ActivationCheckpoint(Section):
    """Recomputation of activations in the backward pass, which saves memory."""

    SMALL: ClassVar = {"every_n_layers": lambda section: min(section.every_n_layers, 2)}

    mode: Literal["none", "full", "selective", "experts", "budget"] = option(
        "none",
        "full: whole layers; selective: all except matmuls; experts: only routers and experts; budget: as the compiler "
        "chooses for a layer that saves a share of its activations",
    )
    every_n_layers: Layers = option(1, "checkpoint every n-th layer", gt=0)
    budget: float | None = option(
        None,
        "with mode budget: that share, from 0 (a compiled layer keeps its input) to 1 (nothing more is recomputed)",
        ge=0,
        le=1,
    )
    offload: bool = option(False, "offload the layers' saved tensors to host memory and prefetch them for backward")


class Compile(Section):
    """torch.compile of the transformer layers, or of the whole model."""

    enable: bool = option(False, "compile the model, as compile.scope says")
    scope: Literal["auto", "layers", "model"] = option(
        "auto",
        "layers: a graph for each layer; model: one graph from the embedding to the loss; auto: model on one process "
        "if it compiles in about a minute, else layers",
    )
    cudagraphs: bool = option(False, "launch a step as one CUDA graph: for one process whose host cannot keep up")


class Float8(Section):
    """Float8 matmuls in the linear modules of the transformer layers (docs/float8.md)."""

    enable: bool = option(False, "multiply in float8: on CUDA from compute capability 8.9 on; on a CPU it is emulated")
    recipe: Literal["tensorwise", "rowwise"] = option(
        "tensorwise", "one scale a tensor, or one a row or column that is summed over (slower, more accurate)"
    )
    filter: TextList = option(
        [],
        'modules of the layers that stay in training.dtype, with * for any part of a name: "layers.0", '
        '"layers.*.mlp.fc2". The output matrix and modules whose sides are not multiples of 16 always stay',
    )


class LoRA(Section):
    """Low-rank adapters of the layers' linear modules, trained on frozen weights (docs/lora.md)."""

    SMALL: ClassVar = {"dropout": 0.0}

    rank: int = option(0, "rank of the adapters; 0 trains all weights", ge=0, le=2**14)
    alpha: float = option(16.0, "an adapter's output is multiplied by alpha / rank", gt=0, le=1e6)
    dropout: float = option(0.0, "dropout of the adapters' inputs", ge=0, lt=1)
    modules: TextList = option(
        [],
        "modules with an adapter, by the ends of their names, here or in Hugging Face's files, with * for any part of "
        'a name: "attention.proj", "mlp.*", "q_proj" (default: all linear modules of the layers)',
    )


class Cluster(Surroundings):
    """The target machine of the run."""

    gpu: str | None = option(None, 'GPU against whose peak MFU is measured, such as "A100" (default: the one found)')
    gpus_per_node: int | None = option(None, "GPUs per node, with one process each", gt=0, le=1024)
    nodes: int | None = option(None, "number of nodes, for a dry run and the planner", gt=0, le=2**15)
    node_bandwidth: float | None = option(
        None,
        "bandwidth of a node's network cards together, in one direction, in GB/s (1e9 bytes), for the planner: 200 for "
        "eight cards of 200 Gb/s (default: the stack profile's)",
        ge=0.001,
        le=1e5,
    )
    profile: OptionalPath = option(
        None,
        "stack profile for predictions: a shipped one's name, or a TOML file that scripts/plan.py microbenchmark or "
        "calibrate wrote (default: the GPU's)",
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
    lora: LoRA = Field(default_factory=LoRA)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    metrics: Metrics = Field(default_factory=Metrics)
    health: Health = Field(default_factory=Health)
    profiling: Profiling = Field(default_factory=Profiling)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    cluster: Cluster = Field(default_factory=Cluster)
