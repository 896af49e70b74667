"""Experts, their balance and its losses by definition: no sorting, no grouping, no common buffers."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from tests.reference.float8 import Float8Linear
from titan_like.config.schema import Float8
from titan_like.models.config import has_experts
from titan_like.models.layers.experts import ExpertLinear, SparseMLP
from titan_like.models.transformer import Transformer
from titan_like.parallel.expert_balance import FIGURES


class PlainExperts:
    """The experts of a model, whose forward passes this replaces. Without experts it does nothing."""

    def __init__(self, model: Transformer, float8: Float8) -> None:
        self.float8 = float8
        self.losses: list[torch.Tensor] = []  # sums over the tokens of one piece, of one layer each
        self.load: dict[str, list[float]] = {}  # layer → each expert's share of the last good step's tokens
        self.bias: dict[str, list[float]] = {}
        self.sent: dict[str, list[int]] = {}  # tokens of this step so far
        self.sums: dict[str, list[float]] = {}  # over these tokens: the balance and the z-loss without coefficients
        # By the router's name, of each piece of this step so far: scores and choice, [samples, seq, …].
        self.routed: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.replayed: dict[str, torch.Tensor] = {}  # choices for all samples of this step that are taken instead
        if not has_experts(model.config):
            return
        self.config = model.config
        for name, module in model.named_modules():
            if isinstance(module, SparseMLP):
                module.forward = partial(self._forward, name, module)
                self.load[name] = [1 / self.config.num_experts] * self.config.num_experts
                self.bias[name] = [0.0] * self.config.num_experts
        self.forget()

    def _forward(
        self, name: str, mlp: SparseMLP, x: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[batch, seq, hidden] → the same shape."""
        config, tokens = self.config, x.flatten(0, 1)
        exact = torch.promote_types(x.dtype, torch.float32)
        logits = tokens.to(exact) @ mlp.router.weight.to(exact).t()
        if mlp.router.logit_bias is not None:
            logits = logits + mlp.router.logit_bias.to(exact)
        exponentials = (logits - logits.max(1, keepdim=True).values.detach()).exp()
        probabilities = exponentials / exponentials.sum(1, keepdim=True)
        scores = probabilities if config.router_score == "softmax" else 1 / (1 + (-logits).exp())
        ranked = scores.detach() + torch.tensor(self.bias[name], dtype=exact, device=x.device)
        given = ranked.clone()
        size, counted = config.num_experts // config.router_groups, 1 if config.router_group_score == "max" else 2
        is_limited = config.router_top_groups < config.router_groups
        for row, values in zip(ranked, given.tolist(), strict=True) if is_limited else ():
            firsts = range(0, config.num_experts, size)  # the first expert of each group
            sums = {first: sum(sorted(values[first : first + size])[-counted:]) for first in firsts}
            for first in sorted(firsts, key=lambda first: -sums[first])[config.router_top_groups :]:
                row[first : first + size] = -math.inf
        chosen = ranked.argsort(dim=1, descending=True, stable=True)[:, : config.experts_per_token]
        if mlp.training:
            chosen = self._replay(f"{name}.router", given, chosen, len(x))
        weights = torch.stack([scores[torch.arange(len(scores)), one] for one in chosen.t()], 1)
        if config.renormalize:
            weights = weights / weights.sum(1, keepdim=True)
        weights = weights * config.routed_scaling
        if mlp.training:
            is_real = slice(None) if padding_mask is None else ~padding_mask.flatten()
            self._note(name, logits[is_real], scores[is_real], chosen[is_real])
        copies = tokens[:, None].expand(-1, config.experts_per_token, -1)  # one for each choice
        results = torch.zeros_like(copies)
        for expert in range(config.num_experts):
            is_sent, own = chosen == expert, copies[chosen == expert]
            gate, up = self._linear(own, mlp.experts.gate, expert), self._linear(own, mlp.experts.up, expert)
            if config.activation == "silu":
                inner = F.silu(gate) * up
            else:
                inner = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (1 + up.clamp(-7, 7))
            results = results.masked_scatter(is_sent[..., None], self._linear(inner, mlp.experts.down, expert))
        total = (results * weights[..., None]).sum(1).to(x.dtype).view(x.shape)
        if mlp.shared is None:
            return total
        return total + mlp.shared(x) * (1.0 if mlp.shared_gate is None else torch.sigmoid(mlp.shared_gate(x)))

    def _replay(self, name: str, scores: torch.Tensor, chosen: torch.Tensor, samples: int) -> torch.Tensor:
        earlier = self.routed.setdefault(name, [])
        first = sum(len(one) for one, _ in earlier)
        if name in self.replayed:
            chosen = self.replayed[name][first : first + samples].flatten(0, 1).long()
        earlier.append((scores.unflatten(0, (samples, -1)), chosen.unflatten(0, (samples, -1))))
        return chosen

    def _linear(self, x: torch.Tensor, linear: ExpertLinear, expert: int) -> torch.Tensor:
        weight = linear.weight.unflatten(0, (self.config.num_experts, -1))[expert]
        result = Float8Linear.apply(x, weight, self.float8.recipe) if self.float8.enable else x @ weight.t()
        return result if linear.bias is None else result + linear.bias.unflatten(0, (-1, len(weight)))[expert]

    def _note(self, name: str, logits: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        config, balance = self.config, logits.new_zeros(())
        for expert in range(config.num_experts):
            self.sent[name][expert] += int((chosen == expert).sum())
            share = (scores[:, expert] / scores.sum(1)).sum()
            balance = balance + config.num_experts * self.load[name][expert] * share
        z = (logits.exp().sum(1).log() ** 2).sum()
        self.sums[name] = [old + new.item() for old, new in zip(self.sums[name], (balance, z), strict=True)]
        coefficient = config.balance_coefficient if config.balance == "auxiliary" else 0.0
        self.losses.append(coefficient * balance + config.z_loss_coefficient * z)

    def figures(self) -> dict[str, torch.Tensor]:
        """What a step reports of its experts, by its names in metrics.jsonl."""
        if not self.sent:
            return {}
        shares = [number * len(sent) / sum(sent) for sent in self.sent.values() for number in sent]
        entropies = [-sum(n / sum(sent) * math.log(n / sum(sent)) for n in sent if n) for sent in self.sent.values()]
        each = [
            [x * self.config.experts_per_token / sum(self.sent[name]) for x in self.sums[name]] for name in self.sent
        ]
        losses = map(sum, zip(*each, strict=True))
        entropy = sum(entropies) / len(entropies) / math.log(self.config.num_experts)
        found = (*losses, min(shares), max(shares), entropy)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in zip(FIGURES, found, strict=True)}

    def loss_of_piece(self, num_tokens: int) -> torch.Tensor | float:
        """The losses of the last forward pass, over the ``num_tokens`` of the global batch that are not padding."""
        losses, self.losses = self.losses, []
        return sum(losses) / num_tokens

    def forget(self) -> None:
        """After a step that updates nothing, or before the first: nothing is counted yet."""
        self.sent = {name: [0] * self.config.num_experts for name in self.load}
        self.sums = {name: [0.0, 0.0] for name in self.load}

    def update(self) -> None:
        """After a step: its loads are those of the next one, and biases move towards equal loads."""
        for name, sent in self.sent.items():
            mean = sum(sent) / len(sent)
            self.load[name] = [number / sum(sent) for number in sent]
            for expert, number in enumerate(sent) if self.config.balance == "bias" else ():
                self.bias[name][expert] += self.config.bias_update_rate * ((number < mean) - (number > mean))
        self.forget()
