"""Masks of packed documents and prefixes, and attention over intervals, against definitions pair by pair in float64."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.e2e.scripts import Script
from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import moe_config
from titan_like.config import ConfigError
from titan_like.config.load import load_config
from titan_like.config.schema import Data, JobConfig
from titan_like.config.schema import Model as ModelSection
from titan_like.data.batch import Batch
from titan_like.data.objectives.masks import Masks, masks_of
from titan_like.models.layers.attention import AttentionCore, flex_attention
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.layers.interval_attention import Scores, interval_attention
from titan_like.models.layers.key_ranges import KeyRanges, block_mask
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.train.rules import check_rules


def intervals(batch: int, seq: int, generator: torch.Generator) -> KeyRanges:
    """Documents of random lengths with random prefixes."""
    first, end = [], []
    for _ in range(batch):
        starts, ends = [], []
        while len(starts) < seq:
            size = min(seq - len(starts), int(torch.randint(1, seq, (), generator=generator)))
            prefix, start = int(torch.randint(0, size, (), generator=generator)), len(starts)
            ends += [max(t + 1, start + prefix) for t in range(start, start + size)]
            starts += [start] * size
        first.append(starts)
        end.append(ends)
    return KeyRanges(torch.tensor(first), torch.tensor(end))


def within(visible: KeyRanges, window: int) -> KeyRanges:
    """The same without keys that are ``window`` or more before the query."""
    order = torch.arange(visible.first.shape[1])
    return visible._replace(first=torch.maximum(visible.first, order - window + 1))


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None = None,
    softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention by definition. mask: [batch, 1, queries, keys]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), 3)
    return scores.softmax(3)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("block_bytes", [8 << 20, 4096, 1])  # one block a document, some, one a query
@pytest.mark.parametrize(("kv_heads", "window", "softcap", "has_sinks"), [
    (4, 0, 0.0, False), (2, 0, 1.5, True), (1, 5, 0.0, True), (2, 1, 1.5, False), (1, 37, 0.0, False),
])  # fmt: skip
def test_interval_attention_and_its_gradients(
    kv_heads: int, window: int, softcap: float, has_sinks: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_like.models.layers.interval_attention.BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("titan_like.models.layers.interval_attention._FEW_KEYS", 4)
    generator = torch.Generator().manual_seed(kv_heads)
    visible = intervals(3, 37, generator)
    visible = within(visible, window) if window else visible
    q, k, v, weight = (
        torch.randn(3, 37, heads, 8, generator=generator, dtype=torch.float64).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads, 4)
    )
    sinks = [torch.randn(4, generator=generator, dtype=torch.float64)] if has_sinks else []
    results = []
    for attend in (
        lambda q, k, v, *sinks: interval_attention(q, k, v, visible, Scores(0.7, softcap, *sinks)),
        lambda q, k, v, *sinks: dense(q, k, v, visible.mask(), 0.7, softcap, *sinks),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
        output = attend(*leaves)
        (output * weight).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() <= bound() * wanted.abs().max()


def test_causal_layers_share_no_mask_with_others() -> None:
    causal, other = (AttentionCore(0.0, is_causal=is_causal, softcap=5.0) for is_causal in (True, False))
    assert causal.mask_settings != other.mask_settings
    windowed, chunked = (AttentionCore(0.0, **kind) for kind in ({"window": 5}, {"chunk": 5}))
    assert windowed.mask_settings != chunked.mask_settings


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37])
@in_float64()
def test_chunks_of_positions_see_only_themselves(chunk: int, is_packed: bool) -> None:
    """Chunks are those of the sequence in which documents are packed, wherever these begin."""
    order, starts = torch.arange(37), torch.tensor([0, 3, 12]).repeat_interleave(torch.tensor([3, 9, 25]))
    packed = KeyRanges(starts.expand(2, -1), (order + 1).expand(2, -1))
    mask = (order[:, None] >= order) & (order[:, None] // chunk == order // chunk)
    mask = mask & (starts[:, None] == starts) if is_packed else mask
    q, k, v = (torch.randn(2, heads, 37, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    found = AttentionCore(0.0, chunk=chunk)(q, k, v, packed if is_packed else None)
    wanted = dense(q, k, v, mask.expand(2, 1, -1, -1))
    assert (found - wanted).abs().max() <= bound() * wanted.abs().max()


def test_masks_and_settings_that_attention_cannot_take_are_refused() -> None:
    visible, (q, k, v) = intervals(1, 7, torch.Generator().manual_seed(1)), torch.zeros(3, 1, 2, 7, 8)
    assert AttentionCore(0.0, window=7).key_ranges(1, 7, q.device, visible) is visible  # which is no window
    with pytest.raises(ValueError, match="a window of 5 got a mask for a window of 6"):
        AttentionCore(0.0, window=5)(q, k, v, visible._replace(window=6))
    with pytest.raises(ValueError, match="either the keys that queries see, or a bias"):
        AttentionCore(0.0)(q, k, v, visible, torch.zeros(1, 1, 7, 7))
    for refused in ({"dropout": 0.1, "softcap": 2.0}, {"dropout": 0.0, "is_causal": False, "chunk": 2}):
        with pytest.raises(ValueError, match=r"set (dropout|both) to 0"):
            AttentionCore(**refused)


def test_half_types_round_only_their_inputs_and_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    visible = intervals(2, 33, generator)
    q, k, v = (torch.randn(2, 2, 33, 16, generator=generator).bfloat16() for _ in range(3))
    found = interval_attention(q, k, v, visible, Scores(16**-0.5))
    wanted = dense(q.double(), k.double(), v.double(), visible.mask())
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_operator_is_correct_for_torch() -> None:
    visible = intervals(2, 12, torch.Generator().manual_seed(0))
    q, k, v = (torch.randn(2, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    inputs = q, k, v, visible.first, visible.end, sinks, 0.5, 2.0
    torch.library.opcheck(torch.ops.titan_like.interval_attention.default, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [256, 300, 40])
@in_float64()
def test_block_mask_is_the_same_mask(seq_len: int) -> None:
    from torch.nn.attention import flex_attention as flex

    generator = torch.Generator().manual_seed(seq_len)
    visible = intervals(2, seq_len, generator)
    blocks = block_mask(visible.first, visible.end, seq_len)
    wanted = torch.nn.functional.pad(visible.mask(), (0, -seq_len % 128) * 2)
    tiles = wanted.unflatten(3, (-1, 128)).unflatten(2, (-1, 128))  # [batch, 1, blocks, 128, blocks, 128]
    computed = blocks.to_dense().bool()
    assert computed[tiles.any(5).any(3)].all()  # whatever is seen is computed
    full = torch.zeros_like(computed)
    for row, column in [(b, i) for b in range(2) for i in range(computed.shape[2])]:
        count = blocks.full_kv_num_blocks[row, 0, column]
        full[row, 0, column, blocks.full_kv_indices[row, 0, column, :count].long()] = True
    real = torch.arange(128 * tiles.shape[2]).unflatten(0, (-1, 128)) < seq_len
    seen = tiles | ~real[:, :, None, None]  # queries past the end may see anything
    assert seen.all(5).all(3)[full].all()  # whatever is computed without a mask is seen
    q, k, v = (torch.randn(2, 4, seq_len, 16, generator=generator) for _ in range(3))
    found = flex.flex_attention(q, k[:, :2], v[:, :2], block_mask=blocks, enable_gqa=True)
    torch.testing.assert_close(found, dense(q, k[:, :2], v[:, :2], visible.mask()), rtol=bound(), atol=bound())


def test_dropout_drops_only_what_is_seen() -> None:
    core, visible = AttentionCore(dropout=0.5), intervals(1, 64, torch.Generator().manual_seed(1))
    q, k = torch.randn(2, 1, 2, 64, 8, dtype=torch.float64)
    units = torch.eye(64, dtype=torch.float64).expand(1, 2, 64, 64)  # as values, they show the probabilities
    dropped = core(q, k, units, visible)
    kept = dense(q, k, units, visible.mask())
    mask = visible.mask().expand_as(kept)
    assert not kept[~mask].any() and not dropped[~mask].any()
    ratio = dropped[mask] / kept[mask]
    assert torch.logical_or(ratio == 0, (ratio - 2).abs() < bound()).all()
    assert abs((ratio == 0).double().mean() - 0.5) < 6 * 0.5 / math.sqrt(mask.sum())


def test_end_of_document_comes_from_the_tokenizer_if_it_is_needed() -> None:
    model = model_config(ModelSection())
    assert masks_of(JobConfig(data=Data(reset_attention_mask=True)), model).eod_id == 256
    assert masks_of(JobConfig(data=Data(prefix_lm=True, tokenizer="absent.json")), model).eod_id is None
    with pytest.raises(ConfigError, match=r"absent\.json"):
        masks_of(JobConfig(data=Data(eod_mask_loss=True, tokenizer="absent.json")), model)


def test_a_family_of_causal_attention_alone_has_no_masks() -> None:
    config = load_config(["--training.steps=1", "--data.prefix_lm", "true"])
    model = model_config(config.model)

    class Plain(type(model)):  # type: ignore[misc]
        supports_masks = False

    with pytest.raises(ConfigError, match=r"data.prefix_lm = true.*only causal attention"):
        check_rules(config, Plain(**model.model_dump()), resolve_layout(config.parallelism, 1))


def test_next_tokens_of_other_documents_carry_no_loss() -> None:
    """A document ends with token 0. The last label of the sample has no next one."""
    config = model_config(ModelSection(family="decoder", flavor="debug_latent"))
    tokens = torch.tensor([5, 6, 0, 7, 8, 0, 9])
    sample = Batch(tokens, torch.tensor([6, 0, 7, 8, 0, 9, 4]))
    plain = replace(masks_of(JobConfig(), config), samples=[sample])[0]
    assert plain.next_tokens is not None and plain.next_tokens[:-1].tolist() == tokens[1:].tolist()
    assert plain.next_labels is not None and plain.next_labels.tolist() == [0, 7, 8, 0, 9, 4, IGNORED_LABEL]
    masks = Masks(Data(reset_attention_mask=True, eod_mask_loss=True), 0, 0, has_next=True, samples=[sample])
    ignored = [0, IGNORED_LABEL, IGNORED_LABEL, 0, IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL]
    assert masks[0].next_labels is not None and masks[0].next_labels.tolist() == ignored
    assert masks_of(JobConfig(), moe_config()).over([sample])[0].next_labels is None


MEMORY_OF_A_LONG_SAMPLE = """
import pathlib, re, torch
from titan_like.config.schema import Data
from titan_like.data.batch import Batch, collate
from titan_like.data.objectives.masks import Masks
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.layers.attention import AttentionCore

