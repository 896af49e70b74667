"""Pipeline parallelism: microbatches pass through stages on different processes (arXiv 2104.04473, section 2.2).

A stage is a `torch.distributed.pipelining.PipelineStage`, so torch's schedules can run it. The trainer runs it with
`TableSchedule`, which follows the tables of `titan_like.parallel.schedules`: on 4 ranks, torch's 1F1B holds 64 to 70
activations where this one holds 8, because torch's runtime allocates the receive buffers of all microbatches at the
start of a step (docs/architecture.md).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from titan_like.data.batch import Batch
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import LossFunction, ParallelModel, Stage
from titan_like.parallel.schedules.communication import MAX_PENDING_SENDS, steps_of_rank
from titan_like.parallel.schedules.tables import Action
from titan_like.parallel.timeline import TimedPasses, Timeline
from titan_like.parallel.weight_gradients import Product


class RunningStage(PipelineStage, TimedPasses):
    """A stage that holds tensors only for the microbatches in flight.

    It overrides every method through which a schedule runs a stage; all of them are public. The base class gets empty
    example tensors, because it would otherwise allocate a receive buffer for every microbatch. It gets no module,
    because it would otherwise gather and reduce FSDP2's parameters at times of its own choosing.
    """

    def __init__(
        self,
        stage: Stage,
        ranks: list[int],
        group: dist.ProcessGroup,
        new_hidden: Callable[[], torch.Tensor],
        device: torch.device,
    ) -> None:
        """``ranks`` has the rank of every stage. ``new_hidden`` allocates a tensor [batch, seq here, hidden]."""
        nothing = torch.empty(0)
        super().__init__(nn.Identity(), stage.index, len(ranks), device, nothing, nothing, group=group)
        self.stage, self.ranks, self.new_hidden = stage, ranks, new_hidden
        self._batches: Sequence[Batch] = ()
        self._loss_function: LossFunction | None = None
        self._backwards_left = 0
        # By pass (F or B) and microbatch: the input that has arrived for it, and the result that waits to be sent.
        self._arrived: dict[tuple[str, int], torch.Tensor] = {}
        self._made: dict[tuple[str, int], torch.Tensor] = {}
        # By microbatch: the stage's input and the graph node of its output. Keeping the node instead of the output lets
        # the output's memory be freed once it is sent.
        self._in_flight: dict[int, tuple[torch.Tensor | None, GradientEdge]] = {}
        self._products: dict[int, list[Product]] = {}  # by microbatch, between the two parts of a backward pass

    def begin(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        """Start a batch, given its microbatches; only the first stage reads their tokens."""
        self._batches, self._loss_function, self._backwards_left = batches, loss_function, len(batches)

    def end(self) -> None:
        """Finish a batch, and check that no microbatch is left in flight."""
        unfinished = self._arrived or self._made or self._in_flight or self._products
        assert not unfinished, "the schedule left something unfinished"
        self._batches, self._loss_function = (), None

    def forward_one_chunk(self, fwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Run one microbatch's forward pass.

        Returns:
            Hidden states [batch, seq here, hidden], or the scalar loss in the last stage.
        """
        batch = self._batches[fwd_chunk_id]
        hidden, backward = None, torch.is_grad_enabled()
        if not self.is_first:
            hidden = self._arrived.pop(("F", fwd_chunk_id))
            hidden.requires_grad_(backward)  # it is a leaf, whose gradient goes back to the previous stage
        output = self.stage.module(batch, hidden)
        if self.is_last:
            assert self._loss_function is not None
            output = self._loss_function(output, fwd_chunk_id)
        if backward:
            self._in_flight[fwd_chunk_id] = hidden, get_gradient_edge(output)
        output = output.detach()
        if not self.is_last and self.ranks[self.stage_index + 1] != self.group_rank:
            self._made["F", fwd_chunk_id] = output
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *_args: Any, full_backward: bool = True, **_kwargs: Any) -> None:
        """Run one microbatch's backward pass, or only the part of it that the previous stage waits for."""
        gradient = None if self.is_last else self._arrived.pop(("B", bwd_chunk_id))
        # With deferred weight gradients this pass must not reduce: gradients are complete only with their products.
        data_parallel, deferred = self.stage.data_parallel, self.stage.weight_gradients
        # A pass that cannot be split runs whole where the schedule asks for its first part.
        is_split = deferred is not None
        data_parallel.before_backward(is_last=not is_split and self._is_last_backward(), is_split=is_split)
        hidden, output = self._in_flight.pop(bwd_chunk_id)
        torch.autograd.backward(output, gradient)
        data_parallel.after_backward()
        if hidden is not None:
            assert hidden.grad is not None
            self._made["B", bwd_chunk_id] = hidden.grad
        if deferred is not None:
            self._products[bwd_chunk_id] = deferred.take()
            if full_backward:
                del hidden, output, gradient  # the second part needs their memory
                self._add_products(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> None:
        """Run the second part of a split backward pass, which computes the weights' gradients."""
        if self.stage.weight_gradients is not None:
            self._add_products(bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receive of a forward pass's input, into a buffer that is allocated now."""
        return [] if self.is_first else [self._receive("F", fwd_chunk_id, self.stage_index - 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receive of the gradient of the stage's output."""
        return [] if self.is_last or not self.has_backward else [self._receive("B", bwd_chunk_id, self.stage_index + 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The send of a forward pass's output."""
        return [] if self.is_last else [self._send("F", fwd_chunk_id, self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The send of the gradient of the stage's input."""
        return [] if self.is_first or not self.has_backward else [self._send("B", bwd_chunk_id, self.stage_index - 1)]

    def set_local_fwd_input(self, prev_stage_outputs: torch.Tensor, mb_index: int) -> None:
        """Take the input [batch, seq here, hidden] from the previous stage, if that is on this rank."""
        self._arrived["F", mb_index] = prev_stage_outputs

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor]:
        """Hand the gradient of the input, [batch, seq here, hidden], to the previous stage, if that is on this rank."""
        return (self._made.pop(("B", mb_index)),)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient of the output, [batch, seq here, hidden], from the next stage, if that is on this rank."""
        (gradient,) = next_stage_bwd_outputs
        assert gradient is not None
        self._arrived["B", mb_index] = gradient

    def _receive(self, kind: str, microbatch: int, source: int) -> dist.P2POp:
        self.num_actions += 1
        buffer = self._arrived[kind, microbatch] = self.new_hidden()
        return dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=self.ranks[source])

    def _send(self, kind: str, microbatch: int, target: int) -> dist.P2POp:
        self.num_actions += 1
        tensor = self._made.pop((kind, microbatch)).contiguous()
        return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=self.ranks[target])

    def _add_products(self, microbatch: int) -> None:
        for product in self._products.pop(microbatch):
            product.add()
            del product  # before gradients are reduced
        self.stage.data_parallel.reduce_gradients(is_last=self._is_last_backward())

    def _is_last_backward(self) -> bool:
        """Count down the step's backward passes; true for the last."""
        self._backwards_left -= 1
        return self._backwards_left == 0


_MESSAGES = {
    "RECV_F": "get_fwd_recv_ops",
    "RECV_B": "get_bwd_recv_ops",
    "SEND_F": "get_fwd_send_ops",
    "SEND_B": "get_bwd_send_ops",
}  # kind of step → the method of a stage that makes its message


class TableSchedule(PipelineScheduleMulti):
    """Runs the steps that `steps_of_rank` lists for this rank."""

    def __init__(self, stages: Sequence[RunningStage], num_microbatches: int, steps: list[Action]) -> None:
        super().__init__(list(stages), num_microbatches, loss_fn=loss_of_last_stage, scale_grads=False)
        self._table = steps
        self._stage = {stage.stage_index: stage for stage in stages}
        self._receives: dict[tuple[str, int, int], dist.Work] = {}  # by the pass that needs them
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Run one batch, whose inputs and loss function the stages got from `RunningStage.begin`."""
        for step in self._table:
            stage = self._stage[step.stage]
            if step.kind in _MESSAGES:
                self._post(step, getattr(stage, _MESSAGES[step.kind])(step.microbatch))
            else:
                self._compute(step, stage)
        self._finish_sends(0)

    def _compute(self, step: Action, stage: RunningStage) -> None:
        kind, index, microbatch = step
        if kind != "W":
            self._wait_for_input("F" if kind == "F" else "B", step, stage)
        with stage.timed(step):
            if kind == "F":
                output = stage.forward_one_chunk(microbatch)
            elif kind == "W":
                stage.backward_weight_one_chunk(microbatch)
            else:
                stage.backward_one_chunk(microbatch, full_backward=kind == "B")
        if kind == "F" and index + 1 in self._stage:  # the next stage is on this rank too, so no message is sent
            self._stage[index + 1].set_local_fwd_input(output, microbatch)
        elif kind in ("B", "I") and index - 1 in self._stage:
            self._stage[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def _post(self, step: Action, ops: Iterable[dist.P2POp]) -> None:
        sends = step.kind.startswith("SEND")
        for op in ops:
            work = op.op(op.tensor, group=op.group, **{"group_dst" if sends else "group_src": op.group_peer})
            assert work is not None, "this process is not in the pipeline's group"
            if sends:
                self._sends.append((work, op.tensor))
            else:
                self._receives[step.kind[-1], step.stage, step.microbatch] = work
        if sends:
            self._finish_sends(MAX_PENDING_SENDS)

    def _wait_for_input(self, kind: str, step: Action, stage: RunningStage) -> None:
        work = self._receives.pop((kind, step.stage, step.microbatch), None)
        if work is not None:
            if stage.timeline is not None:
                stage.timeline.waiting()
            work.wait()

    def _finish_sends(self, most: int) -> None:
        """Release the tensors of finished sends, and wait until at most ``most`` sends are unfinished."""
        while self._sends and (len(self._sends) > most or self._sends[0][0].is_completed()):
            self._sends.popleft()[0].wait()


def loss_of_last_stage(output: torch.Tensor, _target: object) -> torch.Tensor:
    """Loss function for torch's schedules. The last stage has computed the loss, a scalar, so it is passed through."""
    return output


class Pipeline:
    """Runs batches through this process's stages, together with the processes that hold the other stages."""

    def __init__(
        self,
        model: ParallelModel,
        layout: Layout,
        group: dist.ProcessGroup,
        hidden_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``hidden_shape``, [batch, seq on this rank, hidden], and ``dtype`` describe the tensors between stages."""
        self.model, self.layout, self.group = model, layout, group

        def new_hidden() -> torch.Tensor:
            return torch.empty(tuple(hidden_shape), dtype=dtype, device=device)

        self.stages = [RunningStage(stage, layout.stage_ranks, group, new_hidden, device) for stage in model.stages]
        self._schedules: dict[tuple[int, bool], TableSchedule] = {}

    @property
    def num_actions(self) -> int:
        """Passes, sends and receives so far, which grow as long as the pipeline makes progress."""
        return sum(stage.num_actions for stage in self.stages)

    @property
    def timeline(self) -> Timeline | None:
        """If set, it receives the time of every pass."""
        return self.stages[0].timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        for stage in self.stages:
            stage.timeline = timeline

    def forward_backward(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        """Accumulate the gradients of all microbatches' losses."""
        self._run(batches, loss_function, backward=True)
        for stage in self.model.stages:
            stage.data_parallel.finish()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        """Run forward passes only. The last stage calls ``loss_function`` with what the model returns."""
        self._run(batches, loss_function, backward=False)

    def _run(self, batches: Sequence[Batch], loss_function: LossFunction, backward: bool) -> None:
        key = len(batches), backward  # a batch-size ramp-up and validation need schedules of their own
        if key not in self._schedules:
            steps = steps_of_rank(self.layout, dist.get_rank(self.group), *key)
            self._schedules[key] = TableSchedule(self.stages, len(batches), steps)
        for stage in self.stages:
            stage.stage.data_parallel.before_forward()
            stage.has_backward = backward
            stage.begin(batches, loss_function)
        self._schedules[key].step()
        for stage in self.stages:
            stage.end()
