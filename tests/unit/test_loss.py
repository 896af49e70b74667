"""The chunked loss against torch's cross entropy of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.float64 import bound
from titan_like.models.layers import cross_entropy
from titan_like.models.layers.cross_entropy import IGNORED_LABEL, TokenLoss

VOCAB, PADDED, HIDDEN, FACTOR = 1000, 1024, 16, 1 / 7


def some(dtype, largest=5.0, with_bias=False):
    """Leaves x [2, 24, hidden], weight [padded, hidden] and bias [padded] or None; labels with ignored ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, HIDDEN, generator=generator, dtype=torch.float64)
    weight = largest / HIDDEN**0.5 * torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(PADDED, generator=generator, dtype=torch.float64) if with_bias else None
    labels = torch.randint(VOCAB, (2, 24), generator=generator)
    labels[0, 3] = labels[1, 20:] = IGNORED_LABEL
    return [one if one is None else one.to(dtype).requires_grad_() for one in (x, weight, bias)], labels


def loss_of(leaves, labels, factor=FACTOR):
    factors = torch.tensor(factor, dtype=torch.promote_types(leaves[0].dtype, torch.float32))
    return TokenLoss(VOCAB, PADDED)(*leaves, labels, factors)


def expected_of(leaves, labels):
    """The loss and its gradients in float64, from the same values."""
    exact = [one if one is None else one.detach().double().requires_grad_() for one in leaves]
    logits = F.linear(*exact)[..., :VOCAB]
    loss = FACTOR * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.item(), [one if one is None else one.grad for one in exact]


@pytest.mark.parametrize(
    ("chunk", "block_bytes"),
    [(PADDED, 4 << 20), (11 * PADDED, 1), (11 * PADDED, 5 * 8 * PADDED), (1 << 25, 5 * 8 * PADDED), (1 << 25, 4 << 20)],
    ids=["48 chunks", "5 chunks by row", "5 chunks by 5 to 20 rows", "1 chunk by 5 to 20 rows", "1 chunk"],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        *((dtype, 5.0) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, 1e4) for dtype in (torch.float64, torch.float32)),  # 16-bit logits of this size are other logits
    ],
    ids=str,
)
def test_loss_and_gradients_are_torch_s(monkeypatch, dtype, largest, with_bias, block_bytes, chunk):
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", {"cpu": chunk})
    leaves, labels = some(dtype, largest, with_bias)
    loss, gradients = expected_of(leaves, labels)
    # Probabilities are off by as much as the logits, in proportion to their size. Half types round results too.
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = bound(HIDDEN * largest + VOCAB, wide) + (bound(1, dtype) if dtype != wide else 0)
    value = loss_of(leaves, labels)
    (value / 3).backward()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.item() == pytest.approx(loss, rel=tolerance)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == dtype
            assert (leaf.grad.double() - gradient / 3).norm() <= tolerance * gradient.norm()
    x, weight, bias = leaves
    assert not x.grad[0, 3].any() and not weight.grad[VOCAB:].any() and (bias is None or not bias.grad[VOCAB:].any())


def test_products_of_chunks_add_up_in_float32(monkeypatch):
    """48 chunks lose no more than one: bfloat16 sums of so many would be off by several of its roundings."""
    leaves, labels = some(torch.bfloat16)
    _, gradients = expected_of(leaves, labels)
    errors = []
    for chunk in (1 << 25, PADDED):
        monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", {"cpu": chunk})
        (gradient,) = torch.autograd.grad(loss_of(leaves, labels), leaves[1])
        errors.append((gradient.double() - gradients[1]).norm())
    assert errors[1] < 1.1 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_compiled_form_is_the_same(cap):
    """GPUs run the two kernels compiled, in another form of the gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(12, PADDED, generator=generator)
    columns = torch.randint(-1, VOCAB, (12,), generator=generator)
    denominator, scale = logits[:, :VOCAB].logsumexp(1), torch.rand(12, generator=generator)
    plain, fused, compiled = logits.clone(), logits.clone(), logits.clone()
    cross_entropy._write_gradient(plain, columns, denominator, scale, VOCAB, cap)
    cross_entropy._write_fused_gradient(fused, columns, denominator, scale, VOCAB, cap)
    cross_entropy._compiled(cross_entropy._write_fused_gradient)(compiled, columns, denominator, scale, VOCAB, cap)
    rounding = bound(int(logits.abs().max()) + VOCAB, torch.float32)  # of an exponential and of the sum of all
    within = {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(fused, plain, **within)
    torch.testing.assert_close(compiled, plain, **within)
    again = logits.clone()
    found = cross_entropy._compiled(cross_entropy._statistics)(logits, columns, VOCAB, cap)
    torch.testing.assert_close(found, cross_entropy._statistics(again, columns, VOCAB, cap), **within)
    torch.testing.assert_close(logits, again, **within)


def test_operators_are_correct_for_torch():
    logits, columns = torch.randn(12, PADDED), torch.randint(-1, VOCAB, (12,))
    rows = logits.logsumexp(1), torch.rand(12)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.titan_like.loss_statistics.default, (logits, columns, VOCAB, 2.0), test_utils=checks
    )
    inputs = logits, columns, *rows, VOCAB, 2.0
    torch.library.opcheck(torch.ops.titan_like.loss_gradient.default, inputs, test_utils=checks)


@pytest.mark.parametrize("wrong", [VOCAB, PADDED, -5])
def test_a_label_outside_the_vocabulary_makes_loss_and_gradient_nan(wrong):
    leaves, labels = some(torch.float32)
    labels[0, 0] = wrong
    value = loss_of(leaves, labels)
    value.backward()
    assert value.isnan() and leaves[1].grad[:VOCAB].isnan().all()


class Largest(TorchDispatchMode):
    """The elements of the largest result that shares no memory with an argument."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in known:
                self.size = max(self.size, result.numel())
        return result


@pytest.mark.parametrize("with_gradient", [True, False])
def test_nothing_larger_than_a_chunk_or_the_output_matrix_is_made(monkeypatch, with_gradient):
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", {"cpu": 16 * PADDED})
    leaves, labels = some(torch.bfloat16)
    with Largest() as largest, torch.set_grad_enabled(with_gradient):
        value = loss_of(leaves, labels)
        if with_gradient:
            value.backward()
    assert largest.size == 16 * PADDED  # of 48 positions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_never_holds_float32_logits(monkeypatch):
    positions, vocab, hidden = 2048, 32_000, 256
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", {"cuda": positions * vocab // 4})
    x = torch.randn(1, positions, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels, factor = torch.randint(vocab, (1, positions), device="cuda"), torch.ones((), device="cuda")
    loss_of_gpu = TokenLoss(vocab, vocab)
    loss_of_gpu(x, weight, None, labels, factor).backward()  # compiles
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of_gpu(x, weight, None, labels, factor).backward()
    used = torch.cuda.max_memory_allocated() - before
    # A chunk of logits, the matrix's gradient in float32 and in bfloat16, and little else.
    assert used < 1.2 * (2 * positions * vocab / 4 + 6 * vocab * hidden)
