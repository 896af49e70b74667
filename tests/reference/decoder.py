"""A decoder by definition, in the dtype of its weights: loops over layers, heads and experts, and masks of all pairs.

It imports nothing of the product. Weights have the product's names and order of rows; ``fields`` are all fields
of a flavor. Sources are the papers that docs/families.md names and the documented behaviour of `transformers`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tests.reference.delta_net import delta_net, kimi_delta
from tests.reference.linear import Linear, Weights, linear_of
from tests.reference.rope import frequency_of, latent_factor, magnitude
from tests.reference.state_space import mamba2

Fields = Mapping[str, Any]


class Sample(NamedTuple):
    """Sequences of a batch. Documents are packed: a token sees its own document up to itself."""

    tokens: torch.Tensor  # int64 [batch, seq]
    documents: torch.Tensor  # int64 [batch, seq], number of each token's document
    positions: torch.Tensor  # int64 [batch, seq]
    labels: torch.Tensor  # int64 [batch, seq]; negative: none
    next_tokens: torch.Tensor  # int64 [batch, seq], for multi-token prediction
    next_labels: torch.Tensor


class Experts(NamedTuple):
    """What one layer's router saw of the tokens that count."""

    sent: torch.Tensor  # int64 [experts], choices
    balance: torch.Tensor  # E · Σ over experts of (previous share of the tokens · sum of this batch's scores)
    z: torch.Tensor  # Σ over tokens of logsumexp²


class Output(NamedTuple):
    """Logits of the next token and of the one after it, [batch, seq, vocab], and each router's statistics."""

    logits: torch.Tensor
    ahead: torch.Tensor | None
    experts: dict[str, Experts]

    def loss(self, fields: Fields, sample: Sample) -> torch.Tensor:
        """The loss of a step whose global batch is this one."""
        total = _mean_loss(self.logits, sample.labels)
        if self.ahead is not None:
            total = total + fields["mtp_coefficient"] * _mean_loss(self.ahead, sample.next_labels)
        coefficient = fields["balance_coefficient"] if fields["balance"] == "auxiliary" else 0.0
        for router in self.experts.values():
            total = (
                total + (coefficient * router.balance + fields["z_loss_coefficient"] * router.z) / sample.tokens.numel()
            )
        return total


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = []
    for row, label in zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label >= 0:
            losses.append(row.exp().sum().log() - row[label])
    return torch.stack(losses).mean()


def decode(fields: Fields, weights: Weights, sample: Sample, linear: Linear | None = None) -> Output:
    """Run the model. ``linear`` replaces x · Wᵀ + b of the layers, by name: adapters."""
    return _Decoder(fields, weights, sample, linear).run()


_MIXERS = {"gated_delta_net": delta_net, "kimi_delta": kimi_delta, "mamba2": mamba2}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
}


