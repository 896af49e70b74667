"""Checks in dtypes narrower than float64, in which weights cannot be compared.

The product's optimizer on one process repeats each update in float64 from the whole gradients that the trainer's
received. Rounding in the gradients therefore plays no part: a wrong rate, decay or dtype of state shows as clearly as
in float64, where weights are compared instead.

In 16-bit dtypes there is more that needs no tolerance: the dtypes of sums, their digits, the state of a resumed run. A
sum that has been rounded to 16 bits may be within its tolerance, but it has no more digits than that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from titan_like.data.batch import Batch
from titan_like.metrics.record import StepRecord
from titan_like.models.layers import cross_entropy
from titan_like.models.layers.init import local_part
from titan_like.optim.optimizer import build_optimizer
from titan_like.optim.shards import full_tensor, num_matrices
from titan_like.parallel import cp_attention
from titan_like.parallel.cp_attention import BlockSteps
from titan_like.torch_private import TorchDispatchMode
from titan_like.train.pending_step import PendingStep
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import EPS, HALF, SINGLE, Key, Reference, Report, Row, distance
from titan_like.verify.places import local
from titan_like.verify.reference import FEW
from titan_like.verify.watch import LayoutWatch, Watch, digest, steps_alone

_LOST = 1e-4  # by float32 in moments and bias corrections, as a share of the learning rate or of the update
_WEIGHT_ROUNDINGS = 4  # of a weight, in units of its type
_STATE_ROUNDINGS = 64  # of moments over a few steps, and of sums of squares, in units of float32

_TRAVELLING, _MERGED = "gradients of keys", "attention to several blocks of keys"
_LOSS_ROUNDING = 1e-5  # relative, of a loss that is computed in float32 from hundreds of positions
_SPARE_BITS = {"bfloat16": 16, "float16": 13}  # mantissa bits of float32 that the 16-bit dtype lacks
# By the names of all versions of torch. Tensor parallelism and pipelines send activations in other ways.
_SUMS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "batch_isend_irecv")


def finer(numbers: torch.Tensor, dtype: str) -> int:
    """How many of some numbers have more digits, as float32, than a 16-bit dtype has, or are not finite.

    Its range does not matter.
    """
    spare = numbers.float().view(torch.int32) & ((1 << _SPARE_BITS[dtype]) - 1)
    return int(((spare != 0) | ~numbers.isfinite()).sum())


class NarrowWatch(LayoutWatch):
    """Compares each step of a layout in a narrower dtype with the reference, and repeats the updates of a new run."""

    def attach(self, trainer: Trainer) -> None:
        """Copy the weights, and build the optimizer that repeats their updates."""
        super().attach(trainer)
        self.parameters = [(name, p, nn.Parameter(_gathered(p))) for name, p in trainer.model.named_parameters()]
        for _, parameter, copy in self.parameters:
            copy.num_matrices = num_matrices(parameter)  # type: ignore[attr-defined]
        self.optimizer = build_optimizer([(name, copy) for name, _, copy in self.parameters], trainer.config.optimizer)

    @torch.no_grad()
    def end_step(self, issued: PendingStep) -> None:
        """Check the update and the optimizer's state: a good step changes all parameters', a bad one none.

        Clipping must go by the norm that the step reports. AdamW's update hardly depends on it, but its moments do.
        """
        super().end_step(issued)
        if issued.step > self.small.num_steps:
            return
        is_good, gradients = issued.step not in self.small.bad_steps, dict(self.gradients)
        before = [copy.detach().clone() for _, _, copy in self.parameters]
        max_norm, grad_norm = self.trainer.config.training.max_norm, issued.read()[0].grad_norm
        factor = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0
        if is_good:
            for name, _, copy in self.parameters:
                copy.grad = _gathered(gradients[name]) * factor if name in gradients else None
            for group in self.optimizer.param_groups:
                group["lr"] = issued.lr
            self.optimizer.step()
        for (name, parameter, copy), old in zip(self.parameters, before, strict=True):
            new = _gathered(parameter)
            if not is_good:
                self.report.require(torch.equal(new, old), Key(issued.step, Row.SKIPPED, name), "it is updated")
            elif name not in gradients:
                self.report.require(False, Key(issued.step, Row.UPDATE, name), "it is not updated")
            else:
                rounding, moved = _WEIGHT_ROUNDINGS * EPS[SINGLE] * old.norm().item(), distance(copy, old)
                lost = _LOST * max(issued.lr * math.sqrt(old.numel()), moved)
                size = max(moved, rounding, 1e-30)
                off = distance(new, copy) / size
                self.report.add(Key(issued.step, Row.UPDATE, name), off, (rounding + lost) / size)
            self._compare_state(Key(issued.step, Row.STATE, name), parameter, self.optimizer.state[copy])
            copy.copy_(new)  # the next update starts from the trainer's own weights
            copy.grad = None

    def _compare_state(self, key: Key, parameter: torch.Tensor, expected: dict[str, torch.Tensor]) -> None:
        for name, exact in expected.items():
            if isinstance(exact, torch.Tensor):
                # Squares below the smallest normal number lose digits.
                size, floor = exact.double().norm().item() or 1.0, math.sqrt(exact.numel()) * 1e-37
                off = distance(_gathered(self.trainer.state.optimizer.state[parameter][name]), exact.double()) / size
                self.report.add(key, off, _STATE_ROUNDINGS * EPS[SINGLE] + floor / size, name)


class _Operators(TorchDispatchMode):
    """Lets a watch check what operators compute."""

    def __init__(self, watch: HalfWatch) -> None:
        super().__init__()
        self.watch = watch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Layers are compiled as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cp_attention.WITH_STEPS:
            return cp_attention.WITH_STEPS[func](*args, steps=self.watch.block_steps())
        if func is torch.ops.titan_like.loss_gradient.default:
            return self.watch.check_loss(*args)
        return func(*args, **(kwargs or {}))


class HalfWatch(NarrowWatch):
    """Also checks how a run in a 16-bit dtype sums, and that it can be resumed."""

    def __init__(self, reference: Reference, report: Report) -> None:
        super().__init__(reference, report)
        self.reference = reference
        self.is_in_passes = self.is_travelling = False  # in forward and backward passes; gradients in a ring
        self.finer = {"loss": 0, "gradient norm": 0}  # good steps in which it has more digits than the dtype
        self.dtypes_of_sums = set[str]()  # sums of gradients between processes

    @contextmanager
    def watched_sums(self) -> Iterator[None]:
        """Check sums between processes, of blocks of attention, and of the loss, while this lasts."""

        def watched(original: Callable, name: str, *args: Any, **options: Any) -> Any:
            is_ring = name == "batch_isend_irecv"
            for tensor in [sent.tensor for sent in args[0]] if is_ring else [*args, *options.values()]:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    self._note_sum(_TRAVELLING if self.is_travelling else name, tensor.dtype)
            return original(*args, **options)

        with ExitStack() as stack:
            for name in _SUMS:
                if original := getattr(dist, name, None):
                    stack.enter_context(patch.object(dist, name, partial(watched, original, name)))
            stack.enter_context(_Operators(self))
            yield

    def block_steps(self) -> BlockSteps:
        """What operators of context parallelism call, with checks of the sums."""
        steps = BlockSteps.default()

        def merge(output: torch.Tensor, total: torch.Tensor, block: torch.Tensor, summand: torch.Tensor) -> None:
            sees_both = total.isfinite() & summand.isfinite()
            steps.merge(output, total, block, summand)
            for value in (output[sees_both], total[sees_both]) if sees_both.any() else ():
                self._note_sum(_MERGED, value.dtype if finer(value, self.dtype) else getattr(torch, self.dtype))

        def exchange_gradients(*ring: Any) -> torch.Tensor:
            self.is_travelling = True
            received = steps.exchange_gradients(*ring)
            self.is_travelling = False
            return received

        return steps._replace(merge=merge, exchange_gradients=exchange_gradients)

    def _note_sum(self, name: str, dtype: torch.dtype) -> None:
        """Check that a sum is computed in float32, or, for gradients between processes, in their dtype."""
        if self.is_in_passes and name == "batch_isend_irecv":  # a ring passes keys and values on
            return
        of_weights = self.is_in_passes and name not in (_TRAVELLING, _MERGED)
        dtype_name = str(dtype).removeprefix("torch.")
        if of_weights:
            self.dtypes_of_sums.add(dtype_name)
        is_wanted = of_weights and dtype_name == self.trainer.config.training.reduce_dtype
        key = Key(self.at_step or 1, Row.SUMS, name)
        self.report.require(dtype_name not in HALF or is_wanted, key, f"it is in {dtype_name}")

    def check_loss(self, logits: torch.Tensor, columns: torch.Tensor, *others: Any) -> None:
        """Run `cross_entropy.write_gradient`, and check the gradient, and the softmax's denominators that it takes.

        Both are compared with float64 from the same logits. Only the gradient may be rounded to their dtype.
        """
        exact, (denominator, scale, size, cap) = logits.double(), others
        sums = cross_entropy.statistics(exact, columns, size, cap)
        group = self.trainer.mesh.get_group("tp")  # shares the vocabulary
        parts = [torch.empty_like(sums) for _ in range(group.size())]
        dist.all_gather(parts, sums, group=group)
        expected = torch.stack(parts)[:, 0].logsumexp(0)
        cross_entropy.write_gradient(exact, columns, expected, scale.double(), size, cap)
        cross_entropy.write_gradient(logits, columns, denominator, scale, size, cap)
        key = Key(min(self.at_step, self.small.num_steps) or 1, Row.SUMS, "loss of these logits")
        rounding = torch.finfo(logits.dtype).eps / 2
        for value, wanted, allowed in ((denominator, expected, 0.0), (logits, exact, rounding)):
            self.report.add(key, distance(value, wanted) / (wanted.norm().item() or 1.0), allowed + _LOSS_ROUNDING)

    def note_routers(self, key: Key, value: torch.Tensor, expected: torch.Tensor | None) -> None:
        """Compare what a router computes, and check that its scores have more digits than the dtype."""
        assert expected is not None, "a layout records nothing"
        self.report.compare_routers(self.reference, key, value, expected)
        if key.row == Row.SCORES and key.step == 1:  # before a bias, which has more digits, is added
            reason = f"its scores are rounded to {self.dtype}"
            self.report.require(finer(value, self.dtype) > 0, Key(1, Row.SUMS, key.name), reason)

    def take_batch(self, batch: Batch) -> None:
        """From here on sums are computed in passes."""
        super().take_batch(batch)
        self.is_in_passes = True

    def complete_gradients(self) -> None:
        """Check that gradients have the digits of a sum."""
        self.is_in_passes = False
        super().complete_gradients()
        training, samples = self.trainer.config.training, len(self.drawn) * self.trainer.dp_size
        if self.at_step == 1 and samples > 1 and training.reduce_dtype not in HALF:
            # A few parameters may have gradients in one microbatch alone, such as an expert's or the head's for pairs.
            parts = [(name, local_part(gradient)[0]) for name, gradient in self.gradients]
            # Below it float16 has fixed steps, of which a sum has no more digits.
            least = 8 * torch.finfo(getattr(torch, self.dtype)).smallest_normal / float(self.trainer.state.loss_scale)
            parts = [(name, part) for name, part in parts if int((part.abs() >= least).sum()) >= FEW]
            rounded = [name for name, part in parts if not finer(part, self.dtype)]
            key = Key(1, Row.SUMS, next(iter(rounded), ""))
            self.report.require(2 * len(rounded) <= len(parts), key, f"it is rounded to {self.dtype}")

    def read_step(self, record: StepRecord) -> None:
        """Count the digits of the loss and the norm."""
        super().read_step(record)
        is_good = record.step not in self.small.bad_steps and record.step <= self.small.num_steps
        for name, number in {"loss": record.loss, "gradient norm": record.grad_norm}.items():
            self.finer[name] += is_good and finer(torch.tensor(number), self.dtype)

    def check_run(self) -> None:
        """Check, at the end, the digits and dtypes of all steps. Only a run that is right so far is resumed."""
        for name, steps in self.finer.items():
            self.report.require(steps > 0, Key(1, Row.SUMS, name), f"it is rounded to {self.dtype}")
        trainer, expected = self.trainer, self.trainer.config.training.reduce_dtype
        is_missing = trainer.token_group.size() > 1 and expected in HALF and expected not in self.dtypes_of_sums
        reason = f"they are in {', '.join(sorted(self.dtypes_of_sums))}, not {expected}"
        self.report.require(not is_missing, Key(1, Row.SUMS, "gradients"), reason)
        is_wrong = not all(check.ok for check in self.report.checks.values())
        wrong = torch.tensor(int(is_wrong), device=trainer.run.device)
        dist.all_reduce(wrong, dist.ReduceOp.MAX)
        if not wrong:
            self._check_resumed()

    def _check_resumed(self) -> None:
        """Resume from the run's last save, and compare the states bit for bit.

        Then both trainers take a step. The new one has never seen earlier weights. So gradients that differ in one
        bit show that the first used old weights, which may be too near the new ones for a tolerance to find. Some
        kernels of GPUs add in any order.
        """
        trainer, report, step, resumed_watch = self.trainer, self.report, self.trainer.state.step, Watch()
        resumed = Trainer(trainer.run, observer=resumed_watch)
        scalers = trainer.state.scaler, resumed.state.scaler
        old, new = (scaler and (scaler.scale.item(), int(scaler.good_steps)) for scaler in scalers)
        report.require(old == new, Key(step, Row.RESUMED, "loss scale"), f"{new}, not {old}")
        for (name, parameter), copy in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
            reason = "its weights or its optimizer's state differ, or have another type"
            report.require(_bits(trainer, parameter) == _bits(resumed, copy), Key(step, Row.RESUMED, name), reason)
        gradients = list[list[torch.Tensor]]()
        for watch in (self, resumed_watch):
            steps_alone(watch.trainer, 1)
            gradients.append([local_part(gradient)[0] for _, gradient in watch.gradients])
        allowed = 0.0 if trainer.run.device.type == "cpu" else torch.finfo(getattr(torch, report.kind)).eps
        apart = {
            name: distance(gradient, expected) / (expected.norm().item() or 1.0)
            for (name, _), gradient, expected in zip(self.gradients, *gradients, strict=True)
        }
        worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        report.add(Key(step, Row.FRESH), apart[worst], allowed, f"{worst} differs most, by {apart[worst]:.3g}")


def _bits(trainer: Trainer, parameter: torch.nn.Parameter) -> dict[str, tuple[torch.dtype, str]]:
    state = {"weights": parameter, **trainer.state.optimizer.state[parameter]}
    return {name: (value.dtype, digest(local_part(value)[0])) for name, value in state.items()}


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy of a whole tensor. All ranks that share it call this together."""
    return local(full_tensor(tensor)).double()
