"""Scoring windows with a model that may be split over processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, collate, to_device
from titan_like.data.objectives.sentence_pairs import PairTokens, pair_tokens_of
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import tokenizer_of
from titan_like.evaluate.task import Score, Window
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.parallel.apply import run_batches
from titan_like.parallel.collectives import Group, all_gather
from titan_like.parallel.context import cp_shard_of
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.mesh import one_dimension
from titan_like.parallel.model import ParallelModel, WholeModel

if TYPE_CHECKING:
    from titan_like.parallel.pipeline import Pipeline


def token_scores(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the labels: logits [batch, seq, vocab], labels [batch, seq] → two tensors [batch, seq].

    The first has the log-probability of each label in nats, at least float32, the second whether the label is the most
    probable token (the lowest of equally probable ones). Without a label: 0 and False. Logits may be a DTensor split
    over the vocabulary. One small all-gather then gives every rank the same result.
    """
    parts = logits.to_local() if isinstance(logits, DTensor) else logits
    group = Group.of(logits.device_mesh) if isinstance(logits, DTensor) else None
    first = 0 if group is None else group.vocabulary(logits.shape[2]).start
    # One sequence at a time, because the float32 logits of a batch can be gigabytes.
    local = torch.stack([_parts(part, label, first) for part, label in zip(parts, labels, strict=True)], 1)
    gathered = local[None] if group is None else all_gather(local[None], 0, group)  # [ranks, 4, batch, seq]
    denominator, target = gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)
    best = gathered[:, 2].argmax(0, keepdim=True)  # rank, and below the token on it; argmax takes the first of equals
    most_probable = gathered[:, 3].gather(0, best)[0]
    valid = labels != IGNORED_LABEL
    return (target - denominator).masked_fill(~valid, 0), (most_probable == labels) & valid


