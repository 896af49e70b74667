"""The part of the model that one process holds, and training it without pipelining.

Several pipeline stages may hold copies of one parameter: of tied embeddings, or of what their layers share. All copies
begin with the same value, and the sum of their gradients updates each of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_like.data.batch import Batch
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.init import ADAPTER_NAMES
from titan_like.models.parts import one_of_each, parameters_of
from titan_like.models.transformer import Transformer, shared_modules
from titan_like.optim.shards import local, widen
from titan_like.parallel.data import DataParallel
from titan_like.parallel.gradients import CopiedUnit
from titan_like.parallel.layout import Layout
from titan_like.parallel.schedules.tables import Action
from titan_like.parallel.split import StageLayers
from titan_like.parallel.timeline import TimedPasses
from titan_like.parallel.weight_gradients import WeightGradients

ModelOutput = torch.Tensor | tuple[torch.Tensor, ...]  # what `Transformer.predict` returns
LossFunction = Callable[[Any, int], torch.Tensor]  # (the model's output, microbatch number) → scalar


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, or the whole model if there is no pipelining."""

    index: int
    module: Transformer
    data_parallel: DataParallel
    weight_gradients: WeightGradients | None = None  # set if backward passes defer the gradients of matrices


@dataclass(frozen=True)
class ParallelModel:
    """All stages of one process, in the model's order."""

    stages: list[Stage]
    tied_stages: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter in several stages → these stages
    expert_mesh: DeviceMesh | None = None  # set if `Layout.splits_experts`

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every local parameter that is trained. Copies that a process holds come under the same name."""
        for stage in self.stages:
            yield from (named for named in stage.module.named_parameters() if named[1].requires_grad)

    def base_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every local parameter of the model without adapters, trained or frozen."""
        for stage in self.stages:
            yield from (named for named in stage.module.named_parameters() if not named[0].endswith(ADAPTER_NAMES))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every local parameter that is trained, as in `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """Every trained local parameter, of copies only the first stage's, so all stages together have each once."""
        for stage in self.stages:
            for name, parameter in stage.module.named_parameters():
                if parameter.requires_grad and self.tied_stages.get(name, (stage.index,))[0] == stage.index:
                    yield parameter

    def copies_of(self, name: str) -> list[nn.Parameter]:
        """The copies of one parameter that this process holds, in the order of its stages."""
        held = self.tied_stages.get(name, ())
        return [dict(stage.module.named_parameters())[name] for stage in self.stages if stage.index in held]

    def copied_units(self) -> list[CopiedUnit]:
        """Weights of which forward passes use copies."""
        copies = (stage.data_parallel.copies for stage in self.stages)
        return [unit for copy in copies if copy is not None for unit in copy.units]

    def mark_changed(self) -> None:
        """Tell that something else than an update has changed the weights."""
        for unit in self.copied_units():
            unit.mark_changed()

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.module.train(mode)

    def free_gathered_parameters(self) -> None:
        """Keep only the shards, after forward passes that no backward pass follows."""
        for stage in self.stages:
            stage.data_parallel.free_gathered_parameters()

    def init_weights(self, seed: int) -> None:
        """Initialise every stage. A seed gives the same weights in every layout."""
        for stage in self.stages:
            stage.module.init_weights(seed)

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (copy, original), of the same shape, of every parameter that this process holds more than once."""
        held = [self.copies_of(name) for name in self.tied_stages]
        return [(copy, same[0]) for same in held for copy in same[1:]]

    @torch.no_grad()
    def update_copies(self) -> None:
        """Make the copies of weights equal the originals, which alone were loaded."""
        for copy, original in self.copies():
            copy.copy_(original)


class WholeModel(TimedPasses):
    """Has the interface of `titan_like.parallel.pipeline.Pipeline` and runs one microbatch after the other."""

    def __init__(self, model: ParallelModel, layout: Layout) -> None:
        self.model, self.layout = model, layout
        (self.stage,) = model.stages

    def forward_backward(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        """Accumulate the gradients of all microbatches' losses."""
        self.stage.data_parallel.before_forward()
        self._run(batches, loss_function)

    def _run(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        data_parallel = self.stage.data_parallel
        for microbatch, batch in enumerate(batches):
            with self.timed(Action("F", 0, microbatch)):
                loss = loss_function(self.stage.module(batch), microbatch)
            with self.timed(Action("B", 0, microbatch)):
                data_parallel.before_backward(is_last=microbatch == len(batches) - 1)
                loss.backward()
                data_parallel.after_backward()
        data_parallel.finish()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], loss_function: LossFunction) -> None:
        """Call ``loss_function`` with what the model returns for every microbatch; no gradients."""
        self.stage.data_parallel.before_forward()
        for microbatch, batch in enumerate(batches):
            loss_function(self.stage.module(batch), microbatch)
            self.num_actions += 1


def stages_of_tied_parameters(model: TransformerConfig, splits: Sequence[StageLayers]) -> dict[str, tuple[int, ...]]:
    """Name of each parameter that several stages hold → numbers of these stages."""
    small, kinds = one_of_each(model), model.layer_kinds
    uses = [shared_modules(layer) for layer in small.layers.values()]
    stages_of = {}
    for name, _ in parameters_of(small, small.shared):
        module = name.partition(".")[0]
        stages_of[name] = [i for i, split in enumerate(splits) if any(module in uses[kinds[n]] for n in split.layers)]
    if model.uses_table_last:
        stages_of["embedding.weight"] = [i for i, split in enumerate(splits) if split.is_first or split.is_last]
    return {name: tuple(stages) for name, stages in stages_of.items() if len(stages) > 1}


@torch.no_grad()
def sum_gradients_of_copies(model: ParallelModel, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Replace the gradients of each parameter's copies by their sum.

    ``group`` is the pipeline's process group, and ``ranks`` has the rank of every stage. Copies are sharded alike over
    data and tensor ranks, so each process exchanges its part with those that hold the same part in other stages. All of
    them add in the order of the ranks, so the sums are bitwise equal.
    """
    pp_rank = dist.get_rank(group)
    exchange, sums = [], []
    for name, stages in model.tied_stages.items():
        held = [copy for copy in model.copies_of(name) if copy.requires_grad]
        widen(held)
        gradients = [local(p.grad) for p in held if p.grad is not None]
        assert len(gradients) == len(held), "a copy received no gradient"
        if not gradients:
            continue
        local_sum = gradients[0]
        for other in gradients[1:]:
            local_sum += other
        parts = {pp_rank: local_sum}
        for rank in sorted({ranks[stage] for stage in stages} - {pp_rank}):
            parts[rank] = torch.empty_like(local_sum)
            exchange.append(dist.P2POp(dist.isend, local_sum, group=group, group_peer=rank))
            exchange.append(dist.P2POp(dist.irecv, parts[rank], group=group, group_peer=rank))
        sums.append((gradients, parts))
    for work in dist.batch_isend_irecv(exchange) if exchange else []:
        work.wait()
    for gradients, parts in sums:
        total, *remaining = [parts[rank] for rank in sorted(parts)]
        for other in remaining:
            total += other
        for gradient in gradients:
            gradient.copy_(total)
