"""AdamW in one pass: the numbers of torch's own AdamW, whatever the blocks, the gradients' dtype and the copies."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.float64 import bound
from titan_like.optim.adamw import InBlocks, Tensors

SHAPES = [(64, 64), (5000, 3), (7,), (0, 4), (128, 96)]
FACTOR = 0.37


def tensors(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensors, list[torch.Tensor]]:
    """Parameters of two groups, all but one with a copy in ``dtype``, and gradients, all but one in ``dtype``."""
    draw, common = torch.Generator().manual_seed(0), {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [common | {"weight_decay": decay} for decay in (0.0, 0.1)]
    weights = [torch.randn(shape, generator=draw).to(device) for shape in SHAPES]
    copies = [None if i == 1 else torch.zeros(shape, dtype=dtype, device=device) for i, shape in enumerate(SHAPES)]
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    steps = torch.zeros(len(weights), device=device)
    gradients = [
        torch.randn(shape, generator=draw).to(device, dtype if i != 2 else None) for i, shape in enumerate(SHAPES)
    ]
    return Tensors([groups[len(shape) > 1] for shape in SHAPES], weights, copies, *moments, steps), gradients


def expected(dtype: torch.dtype, device: str = "cpu") -> Tensors:
    """Two updates by `torch.optim.AdamW` from gradients that are converted and multiplied first."""
    found, gradients = tensors(dtype, device)
    parameters = [torch.nn.Parameter(weight) for weight in found.weights]
    groups = [{**settings, "params": [p]} for settings, p in zip(found.settings, parameters, strict=True)]
    optimizer = torch.optim.AdamW(groups, fused=True)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.float() * FACTOR
        optimizer.step()
    moments = [[optimizer.state[p][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq")]
    copies = [None if copy is None else p.detach().to(dtype) for copy, p in zip(found.copies, parameters, strict=True)]
    return Tensors(found.settings, [p.detach() for p in parameters], copies, *moments, found.steps)


def check(update_of, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare two updates of ten products and sums each, and one that is skipped between them."""
    found, gradients = tensors(dtype, device)
    update, factor = update_of(found), torch.tensor(FACTOR, dtype=torch.float64, device=device)
    for skips in (False, True, False):
        skip = torch.tensor(float(skips), device=device)
        for copy in found.copies if skips else ():  # they may have been freed
            if copy is not None:
                copy.fill_(torch.nan)
        found.steps.add_(1 - skip)
        update([gradient.clone() for gradient in gradients], factor, skip)
        assert all(copy is None or copy.isfinite().all() for copy in found.copies)
    wanted = expected(dtype, device)
    within = bound(2 * 10, torch.float32)
    for name in ("weights", "first_moments", "second_moments", "copies"):
        allowed = within + bound(1, dtype) * (name == "copies")
        for mine, theirs in zip(getattr(found, name), getattr(wanted, name), strict=True):
            if mine is not None and mine.numel():
                assert (mine.double() - theirs.double()).norm() <= allowed * theirs.double().norm(), name


@pytest.mark.parametrize("size", [1000, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_are_updated_as_by_torch(dtype: torch.dtype, size: int) -> None:
    check(lambda found: InBlocks(found, size), dtype)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_computes_the_same() -> None:
    """In Triton's interpreter, which rounds to bfloat16 in its own way."""
    script = "from tests.unit import test_adamw; test_adamw.check_kernel('cpu')"
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_computes_the_same_on_a_gpu() -> None:
    check_kernel("cuda")


def check_kernel(device: str) -> None:
    """Compare the kernel with torch's for three types of gradients."""
    from titan_like.optim.adamw_kernel import OneKernel

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(OneKernel, dtype, device)