def _parts(logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """Statistics of one rank: logits [seq, tokens of this rank], from token ``first`` on, labels [seq] → [4, seq].

    The rows are the logarithm of its part of the softmax's denominator, the label's logit or else 0, its largest logit,
    and that logit's token, which is exact in float32 up to 2²⁴.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    columns = labels - first
    is_local = (columns >= 0) & (columns < values.shape[1])
    target = values.gather(1, columns.masked_fill(~is_local, 0)[:, None])[:, 0].masked_fill(~is_local, 0)
    token = values.argmax(1)
    largest = values.gather(1, token[:, None])[:, 0]
    return torch.stack((values.logsumexp(1), target, largest, (token + first).to(values.dtype)))


_WIDTHS = 64  # windows are padded to a multiple of this, so that few lengths occur
_MICROBATCHES_PER_STAGE = 4  # in one pass through a pipeline, to keep its stages busy

Progress = Callable[[int, int], None]  # called with (windows scored, all windows)


class Scorer:
    """Scores windows with a model. All processes that have a part of it call it with the same windows.

    Data-parallel ranks share the windows, in microbatches of `training.micro_batch_size`. The logits stay where they
    are: only a few numbers per token leave a process. With `data.prefix_lm` the tokens before a window's targets see
    each other, as in a prefix in training.
    """

    def __init__(
        self, config: JobConfig, model: ParallelModel, mesh: DeviceMesh, device: torch.device, one_length: bool = False
    ) -> None:
        """With ``one_length`` every window is padded to `training.seq_len`, for a model compiled for that length."""
        self.config, self.model, self.mesh, self.device = config, model, mesh, device
        self._one_length = one_length
        dp_mesh = one_dimension(mesh, "dp", "dp_replicate", "dp_shard")
        self._layout = resolve_layout(config.parallelism, mesh.size())
        self.shape = model.stages[0].module.config
        self.cp_shard = cp_shard_of(config, self.shape, mesh)
        self.dp_rank, self.dp_size = self._layout.data_rank(mesh.get_rank()), self._layout.data_parallel
        self.groups = [mesh.get_group() for mesh in (dp_mesh, mesh["pp"]) if mesh.size() > 1]
        self._pipelines: dict[int, Pipeline | WholeModel] = {}  # by length of the inputs

    @cached_property
    def _pair_tokens(self) -> PairTokens | None:
        """The tokens around two sentences, for a model that scores the options of questions."""
        shape, section = self.shape, self.config.data
        if "choice" not in shape.predictions:
            return None
        return pair_tokens_of(section.tokenizer, tokenizer_of(section), shape.vocab_size)

    @property
    def num_actions(self) -> int:
        """Passes, sends and receives so far, which grow as long as scoring makes progress."""
        return sum(pipeline.num_actions for pipeline in self._pipelines.values())

    @torch.no_grad()
    def __call__(self, windows: Sequence[Window], progress: Progress | None = None) -> list[Score]:
        """Score every window, with dropout off. Every process returns all scores, in the order of the windows.

        No window may have more than `training.seq_len` inputs.
        """
        was_training = self.model.stages[0].module.training
        self.model.train(False)
        # By length, so that little padding is needed.
        order = sorted(range(len(windows)), key=lambda number: len(windows[number].tokens), reverse=True)
        results = torch.zeros(len(windows), 2, dtype=torch.float64, device=self.device)
        rows, stages = self.config.training.micro_batch_size, self._layout.pipeline
        at_once = _MICROBATCHES_PER_STAGE * stages * rows * self.dp_size
        for start in range(0, len(order), at_once):
            chunk = order[start : start + at_once]
            width = self._width(len(windows[chunk[0]].tokens) - 1)
            num_microbatches = -(-len(chunk) // (rows * self.dp_size))  # the same on every rank
            numbers = chunk[self.dp_rank :: self.dp_size]
            scores = self._score([windows[number] for number in numbers], num_microbatches, width)
            results[numbers] = scores[: len(numbers)]
            if progress is not None:
                progress(start + len(chunk), len(order))
        for group in self.groups:
            dist.all_reduce(results, group=group)
        self.model.train(was_training)
        self.model.free_gathered_parameters()
        return [Score(log_probability, int(right)) for log_probability, right in results.tolist()]

    def _width(self, longest: int) -> int:
        """The number of inputs that windows of at most ``longest`` inputs are padded to."""
        seq_len = self.config.training.seq_len
        if self._one_length:
            return seq_len
        unit = math.lcm(_WIDTHS, self._layout.context_chunks, self._layout.sequence_shards)
        return min(-(-longest // unit) * unit, seq_len)

    def _score(self, windows: Sequence[Window], num_microbatches: int, width: int) -> torch.Tensor:
        """This rank's windows → float64 [num_microbatches · rows, 2]: zeros for padding, and outside the last stage."""
        rows = self.config.training.micro_batch_size
        padding = [Window(np.zeros(1, np.int64), 0)] * (num_microbatches * rows - len(windows))
        samples = [self._sample(window, width) for window in (*windows, *padding)]
        batches = (collate(samples[at : at + rows]) for at in range(0, len(samples), rows))
        microbatches = [self.cp_shard.shard(to_device(batch, self.device)) for batch in batches]
        scores = torch.zeros(num_microbatches, rows, 2, dtype=torch.float64, device=self.device)

        def keep(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
            if self._pair_tokens is not None:
                scores[microbatch, :, 0] = logits.flatten().double()
                return logits.sum()
            targets = microbatches[microbatch].labels
            assert targets is not None
            log_probability, is_right = token_scores(logits, targets)
            scores[microbatch, :, 0] = log_probability.double().sum(1)
            scores[microbatch, :, 1] = is_right.sum(1).double()
            return log_probability.sum()

        self.pipeline(width).forward(microbatches, keep)
        return scores.flatten(0, 1)

    def _sample(self, window: Window, width: int) -> Batch:
        """A window in ``width`` positions. In a prefix language model the tokens before its targets see each other."""
        tokens, length = torch.from_numpy(window.tokens), len(window.tokens) - 1
        inputs, scored = F.pad(tokens[:-1], (0, width - length)), slice(length - window.num_targets, length)
        if self._pair_tokens is not None:
            return self._pair_tokens.batch(inputs)
        labels, order = torch.full_like(inputs, IGNORED_LABEL), torch.arange(1, width + 1)
        labels[scored] = tokens[1:][scored]
        seen = KeyRanges(torch.zeros_like(inputs), order.clamp(min=scored.start + 1))
        mask = seen if self.config.data.prefix_lm else None
        return Batch(inputs, labels, document_mask=mask, num_tokens=torch.tensor(length))

    def pipeline(self, width: int) -> Pipeline | WholeModel:
        """The pipeline for microbatches of ``width`` positions."""
        if width not in self._pipelines:
            rows = self.config.training.micro_batch_size
            self._pipelines[width] = run_batches(self.config, self.model, self.mesh, self.device, rows, width)
        return self._pipelines[width]
