"""The checks of a run that can be made before a process group exists."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from titan_like.checkpoint.compatible import check_readable, check_same_run
from titan_like.checkpoint.lock import lock_path, lock_problem
from titan_like.checkpoint.step_folders import checkpoint_folder, checkpoint_path, complete_steps, leftover_bytes
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import total_steps
from titan_like.data.lengths import sample_length
from titan_like.data.masks import Masks, masks_of
from titan_like.data.objective import objective_of
from titan_like.data.open_source import open_source
from titan_like.data.source import IGNORED_LABEL, UNKNOWN_LENGTH, DataRequest, Source
from titan_like.data.tokenizer import build_tokenizer, check_vocabulary
from titan_like.evaluate.task import Task, TextSettings
from titan_like.evaluate.tasks import check_predictions, check_tasks, open_tasks
from titan_like.metrics.devices import find_device
from titan_like.metrics.writers import check_wandb
from titan_like.models.config import TransformerConfig
from titan_like.models.parts import one_of_each
from titan_like.optim.state_size import optimizer_state
from titan_like.parallel.layout import Layout
from titan_like.train.environment import environment_number, number_of_processes
from titan_like.train.initial_weights import check_initial_weights
from titan_like.train.out_of_memory import host_memory_bytes
from titan_like.train.rules import resolve_settings

_LARGE = ("hidden_size", "num_layers", "ffn_hidden_size", "vocab_size", "vocab_multiple", "max_seq_len")


@dataclass(frozen=True)
class Run:
    """A run whose settings, data and folders have been checked."""

    config: JobConfig
    model: TransformerConfig
    layout: Layout
    total_steps: int
    device: torch.device
    datasets: dict[str, Source]  # "train" and "validation"
    checkpoint_folder: Path
    masks: Masks
    tasks: list[Task] = field(default_factory=list)  # scored at each validation


def prepare_run(config: JobConfig) -> Run:
    """Check the configuration against itself, the machine and the data. New data is tokenized.

    Raises:
        ConfigError: the user has to change something.
    """
    model, layout = check_settings(config, number_of_processes())
    device = select_device(config.training.dtype)
    check_folders(config, model, make=True)
    _check_memory(config, model, device)
    return Run(
        config=config,
        model=model,
        layout=layout,
        total_steps=total_steps(config.training),
        device=device,
        datasets=open_data(config, model),
        checkpoint_folder=checkpoint_folder(config),
        masks=masks_of(config.data, config.job.seed, objective_of(config, model), model),
        tasks=open_evaluation(config, model),
    )


def check_settings(config: JobConfig, world_size: int) -> tuple[TransformerConfig, Layout]:
    """Check what depends neither on this machine's devices nor on its files.

    Raises:
        ConfigError: the user has to change something.
    """
    model, layout = resolve_settings(config, world_size)
    if config.cluster.gpu is not None:
        find_device(config.cluster.gpu)  # raises if the device is unknown
    check_wandb(config.metrics)
    return model, layout


def check_folders(config: JobConfig, model: TransformerConfig, make: bool) -> None:
    """Check that the run can write to its folders, and can resume or start from and evaluate what they hold.

    Raises:
        ConfigError: a folder cannot be created or written to, checkpoints are of another run, initial weights are of
            another model, or a file of `evaluation.datasets` is missing.
    """
    check_tasks("evaluation.datasets", config.evaluation.datasets)
    _check_writable("job.dump_folder", Path(config.job.dump_folder), make)
    if config.checkpoint.enable:
        folder = checkpoint_folder(config)
        _check_writable("checkpoint.folder", folder, make)
        problem = lock_problem(folder)
        if problem is not None:
            raise ConfigError("checkpoint.folder", str(folder), f"{lock_path(folder)} {problem}")
        _check_checkpoints(config, model, folder)
        if make:
            _check_space(config, model, folder)
    elif config.checkpoint.load_step is not None:
        problem = "is only read by a run with checkpoint.enable; set that to true or leave this out"
        raise ConfigError("checkpoint.load_step", config.checkpoint.load_step, problem)
    if not (config.checkpoint.enable and complete_steps(checkpoint_folder(config))):  # checkpoints take precedence
        check_initial_weights(config, model)


def select_device(dtype: str) -> torch.device:
    """Select this process's GPU, or the CPU if there is none.

    Raises:
        ConfigError: the machine has fewer GPUs than processes, or the GPU does not support ``dtype``.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, found = environment_number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local_rank >= found:
        problem = f"this machine has {found} GPUs; start at most that many processes on it"
        raise ConfigError("torchrun --nproc_per_node", environment_number("LOCAL_WORLD_SIZE", 1), problem)
    device = torch.device("cuda", local_rank)
    if dtype == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise ConfigError("training.dtype", dtype, f'{name} has no bfloat16 arithmetic; use "float16" or "float32"')
    return device


