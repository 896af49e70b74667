"""The checks of a run that can be made before a process group exists."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from titan_like.checkpoint import checks
from titan_like.checkpoint.step_folders import checkpoint_folder, hugging_face_folder, newest_in
from titan_like.config.errors import ConfigError, blamed_on, first_line, require
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.config.urls import path_of
from titan_like.data.loading.batch_size import in_samples
from titan_like.data.loading.open_source import open_data
from titan_like.data.objectives.masks import Masks, masks_of
from titan_like.data.source import Source
from titan_like.evaluate.task import Task
from titan_like.evaluate.tasks import validation_tasks
from titan_like.metrics.console import describe_parameters
from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import RefusedError, family_of
from titan_like.parallel.layout import method_of
from titan_like.parallel.lora import adapter_parameters
from titan_like.parallel.tuning import DEFAULT_TUNING, Tuning
from titan_like.train.environment import environment_number
from titan_like.train.initial_weights import check_base, check_initial_weights, with_base
from titan_like.train.rules import Settings

# Messages of torch's allocators and the C++ library. Only the GPU's allocator has an exception class of its own.
_WORDS = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "out of memory")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # a container's limit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


@contextmanager
def out_of_memory_names(key: str, value: object, hint: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn a failed allocation inside this context into a `ConfigError` about a setting; others pass through."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = first_line(error).partition(" Including ")[0][:200]  # of a GPU's: how much it wanted, has, has left
        reason = f"this machine does not have enough memory for it ({message}); {hint(error)}"
        raise ConfigError(key, value, reason) from None


def host_memory_bytes() -> int:
    """Memory that this machine's processes may use together: the installed memory, or a lower limit if one is set."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    of_process = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits if of_process == resource.RLIM_INFINITY else [*limits, of_process])


@dataclass(frozen=True)
class Run(Settings):
    """A run whose settings, data and folders have been checked."""

    device: torch.device
    datasets: dict[str, Source]  # "train", "validation" and, for each of `evaluation.sets`, "validation/NAME"
    masks: Masks
    tasks: list[Task] = field(default_factory=list)  # scored at each validation
    tuning: Tuning = DEFAULT_TUNING

    @property
    def checkpoint_folder(self) -> Path:
        """Where the run saves."""
        return checkpoint_folder(self.config)


def describe_run(run: Run) -> str:
    """One line about the model, the processes and the layout."""
    processes = f"{run.layout.num_processes} process{'es' if run.layout.num_processes > 1 else ''} on {run.device.type}"
    trained = adapter_parameters(run.model, run.config.lora)
    size = describe_parameters(run.model.num_parameters(), run.model.active_parameters, trained)
    return (
        f"{run.config.model.family} {run.config.model.flavor}: {size}, "
        f"{run.config.training.dtype}, {processes} ({run.layout.described()})"
        + (f", {method_of(run.config, run.model).message}" if run.layout.context > 1 else "")
    )


def prepare_run(settings: Settings) -> Run:
    """Check settings against the machine and the data, the quick checks first. New data is tokenized."""
    config, model = settings.config, settings.model
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # torch's optimizers import the compiler, which makes it
        checks.check_writable("environment variable TORCHINDUCTOR_CACHE_DIR", Path(cache), make=True)
    device, saved = select_device(config.training.dtype, config.float8.enable), checks.checkpoint_bytes(config, model)
    reason = "needs a GPU, and this machine has none; set it to false"
    require(device.type == "cuda" or not config.compile.cudagraphs, "compile.cudagraphs", True, reason)
    config = check_folders(config, model, make=True)
    if config.checkpoint.enable:
        checks.check_room(checkpoint_folder(config), saved)
    if device.type == "cpu" and environment_number("GROUP_WORLD_SIZE", 1, least=1) == 1:
        _check_memory(settings, saved)
    tasks, (datasets, masks) = validation_tasks(config, model), open_run_data(config, model)
    if config.training.epochs is not None:
        config = config.model_copy(update={"training": in_samples(config.training, len(datasets["train"]))})
        checks.check_schedule(config)
    return Run(config, model, settings.layout, device, datasets, masks, tasks)


