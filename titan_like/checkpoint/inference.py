"""Loading a checkpoint for inference, in one process or in the layout of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.checkpoint.checks import check_same_run, usable_steps
from titan_like.checkpoint.loader import load_checkpoint, reading
from titan_like.checkpoint.step_folders import RUN_FILE, checkpoint_folder, checkpoint_path, complete_steps
from titan_like.config.errors import require
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.parallel.apply import build_parallel_model, run_batches
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import ParallelModel
from titan_like.parallel.tensor import full_logits


def find_checkpoint(config: JobConfig) -> Path:
    """The newest checkpoint of a run, or the one that `checkpoint.load_step` selects.

    Raises:
        ConfigError: there is no such checkpoint, or it belongs to another model.
    """
    folder = checkpoint_folder(config)
    require(complete_steps(folder), "checkpoint.folder", str(folder), _problem_without_checkpoints(folder))
    path = checkpoint_path(folder, usable_steps(folder, config.checkpoint.load_step)[-1])
    check_same_run(path, config, model_config(config.model), resumes=False)
    return path


def _other_checkpoints(folder: Path, step: int) -> str:
    """What to do if the checkpoint of a step is damaged."""
    others = [str(other) for other in complete_steps(folder) if other != step][-3:]
    if others:
        return f"set checkpoint.load_step to {' or '.join(others)}"
    return "there is no other in that folder; set checkpoint.folder or job.dump_folder to that of another run"


def _problem_without_checkpoints(folder: Path) -> str:
    """What is wrong with a folder that holds no checkpoint, as the predicate of a sentence."""
    if os.path.isfile(folder / RUN_FILE):
        return f"is a checkpoint itself; name the folder that it is in, {folder.parent}, and its checkpoint.load_step"
    if os.path.isfile(folder / "config.json"):
        return "is a Hugging Face folder; convert it by scripts/convert.py from-hf and name what that writes"
    return "holds no checkpoint; train with checkpoint.enable first, or set checkpoint.folder or job.dump_folder"


def load_for_inference(config: JobConfig, path: Path, device: torch.device) -> Transformer:
    """The whole model of a checkpoint in this process; a `RunError` if the checkpoint is damaged."""
    with torch.device("meta"):
        model = build_model(model_config(config.model), config.model.family)
    model.to_empty(device=device)
    _load(path, model)
    return model.eval()


def _load(path: Path, model: ParallelModel | Transformer) -> None:
    with reading(path, f"; {_other_checkpoints(path.parent, int(path.name.removeprefix('step-')))}"):
        load_checkpoint(path, model)


def load_parallel_model(config: JobConfig, path: Path, mesh: DeviceMesh, device: torch.device) -> ParallelModel:
    """This process's part of a checkpoint's model, in the configuration's layout. Needs a process group.

    Raises:
        RunError: the checkpoint is damaged.
    """
    eager = config.model_copy(update={"compile": config.compile.model_copy(update={"enable": False})})
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
        """``model`` comes from `load_parallel_model`. No call may have more than ``max_tokens`` tokens, and those of an
        encoder, without sequence parallelism.
        """
        whole, shards = model_config(config.model), Layout.of(config.parallelism).sequence_shards
        # Sequence parallelism needs equal parts.
        most = min(-(-max_tokens // shards), whole.max_seq_len // shards) * shards
        self.config: TransformerConfig = whole.model_copy(update={"max_seq_len": most})
        self._window = encoder_len + most
        self._pipeline = run_batches(config, model, mesh, device, batch=1, seq_len=self._window)
        self._last_rank = int(mesh.mesh[self._pipeline.layout.stage_ranks[-1]].flatten()[0])  # a rank of the last stage

    def eval(self) -> None:
        """Turn dropout off."""
        self._pipeline.model.train(False)

    @torch.no_grad()
    def __call__(
        self, tokens: torch.Tensor, document_mask: KeyRanges | None = None, encoder_len: int | None = None
    ) -> torch.Tensor:
        """tokens [1, seq] → logits [1, 1, padded vocab] of the last token, the same on every process."""
        last = tokens.shape[1] - (encoder_len or 0) - 1
        # Messages between stages have a fixed shape, so pad; no token sees the padding.
        padding = 0, self._window - tokens.shape[1]
        padded = torch.nn.functional.pad(tokens, padding)
        if document_mask is not None:
            order = torch.arange(self._window, device=tokens.device)[None]
            end = torch.cat((document_mask.end, order[:, tokens.shape[1] :] + 1), 1)
            document_mask = KeyRanges(torch.nn.functional.pad(document_mask.first, padding), end)
        found = torch.empty(1, 1, self.config.padded_vocab_size, device=tokens.device)

        def keep(logits: torch.Tensor, _: int) -> torch.Tensor:
            return found.copy_(full_logits(logits, slice(last, last + 1)))

        self._pipeline.forward([Batch(padded, document_mask=document_mask, encoder_len=encoder_len)], keep)
        dist.broadcast(found, src=self._last_rank)
        return found