torch.set_num_threads(1)
n, head_dim = 32768, 4
tokens = torch.zeros(n, dtype=torch.int64)
tokens[n // 4 - 1 :: n // 4] = 1
masks = Masks(Data(reset_position_ids=True, reset_attention_mask=True, prefix_lm=True), 1, 0)
q, k, v = torch.zeros(3, 1, 1, n, head_dim, requires_grad=True)
core = AttentionCore(0.0)

def memory(kind):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.findall(kind + r":\\s+(\\d+) kB", status)[0])

pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = memory("VmRSS")
batch = collate([masks.over([Batch(tokens, tokens)])[0]])
core(q, k, v, batch.document_mask).sum().backward()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.slow
def test_a_packed_sample_of_32k_tokens_needs_no_memory_for_pairs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MEMORY_OF_A_LONG_SAMPLE)
    done = Script(str(script), []).wait()
    assert done.returncode == 0, done.stderr
    kibibytes = int(done.stdout)
    assert 0 < kibibytes < 256 << 10, f"{kibibytes / 1024:.0f} MiB"  # a byte for every pair would be 1 GiB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(0, 2.0, False), (70, 0.0, True), (70, 2.0, True), (-130, 0.0, False)]
)
@in_float64()
def test_flex_attention_with_windows_soft_caps_and_sinks(
    window: int, softcap: float, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, because torch has no compiled backward pass on CPUs, and without its check of that.

    A negative window is a chunk.
    """
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    seq_len, generator = 300, torch.Generator().manual_seed(1)
    visible = intervals(2, seq_len, generator)
    visible = within(visible, window) if window > 0 else visible
    if window < 0:
        visible = cast(
            KeyRanges, AttentionCore(0.0, chunk=-window).key_ranges(2, seq_len, visible.first.device, visible)
        )
    blocks = block_mask(visible.first, visible.end, seq_len)
    q, k, v = (torch.randn(2, heads, seq_len, 16, generator=generator) for heads in (4, 2, 2))
    leaves = [q, k, v, *([torch.randn(4, generator=generator)] if has_sinks else [])]
    weight, results = torch.randn(q.shape, generator=generator), []
    by_blocks = partial(flex_attention, kernel=flex.flex_attention)
    for attend, what in ((by_blocks, blocks), (interval_attention, visible)):
        inputs = [x.clone().requires_grad_() for x in leaves]
        sinks = inputs[3] if has_sinks else None
        output = attend(inputs[0], inputs[1], inputs[2], what, Scores(0.25, softcap, sinks))
        results.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() <= bound() * wanted.abs().max()
