"""What in a model needs whole sequences, of which a rank has only a part where positions are split.

Context parallelism lets `AttentionCore` alone see other ranks' positions, and sequence parallelism TP blocks. Anything
else that mixes positions, such as a convolution or a mean, would compute from the part that a rank happens to have.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from titan_like.config.errors import first_line
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.experts import Router
from titan_like.models.small import small_fields
from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend
from titan_like.parallel.tensor import family_plan, styles_of
from titan_like.parallel.tensor_styles import Region, Style

_POSITIONS = 128  # of each sequence
_ROUNDING = 1e-6  # relative; results of float64 are compared in float32, which rounds by 6e-8

Values = list[tuple[str, torch.Tensor]]  # with the module that computes each


class _OwnKey(AttentionCore):
    """Attention in which a query sees nothing but its own key, if it is one of the same sequence."""

    needs_ranges = False

    def attend(self, q, k, v, document_mask, bias):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        if q.shape[2] != k.shape[2]:
            return torch.zeros_like(q)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return v * (1 + (q * k).sum(3, keepdim=True).tanh())


@lru_cache(maxsize=256)
def needs_whole_sequences(model: TransformerConfig, in_blocks: bool) -> str | None:
    """What computes other numbers from a part of a sequence than from all of it, as "… needs …"; None if nothing does.

    A small copy runs on a sequence and on every second position of it, while its attention mixes no positions. With
    ``in_blocks``, what TP blocks compute does not count.
    """
    try:
        name = _first_difference(model, in_blocks)
    except Exception as error:  # whatever the family's code raises
        return f"a small copy of the model fails ({first_line(error)}), so it may need whole sequences"
    return None if name is None else f"{name} needs whole sequences"


def _first_difference(config: TransformerConfig, in_blocks: bool) -> str | None:
    length = _POSITIONS * (2 if config.has_decoder else 1)
    fields = config.model_dump() | small_fields(config, 1, 1, 1, False, False) | config.shrunk(_POSITIONS)
    small = type(config).model_validate(fields | {"max_seq_len": length})
    with torch.device("meta"):
        model: Transformer = small.family_module("model").build(small).to(torch.float64).eval()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # zeros, with which some begin, would hide what they multiply
        nn.init.normal_(parameter, std=0.3, generator=generator)
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.reset()
        if isinstance(module, AttentionCore):
            if type(module).attend is not AttentionCore.attend and not in_blocks:
                return name  # context parallelism would compute something else in its place
            extend(module, _OwnKey)
    blocks = _blocks(model) if in_blocks else []
    for name in blocks:
        model.get_submodule(name).register_forward_hook(lambda _, x, y: x[0].sin().mean(2, keepdim=True).expand_as(y))
    tokens = torch.randint(small.vocab_size, (1, length), generator=generator)
    whole, part = _run(model, tokens, blocks, 1), _run(model, tokens[:, ::2], blocks, 2)
    for (name, of_all), (_, of_part) in zip(whole, part, strict=True):
        expected = of_all[:, ::2]
        is_comparable = of_all.shape[1] == 2 * of_part.shape[1] and expected.shape == of_part.shape
        if is_comparable and not torch.allclose(expected, of_part, 0, _ROUNDING * float(expected.abs().max())):
            return name or type(model).__name__
    return None


def _blocks(model: Transformer) -> list[str]:
    try:
        styles = styles_of(family_plan(model), model, True)
    except ValueError:  # tensor parallelism says what is wrong with the plan
        return []
    return [name for name, style in styles.items() if isinstance(style, Style) and issubclass(style.kind, Region)]


@torch.no_grad()
def _run(model: Transformer, tokens: torch.Tensor, blocks: list[str], stride: int) -> Values:
    """What modules outside ``blocks`` return and are given; ``tokens`` are every ``stride``-th of a sequence."""
    values: Values = []

    def note(name: str, *given: Any) -> None:
        tensors = (x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim == 3)
        values.extend((name, x.to(torch.float32, copy=True)) for x in tensors)

    def observe(name: str, module: nn.Module) -> list[Any]:
        caller = name.rpartition(".")[0]
        while isinstance(model.get_submodule(caller), nn.ModuleDict | nn.ModuleList):
            caller = caller.rpartition(".")[0]
        before = module.register_forward_pre_hook(
            lambda _, args, named: note(caller, *args, *named.values()), with_kwargs=True
        )
        return [
            before,
            module.register_forward_hook(lambda _, __, x: note(name, *(x if isinstance(x, tuple) else (x,)))),
        ]

    inner = tuple(f"{block}." for block in blocks)
    hooks = [
        hook for name, module in model.named_modules() if not name.startswith(inner) for hook in observe(name, module)
    ]
    positions = torch.arange(0, _POSITIONS, stride)
    fields: dict[str, Any] = {"positions": positions}
    if model.config.has_decoder:  # its positions count from 0 in both parts of a CP shard, as in `CPShard.shard`
        both = torch.cat((positions, positions + (_POSITIONS if stride == 1 else 0)))
        fields = {"positions": both, "encoder_len": len(positions)}
    if "mtp" in model.config.predictions:
        fields |= {"next_tokens": tokens // 2, "next_labels": tokens, "loss_factors": torch.ones(2)}
    model.is_last, model.context_shards = False, stride
    results = model.predict(model(tokens, **fields))
    note("", *(results if isinstance(results, tuple) else (results,)))
    for hook in hooks:
        hook.remove()
    return values
