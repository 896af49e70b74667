"""AdamW's update of any number of tensors as one GPU kernel.

It computes what torch's fused kernel does, and rounds after every operation. Last bits can differ from torch's, whose
compiler rounds a multiplication and an addition once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
import triton
import triton.language as tl

from titan_like.optim.adamw import Tensors

BLOCK = 4096  # elements of a program
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["num_tensors", "num_programs", "first"])
def _update(  # type: ignore[no-untyped-def]
    table,  # int64 [4, tensors]: addresses of weights, first and second moments, and numbers of elements
    addresses,  # int64 [2, tensors]: of gradients and copies
    programs,  # int32 [2, programs]: the tensor that a program updates, and which block of it
    rates,  # float32 [3, tensors]: step size, root of the second moment's correction, factor that decays the weight
    factor,  # float32, multiplies the gradients
    found_inf,  # float32, above 0 if only copies are written
    num_tensors,
    num_programs,
    first,  # program of this launch
    beta1,
    rest1,  # 1 - beta1
    beta2,
    rest2,
    eps,
    gradient_type: tl.constexpr,
    copy_type: tl.constexpr,
    aligned: tl.constexpr,  # addresses and numbers of elements are multiples of 16
    block: tl.constexpr,
):
    program = first + tl.program_id(0)
    tensor = tl.load(programs + program)
    start = tl.load(programs + num_programs + program).to(tl.int64) * block
    offsets = start + tl.arange(0, block)
    weights = tl.load(table + tensor).to(tl.pointer_type(tl.float32))
    first_moments = tl.load(table + num_tensors + tensor).to(tl.pointer_type(tl.float32))
    second_moments = tl.load(table + 2 * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    size = tl.load(table + 3 * num_tensors + tensor)
    gradients = tl.load(addresses + tensor).to(tl.pointer_type(gradient_type))
    if aligned:  # so that the compiler loads 16 bytes at once
        weights = tl.multiple_of(weights, 16)
        first_moments = tl.multiple_of(first_moments, 16)
        second_moments = tl.multiple_of(second_moments, 16)
        size = tl.multiple_of(size, 16)
        gradients = tl.multiple_of(gradients, 16)
    mask = offsets < size
    weight = tl.load(weights + offsets, mask)
    if tl.load(found_inf) <= 0:
        gradient = tl.load(gradients + offsets, mask).to(tl.float32) * tl.load(factor)
        moment = beta1 * tl.load(first_moments + offsets, mask) + rest1 * gradient
        square = beta2 * tl.load(second_moments + offsets, mask) + rest2 * gradient * gradient
        tl.store(first_moments + offsets, moment, mask)
        tl.store(second_moments + offsets, square, mask)
        root = tl.div_rn(tl.sqrt_rn(square), tl.load(rates + num_tensors + tensor))
        step = tl.div_rn(tl.load(rates + tensor) * moment, root + eps)
        weight = weight * tl.load(rates + 2 * num_tensors + tensor) - step
        tl.store(weights + offsets, weight, mask)
    if copy_type is not None:
        copies = tl.load(addresses + num_tensors + tensor).to(tl.pointer_type(copy_type))
        if aligned:
            copies = tl.multiple_of(copies, 16)
        tl.store(copies + offsets, weight.to(copy_type), mask)


class OneKernel:
    """A `titan_like.optim.adamw.Update` of float32 tensors on a GPU."""

    def __init__(self, tensors: Tensors) -> None:
        settings, weights, self.copies, *moments, self.steps = tensors
        assert all(tensor.is_contiguous() for column in (weights, *moments) for tensor in column)
        self.settings = settings[0]
        self.device = weights[0].device
        numels = [weight.numel() for weight in weights]
        table = [*([tensor.data_ptr() for tensor in column] for column in (weights, *moments)), numels]
        self.is_aligned = not any(value % 16 for column in table for value in column)
        self.table = torch.tensor(table, device=self.device)
        blocks = [-(-numel // BLOCK) for numel in numels]
        self.ends = list(accumulate(blocks))
        programs = [(tensor, block) for tensor, count in enumerate(blocks) for block in range(count)]
        self.programs = torch.tensor(programs, dtype=torch.int32, device=self.device).view(-1, 2).t().contiguous()
        self.decays = torch.tensor([group["weight_decay"] for group in settings], device=self.device).double()
        self.unscaled = torch.ones((), device=self.device)

    def __call__(self, gradients: Sequence[torch.Tensor], factor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """See `titan_like.optim.adamw.Update`."""
        beta1, beta2 = self.settings["betas"]
        lr = self.settings["lr"]
        steps = self.steps.double()
        corrections = lr / (1 - beta1**steps), (1 - beta2**steps).sqrt(), 1 - lr * self.decays
        rates = torch.stack(corrections).float()
        gradients = [gradient.contiguous() for gradient in gradients]
        addresses = [x.data_ptr() for x in gradients], [0 if copy is None else copy.data_ptr() for copy in self.copies]
        is_aligned = self.is_aligned and not any(address % 16 for column in addresses for address in column)
        on_host = torch.tensor(addresses, pin_memory=self.device.type == "cuda")
        on_device = on_host.to(self.device, non_blocking=True)
        scale = self.unscaled if factor is None else factor.float()
        kinds = zip(gradients, self.copies, strict=True)
        types = [(gradient.dtype, None if copy is None else copy.dtype) for gradient, copy in kinds]
        for (of_gradient, of_copy), run in groupby(range(len(types)), key=types.__getitem__):
            tensors = list(run)
            first, stop = self.ends[tensors[0] - 1] if tensors[0] else 0, self.ends[tensors[-1]]
            if first == stop:  # all of these tensors are on other processes
                continue
            _update[(stop - first,)](
                self.table, on_device, self.programs, rates, scale, found_inf,
                len(types), self.programs.shape[1], first, beta1, 1 - beta1, beta2, 1 - beta2, self.settings["eps"],
                gradient_type=_TYPES[of_gradient], copy_type=None if of_copy is None else _TYPES[of_copy],
                aligned=is_aligned, block=BLOCK, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