def _check_memory(config: JobConfig, model: TransformerConfig, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and optimizer state, held once, exceed the memory of a single machine.

    Without this check the kernel would kill a process, which could not report anything.
    """
    on_this_machine = environment_number("GROUP_WORLD_SIZE", 1, least=1) == 1
    needed, there = checkpoint_bytes(config, model) + 4 * model.num_parameters(), host_memory_bytes()
    if device.type == "cpu" and on_this_machine and needed > there:
        problem = (
            f"its {model.num_parameters() / 1e9:.4g} billion parameters take {needed / 2**30:.4g} GiB with gradients "
            f"and optimizer state, but this machine has {there / 2**30:.3g} GiB of memory; choose a smaller model"
        )
        key = next((f"model.overrides.{name}" for name in _LARGE if name in config.model.overrides), "model.flavor")
        value = config.model.overrides.get(key.rpartition(".")[2], config.model.flavor)
        raise ConfigError(key, value, problem)


def _check_writable(key: str, folder: Path, make: bool) -> None:
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        problem = f"the folder cannot be created ({error.strerror}); name one that you may write to"
        raise ConfigError(key, str(folder), problem) from None
    if not there.is_dir():
        problem = f"the folder cannot be created ({there} is a file); name one that you may write to"
        raise ConfigError(key, str(folder), problem)
    if not os.access(there, os.W_OK):
        raise ConfigError(key, str(folder), f"the folder {there} is not writable; name one that is")


def _check_checkpoints(config: JobConfig, model: TransformerConfig, folder: Path) -> None:
    steps, wanted = complete_steps(folder), config.checkpoint.load_step
    if wanted is not None and wanted not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
        raise ConfigError("checkpoint.load_step", wanted, f"no such checkpoint in {folder}; {there}")
    cure = "move it away to start anew, or name another folder"
    check_readable(folder, steps if wanted is None else [wanted], cure)
    for step in steps[-1:] if wanted is None else [wanted]:
        check_same_run(checkpoint_path(folder, step), config, model)


def checkpoint_bytes(config: JobConfig, model: TransformerConfig) -> int:
    """Approximate size of a checkpoint: master weights and the optimizer's state."""
    element, state = 8 if config.training.dtype == "float64" else 4, optimizer_state(config.optimizer)
    values: float = model.num_parameters()
    small = one_of_each(model)
    counts = {f"layers.{kind}": count for kind, count in zip(small.layers, model.layer_counts, strict=True)}
    for name, parameter in small.named_parameters():
        values += state.of(name, parameter.shape) * counts.get(".".join(name.split(".")[:2]), 1)
    return int(element * values)


def _check_space(config: JobConfig, model: TransformerConfig, folder: Path) -> None:
    needed, free = checkpoint_bytes(config, model), shutil.disk_usage(folder).free + leftover_bytes(folder)
    if free < needed:
        problem = f"a checkpoint takes {needed / 2**30:.3g} GiB, but the disk has {free / 2**30:.3g} GiB left"
        raise ConfigError("checkpoint.folder", str(folder), f"{problem}; make room, or name a folder on another disk")


def open_evaluation(config: JobConfig, model: TransformerConfig) -> list[Task]:
    """Read and tokenize the files of `evaluation.datasets`.

    Raises:
        ConfigError: a task or file cannot be used.
    """
    if not config.evaluation.datasets:
        return []
    check_predictions("evaluation.datasets", config.evaluation.datasets, config.model.family, model.predictions)
    tokenizer = build_tokenizer(config.data.tokenizer)
    check_vocabulary(config.data.tokenizer, tokenizer, model.vocab_size)
    settings = TextSettings.of(config.training.seq_len)
    return open_tasks("evaluation.datasets", config.evaluation.datasets, tokenizer, settings)


def open_data(config: JobConfig, model: TransformerConfig) -> dict[str, Source]:
    """Open the splits that the run reads. New data is tokenized.

    Raises:
        ConfigError: data is missing or unusable, or there is too little of it.
    """
    request = DataRequest(
        section=config.data,
        split="train",
        seq_len=sample_length(config, model).raw,
        seed=config.job.seed,
        vocab_size=model.vocab_size,
        cache_folder=Path(config.job.dump_folder) / "data_cache",
    )
    sources = {split: open_source(replace(request, split=split)) for split in ("train", "validation")}
    if len(sources["train"]) == 0:
        raise ConfigError("data.dataset", config.data.dataset, "its training split has no samples; give it more data")
    if config.evaluation.interval and len(sources["validation"]) == 0:
        problem = "leaves no whole sample for validation; give it more weight or set evaluation.interval to 0"
        raise ConfigError("data.split", config.data.split, problem)
    wanted = config.evaluation.steps * config.training.global_batch_size
    if config.evaluation.interval and len(sources["validation"]) == UNKNOWN_LENGTH:
        first = range(min(wanted, config.data.num_readers))  # a stream's readers take turns
        if all((sources["validation"][index][1] == IGNORED_LABEL).all() for index in first):
            problem = f"the first {wanted} samples for validation are of readers that have none; raise it"
            raise ConfigError("evaluation.steps", config.evaluation.steps, problem)
    if config.data.sentence_objective == "next_sentence" and len(sources["train"]) == UNKNOWN_LENGTH:
        problem = "takes the second sentence from anywhere in the data, and a stream is only read in order"
        problem += '; use "sentence_order", or write the data with scripts/preprocess_data.py'
        raise ConfigError("data.sentence_objective", "next_sentence", problem)
    return sources
