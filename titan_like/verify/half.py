"""What needs no tolerance in half types: the types of sums, their digits, the state of a resumed run.

A sum that has been rounded to the half type may be within its tolerance, but it has no more digits than that type.
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

from titan_like.models.layers.cross_entropy import Vocabulary
from titan_like.models.layers.init import local_part
from titan_like.optim.optimizer import LossScaler
from titan_like.parallel import cp_attention
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Report, Row, distance
from titan_like.verify.watch import Watch, digest, steps_alone

TRAVELLING, MERGED = "gradients of keys", "attention to several blocks of keys"
_LOSS_ROUNDING = 1e-5  # relative, of a loss that is computed in float32 from hundreds of positions
_SPARE_BITS = {"bfloat16": 16, "float16": 13}  # of a float32 mantissa that the half type lacks
# By the names of all versions of torch. Tensor parallelism and pipelines send activations in other ways.
_SUMS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "batch_isend_irecv")


def finer(numbers: torch.Tensor, dtype: str) -> int:
    """How many of some numbers have more digits, as float32, than a half type has, or are not finite.

    Its range does not matter.
    """
    rest = numbers.float().view(torch.int32) & ((1 << _SPARE_BITS[dtype]) - 1)
    return int(((rest != 0) | ~numbers.isfinite()).sum())


@contextmanager
def watched_sums(half: str, note: Callable[[str, torch.dtype], None]) -> Iterator[None]:
    """Call ``note`` with the name and the type of each floating-point tensor of a sum between processes.

    The name is that of torch's function, `TRAVELLING` for the gradients that a ring passes on, or `MERGED` for results
    of attention that are added up; these have the half type if they have no more digits.
    """
    exchange, merge, travelling = cp_attention._exchange, cp_attention._merge, [False]

    def watched_merge(
        output: torch.Tensor, denominator: torch.Tensor, found: torch.Tensor, total: torch.Tensor
    ) -> None:
        sees_both = denominator.isfinite() & total.isfinite()
        merge(output, denominator, found, total)
        for value in (output[sees_both], denominator[sees_both]) if sees_both.any() else ():
            note(MERGED, value.dtype if finer(value, half) else getattr(torch, half))

    def watched_exchange(*ring: Any) -> torch.Tensor:
        travelling[0] = True
        try:
            return exchange(*ring)
        finally:
            travelling[0] = False

    def noted(original: Callable, name: str, *args: Any, **options: Any) -> Any:
        for value in (*args, *options.values()):
            sent = [operation.tensor for operation in value] if name == "batch_isend_irecv" else [value]
            for tensor in sent:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    note(TRAVELLING if travelling[0] else name, tensor.dtype)
        return original(*args, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(cp_attention, "_exchange", watched_exchange))
        stack.enter_context(patch.object(cp_attention, "_merge", watched_merge))
        for name in _SUMS:
            if original := getattr(dist, name, None):
                stack.enter_context(patch.object(dist, name, partial(noted, original, name)))
        yield


def checked_loss(
    report: Report, step: int, group: dist.ProcessGroup, original: Callable[..., torch.Tensor],
    logits: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor, vocabulary: Vocabulary, with_gradient: bool,
) -> torch.Tensor:  # fmt: skip
    """The loss of a chunk, in place of ``original``, which is `cross_entropy._loss`.

    It is checked, with the gradient that it writes, against float64 from the same logits. Only the gradient may be
    rounded to their type. ``group`` shares the vocabulary, if several processes do.
    """

    def combine(own: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        denominators, targets = torch.stack(parts, 1)
        return torch.stack((denominators.logsumexp(0), targets.sum(0)))

    wanted, shared = logits.double(), vocabulary.combine and combine
    loss = original(wanted, labels, factor.double(), vocabulary._replace(combine=shared), with_gradient).item()
    found = original(logits, labels, factor, vocabulary, with_gradient)
    key = Key(step, Row.SUMS, "loss of these logits")
    report.add(key, abs(found.item() - loss) / (abs(loss) or 1.0), _LOSS_ROUNDING)
    if with_gradient:
        apart = distance(logits, wanted) / (wanted.norm().item() or 1.0)
        report.add(key, apart, torch.finfo(logits.dtype).eps / 2 + _LOSS_ROUNDING)
    return found


def state_of(scaler: LossScaler) -> tuple[float, int]:
    """Loss scale and number of good steps since it last changed."""
    return scaler.scale.item(), int(scaler.good_steps)


def check_resumed(report: Report, watch: Watch) -> None:
    """Resume from the run's last save, and compare the states bit for bit. Only a run that is right so far is resumed.

    Then both trainers take a step. The new one knows nothing of earlier weights. So gradients
    that differ in one bit tell of old ones in the first, which may be too near the new ones to be found by a tolerance.
    Some kernels of GPUs add in any order.
    """
    trainer = watch.trainer
    is_wrong = not all(check.ok for check in report.checks.values())
    wrong = torch.tensor(int(is_wrong), device=trainer.run.device)
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    if wrong:
        return
    again, kept = Watch(), list[list[torch.Tensor]]()
    resumed = Trainer(trainer.run, observer=again)
    scales = [state_of(one.scaler) for one in (resumed, trainer) if one.scaler is not None]
    message = None if scales[:1] == scales[1:] else f"{scales[0]}, not {scales[1]}"
    report.exact(Key(trainer.step, Row.RESUMED, "loss scale"), message)
    for (name, parameter), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        same = _bits(trainer, parameter) == _bits(resumed, other)
        message = None if same else "its weights or its optimizer's state are others, or of another type"
        report.exact(Key(trainer.step, Row.RESUMED, name), message)
    step = trainer.step
    for one in (watch, again):
        steps_alone(one.trainer, 1)
        kept.append([local_part(gradient)[0] for _, gradient in one.gradients])
    allowed = 0.0 if trainer.run.device.type == "cpu" else torch.finfo(getattr(torch, report.kind)).eps
    apart = {
        name: distance(here, there) / (there.norm().item() or 1.0)
        for (name, _), here, there in zip(watch.gradients, *kept, strict=True)
    }
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    report.add(Key(step, Row.FRESH), apart[worst], allowed, f"{worst} differs most, by {apart[worst]:.3g}")


def _bits(trainer: Trainer, parameter: torch.nn.Parameter) -> dict[str, tuple[torch.dtype, str]]:
    state = {"weights": parameter, **trainer.optimizer.state[parameter]}
    return {what: (value.dtype, digest(local_part(value)[0])) for what, value in state.items()}
