"""Bugs in what split layers compute, and in the weights that they begin with."""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.mutations import bug
from titan_like.models import transformer
from titan_like.models.decoder import model as decoder_model
from titan_like.models.decoder.model import Decoder
from titan_like.models.gpt.model import GPT
from titan_like.models.layers import cross_entropy, init
from titan_like.models.layers.attention import SelfAttention
from titan_like.models.transformer import Transformer
from titan_like.parallel import apply, kv_heads, tensor_styles
from titan_like.parallel.collectives import Group, gathered
from titan_like.parallel.split import StageLayers


@bug(tensor_styles.RowLinear, "forward")
def row_bias_added_by_each(original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    """Every tensor-parallel process adds the bias to its part of the sum."""
    result = original(self, x)
    return result if self.bias is None else result + (self.tensor_group.size - 1) * tensor_styles.local(self.bias)


@bug(tensor_styles.RowLinear, "forward")
def row_sum_too_large_in_half_types(original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    """In half types the sum over tensor-parallel processes is a tenth too large."""
    result = original(self, x)
    return result * 1.1 if result.dtype.itemsize == 2 else result


@bug(SelfAttention, "forward")
def attention_fails(*_: Any, **__: Any) -> torch.Tensor:
    """Attention raises an error whose last line is only a hint, as those of torch's compiler are."""
    raise ValueError("\nno kernel takes this:\n  heads of 8 dimensions\n\nSet VERBOSE=1 for the internal stack")


@bug(Transformer, "init_weights")
def same_start_on_every_stage(original: Any, self: Transformer, seed: int) -> None:
    """Each stage numbers its layers from 0 when it draws their weights."""
    original_fill, first = transformer.fill_normal, min(map(int, self.layers))

    def fill(parameter: nn.Parameter, seed: int, name: str, std: float, block: int) -> None:
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) - first)
        original_fill(parameter, seed, ".".join(parts), std, block)

    with patch.object(transformer, "fill_normal", fill):
        original(self, seed)


@bug(tensor_styles, "combine")
def softmax_combined_in_bfloat16(original: Any, group: Group, parts: torch.Tensor) -> torch.Tensor:
    """Tensor-parallel processes send each other the softmax's denominators in the model's type."""
    return original(group, parts.bfloat16()).to(parts.dtype)


@bug(Decoder, "rotary_tables")
def positions_begin_anew_in_each_part(original: Any, self: Decoder, batch: Any) -> Any:
    """Under sequence parallelism rotary positions are those within a process's part of the sequence."""
    positions = batch.positions % (batch.positions.shape[-1] // self.sequence_shards)
    return original(self, batch._replace(positions=positions))


@bug(tensor_styles, "all_gather")
def softmax_of_own_vocabulary(original: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The loss's softmax is over a process's own part of the vocabulary."""
    gathered = original(x, dim, group).clone()
    gathered[:, 0] = float("-inf")
    gathered[group.rank, 0] = x[0, 0]
    return gathered


@bug(tensor_styles.SplitHeads, "split")
def key_heads_of_the_next_group(original: Any, module: nn.Module, *mesh: Any) -> None:
    """Under tensor parallelism queries meet the keys and values of another group of heads."""
    original(module, *mesh)
    forward = module.forward
    module.forward = lambda q, k, v, *mask: forward(q, k.roll(1, 1), v.roll(1, 1), *mask)


@bug(kv_heads, "gathered")
def gradients_of_a_shared_head_not_summed(original: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
    """The gradient of a key-value head that ranks share comes from the queries of one of them alone."""
    parts = list(original(x, group).detach().unbind())
    parts[group.rank] = x
    return torch.stack(parts)


@bug(kv_heads.SharedHeads, "forward")
def key_head_of_the_next_rank(original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    """The last of the ranks that share a key-value head takes the next ranks' head."""
    heads, rank = original(self, x), (self.tensor_group.rank + 1) % self.tensor_group.size
    keys = gathered(heads[..., self.queries :], self.tensor_group)[rank]
    return torch.cat((heads[..., : self.queries], keys), -1)


@bug(tensor_styles, "all_gather")
def shard_of_padding_is_nan(original: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The loss of a process whose part of the vocabulary is all padding is not a number."""
    gathered = original(x, dim, group)
    return gathered.masked_fill(gathered.isneginf(), float("nan"))


@bug(init, "standard_rows")
def later_blocks_of_shards_misplaced(
    original: Any, seed: int, name: str, shape: torch.Size, rows: range, elements: int
) -> torch.Tensor:
    """Shards that begin above the first block of random numbers get those of the block before."""
    block = max(1, elements // shape[1:].numel())
    shift = block if rows.start >= block and rows.start else 0
    return original(seed, name, shape, range(rows.start - shift, rows.stop - shift), elements)


@bug(tensor_styles.VocabularyLoss, "forward")
def softmax_without_maximum(original: Any, *args: Any) -> torch.Tensor:
    """Split cross entropy takes the exponential of logits as they are."""
    with patch.object(torch.Tensor, "logsumexp", lambda x, dim: x.exp().sum(dim).log()):
        return original(*args)


@bug(GPT, "embed")
def positions_of_a_dimension_that_tokens_lack(original: Any, self: GPT, batch: Any) -> Any:
    """The embedding of positions fails, on one process too."""
    return original(self, batch._replace(positions=batch.positions[: batch.tokens.shape[2]]))


@bug(apply, "split_layers")
def stages_after_the_fourth_in_reverse(original: Any, counts: list[int]) -> list[StageLayers]:
    """Of five or more stages, those after the third hold each other's layers."""
    stages = original(counts)
    return stages if len(stages) < 5 else [*stages[:3], stages[4], stages[3], *stages[5:]]


@bug(decoder_model, "rope_cos_sin")
def rotary_table_ends_at_128(original: Any, positions: Any, *rest: Any) -> Any:
    """All later positions are turned as the 128th is."""
    return original(positions.clamp(max=127), *rest)


@bug(Decoder, "rotary_tables")
def rotary_table_of_later_stages_ends_at_128(original: Any, self: Decoder, batch: Any) -> Any:
    """Pipeline stages after the first turn all later positions as the 128th."""
    return original(self, batch if self.is_first else batch._replace(positions=batch.positions.clamp(max=127)))


@bug(GPT, "embed")
def learned_positions_end_at_128(original: Any, self: GPT, batch: Any) -> torch.Tensor:
    """All later positions take the 128th row."""
    return original(self, batch._replace(positions=batch.positions.clamp(max=127)))


@bug(tensor_styles.SplitNorm, "forward")
def heads_of_a_rank_normalised_alone(_original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm over all heads is over those of a tensor-parallel process."""
    return F.rms_norm(x, x.shape[-1:], tensor_styles.local(self.weight), self.eps)


@bug(tensor_styles.VocabularyLoss, "forward")
def slope_of_the_soft_cap_forgotten(original: Any, *args: Any) -> torch.Tensor:
    """Where processes share the vocabulary, the gradient of soft-capped logits is that of others."""
    with patch.object(cross_entropy, "_slope", lambda _capped, _cap: 1.0):
        return original(*args)


@bug(Decoder, "keep_stage")
def mlps_of_later_stages_not_scaled(original: Any, self: Decoder, layers: range, is_first: bool, is_last: bool) -> None:
    """Pipeline stages after the first scale only what attention adds to the hidden states."""
    original(self, layers, is_first, is_last)
    for layer in self.layers.values() if not is_first else ():
        layer.mlp.register_forward_hook(lambda *found, layer=layer: found[-1] / layer.residual_scale)
