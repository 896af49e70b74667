"""The settings of a run's log, health checks, profiles, validations and checkpoints."""

from operator import attrgetter
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from titan_like.config.section import (
    OptionalUrl,
    PathList,
    RankList,
    Section,
    StepCount,
    StepList,
    StepNumber,
    Surroundings,
    TextList,
    option,
)


class Metrics(Surroundings):
    """The log line's interval and the writers of metrics."""

    SMALL: ClassVar = {"log_interval": 1, "log_format": "megatron"}

    log_interval: StepNumber = option(10, "steps between console lines; metrics.jsonl has every step")
    log_format: Literal["short", "megatron"] = option(
        "short", "megatron: Megatron-LM's line, with the number of gradient elements that are exactly 0"
    )
    run_name: str = option("", "name of the run in wandb and MLflow (default: the model and the layout)")
    tensorboard: bool = option(False, "write TensorBoard events to <job.dump_folder>/tensorboard")
    wandb: bool = option(False, "log to Weights & Biases")
    wandb_project: str = option("titan_like", "wandb project")
    wandb_mode: Literal["auto", "online", "offline"] = option(
        "auto", "auto uses WANDB_MODE if it is set, else online if a wandb key is configured, else offline"
    )
    mlflow: bool = option(False, "log to MLflow, to the server that MLFLOW_TRACKING_URI names")


class Health(Surroundings):
    """Detection of bad steps and hangs, and what to do about them."""

    skip_nonfinite: bool = option(
        True, "skip the update if the gradient norm is not finite; else stop (float16 overflows are always skipped)"
    )
    loss_spike_factor: float = option(
        0.0, "robust standard deviations above the recent losses' median that make a spike; 0: off", ge=0, le=1e6
    )
    loss_spike_window: int = option(128, "number of recent losses that the next one is compared with", gt=1, le=10**6)
    loss_spike_action: Literal["skip", "rewind"] = option(
        "skip", "on a spike, skip the update, or resume from the newest checkpoint with the samples after the spike"
    )
    max_consecutive_skips: StepNumber = option(100, "consecutive steps without an update after which the run ends")
    max_diverged_steps: StepCount = option(
        1000,
        "steps after divergence (docs/reliability.md defines it) at which the run ends; 0: no limit",
    )
    hang_timeout_seconds: float = option(  # socket timeouts are milliseconds in 32 bits
        600.0, "seconds without progress until the job ends and names the rank at fault; 0: never", ge=0, le=10**6
    )

    @property
    def rewinds(self) -> bool:
        """Whether a loss spike sends the run back to its newest checkpoint."""
        return self.loss_spike_factor > 0 and self.loss_spike_action == "rewind"


class Profiling(Surroundings):
    """Time and memory profiles of single steps."""

    timeline_steps: StepList = option(
        [],
        "steps that are timed on every pipeline rank: bubble, slowest stage and exposed communication in "
        "<job.dump_folder>/timeline/step-N.json (for ui.perfetto.dev), .png and .txt",
    )
    timeline_interval: StepCount = option(0, "also time every n-th step; 0 turns this off")
    trace_steps: StepList = option([], "steps to record with torch.profiler, in <job.dump_folder>/trace")
    trace_warmup_steps: StepCount = option(3, "steps before each recorded one in which torch.profiler starts up")
    trace_ranks: RankList = option([], "ranks that write traces; all if empty")
    trace_shapes: bool = option(False, "record the shapes of operators' inputs in traces")
    trace_stacks: bool = option(False, "record the source lines that call operators in traces, which slows the step")
    memory_snapshot_steps: StepList = option(
        [],
        "steps after which each rank's GPU memory is written to <job.dump_folder>/memory, for pytorch.org/memory_viz; "
        "every allocation of the run is then recorded, which takes host time",
    )


class ValidationSet(Section):
    """Held-out data with a validation loss of its own."""

    name: str = Field(description="letters, digits and . _ - ; metrics.jsonl has validation_loss/NAME")
    paths: PathList = Field(description="as data.paths, read as data.dataset is (stdlib: as text); all is held out")


class Evaluation(Surroundings):
    """Validation on held-out data."""

    SMALL: ClassVar = {"interval": 2, "steps": 1}  # the held-out samples would fill two batches

    interval: StepCount = option(0, "steps between validations; 0 turns validation off")
    steps: StepNumber = option(10, "global batches per validation")
    patience: StepCount = option(
        0, "stop early after this many validations in a row without a lower validation loss than the best; 0: never"
    )
    sets: Annotated[list[ValidationSet], BeforeValidator(lambda x: [x] if isinstance(x, dict) else x)] = option(
        [],
        "validation sets, each a table [[evaluation.sets]] with a name and paths, besides the validation split of the "
        "training data, which a weight of 0 in data.split turns off",
        examples=[[{"name": "books", "paths": ["books.jsonl"]}]],
    )
    datasets: TextList = option(
        [],
        "tasks to score at each validation, each NAME=PATH, where NAME is text, wikitext103, lambada or race",
        examples=[["lambada=lambada_test.jsonl"]],
    )


class Checkpoint(Surroundings):
    """Saving and resuming."""

    SMALL: ClassVar = {name: attrgetter(name) for name in ("interval", "async_", "on_failure")}

    enable: bool = option(False, "save checkpoints, and resume from the newest one in the folder")
    interval: StepNumber = option(500, "steps between checkpoints; the last step is always saved")
    async_: bool = option(False, "write while training continues, from copies in host memory", alias="async")
    on_failure: Literal["stop", "continue"] = option(
        "stop", "what to do if a checkpoint cannot be written (full disk); the last one's failure always stops the run"
    )
    keep_latest: StepCount = option(0, "number of checkpoints, and of Hugging Face folders, to keep; 0 keeps all")
    keep_best: bool = option(
        False,
        "save whenever a validation's loss is the lowest so far, and keep that checkpoint in addition to keep_latest; "
        "FOLDER/best, as in --checkpoint outputs/run/best, reads it",
    )
    hugging_face_interval: StepCount = option(
        0,
        "steps between folders of weights for transformers and vLLM, <job.dump_folder or checkpoint.folder>/"
        "hugging_face/step-N; the run's last step is always written; 0 writes none",
    )
    load_step: StepCount | None = option(None, "step to resume from (default: the newest complete one)")
    folder: OptionalUrl = option(None, "folder or URL of the checkpoints (default: <job.dump_folder>/checkpoint)")
    initial_load_path: OptionalUrl = option(
        None,
        "folder as in model.from, but only for a new run's initial weights: set [model] and data.tokenizer too, the "
        "tokenizer perhaps to another",
    )
