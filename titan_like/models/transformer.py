"""The base class of all families, which is the only interface to a model that the rest of the project uses."""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Batch, Context
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.cross_entropy import TokenLoss, soft_capped
from titan_like.models.layers.experts import Router
from titan_like.models.layers.init import BLOCK_ELEMENTS, fill_normal
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.mlp import XIELU

Labels = torch.Tensor | None


class TiedOutput(nn.Module):
    """The output matrix of a model with tied embeddings (arXiv 1608.05859). It has no parameters."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] and [padded vocab, hidden] → [batch, seq, padded vocab]."""
        return F.linear(x, table)


class VocabularyBias(nn.Module):
    """Adds a bias to the logits in place, which saves memory.

    The bias is not part of the output matrix, because torch computes a product with a bias as a view, and the backward
    pass of an FSDP2 module that returns a view crashes.
    """

    def __init__(self, padded_vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(padded_vocab_size))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, padded vocab] → the same tensor, changed in place."""
        return logits.add_(self.bias)


class PaddingMask(nn.Module):
    """Sets the logits of tokens that only pad the vocabulary to -inf."""

    def __init__(self, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.padded_vocab_size = vocab_size, padded_vocab_size

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """[batch, seq, padded vocab] → the same tensor, changed in place."""
        # Detached, because the gradient of a padding logit, its probability, is exactly zero.
        logits.detach()[..., self.vocab_size :] = float("-inf")
        return logits


class Transformer(nn.Module):
    """Base class of the families: embedding → layers → head, such as a norm → logits over the padded vocabulary.

    The layers are in a ModuleDict, so that a layer has the same name on every pipeline stage. `keep_stage` turns the
    model into one stage of a pipeline.
    """

    residual_outputs: tuple[str, ...] = ()  # name endings of the matrices that write to the residual stream
    entry: tuple[str, ...] = ("embedding",)  # modules before the layers
    head: tuple[str, ...] = ("norm",)  # modules between the layers and the output matrix, in the order of their use
    shared: tuple[str, ...] = ()  # modules that layers share; a layer names those that it needs in `uses`
    pooled: tuple[str, ...] = ()  # of these, the ones that compute once a sequence, not once a token
    may_be_new: tuple[str, ...] = ()  # modules that begin anew where initial weights lack them, such as a new head
    initial_elements = BLOCK_ELEMENTS  # of initial weights that one generator draws

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.is_first = self.is_last = True  # whether this stage has the embedding, and whether it returns logits
        self.absent: frozenset[str] = frozenset()  # names of the modules that only other stages have
        self.sequence_shards = 1  # number of parts that sequence parallelism splits each sequence into between layers
        self.context_shards = 1  # number of CP shards of each sequence
        self._cores: dict[str, AttentionCore] | None = None  # what `find_cores` has found
        self.embedding = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict()
        self.norm: nn.Module = nn.Identity()
        self.output: nn.Module = (
            TiedOutput()
            if config.tied_embeddings
            else nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        )
        self.output_bias: nn.Module = nn.Identity()
        self.mask_padding: nn.Module = PaddingMask(config.vocab_size, config.padded_vocab_size)
        self.token_loss: nn.Module = TokenLoss(config.vocab_size, config.padded_vocab_size)

    def keep_stage(self, layers: range, is_first: bool, is_last: bool) -> None:
        """Drop what other pipeline stages hold.

        Both the first and the last stage keep an embedding table that both use, and every stage the shared modules of
        its layers.
        """
        names = {name for name, _ in self.named_modules()}
        self.is_first, self.is_last = is_first, is_last
        for name in [name for name in self.layers if int(name) not in layers]:
            del self.layers[name]
        for name in set(self.shared).difference(*(shared_modules(layer) for layer in self.layers.values())):
            delattr(self, name)
        keeps_table = is_last and self.config.uses_table_last
        for name in () if is_first else self.entry:
            if name != "embedding" or not keeps_table:
                delattr(self, name)
        for name in () if is_last else (*self.head, "output", "output_bias", "mask_padding", "token_loss"):
            delattr(self, name)
        self.absent = frozenset(names.difference(name for name, _ in self.named_modules()))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def last_norm(self) -> nn.Module:
        """The norm whose weights scale the logits. Only the last stage has it."""
        return self.norm

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A batch → what `predict` returns: logits [batch, seq, padded vocab] in most families.

        With ``loss_factors`` → the losses of `loss`, [heads]. A stage that is not the first takes the ``hidden`` states
        [batch, seq, hidden] of the stage before it. One that is not the last returns hidden states.
        """
        if batch.positions is None:
            batch = batch._replace(positions=torch.arange(batch.tokens.shape[1], device=batch.tokens.device))
        x = self.embed(batch) if hidden is None else hidden
        contexts = self.contexts(batch)
        for name, layer in self.layers.items():
            x = self.run_layer(layer, x, contexts[name], batch)
        if not self.is_last:
            return x
        return self.predict(x, batch) if batch.loss_factors is None else self.loss(x, batch)

    def embed(self, batch: Batch) -> torch.Tensor:
        """A batch, which has positions → hidden states [batch, seq, hidden]."""
        raise NotImplementedError

    def contexts(self, batch: Batch) -> Mapping[str, Any]:
        """The context of each layer, by the layer's name. Layers with equal masks share one."""
        context = Context(batch.positions, batch.document_mask, padding_mask=batch.padding_mask)
        masks = self.masks(batch)
        return {name: context._replace(document_mask=masks[name]) if name in masks else context for name in self.layers}

    def run_layer(self, layer: nn.Module, x: torch.Tensor, context: Any, batch: Batch) -> torch.Tensor:
        """Hidden states before a layer → after it, both [batch, seq, hidden]."""
        return layer(x, context)

    def masks(self, batch: Batch) -> dict[str, KeyRanges | None]:
        """The masks of layers whose attention has a window, a soft cap or sinks, by layer; one for all alike."""
        masks: dict[tuple[bool | int, ...], KeyRanges | None] = {}
        cores = self.find_cores() if self._cores is None else self._cores
        for core in cores.values():
            if core.mask_settings not in masks:
                size, seq_len = batch.tokens.shape
                ranges = core.key_ranges(size, seq_len, batch.tokens.device, batch.document_mask)
                masks[core.mask_settings] = ranges
        return {name: masks[core.mask_settings] for name, core in cores.items()}

    def find_cores(self) -> dict[str, AttentionCore]:
        """Find an attention core of each layer whose cores are alike and need key ranges, by layer, once for all."""
        cores_of_layers = {}
        for name, layer in self.layers.items():
            cores = [module for module in layer.modules() if isinstance(module, AttentionCore) and module.needs_ranges]
            if len({core.mask_settings for core in cores}) == 1:
                cores_of_layers[name] = cores[0]
        self._cores = cores_of_layers
        return cores_of_layers

    def predict(self, x: torch.Tensor, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Hidden states after the last layer → a tensor for each of the configuration's ``predictions``.

        The logits of tokens are [batch, seq, padded vocab], -inf for padding.
        """
        return self.logits(self.before_output(x))

    def loss(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states after the last layer → the summed loss of each head times its factor, [heads].

        Sums, not means: the caller makes each factor one over the number of labels in the global batch, so that every
        layout and accumulation count computes the same quantity. Losses are in nats and at least float32.
        """
        assert batch.loss_factors is not None
        return torch.stack([self.loss_of_tokens(self.before_output(x), batch.labels, batch.loss_factors[0])])

    def before_output(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer → the output matrix's input, both [batch, seq, hidden]."""
        for name in self.head:
            x = self.get_submodule(name)(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The output matrix's input [batch, seq, hidden] → [batch, seq, padded vocab], -inf for padding."""
        logits = self.output(x, self.embedding.weight) if self.config.tied_embeddings else self.output(x)
        return self.mask_padding(soft_capped(self.output_bias(logits), cast(TokenLoss, self.token_loss).softcap))

    def loss_of_tokens(self, x: torch.Tensor, labels: Labels, factor: torch.Tensor) -> torch.Tensor:
        """The output matrix's input [batch, seq, hidden] and labels [batch, seq] → `TokenLoss`, a scalar."""
        assert labels is not None
        table = self.embedding.weight if self.config.tied_embeddings else self.output.weight
        return self.token_loss(x, table, getattr(self.output_bias, "bias", None), labels, factor)

    def init_weights(self, seed: int) -> None:
        """Draw matrices from N(0, `initial_std`²); biases and sinks become 0, norm weights 1; routers begin anew.

        A module with ``initial_values`` has functions of N(0, 1) for some of its own parameters.
        """
        for name, parameter in self.named_parameters():
            owner, _, own_name = name.rpartition(".")
            values = getattr(self.get_submodule(owner), "initial_values", {})
            if own_name in values:
                fill_normal(parameter, seed, name, 1.0, self.initial_elements, values[own_name])
            elif name.endswith(("bias", "sinks", "lora_b")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.constant_(parameter, getattr(self.get_submodule(owner), "initial_vector", 1.0))
            else:
                fill_normal(parameter, seed, name, self.initial_std(name, parameter), self.initial_elements)
        for module in self.modules():
            if isinstance(module, Router | XIELU):
                module.reset()

    def initial_std(self, name: str, parameter: torch.Tensor) -> float | torch.Tensor:
        """Standard deviation of a matrix's initial values, or of each row's, [rows].

        It is `init_std`. Matrices that write to the residual stream are scaled by 1/√blocks, two a layer, as in GPT-2
        (Radford et al. 2019, section 2.3).
        """
        if name.endswith("lora_a"):  # uniform; √3 · std of kaiming_uniform_ with a = √5, as PEFT draws it
            return parameter.shape[1] ** -0.5
        residual = name.removesuffix(".weight").endswith(self.residual_outputs)
        return self.config.init_std * (self.config.num_blocks**-0.5 if residual else 1.0)


def shared_modules(layer: nn.Module) -> tuple[str, ...]:
    """Names of the modules that a layer shares with others."""
    return getattr(layer, "uses", ())