def open_run_data(config: JobConfig, model: TransformerConfig, trains: bool = True) -> tuple[dict[str, Source], Masks]:
    """The splits that the run reads, and what it adds to their samples. New data is tokenized."""
    masks = masks_of(config, model)  # what it refuses is refused before tokenizing, which may take hours
    return open_data(config, model, trains), masks


def check_folders(config: JobConfig, model: TransformerConfig, make: bool) -> JobConfig:
    """Refuse folders that cannot be written, or that hold another model's weights. Returns the settings `with_base`."""
    checks.check_writable("job.dump_folder", Path(config.job.dump_folder), make)
    resumes = False
    if config.checkpoint.enable:
        resumes = checks.check_checkpoints(config, model, checkpoint_folder(config), make)
    load_step, reason = config.checkpoint.load_step, "is only read by a run with checkpoint.enable; leave it out"
    require(config.checkpoint.enable or load_step is None, "checkpoint.load_step", load_step, reason)
    check_export(config, model)
    state = checks.saved_state(config) if resumes and config.lora.rank else None
    config = config if state is None else with_base(config, state)
    text = config.checkpoint.initial_load_path
    if text and (newest := newest_in(path_of(text))) != path_of(text):  # of a run, which may have another one soon
        config = edit(config, {"checkpoint.initial_load_path": str(newest)})
    if not resumes or config.lora.rank:
        check_initial_weights(config, model)
    if state is not None:
        check_base(config, state)
    return config


def check_export(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse `checkpoint.hugging_face_interval` for a model that Hugging Face's files cannot hold."""
    key, interval = "checkpoint.hugging_face_interval", config.checkpoint.hugging_face_interval
    if interval == 0:
        return
    reason = "float64 weights are not written for transformers; use another training.dtype, or set it to 0"
    require(config.training.dtype != "float64", key, interval, reason)
    reason = "adapters alone are not a model for transformers; set it to 0, and export by scripts/convert.py to-hf"
    require(not config.lora.rank, key, interval, reason)
    with blamed_on(key, interval, RefusedError, after="; set it to 0"):
        family_of(model).to_fields(model)
    checks.check_writable("checkpoint.folder", hugging_face_folder(config), make=False)


def select_device(dtype: str, float8: bool = False) -> torch.device:
    """Select this process's GPU, which must support ``dtype`` and ``float8``, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, devices = environment_number("LOCAL_RANK", 0), torch.cuda.device_count()
    reason = f"this machine has {devices} GPUs; start at most that many processes on it"
    require(local_rank < devices, "torchrun --nproc_per_node", environment_number("LOCAL_WORLD_SIZE", 1), reason)
    device = torch.device("cuda", local_rank)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    reason = f'{name} has no bfloat16 arithmetic; use "float16" or "float32"'
    require(dtype != "bfloat16" or capability >= (8, 0), "training.dtype", dtype, reason)
    reason = f"{name} has no float8 arithmetic, which takes compute capability 8.9 (Ada, Hopper); set it to false"
    require(not float8 or capability >= (8, 9), "float8.enable", True, reason)
    return device


def _check_memory(settings: Settings, saved: int) -> None:
    """Refuse a model whose weights, gradients and optimizer state, held once, exceed the memory of this machine.

    Without this check the kernel would kill a process, which could not report anything. ``saved`` is the size of a
    checkpoint in bytes.
    """
    section, num_parameters = settings.config.model, settings.model.num_parameters()
    frozen = getattr(torch, settings.config.training.dtype).itemsize if settings.config.lora.rank else 0
    needed, available = saved + (frozen or 4) * num_parameters, host_memory_bytes()
    reason = (
        f"its {num_parameters / 1e9:.4g} billion parameters take {needed / 2**30:.4g} GiB with gradients "
        f"and optimizer state, but this machine has {available / 2**30:.3g} GiB of memory; choose a smaller model"
    )
    require(needed <= available, "model.flavor", section.flavor, reason)
