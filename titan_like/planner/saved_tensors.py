"""Bytes that autograd keeps of one layer for its backward pass, found by running the layer on two tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.experts import ExpertLinear
from titan_like.models.parts import Lengths, layers_of, new_one_of_each, one_of_each
from titan_like.models.transformer import replace_forward
from titan_like.planner.shapes import description
from titan_like.planner.workload import BYTES

_TOKENS = 2  # with a single token, copies of transposed tensors would be views


@lru_cache(maxsize=4096)
def layer_input_bytes(
    model: TransformerConfig, dtype: str, seq_len: int, decoder_seq_len: int = 0, tensor: int = 1
) -> float:
    """Bytes of a layer's inputs other than the hidden states, such as rotary tables.

    Inputs that are computed from parameters, such as the biases of positions, have the parameters' type, and tensor
    parallelism splits them.
    """
    positions = torch.arange(seq_len + decoder_seq_len, device="meta")
    saved: dict[int, torch.Tensor] = {}  # by storage: what their own backward pass needs

    def pack(one: torch.Tensor) -> torch.Tensor:
        if not one.requires_grad:
            saved[id(one.untyped_storage())] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        found = _tensors_in(_layer_inputs(one_of_each(model), positions, seq_len))
    total = sum(BYTES[dtype] * one.numel() / tensor if one.requires_grad else one.nbytes for one in found)
    return total + sum(one.nbytes for one in saved.values())


def _layer_inputs(model: Any, positions: torch.Tensor, encoder_len: int) -> tuple[Any, ...]:
    return model.layer_inputs(positions, *((encoder_len,) if model.config.has_decoder else ()))


def _tensors_in(inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    for one in inputs:
        if isinstance(one, tuple):
            found += _tensors_in(one)
        elif isinstance(one, torch.Tensor):
            found.append(one)
    return found


class Saved(NamedTuple):
    """Bytes that a part of a layer keeps, before tensor parallelism splits them."""

    token: float  # for each token of the first stack
    decoder: float  # for each token of a decoder
    fixed: float = 0.0  # whatever the tokens


@lru_cache(maxsize=4096)
def saved_inside(
    model: TransformerConfig, dtype: str, context: int = 1, method: str = "all_gather", fused_norms: bool = False
) -> tuple[Mapping[str, Saved], ...]:
    """What each region of a layer keeps, and, apart from these, its router and its experts.

    For each kind of layers, they are by the region's name, on a process of ``context`` that share each sequence by this
    method. ``fused_norms``: each norm inside a region is one operator, as on a GPU.
    """
    how, found = (context, method, fused_norms), []
    for kind, parts in enumerate(description(model).kinds):
        one = _kept(model, dtype, kind, (_TOKENS, 2 * model.has_decoder), *how)
        if not model.has_decoder and parts.experts is None:
            found.append({name: Saved(total / _TOKENS, 0.0) for name, total in one.items()})
            continue
        # The bytes are linear in both lengths.
        more = _kept(model, dtype, kind, (2 * _TOKENS, 2 * model.has_decoder), *how)
        tokens = {name: (more[name] - one[name]) / _TOKENS for name in one}
        if model.has_decoder:
            others = _kept(model, dtype, kind, (_TOKENS, 4), *how)
            found.append({name: Saved(tokens[name], (others[name] - one[name]) / 2) for name in one})
        else:
            found.append({name: Saved(tokens[name], 0.0, one[name] - _TOKENS * tokens[name]) for name in one})
    return tuple(found)


def _kept(
    model: TransformerConfig,
    dtype: str,
    kind: int,
    lengths: Lengths,
    context: int,
    method: str,
    fused_norms: bool,
) -> Mapping[str, int]:
    """Bytes that each region of a layer keeps of one sequence, and its router and its experts outside regions.

    Each storage counts once, however many tensors share it, and inputs of these parts do not count. An attention core
    counts with its queries, keys and values, as a fused kernel keeps them.

    What matrix products, norms and attention cores keep is known, so stand-ins replace them and their weights stay on
    the meta device. The other operators run on the CPU: on the meta device, any sum of two tensors would first
    import torch's compiler.
    """
    whole, parts, cpu = new_one_of_each(model), description(model).kinds[kind], torch.device("cpu")
    layer = layers_of(whole)[kind].to(getattr(torch, dtype))
    for name in whole.shared:
        replace_forward(whole.get_submodule(name), lambda *_: None)
    for name, module in layer.named_modules():
        if isinstance(module, AttentionCore):
            replace_forward(module, partial(_core, context, method))
        elif isinstance(module, nn.Linear):
            replace_forward(module, partial(_product, module.out_features))
        elif isinstance(module, ExpertLinear):
            replace_forward(module, partial(_expert_product, module.out_features))
        elif name in parts.norms or (fused_norms and isinstance(module, nn.RMSNorm)):
            replace_forward(module, _norm)
        else:
            module.to_empty(device=cpu, recurse=False)
    inputs = _layer_inputs(whole, torch.arange(sum(lengths)), lengths[0])
    shape = 1, sum(lengths), model.hidden_size
    x = torch.zeros(shape, dtype=getattr(torch, dtype), device=cpu, requires_grad=True)
    others = [tensor.untyped_storage() for tensor in (*layer.parameters(), *layer.buffers(), *_tensors_in(inputs))]
    names = [region.name for region in parts.regions]
    names += [parts.experts.name, f"{parts.experts.name}.experts"] if parts.experts else []
    regions = {name: layer.get_submodule(name) for name in names}
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), _saved_in(regions) as found:
        layer(x, *inputs)
    # `id` tells storages apart: all tensors that share a storage return the same object while one of them is alive.
    known = {id(storage) for storage in (*others, x.untyped_storage())}
    return {
        name: sum(storage.nbytes() for storage in storages if id(storage) not in known)
        for name, storages in found.items()
    }


@contextmanager
def _saved_in(regions: Mapping[str, nn.Module]) -> Iterator[dict[str, list[torch.UntypedStorage]]]:
    """Collect the storages that autograd saves inside each of some modules, except the modules' inputs.

    What a module saves inside another one is collected for the inner one alone.
    """
    found: dict[str, dict[int, torch.UntypedStorage]] = {name: {} for name in regions}
    inputs: list[torch.UntypedStorage] = []
    inside: list[str] = []

    def enter(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        inside.append(name)
        inputs.append(args[0].untyped_storage())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside:
            storage = tensor.untyped_storage()
            found[inside[-1]][id(storage)] = storage
        return tensor

    # Hooks note which module runs; what autograd packs meanwhile belongs to it.
    handles = [module.register_forward_pre_hook(partial(enter, name)) for name, module in regions.items()]
    handles += [module.register_forward_hook(leave) for module in regions.values()]
    result: dict[str, list[torch.UntypedStorage]] = {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield result
    for handle in handles:
        handle.remove()
    of_inputs = {id(storage) for storage in inputs}
    result |= {name: [s for s in mine.values() if id(s) not in of_inputs] for name, mine in found.items()}


def _core(context: int, method: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: None) -> torch.Tensor:
    """Attention core, all tensors [batch, heads, seq, head_dim]. The result is kept as the next product's input.

    Processes that share a sequence keep a copy of its keys and values, or of their slice of these, or as much of other
    heads and their result.
    """
    if context > 1 and method != "ulysses":
        k, v = (x.repeat(1, 1, context if method == "all_gather" else 1, 1) for x in (k, v))
    elif context > 1:
        whole = torch.cat((q, k, v), 1)
        return _KeepInputs.apply(q.shape, whole, q.clone())
    return _KeepInputs.apply(q.shape, q, k, v)


def _product(outputs: int, x: torch.Tensor) -> torch.Tensor:
    """Linear layer: [batch, seq, in] → [batch, seq, outputs]."""
    return _KeepInputs.apply((*x.shape[:-1], outputs), x)


def _expert_product(outputs: int, x: torch.Tensor, _ends: torch.Tensor) -> torch.Tensor:
    """One product of all experts: [rows, in] → [rows, outputs]."""
    return _product(outputs, x)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Norm: [batch, seq, hidden] → the same shape."""
    return _KeepInputs.apply(x.shape, x)


class _KeepInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros(shape)
