"""Loading a checkpoint or a Hugging Face folder for inference, in one process or in the layout of a configuration."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch.distributed.device_mesh import DeviceMesh

from titan_like.checkpoint import loader, step_folders
from titan_like.checkpoint.checks import check_same_run, usable_steps
from titan_like.config.errors import require
from titan_like.config.load import load_config, parse_overrides
from titan_like.config.schema import JobConfig, LoRA
from titan_like.config.section import options_of
from titan_like.config.urls import path_of
from titan_like.data.text.tokenizer import Tokenizer, tokenizer_in, tokenizer_of
from titan_like.hugging_face.folder import is_hugging_face, local_folder
from titan_like.hugging_face.peft import MergedWeights
from titan_like.hugging_face.start import read_weights
from titan_like.models.batch import Batch
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.init import local_parts
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.parallel.apply import build_parallel_model, run_batches
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import ParallelModel
from titan_like.parallel.tensor import full_logits


def load(
    folder: str | os.PathLike[str], *settings: str, device: torch.device | str | None = None
) -> tuple[Transformer, Tokenizer]:
    """The trained model of a checkpoint, whole and in float32, and its tokenizer.

    Args:
        folder: a checkpoint (step-N), a folder of checkpoints or a run's dump folder, whose newest one is loaded.
        settings: words of a command line that override the run's, such as "--checkpoint.load_step=200".
        device: where the weights go; None is the GPU if there is one.

    Raises:
        ConfigError: the folder has no checkpoint, or a setting is wrong.
        RunError: the checkpoint is damaged.
    """
    config = config_of_checkpoint(os.fspath(folder), list(settings))
    tokenizer = tokenizer_of(config.data, model_config(config.model).vocab_size)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return load_for_inference(config, find_checkpoint(config), device), tokenizer


def config_of_checkpoint(folder: str, settings: list[str]) -> JobConfig:
    """The configuration of the run that wrote a checkpoint, for reading that checkpoint in any number of processes.

    The arguments and errors are the same as for `load`.
    """
    if is_hugging_face(path_of(folder)):
        return load_config([*settings, f"--model.from={folder}", f"--checkpoint.folder={folder}"])
    path = loader.one_checkpoint(path_of(folder), "--checkpoint")
    step = parse_overrides(settings).get("checkpoint.load_step")
    if step is not None:
        path = step_folders.checkpoint_path(path.parent, usable_steps(path.parent, step)[-1])
    with loader.reading(path, f"; {_other_checkpoints(path)}"):
        run = step_folders.read_run_state(path)
    stored = {}
    for name, section in JobConfig.model_fields.items():  # a setting that no longer exists plays no part in reading
        options = options_of(cast(type[BaseModel], section.annotation))
        stored[name] = {key: value for key, value in run.config.get(name, {}).items() if key in options}
    stored["job"].pop("config_file", None)
    stored["model"].pop("from", None)  # the checkpoint has its weights
    stored["checkpoint"] |= {"folder": str(path), "load_step": None}
    stored["parallelism"] |= {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1}
    if tokenizer := tokenizer_in(path):  # the run's own may be elsewhere
        stored["data"]["tokenizer"] = tokenizer
    config = load_config(settings, stored)
    reason = "it holds the run's configuration; leave out --job.config_file, or leave out --checkpoint"
    require(config.job.config_file is None, "--checkpoint", folder, reason)
    return config


def find_checkpoint(config: JobConfig) -> Path:
    """The newest checkpoint of a run, or the one that `checkpoint.load_step` or `checkpoint.folder` itself selects.

    For a run without checkpoints it is the folder that `model.from` names. Raises a `ConfigError` if there is no such
    checkpoint, or it belongs to another model.
    """
    path, step = step_folders.checkpoint_folder(config), config.checkpoint.load_step
    if not loader.is_checkpoint(path) or step not in (None, step_folders.step_of(path)):
        if config.model.from_ is not None and step is None and not step_folders.complete_steps(path):
            return local_folder(config.model.from_, "model.from")
        hint = "train with checkpoint.enable first, or name a run's folder with --checkpoint"
        reason = loader.reason_without_checkpoints(path, hint)
        require(step_folders.complete_steps(path), "checkpoint.folder", str(path), reason)
        path = step_folders.checkpoint_path(path, usable_steps(path, step)[-1])
    check_same_run(path, config, model_config(config.model), resumes=False)
    return path


def _other_checkpoints(path: Path) -> str:
    """A hint for the error of a damaged checkpoint: others to load."""
    steps = [str(step) for step in step_folders.complete_steps(path.parent) if step != step_folders.step_of(path)][-3:]
    if steps:
        return f"set checkpoint.load_step to {' or '.join(steps)}"
    return "there is no other in that folder; name another folder"


def load_for_inference(config: JobConfig, path: Path, device: torch.device) -> Transformer:
    """The whole model of a checkpoint in this process; a `RunError` if the checkpoint is damaged."""
    with torch.device("meta"):
        model = build_model(model_config(config.model), config.model.family)
    model.to_empty(device=device)
    _load(path, model)
    return model.eval()


def _load(path: Path, model: ParallelModel | Transformer, ignore: Collection[str] = ()) -> None:
    hint = f"; {_other_checkpoints(path)}"
    with loader.reading(path, hint):
        adapted = MergedWeights(path) if loader.is_checkpoint(path) and step_folders.read_run_state(path).base else None
    if adapted is not None:
        _load(adapted.base, model, adapted.run.config["model"].get("ignore_fields", ()))
    with loader.reading(path, hint):
        if adapted is not None:
            _add_adapters(adapted, model)
        elif loader.is_checkpoint(path):
            loader.load_checkpoint(path, model)
        else:
            read_weights(path, model, ignore=ignore)


@torch.no_grad()
def _add_adapters(weights: MergedWeights, model: ParallelModel | Transformer) -> None:
    """Add the adapters of a checkpoint to their base, which the model holds."""
    for key, tensor in loader.model_tensors(model).items():
        if (name := key.removeprefix("model.")) in weights.adapters:
            update = weights.update(name)
            for part, offsets in local_parts(tensor):
                bounds = zip(offsets, part.shape, strict=True)
                part += update[tuple(slice(start, start + size) for start, size in bounds)]


def load_parallel_model(config: JobConfig, path: Path, mesh: DeviceMesh, device: torch.device) -> ParallelModel:
    """This process's part of a checkpoint's model, in the configuration's layout. Needs a process group."""
    without = {"compile": config.compile.model_copy(update={"enable": False}), "lora": LoRA()}
    eager = config.model_copy(update=without)
    model = build_parallel_model(eager, model_config(config.model), mesh, device)
    _load(path, model)
    return model


