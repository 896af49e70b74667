"""The planner's input: a model, a batch and a layout."""

from typing import Literal, NamedTuple

from titan_like.config.errors import ConfigError
from titan_like.config.schema import ActivationCheckpoint, JobConfig
from titan_like.data.loading.lengths import sample_length
from titan_like.models.config import TransformerConfig
from titan_like.optim.state_size import ADAMW_STATE, OptimizerState, optimizer_state
from titan_like.optim.update_work import ADAMW_WORK, UpdateWork, update_work
from titan_like.parallel.layout import Layout, method_of
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, Table, schedule_table, stage_ranks
from titan_like.parallel.split import layers_per_stage

NARROW = ("float8", "float4")  # only a layer's matrix products with weights run in these; the rest is bfloat16
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of an element


def stored_dtype(dtype: str) -> str:
    """The type of activations, weights and gradients in a run that computes its products in ``dtype``."""
    return "bfloat16" if dtype in NARROW else dtype


def element_bytes(dtype: str) -> int:
    """Bytes of one activation in a run that computes its products in ``dtype``."""
    return BYTES[stored_dtype(dtype)]


class Adapters(NamedTuple):
    """The settings of [lora] that change a step."""

    rank: int = 0
    dropout: bool = False
    modules: tuple[str, ...] = ()


class PipelineSchedule(NamedTuple):
    """What the order of a pipeline's passes depends on."""

    name: str
    pipeline: int  # ranks
    virtual_stages: int  # on each rank
    microbatches: int

    @property
    def ranks(self) -> list[int]:
        """The rank of each stage."""
        return stage_ranks(self.name, self.pipeline, self.virtual_stages)

    @property
    def table(self) -> Table:
        """The trainer's table: the passes of each rank, in order."""
        return schedule_table(*self)


class Workload(NamedTuple):
    """One training step of a run. The names are the configuration's, shortened."""

    model: TransformerConfig
    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # size of the expert-parallel (EP) group: part of data, context and tensor parallelism
    expert_tensor: int = 1  # processes that split each expert's matrices: 1 or `tensor`
    expert_load: float = 1.0  # rows on the process with the most work for its experts, relative to equal loads
    context_method: str = "all_gather"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "full", "selective", "experts"] = "none"  # selective: only the attention core
    recompute_every: int = 1
    offload: bool = False
    dtype: str = "bfloat16"
    reduce_dtype: str = "float32"  # of sums of 16-bit gradients over processes
    dropout: bool = False
    compiled: bool = False  # a compiler fuses the layers' operators between products
    stage_layers: tuple[int, ...] | None = None  # None: as equal stages as possible
    decoder_seq_len: int = 0  # positions of a decoder, which come in addition to seq_len
    optimizer: OptimizerState = ADAMW_STATE  # what it keeps in our own trainer
    update: UpdateWork = ADAMW_WORK
    replicate: int = 1
    shard: int = 1
    zero_stage: int = 0
    lora: Adapters = Adapters()

    @property
    def activation_checkpoint(self) -> ActivationCheckpoint:
        """What is recomputed, as a section of the configuration."""
        return ActivationCheckpoint(mode=self.recompute, every_n_layers=self.recompute_every)

    @property
    def has_experts(self) -> bool:
        """Whether any layer of the model has experts."""
        return getattr(self.model, "num_experts", 0) > 0

    @property
    def data_parallel(self) -> int:
        """Processes that see different samples."""
        return self.replicate * self.shard

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are added to sums of earlier microbatches: below ZeRO 2, or with a single shard."""
        return self.microbatches > 1 and (self.zero_stage < 2 or self.shard * self.context == 1)

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """The order of the pipeline's passes."""
        return PipelineSchedule(self.schedule, self.pipeline, self.virtual_stages, self.microbatches)

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes run in two parts. A compiled layer's cannot be split."""
        return self.schedule in SPLIT_BACKWARD and self.pipeline > 1 and not self.compiled

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.pipeline * self.context * self.replicate * self.shard

    @property
    def microbatches(self) -> int:
        """Microbatches of one data-parallel rank in one step, rounded up."""
        return -(-self.global_batch_size // (self.micro_batch_size * self.replicate * self.shard))


def workload_of(config: JobConfig, model: TransformerConfig, layout: Layout) -> Workload:
    """The configuration's sections as a `Workload`. Raises a `ConfigError` for mode "budget"."""
    training, recompute, num_stages = config.training, config.activation_checkpoint, len(layout.stage_ranks)
    if recompute.mode == "budget":
        reason = "the planner does not predict what the compiler recomputes; set none, full, selective or experts"
        raise ConfigError("activation_checkpoint.mode", recompute.mode, reason)
    return Workload(
        model=model,
        seq_len=training.seq_len,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        **vars(layout),
        context_method=method_of(config, model).name,
        zero_stage=config.parallelism.zero_stage,
        recompute=recompute.mode,
        recompute_every=recompute.every_n_layers,
        offload=recompute.offload,
        dtype=compute_type(config),
        reduce_dtype=training.reduce_dtype,
        dropout=getattr(model, "dropout", 0.0) > 0,
        compiled=config.compile.enable,
        stage_layers=tuple(layers_per_stage(config, model, num_stages)) if layout.pipeline > 1 else None,
        optimizer=optimizer_state(config.optimizer),
        update=update_work(config.optimizer),
        decoder_seq_len=sample_length(config, model).decoder,
        lora=Adapters(config.lora.rank, config.lora.dropout > 0, tuple(config.lora.modules)),
    )


def compute_type(config: JobConfig) -> str:
    """The data type whose speed counts. float64 is treated as float32."""
    dtype = config.training.dtype
    return "float32" if dtype == "float64" else dtype