class _Decoder:
    def __init__(self, fields: Fields, weights: Weights, sample: Sample, linear: Linear | None) -> None:
        self.fields, self.weights, self.sample = fields, weights, sample
        self.linear = linear or (lambda name, x: linear_of(weights, name, x))
        self.experts: dict[str, Experts] = {}

    def run(self) -> Output:
        fields = self.fields
        x = self.embed(self.sample.tokens)
        for number in range(fields["num_layers"]):
            x = self.layer(number, x, torch.ones_like(self.sample.tokens, dtype=torch.bool))
        x = self.norm("norm", x)
        ahead = None
        if fields["mtp_layers"]:  # arXiv 2412.19437, section 2.2
            name = f"layers.{fields['num_layers']}"
            token = self.norm(f"{name}.enorm", self.embed(self.sample.next_tokens))
            both = torch.cat((token, self.norm(f"{name}.hnorm", x)), -1)
            counted = self.sample.next_labels >= 0
            ahead = self.layer(fields["num_layers"], self.linear(f"{name}.eh_proj", both), counted)
            ahead = self.logits(self.norm(f"{name}.norm", ahead))
        return Output(self.logits(x), ahead, self.experts)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights["embedding.weight"][tokens] * self.fields["embedding_scale"]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        table = self.weights["embedding.weight" if self.fields["tied_embeddings"] else "output.weight"]
        logits = self.fields["logit_scale"] * (x @ table[: self.fields["vocab_size"]].t())
        if self.fields["output_bias"]:
            logits = logits + self.weights["output_bias.bias"][: self.fields["vocab_size"]]
        cap = self.fields["final_softcap"]
        return cap * torch.tanh(logits / cap) if cap else logits

    def norm(self, name: str, x: torch.Tensor, eps: float | None = None, kind: str = "") -> torch.Tensor:
        """RMSNorm (arXiv 1910.07467) or LayerNorm (1607.06450)."""
        kind = kind or self.fields["norm"]
        weight = 1.0 if kind == "layer_no_weight" else self.weights[f"{name}.weight"]
        weight = 1 + weight if self.fields["norm_offset"] and eps is None else weight
        centered = x if kind == "rms" else x - x.mean(-1, keepdim=True)
        size = (centered**2).mean(-1, keepdim=True) + (self.fields["norm_eps"] if eps is None else eps)
        normed = centered / size.sqrt() * weight
        return normed + self.weights[f"{name}.bias"] if kind == "layer" else normed

    def norm_of_head(self, name: str, number: int, head: torch.Tensor) -> torch.Tensor:
        head = head if self.fields["norm"] == "rms" else head - head.mean(-1, keepdim=True)
        size = (head**2).mean(-1, keepdim=True) + self.fields["norm_eps"]
        return head / size.sqrt() * self.weights[f"{name}.weight"].split(head.shape[-1])[number]

    def kind_of(self, number: int) -> dict[str, Any]:
        """Window and rotation of a layer. That for multi-token prediction is like the first."""
        fields, pattern = self.fields, self.fields["layer_pattern"] or ["full"]
        name = pattern[number % len(pattern) if number < fields["num_layers"] else 0]
        of_model = {
            "window": 0,
            "chunk": 0,
            "mixer": "",
            "options": {},
            "rope_theta": fields["rope_theta"],
            "rope_scaling": fields["rope_scaling"],
        }
        return of_model | dict(fields["kinds"].get(name, {}))

    def layer(self, number: int, x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        name, kind, scale = f"layers.{number}", self.kind_of(number), self.fields["residual_scale"]
        attend = self.latent_attention if self.fields["kv_lora_rank"] else self.attention
        is_dense = not self.fields["num_experts"] or number < self.fields["num_dense_layers"]
        is_dense |= kind.get("dense", False) and number < self.fields["num_layers"]

        def attention(x: torch.Tensor) -> torch.Tensor:
            if kind["mixer"] in _MIXERS:
                return self.mixer(f"{name}.attention", kind, x)
            return attend(f"{name}.attention", kind, x)

        def mlp(x: torch.Tensor) -> torch.Tensor:
            return self.dense_mlp(f"{name}.mlp", x) if is_dense else self.sparse_mlp(f"{name}.mlp", x, counted)

        both = {"attention": attention, "mlp": mlp}
        one = {"mixer": "attention", "mlp": "mlp"}.get(kind.get("parts", "both"))
        blocks = both if one is None else {one: both[one]}
        match self.fields["block"]:
            case "pre":
                for part, block in blocks.items():
                    x = x + scale * block(self.norm(f"{name}.{part}_norm", x))
                return x
            case "post":
                for part, block in blocks.items():
                    x = x + scale * self.norm(f"{name}.{part}_norm", block(x))
                return x
            case "sandwich":
                for part, block in blocks.items():
                    result = block(self.norm(f"{name}.{part}_norm", x))
                    x = x + scale * self.norm(f"{name}.{part}_post_norm", result)
                return x
            case "parallel":
                attended = attention(self.norm(f"{name}.attention_norm", x))
                return x + scale * attended + scale * mlp(self.norm(f"{name}.mlp_norm", x))
            case "parallel_one_norm":  # arXiv 2204.02311, section 2
                normed = self.norm(f"{name}.attention_norm", x)
                return x + scale * (attention(normed) + mlp(normed))
        raise AssertionError(self.fields["block"])

    def mixer(self, name: str, kind: Fields, x: torch.Tensor) -> torch.Tensor:
        own = {key.removeprefix(f"{name}."): value for key, value in self.weights.items() if key.startswith(name)}
        linear, eps = (lambda part, x: self.linear(f"{name}.{part}", x)), self.fields["norm_eps"]
        return _MIXERS[kind["mixer"]](kind["options"], own, linear, eps, x, self.sample.documents)

    def attention(self, name: str, kind: Fields, x: torch.Tensor) -> torch.Tensor:
        fields, width = self.fields, self.fields["head_size"]
        groups, per_group = fields["num_kv_heads"], fields["num_attention_heads"] // fields["num_kv_heads"]
        rows = self.linear(f"{name}.qkv", x).split(width, -1)  # a group's queries, its key, its value, the next group's
        each = 2 if kind["options"].get("gate") else 1  # a query, and maybe its gate
        size = each * per_group + 2
        q = [rows[group * size + each * i] for group in range(groups) for i in range(per_group)]
        k = [rows[group * size + size - 2] for group in range(groups)]
        v = [rows[group * size + size - 1] for group in range(groups)]
        rotated = int(width * fields["rotary_fraction"])
        is_last = fields["norm_after_rope"] or fields["qk_norm"] == "l2"
        for step in ("clip", "rotate", "norm") if is_last else ("norm", "clip", "rotate"):
            if step == "rotate":
                q, k = ([self.rotate(head, kind, rotated) for head in heads] for heads in (q, k))
            elif step == "clip":
                if limit := fields["clip_qkv"]:
                    q, k, v = ([head.clamp(-limit, limit) for head in heads] for heads in (q, k, v))
            elif fields["qk_norm"] == "l2":  # Llama 4
                if kind["rope_theta"]:
                    size = fields["norm_eps"]
                    q, k = ([head / ((head**2).mean(-1, keepdim=True) + size).sqrt() for head in x] for x in (q, k))
            elif fields["qk_norm"] == "heads":  # Command R+ and StableLM 2
                q = [self.norm_of_head(f"{name}.q_norm", number, head) for number, head in enumerate(q)]
                k = [self.norm_of_head(f"{name}.k_norm", number, head) for number, head in enumerate(k)]
            elif fields["qk_norm"] == "head":
                q, k = ([self.norm(f"{name}.{x}_norm", head) for head in heads] for x, heads in (("q", q), ("k", k)))
            elif fields["qk_norm"] == "all":
                q = self.norm(f"{name}.q_norm", torch.cat(q, -1)).split(width, -1)
                k = self.norm(f"{name}.k_norm", torch.cat(k, -1)).split(width, -1)
        if fields["query_temperature"] and (fields["query_temperature_of"] == "all" or not kind["rope_theta"]):
            positions = self.sample.positions + fields["query_temperature_offset"]
            times = 1 + (positions // fields["query_temperature_period"]).to(x.dtype)
            q = [(1 + fields["query_temperature"] * times.log())[..., None] * head for head in q]
        scale = fields["attention_scale"] or width**-0.5
        heads = [self.attend(name, i, kind, scale, (q[i], k[i // per_group], v[i // per_group])) for i in range(len(q))]
        if each == 2:
            heads = [
                head * rows[i // per_group * size + 2 * (i % per_group) + 1].sigmoid() for i, head in enumerate(heads)
            ]
        return self.linear(f"{name}.proj", torch.cat(heads, -1))

    def latent_attention(self, name: str, kind: Fields, x: torch.Tensor) -> torch.Tensor:
        """MLA (arXiv 2405.04434, section 2.1)."""
        fields = self.fields
        nope, rope, value = (fields[f"{part}_head_size"] for part in ("nope", "rope", "value"))
        queries_from = x
        if fields["q_lora_rank"]:
            queries_from = self.norm(f"{name}.q_norm", self.linear(f"{name}.q_a", x), 1e-6, "rms")
        latent, shared_key = self.linear(f"{name}.kv_a", x).split([fields["kv_lora_rank"], rope], -1)
        latent = self.norm(f"{name}.kv_norm", latent, 1e-6, "rms")
        shared_key = self.rotate(shared_key, kind, rope)
        of_queries = self.linear(f"{name}.heads.q", queries_from).split(nope + rope, -1)
        of_keys = self.linear(f"{name}.heads.kv", latent).split(nope + value, -1)
        scale = fields["attention_scale"] or (nope + rope) ** -0.5 * latent_factor(kind["rope_scaling"])
        heads = []
        for i in range(fields["num_attention_heads"]):
            q = torch.cat((of_queries[i][..., :nope], self.rotate(of_queries[i][..., nope:], kind, rope)), -1)
            k = torch.cat((of_keys[i][..., :nope], shared_key), -1)
            heads.append(self.attend(f"{name}.heads", i, kind, scale, (q, k, of_keys[i][..., nope:])))
        return self.linear(f"{name}.heads.proj", torch.cat(heads, -1))

    def attend(
        self, name: str, head: int, kind: Fields, scale: float, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """One head, each [batch, seq, width]."""
        (q, k, v), cap = qkv, self.fields["attention_softcap"]
        scores = scale * (q @ k.transpose(1, 2))
        scores = cap * torch.tanh(scores / cap) if cap else scores
        order, documents = torch.arange(q.shape[1]), self.sample.documents
        distance = order[:, None] - order
        is_seen = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
        if kind["window"]:
            is_seen &= distance < kind["window"]
        if kind["chunk"]:
            is_seen &= order[:, None] // kind["chunk"] == order // kind["chunk"]
        weights = torch.where(is_seen, scores.exp(), 0)
        total = weights.sum(-1, keepdim=True)
        if self.fields["attention_sinks"]:
            total = total + self.weights[f"{name}.core.sinks"][head].exp()
        return weights @ v / total

    def rotate(self, x: torch.Tensor, kind: Fields, size: int) -> torch.Tensor:
        """RoPE (arXiv 2104.09864) of the first ``size`` dimensions of one head; dimension i pairs with i + size / 2."""
        if not kind["rope_theta"]:
            return x
        scaling = kind["rope_scaling"] and dict(kind["rope_scaling"])
        seq_len, parts = self.sample.tokens.shape[1], list(x.unbind(-1))
        for pair in range(size // 2):
            frequency = frequency_of(pair, size, kind["rope_theta"], scaling, seq_len)
            angle = self.sample.positions.to(x.dtype) * frequency
            cos, sin = (magnitude(scaling, seq_len) * table for table in (angle.cos(), angle.sin()))
            a, b = x[..., pair], x[..., pair + size // 2]
            parts[pair], parts[pair + size // 2] = a * cos - b * sin, b * cos + a * sin
        return torch.stack(parts, -1)

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.fields["activation"] == "clamped_swiglu":  # GPT-OSS
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return gate / (1 + (-1.702 * gate).exp()) * (up + 1)
        return _ACTIVATIONS[self.fields["activation"]](gate) * up

    def dense_mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        up = self.linear(f"{name}.up", x)
        if self.fields["activation"] == "xielu":  # arXiv 2411.13010
            numbers = ("alpha_p", "alpha_n", "beta", "eps")
            above, below, beta, eps = (self.weights[f"{name}.activation.{number}"] for number in numbers)
            above, below = (1 + above.exp()).log(), beta + (1 + below.exp()).log()
            negative = torch.where(up < eps, up, eps).exp() - 1 - up
            return self.linear(f"{name}.down", torch.where(up > 0, above * up**2, below * negative) + beta * up)
        if not self.fields["gated"]:
            return self.linear(f"{name}.down", _ACTIVATIONS[self.fields["activation"]](up))
        return self.linear(f"{name}.down", self.activate(self.linear(f"{name}.gate", x), up))

    def sparse_mlp(self, name: str, x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        fields, tokens = self.fields, x.flatten(0, 1)
        logits = tokens @ self.weights[f"{name}.router.weight"].t()
        if fields["router_bias"]:
            logits = logits + self.weights[f"{name}.router.logit_bias"]
        scores = logits.sigmoid() if fields["router_score"] == "sigmoid" else logits.softmax(-1)
        biased = scores.detach()
        if fields["balance"] == "bias":
            biased = biased + self.weights[f"{name}.router.bias"]
        chosen = [self.choose(row.tolist()) for row in biased]
        self.count(name, logits, scores, chosen, counted.flatten().tolist())
        results = []
        for number, experts in enumerate(chosen):
            token = tokens[number]
            shares = [scores[number, expert] for expert in experts]
            if fields["router_score"] == "sparsemixer":
                shares = self.mixed(logits[number], experts)
            total = sum(shares) if fields["renormalize"] else 1.0
            each = zip(experts, shares, strict=True)
            weights = [(expert, fields["routed_scaling"] * share / total) for expert, share in each]
            if fields["scale_expert_inputs"]:  # Llama 4
                weighted = [self.expert(name, expert, weight * token) for expert, weight in weights]
            else:
                weighted = [weight * self.expert(name, expert, token) for expert, weight in weights]
            results.append(torch.stack(weighted).sum(0))
        result = torch.stack(results).view_as(x)
        if fields["num_shared_experts"]:
            inner = self.activate(self.linear(f"{name}.shared.gate", x), self.linear(f"{name}.shared.up", x))
            shared = self.linear(f"{name}.shared.down", inner)
            if fields["shared_expert_gate"]:
                shared = shared / (1 + (-self.linear(f"{name}.shared_gate", x)).exp())
            result = result + shared
        return result

    def choose(self, scores: list[float]) -> list[int]:
        """The experts of one token: the best of the best groups.

        A group is as good as the sum of its two best experts (arXiv 2412.19437), or as its best (2405.04434).
        """
        counted = 1 if self.fields["router_group_score"] == "max" else 2
        size = len(scores) // self.fields["router_groups"]
        groups = [range(first, first + size) for first in range(0, len(scores), size)]
        groups.sort(key=lambda group: -sum(sorted((scores[expert] for expert in group), reverse=True)[:counted]))
        if self.fields["router_top_groups"] < self.fields["router_groups"]:
            groups = groups[: self.fields["router_top_groups"]]
        left = [expert for group in groups for expert in group]
        return sorted(left, key=lambda expert: -scores[expert])[: self.fields["experts_per_token"]]

    def mixed(self, logits: torch.Tensor, experts: list[int]) -> list[torch.Tensor]:
        """SparseMixer's weights at inference (arXiv 2409.12136)."""
        shares = []
        for number, expert in enumerate(experts):
            best, near = logits.tolist()[expert], []
            for other, logit in enumerate(logits.tolist()):
                if other not in experts[:number] and best - logit <= self.fields["router_margin"] * max(
                    abs(logit), best
                ):
                    near.append(logits[other].exp())
            shares.append(logits[expert].exp() / sum(near))
        return shares

    def expert(self, name: str, expert: int, token: torch.Tensor) -> torch.Tensor:
        """[hidden] → [hidden]."""

        def linear(part: str, x: torch.Tensor) -> torch.Tensor:
            weight = self.weights[f"{name}.experts.{part}.weight"].chunk(self.fields["num_experts"])[expert]
            if not self.fields["expert_bias"]:
                return weight @ x
            return weight @ x + self.weights[f"{name}.experts.{part}.bias"].chunk(self.fields["num_experts"])[expert]

        return linear("down", self.activate(linear("gate", token), linear("up", token)))

    def count(
        self, name: str, logits: torch.Tensor, scores: torch.Tensor, chosen: list[list[int]], counted: list[bool]
    ) -> None:
        sent = torch.zeros(self.fields["num_experts"], dtype=torch.int64)
        load = self.weights[f"{name}.router.load"]
        balance = z = logits.new_zeros(())
        for number in (number for number, is_counted in enumerate(counted) if is_counted):
            for expert in chosen[number]:
                sent[expert] += 1
            shares = scores[number] / scores[number].sum()
            balance = balance + self.fields["num_experts"] * (load * shares).sum()
            z = z + logits[number].exp().sum().log() ** 2
        self.experts[name] = Experts(sent, balance, z)
