"""The training loss on a CPU against torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titan_like.train import loss as loss_module
from titan_like.train.loss import IGNORED_LABEL, summed_cross_entropy


def some(dtype, vocab=1000, largest=5.0):
    """logits [2, 24, vocab] with two padding entries, labels with ignored ones."""
    generator = torch.Generator().manual_seed(0)
    logits = largest * torch.randn(2, 24, vocab, generator=generator, dtype=torch.float64)
    logits[..., -2:] = -torch.inf
    labels = torch.randint(vocab - 2, (2, 24), generator=generator)
    labels[0, 3] = labels[1, 20:] = IGNORED_LABEL
    return logits.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("block_bytes", [1, 5 * 8 * 1000, 4 << 20], ids=["a row", "5 to 20 rows", "all"])
@pytest.mark.parametrize("largest", [5.0, 1e4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
def test_loss_and_gradient_are_torch_s(monkeypatch, dtype, tolerance, largest, block_bytes):
    monkeypatch.setattr(loss_module, "BLOCK_BYTES", block_bytes)
    logits, labels = some(dtype, largest=largest)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    (expected / 7).backward()
    value = summed_cross_entropy(logits.clone(), labels)
    (value / 7).backward()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.item() == pytest.approx(expected.item(), rel=min(tolerance, 1e-6))
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance / 100)
    assert not logits.grad[0, 3].any() and not logits.grad[..., -2:].any()


def test_no_valid_label_is_no_loss():
    logits, labels = some(torch.float32)
    value = summed_cross_entropy(logits.clone(), torch.full_like(labels, IGNORED_LABEL))
    value.backward()
    assert value.item() == 0 and not logits.grad.any()


class LargeBuffers(TorchDispatchMode):
    """Counts results as large as the logits that share no memory with an argument."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.size:
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            self.count += result.untyped_storage().data_ptr() not in known
        return result


def test_no_buffer_of_the_logits_size_is_made(monkeypatch):
    monkeypatch.setattr(loss_module, "BLOCK_BYTES", 4 * 1000 * 4)
    leaf, labels = some(torch.float32)
    logits = leaf * 1
    with LargeBuffers(logits.numel()) as buffers:
        (gradient,) = torch.autograd.grad(summed_cross_entropy(logits, labels), logits)
    assert buffers.count == 0 and gradient.data_ptr() == logits.data_ptr()


def test_values_of_the_logits_are_not_used_after_the_loss_s_backward_pass():
    """A second term that is computed from them, as a z-loss is, must not read the gradient in their place."""
    leaf, labels = some(torch.float32)
    logits = leaf * 1
    other = logits.square().sum()
    summed_cross_entropy(logits, labels).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
