"""CUDA graphs: a step's forward and backward passes are recorded once, and later steps launch them by one call.

The kernels of a small model take less time than the host needs to issue them. A graph fixes all addresses and shapes,
and it runs no Python: what the passes read and write must stay where it was when they were recorded. Random numbers are
the same as without a graph, because a graph takes the generator's seed and offset when it is launched.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_like.data.batch import Batch, map_tensors
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import LossFunction, ParallelModel, WholeModel
from titan_like.torch_private import copy_all_, tree_leaves

_WARM_UP = 2  # steps before recording: they compile layers, choose kernels and allocate the workspaces of libraries


class Recorder:
    """Issues or records work on a stream of its own. Autograd's nodes must belong to the stream that is recorded."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def issue(self, work: Callable[[], None]) -> None:
        """Run ``work`` after what the current stream has been given, and before what it is given next."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the kernels of ``work`` without running them. The function that is returned launches them."""
        graph = torch.cuda.CUDAGraph()
        # By default, what threads that load data or save do meanwhile would end the recording with an error.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class GraphedModel(WholeModel):
    """Extends `WholeModel` for one process on a GPU: all passes of a step are one graph.

    The gradients and losses that a graph writes are the same tensors in every step. A step with other shapes, another
    number of microbatches or moved weights, and one that is timed pass by pass, runs without a graph.
    """

    def __init__(self, model: ParallelModel, layout: Layout) -> None:
        super().__init__(model, layout)
        if (of_weights := self.stage.data_parallel.copies) is not None:
            of_weights.frees = False
        modules = list(self.stage.module.modules())
        copies = [value for module in modules for value in vars(module).values() if isinstance(value, nn.Parameter)]
        self._read = [*self.stage.module.parameters(), *self.stage.module.buffers(), *copies]
        self._recorder: Recorder | None = None  # made when it is needed: a model that only infers may be on a CPU
        self._fixed: Any = None  # what the graph takes for granted
        self._num_steps = 0  # that had the same
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Batch] = []
        self._outputs: list[torch.Tensor] = []  # of the model, for each microbatch
        self._gradients: list[torch.Tensor | None] = []  # of the model's parameters

    def _run(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        self._recorder = recorder = self._recorder or Recorder()
        issue = partial(super()._run, batches, loss_function)
        if self.timeline is not None:
            recorder.issue(issue)
            return
        leaves = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in tree_leaves(list(batches))]
        fixed = leaves, [tensor.data_ptr() for tensor in self._read]
        if fixed != self._fixed:
            self._fixed, self._num_steps, self._replay = fixed, 0, None
            self._inputs, self._outputs, self._gradients = [], [], []
        self._num_steps += 1
        if self._num_steps <= _WARM_UP:
            recorder.issue(issue)
            return
        if self._replay is None:
            self._replay = self._record(recorder, batches)
        copy_all_(_tensors(self._inputs), _tensors(batches))
        self._replay()
        self.num_actions += 2 * len(batches)
        for parameter, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        for microbatch, output in enumerate(self._outputs):
            loss_function(output, microbatch)

    def _record(self, recorder: Recorder, batches: Sequence[Batch]) -> Callable[[], None]:
        self._inputs = [map_tensors(torch.clone, batch) for batch in batches]

        def note(output: Any, _microbatch: int) -> torch.Tensor:
            self._outputs.append(output.detach())
            return output.sum()

        replay = recorder.record(partial(super()._run, self._inputs, note))
        self._gradients = [parameter.grad for parameter in self.model.parameters()]
        return replay


def _tensors(batches: Sequence[Batch]) -> list[torch.Tensor]:
    return [x for x in tree_leaves(list(batches)) if isinstance(x, torch.Tensor)]
