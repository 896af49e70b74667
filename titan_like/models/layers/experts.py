"""A layer's experts, and the router that chooses some of them for each token.

Shapes: n tokens, k experts a token, E experts. Tokens are sorted by expert once, so that each expert multiplies
consecutive rows. Nothing is padded and no token is dropped. In bfloat16 the GEMMs of all experts are one kernel and the
host never waits; in other dtypes the host loops over experts and waits once a layer, to read their numbers of rows. A
token's experts are summed over a tensor dimension, never by atomic additions, so results are deterministic.

In training a router adds up `counts` and `loss_sums` in every forward, recomputed ones too. Both are divided by the
number of tokens counted, so that recomputation changes nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.layers.mlp import GATED_ACTIVATIONS, GatedMLP

if TYPE_CHECKING:
    from titan_like.models.config import WithExperts


class Routing(NamedTuple):
    """The result of a router. A token's choices are numbered k · token and up."""

    weights: torch.Tensor  # [n, k], at least float32
    order: torch.Tensor  # int64 [n · k], the choices sorted by expert, in the order of the tokens within each
    offsets: torch.Tensor  # int32 [E], ends of each expert's choices in this order


class Router(nn.Module):
    """Chooses k experts for each token, and the weights of their sum.

    Scores are computed in float32 at least: a difference in the last bits of a 16-bit dtype would choose other experts.
    docs/experts.md defines the losses.
    """

    load: torch.Tensor  # [E], each expert's share of the previous step's tokens, which sums to 1
    bias: torch.Tensor | None  # [E], added to the scores for the choice alone
    counts: torch.Tensor  # int64 [E], tokens sent to each expert in this step
    loss_sums: torch.Tensor  # [2], of the auxiliary loss and of the squared logarithms, over these tokens
    loss_factor: torch.Tensor  # [], the loss scale over the number of tokens in the global batch, without padding

    def __init__(self, config: WithExperts) -> None:
        super().__init__()
        self.config, experts = config, config.num_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.logit_bias = nn.Parameter(torch.empty(experts)) if config.router_bias else None
        self.register_buffer("load", torch.empty(experts))
        self.register_buffer("bias", torch.empty(experts) if config.balance == "bias" else None)
        self.register_buffer("counts", torch.empty(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("loss_sums", torch.empty(2), persistent=False)
        self.register_buffer("loss_factor", torch.empty(()), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Begin a training: equal loads, no bias, nothing counted."""
        self.load.fill_(1 / self.config.num_experts)
        for buffer in (self.bias, self.counts, self.loss_sums, self.loss_factor):
            if buffer is not None:
                buffer.zero_()

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Routing:
        """[n, hidden] → which experts its tokens are sent to.

        ``padding_mask``, bool [batch, seq] with n elements, is True for padding, which is routed but never counted.
        """
        config, dtype = self.config, torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.linear()
        logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        scores = logits.sigmoid() if config.router_score == "sigmoid" else logits.softmax(1)
        if config.router_score == "sparsemixer":
            experts = self.choose(logits.detach())
            weights = self._mixed(logits, experts)
        else:
            experts = self.choose(scores.detach() if self.bias is None else scores.detach() + self.bias)
            weights = scores.gather(1, experts)
        if config.renormalize:
            weights = F.normalize(weights, p=1.0, dim=1, eps=1e-20)  # scores of sigmoids may all be almost 0
        weights = weights * config.routed_scaling
        by_expert, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(config.num_experts, device=x.device)
        offsets = torch.searchsorted(by_expert, numbers, right=True)
        routing = Routing(weights, order, offsets.to(torch.int32))
        return self._with_losses(routing, logits, scores, padding_mask) if self.training else routing

    def _mixed(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """SparseMixer's weights at inference (arXiv 2409.12136), [n, E] and the best experts [n, k] → [n, k].

        Each is a softmax over the experts that are left and almost as good as the chosen one.
        """
        left, weights = logits, []
        for expert in experts.split(1, dim=1):
            with torch.no_grad():
                best = left.gather(1, expert)
                is_less = (best - logits) / torch.maximum(logits.abs(), best) > self.config.router_margin
            weights.append(left.masked_fill(is_less, -torch.inf).softmax(1).gather(1, expert))
            left = left.scatter(1, expert, -torch.inf)
        return torch.cat(weights, 1)

    def linear(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [E, hidden] and bias [E] of the logits."""
        return self.weight, self.logit_bias

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores with the bias, [n, E] → the experts of each token, int64 [n, k]. A router of your own overrides it.

        Of several groups of consecutive experts, those with the largest sums of their two best scores, or with the
        best scores, are chosen first.
        """
        config = self.config
        if config.router_top_groups < config.router_groups:
            groups = scores.unflatten(1, (config.router_groups, -1))
            of_groups = groups.amax(2) if config.router_group_score == "max" else groups.topk(2).values.sum(2)
            best = of_groups.topk(config.router_top_groups).indices
            is_left = torch.ones_like(groups[..., :1], dtype=torch.bool).scatter(1, best[..., None], False)
            scores = groups.masked_fill(is_left, -torch.inf).flatten(1)
        return scores.topk(config.experts_per_token, dim=1).indices

    def _with_losses(
        self, routing: Routing, logits: torch.Tensor, scores: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> Routing:
        """Count the choice, and let the backward pass of the weights also compute the losses' gradients."""
        config, offsets = self.config, routing.offsets
        shares = scores / scores.sum(1, keepdim=True) if config.router_score == "sigmoid" else scores
        squares = logits.logsumexp(1).square()
        if padding_mask is not None:
            is_padding = padding_mask.flatten()
            shares, squares = shares.masked_fill(is_padding[:, None], 0), squares.masked_fill(is_padding, 0)
            offsets = F.pad((~is_padding)[routing.order // config.experts_per_token].cumsum(0), (1, 0))[offsets]
        balance = config.num_experts * (shares.sum(0) @ self.load.to(shares.dtype))
        z = squares.sum()
        with torch.no_grad():
            self.counts.add_(offsets.diff(prepend=offsets.new_zeros(1)))
            self.loss_sums.add_(torch.stack((balance, z)))
        if not self.weight.requires_grad:  # frozen under adapters: there is nothing to balance
            return routing
        loss = config.z_loss_coefficient * z
        if config.balance == "auxiliary":
            loss = loss + config.balance_coefficient * balance
        return routing._replace(weights=_AddLoss.apply(routing.weights, loss, self.loss_factor))


class _AddLoss(torch.autograd.Function):
    """Returns the weights; the backward pass gives ``loss`` the gradient ``factor``.

    In this way a loss of any layer joins the backward pass of the pipeline stage that the layer is in.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return gradient, factor.to(ctx.dtype), None


class _ByExpert(torch.autograd.Function):
    """Rows of tokens [n, hidden] → one row for each choice, sorted by expert: [n · k, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = x.shape[0]
        return x[order // (len(order) // len(x))]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].unflatten(0, (ctx.tokens, -1)).sum(1), None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


def permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows in another order: rows[order], both [rows, hidden]. ``inverse`` is the order that undoes it."""
    return _Permuted.apply(rows, order, inverse)


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """The permutation, int64 [rows], that undoes another one."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class ExpertLinear(nn.Module):
    """A linear layer for each expert.

    The matrices are stacked in one parameter, [E · out, in], of which [E, out, in] is a view, and the biases in another
    one, [E · out]. So ZeRO shards them evenly over any number of processes, and each expert's matrix is as contiguous
    as in a checkpoint of its own.
    """

    float8: Any = None  # a `titan_like.parallel.float8.Float8Experts`
    first_bias = 0  # output to which this process adds its first bias; others add the other outputs'

    def __init__(self, config: WithExperts, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.in_features, self.out_features = in_features, out_features
        self.elements_per_token = config.experts_per_token * in_features * out_features
        self.weight = nn.Parameter(torch.empty(config.num_experts * out_features, in_features))
        self.bias = nn.Parameter(torch.empty(config.num_experts * out_features)) if config.expert_bias else None
        self.num_matrices = config.num_experts  # in the whole model
        mark_stacks(self)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[rows, in], sorted by expert, and ends of each expert's rows, int32 [E] → [rows, out].

        ``offsets`` may be on the host unless `is_one_product`.
        """
        by_expert = offsets
        if len(offsets) > self.num_experts:  # linear layers of these experts compute in float8
            per_expert = len(offsets) // self.num_experts
            by_expert = offsets[per_expert - 1 :: per_expert]
        if self.float8 is not None:
            result = self.float8.linear(x, self.matrices(), offsets)
        elif self.is_one_product(x.dtype):
            result = F.grouped_mm(x, self.matrices().transpose(1, 2), offs=by_expert)
        else:
            result = expert_product(x, self.matrices(), by_expert)
        return result if self.bias is None else result + self.bias_rows(result, by_expert)

    def bias_rows(self, result: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The bias of each row's expert, [rows, out], or of the outputs of this process, and 0 for others.

        It is a GEMM with ones, so that a bias's gradient is a sum over rows in a fixed order.
        """
        biases = self.biases()  # [E, out]
        if result.dtype == torch.bfloat16 and biases.shape[1] % 8 == 0:
            ones = result.new_ones(len(result), 8)
            rows = F.grouped_mm(ones, F.pad(biases[:, None], (0, 0, 0, 7)), offs=offsets.to(result.device))
        else:
            rows = expert_product(result.new_ones(len(result), 1), biases[:, :, None], offsets)
        return F.pad(rows, (self.first_bias, result.shape[1] - rows.shape[1] - self.first_bias))

    def is_one_product(self, dtype: torch.dtype) -> bool:
        """Whether the GEMMs of all experts are one kernel, which reads ``offsets`` on the device."""
        # torch's grouped GEMM needs rows of whole 16 bytes, and can be compiled in no other dtype.
        if self.float8 is not None:
            return True
        return dtype == torch.bfloat16 and self.in_features % 8 == self.out_features % 8 == 0

    def matrices(self) -> torch.Tensor:
        """The weight by expert: [E, out, in]."""
        return self.weight.view(self.num_experts, self.out_features, self.in_features)

    def biases(self) -> torch.Tensor:
        """The biases by expert: [E, out]."""
        assert self.bias is not None
        return self.bias.view(self.num_experts, -1)


def mark_stacks(model: nn.Module) -> None:
    """Set ``num_matrices`` of each parameter that is a stack of matrices, for optimizers such as Muon.

    The attribute is lost when a parameter is replaced, so call this again after that.
    """
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            module.weight.num_matrices = module.num_matrices  # type: ignore[attr-defined]


class Experts(nn.Module):
    """A gated MLP for each expert, on its own rows."""

    def __init__(self, config: WithExperts) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.expert_ffn_hidden_size
        self.gated = GATED_ACTIVATIONS[config.activation]
        self.gate = ExpertLinear(config, hidden, ffn)
        self.up = ExpertLinear(config, hidden, ffn)
        self.down = ExpertLinear(config, ffn, hidden)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], sorted by expert, and ends of each expert's rows, int32 [E] → [rows, hidden]."""
        if not self.gate.is_one_product(x.dtype):
            offsets = offsets.cpu()  # the host waits here, not in the nine GEMMs of forward and backward
        return self.down(self.gated(self.gate(x, offsets), self.up(x, offsets)), offsets)


class SparseMLP(nn.Module):
    """The weighted sum of the chosen experts' results, plus the shared experts' result, which are one wider MLP.

    A gate may multiply what the shared experts add by a number between 0 and 1 for each token (Qwen2-MoE).
    """

    def __init__(self, config: WithExperts, router: Router | None = None) -> None:
        super().__init__()
        self.router = router or Router(config)
        self.scales_inputs = config.scale_expert_inputs
        self.experts = Experts(config)
        shared = config.shared_width
        self.shared = GatedMLP(config.hidden_size, shared, config.activation) if shared else None
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. ``padding_mask`` as in `Router.forward`."""
        tokens = x.flatten(0, 1)
        weights, order, offsets = self.router(tokens, padding_mask)
        inverse = inverse_of(order)
        rows = _ByExpert.apply(tokens, order, inverse)
        if self.scales_inputs:
            rows = (rows * permuted(weights.flatten(), order, inverse)[:, None]).to(x.dtype)
        chosen = permuted(self.experts(rows, offsets), inverse, order).view(*weights.shape, -1)  # [n, k, hidden]
        chosen = chosen if self.scales_inputs else chosen * weights[..., None]
        result = chosen.sum(1).to(x.dtype).view(x.shape)
        if self.shared is None:
            return result
        if self.shared_gate is None:
            return result + self.shared(x)
        return result + self.shared_gate(x).sigmoid() * self.shared(x)


@torch.library.custom_op("titan_like::expert_product", mutates_args=())
def expert_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each expert's rows [rows, in] times the transpose of its matrix, of [E, out, in], in a loop → [rows, out].

    It is a custom operator because the host reads ``offsets``, int32 [E], the ends of each expert's rows, which a
    compiler could not trace. They are best on the host.
    """
    result = x.new_empty(x.shape[0], weight.shape[1])
    for matrix, (start, stop) in zip(weight, pairwise([0, *offsets.tolist()]), strict=True):
        if start < stop:
            torch.mm(x[start:stop], matrix.t(), out=result[start:stop])
    return result


@expert_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("titan_like::expert_weight_gradient", mutates_args=())
def expert_weight_gradient(gradient: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[rows, out] and [rows, in] → [E, out, in], zero for an expert without rows."""
    result = x.new_zeros(len(offsets), gradient.shape[1], x.shape[1])
    for matrix, (start, stop) in zip(result, pairwise([0, *offsets.tolist()]), strict=True):
        if start < stop:
            torch.mm(gradient[start:stop].t(), x[start:stop], out=matrix)
    return result


@expert_weight_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(offsets), gradient.shape[1], x.shape[1])


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    return expert_product(gradient, weight.transpose(1, 2), offsets), expert_weight_gradient(gradient, x, offsets), None


expert_product.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
