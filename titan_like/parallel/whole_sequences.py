"""What in a model needs whole sequences, of which a rank has only a part where positions are split.

Context parallelism lets `AttentionCore` alone see other ranks' positions, and sequence parallelism TP blocks. Anything
else that mixes positions, such as a convolution or a mean, would compute from the part that a rank happens to have.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_like.config.errors import first_line
from titan_like.models.batch import Batch
from titan_like.models.config import NUM_OPTIONS, TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.parts import WithoutInit
from titan_like.models.small import small_fields
from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend
from titan_like.parallel.tensor import family_plan, styles_of
from titan_like.parallel.tensor_base import Style
from titan_like.parallel.tensor_styles import Region

_POSITIONS = 1024  # of each sequence
_TOLERANCE = 1e-6  # relative; a family may compute in float32, which rounds by 6e-8

Call = tuple[str, list[torch.Tensor], list[torch.Tensor]]  # a module's name, what it is given, what it returns


class _OwnKey(AttentionCore):
    """Attention in which a query sees nothing but its own key, if it is one of the same sequence."""

    needs_ranges = False

    def attend(self, q, k, v, document_mask, bias):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class. Unlike q · k, the result depends on the positions by which both are rotated."""
        if q.shape[2] != k.shape[2]:
            return torch.zeros_like(q)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q.sin() * k).sum(3, keepdim=True)
        return v * (1 + (scores if bias is None else scores + bias.exp().mean(3, keepdim=True)).tanh())


class _NoDropout(TorchFunctionMode):
    """Leaves dropout out of training."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return args[0] if function is F.dropout else function(*args, **(kwargs or {}))


@lru_cache(maxsize=256)
def needs_whole_sequences(model: TransformerConfig, in_blocks: bool) -> str | None:
    """What computes other numbers from a part of a sequence than from all of it, as "… needs …"; None if nothing does.

    A small copy computes the losses of a sequence and of its two halves: every second position, and all others, each
    in reversed order. Its attention mixes no positions. With ``in_blocks``, what TP blocks compute does not count.
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
    with WithoutInit():
        model: Transformer = small.family_module("model").build(small).to(torch.float64).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # zeros, with which some begin, would hide what they multiply
        nn.init.normal_(parameter, std=0.3, generator=generator)
    for name, module in model.named_modules():
        if isinstance(module, AttentionCore):
            if type(module).attend is not AttentionCore.attend and not in_blocks:
                return name  # context parallelism would compute something else in its place
            extend(module, _OwnKey)
    crossing = [name for name, module in model.named_modules() if hasattr(module, "shard_context")]
    blocks = _blocks(model) if in_blocks else crossing
    for name in blocks:
        model.get_submodule(name).register_forward_hook(lambda _, x, y: x[0].sin().mean(2, keepdim=True).expand_as(y))
    samples = NUM_OPTIONS if "choice" in small.predictions else 1
    tokens = torch.randint(small.vocab_size // 2, (samples, length), generator=generator)
    tokens[:, ::2] += small.vocab_size // 2  # else both halves might have the same largest values
    halves = [torch.arange(_POSITIONS - 1 - first, -1, -2) for first in (0, 1)]
    whole, *parts = (_run(model, tokens, x, blocks) for x in (torch.arange(_POSITIONS), *halves))
    for (name, given, returned), *of_parts in zip(whole, *parts, strict=True):
        if _is_sum(given, *(x for _, x, _ in of_parts)) and not _is_sum(returned, *(x for _, _, x in of_parts)):
            return name or type(model).__name__
    return None


def _is_sum(whole: list[torch.Tensor], *parts: list[torch.Tensor]) -> bool:
    sums = ((x, torch.stack(halves).sum(0)) for x, *halves in zip(whole, *parts, strict=True))
    return all(torch.allclose(x, total, 0, _TOLERANCE * float(x.abs().max())) for x, total in sums)


def _blocks(model: Transformer) -> list[str]:
    try:
        styles = styles_of(family_plan(model), model, True)
    except ValueError:  # tensor parallelism says what is wrong with the plan
        return []
    return [name for name, style in styles.items() if isinstance(style, Style) and issubclass(style.kind, Region)]


def _run(model: Transformer, tokens: torch.Tensor, positions: torch.Tensor, blocks: list[str]) -> list[Call]:
    """The losses of ``tokens`` at ``positions`` of each sequence: calls of modules outside of ``blocks``."""
    calls, where, fields = list[Call](), positions, dict[str, Any](positions=positions)
    share, length = _POSITIONS // len(positions), model.config.max_seq_len
    if model.config.has_decoder:
        where = torch.cat((positions, positions + _POSITIONS))
        # They count from 0 in both parts of a CP shard, as in `CPShard.shard`.
        fields = {"positions": where if share == 1 else positions.repeat(2), "encoder_len": len(positions)}
    tokens = tokens[:, where]
    if "mtp" in model.config.predictions:
        fields |= {"next_tokens": tokens // 2, "next_labels": tokens}

    def reduced(values: Iterable[Any], *ndims: int) -> list[torch.Tensor]:
        """Losses, and of hidden states a number at each position of the whole sequence: 0 where they have none."""
        tensors = [x.double() for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]
        numbers = [x for x in tensors if x.ndim in ndims]
        for x in tensors:
            if x.ndim == 3 and x.shape[1] in (len(positions), len(where)):
                sums = x @ torch.arange(1.0, x.shape[2] + 1).double().sin()
                numbers.append(x.new_zeros(len(x), length).index_copy_(1, where[: x.shape[1]], sums))
        return numbers

    def note(name: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        calls.append((name, reduced((*args, *named.values())), reduced(outputs, 0, 1)))

    inner = tuple(f"{block}." for block in blocks)
    modules = {name: module for name, module in model.named_modules() if not name.startswith(inner)}
    hooks = [module.register_forward_hook(partial(note, name), with_kwargs=True) for name, module in modules.items()]
    model.context_shards = share
    no_labels = torch.full((len(tokens),), IGNORED_LABEL)  # samples' labels, whose first token has the head
    factors = torch.ones(len(model.config.predictions), dtype=torch.float64)
    with _NoDropout():
        model(Batch(tokens, tokens, sample_labels=no_labels, loss_factors=factors, **fields))
    for hook in hooks:
        hook.remove()
    return calls