class ParallelInference:
    """A model split over several processes, which all call it with the same tokens.

    Every data-parallel rank computes the same result.
    """

    def __init__(
        self,
        config: JobConfig,
        model: ParallelModel,
        mesh: DeviceMesh,
        device: torch.device,
        max_tokens: int,
        encoder_len: int = 0,
    ) -> None:
        """``model`` comes from `load_parallel_model`. No call may have more than ``max_tokens`` tokens, except
        for the ``encoder_len`` tokens of an encoder, which needs sequence parallelism off.
        """
        self.device = device
        shape, shards = model_config(config.model), Layout.of(config.parallelism).sequence_shards
        # Sequence parallelism needs equal parts.
        max_len = min(-(-max_tokens // shards), shape.max_seq_len // shards) * shards
        self.config: TransformerConfig = shape.model_copy(update={"max_seq_len": max_len})
        self._window = encoder_len + max_len
        self._pipeline = run_batches(config, model, mesh, device, batch=1, seq_len=self._window)
        self._last_rank = int(mesh.mesh[self._pipeline.layout.stage_ranks[-1]].flatten()[0])  # a rank of the last stage

    def eval(self) -> None:
        """Turn dropout off."""
        self._pipeline.model.train(False)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> torch.Tensor:
        """A batch of one sample → logits [1, 1, padded vocab] of the last token, the same on every process."""
        tokens, document_mask = batch.tokens, batch.document_mask
        last = tokens.shape[1] - (batch.encoder_len or 0) - 1
        # Messages between stages have a fixed shape, so pad; no token sees the padding.
        padding = 0, self._window - tokens.shape[1]
        padded = torch.nn.functional.pad(tokens, padding)
        if document_mask is not None:
            order = torch.arange(self._window, device=tokens.device)[None]
            end = torch.cat((document_mask.end, order[:, tokens.shape[1] :] + 1), 1)
            document_mask = KeyRanges(torch.nn.functional.pad(document_mask.first, padding), end)
        result = torch.empty(1, 1, self.config.padded_vocab_size, device=tokens.device)

        def keep(logits: torch.Tensor, _: int) -> torch.Tensor:
            return result.copy_(full_logits(logits, slice(last, last + 1)))

        length = tokens.new_tensor([tokens.shape[1]])
        self._pipeline.forward([batch._replace(tokens=padded, document_mask=document_mask, num_tokens=length)], keep)
        dist.broadcast(result, src=self._last_rank)
        return result
