"""The gated delta rule against its recurrent definition, in loops over positions and documents."""

import pytest
import torch

from titan_like.models.layers.delta_rule import chunked_gated_delta_rule, gated_delta_rule, short_convolution

SEQ, KEY_HEADS, HEADS, KEY, VALUE = 37, 2, 6, 5, 7


def definition(q, k, v, g, beta, starts):
    """One head of one sequence at a time: q, k [seq, key size], v [seq, value size], g [seq, rows or 1], beta [seq]."""
    state, outputs = q.new_zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        state = torch.zeros_like(state) if starts[t] == t else g[t].exp()[:, None] * state
        state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)
        outputs.append(q[t] @ state / q.shape[1] ** 0.5)
    return torch.stack(outputs)


def by_definition(q, k, v, g, beta, starts):
    per_key, samples = v.shape[2] // k.shape[2], []
    g = g if g.ndim == 4 else g[..., None]
    for b in range(len(q)):
        heads = [
            definition(q[b, :, h // per_key], k[b, :, h // per_key], v[b, :, h], g[b, :, h], beta[b, :, h], starts[b])
            for h in range(v.shape[2])
        ]
        samples.append(torch.stack(heads, 1))
    return torch.stack(samples)


def inputs(dtype=torch.float64, decay=1.0, of_rows=False):
    generator = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(2, SEQ, HEADS if of_rows else KEY_HEADS, KEY, generator=generator, dtype=torch.float64)
        for _ in "qk"
    )
    v = torch.randn(2, SEQ, HEADS, VALUE, generator=generator, dtype=torch.float64)
    g = -decay * torch.rand(2, SEQ, HEADS, *[KEY] * of_rows, generator=generator, dtype=torch.float64)
    beta = torch.rand(2, SEQ, HEADS, generator=generator, dtype=torch.float64)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def starts_of(*lengths):
    starts = [sum(lengths[:number]) for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(starts)


WHOLE = torch.zeros(2, SEQ, dtype=torch.int64)
PACKED = torch.stack((starts_of(3, 5, 8, 1, 20), starts_of(16, 1, 1, 13, 6)))  # also at a chunk's first position


@pytest.mark.parametrize("of_rows", [False, True], ids=["", "Kimi"])
@pytest.mark.parametrize("decay", [0.01, 30.0])
@pytest.mark.parametrize("starts", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_chunks_compute_the_recurrence_and_its_gradients(chunk, starts, decay, of_rows):
    ours, theirs = (inputs(decay=decay, of_rows=of_rows) for _ in range(2))
    result = chunked_gated_delta_rule(*ours, starts, chunk)
    expected = by_definition(*theirs, WHOLE if starts is None else starts)
    assert (result - expected).abs().max() < 1e-10
    for one in (result, expected):
        (one * torch.arange(VALUE)).sin().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-10


def test_in_16_bits_it_computes_in_float32():
    rounded = inputs(torch.bfloat16)
    result = chunked_gated_delta_rule(*rounded, PACKED, 8)
    exact = chunked_gated_delta_rule(*(x.double() for x in rounded), PACKED, 8)
    assert result.dtype == torch.bfloat16
    assert (result - exact).norm() < 2**-8 * exact.norm()


def test_the_convolution_stays_within_documents():
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, SEQ, 3), (3, 1, 4)))
    for starts in (None, PACKED):
        result = short_convolution(x, weight, starts)
        for b, t in ((b, t) for b in range(2) for t in range(SEQ)):
            first = 0 if starts is None else starts[b, t]
            expected = sum(weight[:, 0, 3 - lag] * x[b, t - lag] for lag in range(4) if t - lag >= first)
            assert (result[b, t] - expected).abs().max() < 1e-14


@pytest.mark.parametrize("of_rows", [False, True], ids=["", "Kimi"])
def test_a_kernel_gets_documents_as_decays(of_rows):
    """What a GPU's kernel is given, here computed by the chunked form in float32."""
    import titan_like.models.layers.delta_rule as module

    q, k, v, g, beta = (x.detach() for x in inputs(torch.float32, of_rows=of_rows))
    is_first = (torch.arange(SEQ) == PACKED)[..., None]
    is_first = is_first[..., None] if of_rows else is_first
    expected = gated_delta_rule(q, k, v, g, beta, PACKED, 8)
    reset = gated_delta_rule(q, k, v, g.masked_fill(is_first, module._RESET), beta, None, 8)
    assert (reset - expected).norm() < 1e-4 * expected.norm()
