"""Pipeline parallelism: microbatches pass through stages on different processes (arXiv 2104.04473, section 2.2).

Every process runs its own list of steps, made by `titan_like.parallel.schedules`: forward and backward passes of one
microbatch in one stage, and the sends and receives between them. Without pipelining the list is forward, backward,
forward, backward, and nothing is sent.

torch.distributed.pipelining has these schedules too. Its runtime is not used: it allocates a receive buffer for every
microbatch at the start, so that interleaved stages hold activations of all microbatches of a step, where here it is
those in flight (docs/pipeline_timeline.md has both, measured); and its split of a backward pass in two gives wrong
gradients under ZeRO 3 and fails under selective recomputation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from titan_like.parallel.model import ParallelModel, Stage
from titan_like.parallel.schedules.communication import Step, add_communication
from titan_like.parallel.schedules.tables import forward_table, schedule_table, stage_ranks
from titan_like.parallel.timeline import Timeline
from titan_like.parallel.weight_gradients import Product, WeightGradients

# Sends that may be on their way before one is waited for. gloo cannot say whether one has arrived without waiting.
_MAX_PENDING_SENDS = 8

LossFunction = Callable[[torch.Tensor, int], torch.Tensor]  # (logits of a microbatch, its number) → scalar


@dataclass(frozen=True)
class PipelineShape:
    """How stages lie on processes, and the order in which they work."""

    schedule: str
    degree: int
    virtual_stages: int

    @property
    def ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.degree, self.virtual_stages)

    def steps(self, rank: int, num_microbatches: int, backward: bool) -> list[Step]:
        """What one rank does for one batch."""
        table = schedule_table if backward else forward_table
        actions = table(self.schedule, self.degree, self.virtual_stages, num_microbatches)
        return add_communication(actions, self.ranks)[rank]


@dataclass
class _InFlight:
    """What a stage keeps of a microbatch between its passes."""

    stage_input: torch.Tensor
    output: GradientEdge  # of the loss in the last stage; the output itself can be freed once it is sent


@dataclass
class _Traffic:
    """Tensors on their way between stages, by (kind, stage, microbatch) of the pass that takes them."""

    arriving: dict[tuple[str, int, int], tuple[torch.Tensor, dist.Work | None]] = field(default_factory=dict)
    leaving: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    pending_sends: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque)


class Pipeline:
    """Runs batches through the stages of this process, in step with the processes that hold the others."""

    def __init__(
        self,
        model: ParallelModel,
        shape: PipelineShape,
        group: dist.ProcessGroup,
        hidden_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``hidden_shape`` and ``dtype`` are those of the tensors between stages, [batch, seq on this rank, hidden]."""
        self.model, self.shape, self.group = model, shape, group
        self.rank = dist.get_rank(group)
        self.timeline: Timeline | None = None  # receives the time of every pass while it is set
        self.peak_in_flight = dict.fromkeys((stage.index for stage in model.stages), 0)
        self._stages = {stage.index: stage for stage in model.stages}
        self._ranks = shape.ranks
        self.num_actions = 0  # passes, sends and receives so far, for those who want to see that it gets on
        self._steps: dict[tuple[int, bool], list[Step]] = {}
        self._hidden_shape, self._dtype, self._device = tuple(hidden_shape), dtype, device
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._products: dict[tuple[int, int], list[Product]] = {}  # of a split backward pass, between its parts
        self._remaining: dict[int, int] = {}  # backward passes that a stage still has to finish in this step
        self._traffic = _Traffic()
        self._loss_function: LossFunction | None = None
        self._tokens: Sequence[torch.Tensor] = ()

    def forward_backward(self, tokens: Sequence[torch.Tensor], loss_function: LossFunction) -> None:
        """Add the gradients of all microbatches' losses to the parameters. tokens: each [micro_batch, seq]."""
        self._remaining = dict.fromkeys(self._stages, len(tokens))
        self._run(tokens, loss_function, backward=True)
        for stage in self.model.stages:
            stage.data_parallel.finish()

    @torch.no_grad()
    def forward(self, tokens: Sequence[torch.Tensor], loss_function: LossFunction) -> None:
        """Only call ``loss_function`` with every microbatch's logits, where the last stage is."""
        self._run(tokens, loss_function, backward=False)

    def _run(self, tokens: Sequence[torch.Tensor], loss_function: LossFunction, backward: bool) -> None:
        self._tokens, self._loss_function = tokens, loss_function
        key = len(tokens), backward
        if key not in self._steps:
            self._steps[key] = self.shape.steps(self.rank, *key)
        for step in self._steps[key]:
            self.num_actions += 1
            place = step.stage, step.microbatch
            if step.kind in ("SEND_F", "SEND_B"):
                self._send(step.kind[-1], *place)
            elif step.kind in ("RECV_F", "RECV_B"):
                self._receive(step.kind[-1], *place)
            else:
                self._compute(step, backward)
        traffic = self._traffic
        while traffic.pending_sends:
            traffic.pending_sends.popleft()[0].wait()
        undone = traffic.arriving or traffic.leaving or self._in_flight or self._products
        assert not undone, "the schedule left something undone"
        self._tokens, self._loss_function = (), None

    def _compute(self, step: Step, backward: bool) -> None:
        stage, microbatch = self._stages[step.stage], step.microbatch
        incoming = None
        takes_input = step.kind == "F" and not stage.module.is_first
        takes_gradient = step.kind in ("B", "I") and not stage.module.is_last
        if takes_input or takes_gradient:
            if self.timeline is not None:
                self.timeline.waiting(step)
            incoming = self._take("F" if takes_input else "B", stage.index, microbatch)
        if self.timeline is not None:
            self.timeline.start(step)
        if step.kind == "F":
            self._forward(stage, microbatch, incoming, backward)
        elif stage.weight_gradients is None:
            # The layers' gradients are not put off: the whole pass is where others wait for its first part.
            if step.kind != "W":
                self._backward(stage, microbatch, incoming)
        else:
            if step.kind != "W":
                self._backward_for_input(stage, stage.weight_gradients, microbatch, incoming)
            if step.kind != "I":
                self._backward_for_weights(stage, microbatch)
        if self.timeline is not None:
            self.timeline.stop(step)

    def _forward(self, stage: Stage, microbatch: int, hidden: torch.Tensor | None, backward: bool) -> None:
        x = self._tokens[microbatch] if hidden is None else hidden.requires_grad_(backward)
        output = stage.module(x)
        if stage.module.is_last:
            assert self._loss_function is not None
            output = self._loss_function(output, microbatch)
        else:
            self._give("F", stage.index + 1, microbatch, output.detach())
        if not backward:
            return
        self._in_flight[stage.index, microbatch] = _InFlight(x, get_gradient_edge(output))
        in_flight = sum(index == stage.index for index, _ in self._in_flight)
        self.peak_in_flight[stage.index] = max(self.peak_in_flight[stage.index], in_flight)

    def _backward(self, stage: Stage, microbatch: int, gradient: torch.Tensor | None) -> None:
        stage.data_parallel.before_backward(is_last=self._is_last_backward(stage))
        self._run_backward(stage, microbatch, gradient)

    def _backward_for_input(
        self, stage: Stage, weight_gradients: WeightGradients, microbatch: int, gradient: torch.Tensor | None
    ) -> None:
        stage.data_parallel.before_split_backward()
        self._run_backward(stage, microbatch, gradient)
        self._products[stage.index, microbatch] = weight_gradients.take()

    def _backward_for_weights(self, stage: Stage, microbatch: int) -> None:
        for product in self._products.pop((stage.index, microbatch)):
            product.add()
        stage.data_parallel.reduce_gradients(is_last=self._is_last_backward(stage))

    def _run_backward(self, stage: Stage, microbatch: int, gradient: torch.Tensor | None) -> None:
        held = self._in_flight.pop((stage.index, microbatch))
        torch.autograd.backward(held.output, gradient)
        if not stage.module.is_first:
            assert held.stage_input.grad is not None
            self._give("B", stage.index - 1, microbatch, held.stage_input.grad)

    def _is_last_backward(self, stage: Stage) -> bool:
        """Count down the backward passes of a stage in this step."""
        self._remaining[stage.index] -= 1
        return self._remaining[stage.index] == 0

    def _give(self, kind: str, to_stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        """Hand a tensor to a stage, at once if it is here."""
        if to_stage in self._stages:
            self._traffic.arriving[kind, to_stage, microbatch] = tensor, None
        else:
            self._traffic.leaving[kind, to_stage, microbatch] = tensor

    def _take(self, kind: str, stage: int, microbatch: int) -> torch.Tensor:
        """Wait for a tensor that a pass needs."""
        tensor, work = self._traffic.arriving.pop((kind, stage, microbatch))
        if work is not None:
            work.wait()
        return tensor

    def _send(self, kind: str, stage: int, microbatch: int) -> None:
        """Start to send what a pass of ``stage`` made."""
        to_stage = stage + 1 if kind == "F" else stage - 1
        tensor = self._traffic.leaving.pop((kind, to_stage, microbatch)).contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=self._ranks[to_stage])
        assert work is not None, "this process is not in the pipeline's group"
        pending = self._traffic.pending_sends
        pending.append((work, tensor))
        while pending and (pending[0][0].is_completed() or len(pending) > _MAX_PENDING_SENDS):
            pending.popleft()[0].wait()

    def _receive(self, kind: str, stage: int, microbatch: int) -> None:
        """Start to receive what a pass of ``stage`` needs."""
        from_stage = stage - 1 if kind == "F" else stage + 1
        tensor = torch.empty(self._hidden_shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, group=self.group, group_src=self._ranks[from_stage])
        self._traffic.arriving[kind, stage, microbatch] = tensor, work
