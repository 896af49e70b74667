"""Update rules by definition, for one matrix or vector at a time, in the dtype of its weights.

It imports nothing of the product. ``fields`` are those of [optimizer]. docs/optimizers.md names the papers.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


class PlainOptimizer:
    """Clips gradients and applies the rule that ``fields`` name."""

    def __init__(self, fields: Mapping[str, Any], stacks: Mapping[str, int], max_norm: float) -> None:
        """``stacks``: the number of matrices in each parameter that is a stack of them."""
        self.fields, self.stacks, self.max_norm = fields, stacks, max_norm
        self.count = 0  # updates
        self.state: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def step(self, weights: Tensors, gradients: Tensors, lr: float) -> dict[str, torch.Tensor]:
        """The weights after an update."""
        self.count += 1
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
        factor = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
        updated = {}
        for name, gradient in gradients.items():
            number = self.stacks.get(name, 1)
            pieces = zip(weights[name].chunk(number), gradient.chunk(number), strict=True)
            parts = [self._piece(name, index, *piece, factor, lr) for index, piece in enumerate(pieces)]
            updated[name] = torch.cat(parts)
        return updated

    def _piece(
        self, name: str, number: int, weight: torch.Tensor, gradient: torch.Tensor, factor: float, lr: float
    ) -> torch.Tensor:
        rule, is_matrix = self.fields["name"], weight.ndim == 2
        if rule == "muon":
            rule = "muon" if is_matrix and name.startswith("layers.") else "adamw"
        decay = self.fields["weight_decay"] if weight.ndim > 1 else 0.0
        state = self.state.setdefault((name, number), {})
        return getattr(self, f"_{rule}")(state, weight, gradient * factor, lr, decay)

    def _sgd(self, _: dict, weight: torch.Tensor, gradient: torch.Tensor, lr: float, decay: float) -> torch.Tensor:
        return weight - lr * (gradient + decay * weight)

    def _adamw(self, state: dict, weight: torch.Tensor, gradient: torch.Tensor, lr: float, decay: float):
        """arXiv 1711.05101, algorithm 2."""
        first, second = self.fields["betas"]
        m = state["m"] = first * state.get("m", 0) + (1 - first) * gradient
        v = state["v"] = second * state.get("v", 0) + (1 - second) * gradient**2
        m, v = m / (1 - first**self.count), v / (1 - second**self.count)
        return weight * (1 - lr * decay) - lr * m / (v.sqrt() + self.fields["eps"])

    def _adafactor(self, state: dict, weight: torch.Tensor, gradient: torch.Tensor, lr: float, decay: float):
        """arXiv 1804.04235: algorithms 4 and 5, without a first moment unless there is a `beta1`."""
        fields = self.fields
        kept = 1 - self.count ** -fields["decay_rate"]
        squares = gradient**2 + 1e-30
        if weight.ndim == 2:
            rows = state["rows"] = kept * state.get("rows", 0) + (1 - kept) * squares.mean(1)
            columns = state["columns"] = kept * state.get("columns", 0) + (1 - kept) * squares.mean(0)
            second = rows[:, None] * columns / rows.mean()
        else:
            second = state["v"] = kept * state.get("v", 0) + (1 - kept) * squares
        update = gradient / second.sqrt()
        update = update / max(1.0, float((update**2).mean().sqrt()) / fields["clip_threshold"])
        rate = min(1e-2, self.count**-0.5) * lr / fields["lr"] if fields["relative_step"] else lr
        if fields["scale_parameter"]:
            rate *= max(1e-3, float((weight**2).mean().sqrt()))
        update = rate * update
        if fields["beta1"] is not None:
            update = state["m"] = fields["beta1"] * state.get("m", 0) + (1 - fields["beta1"]) * update
        return weight * (1 - rate * decay) - update

    def _muon(self, state: dict, weight: torch.Tensor, gradient: torch.Tensor, lr: float, decay: float):
        """https://kellerjordan.github.io/posts/muon with Nesterov momentum; the polynomial acts on singular values."""
        fields = self.fields
        momentum = state["m"] = fields["momentum"] * state.get("m", 0) + (1 - fields["momentum"]) * gradient
        direction = fields["momentum"] * momentum + (1 - fields["momentum"]) * gradient
        left, values, right = torch.linalg.svd(direction, full_matrices=False)
        values = values / max(float(direction.norm()), 1e-7)
        for _ in range(fields["newton_schulz_steps"]):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rows, columns = weight.shape
        scale = 0.2 * math.sqrt(max(rows, columns))
        if fields["adjust_lr"] == "original":
            scale = math.sqrt(max(1.0, rows / columns))
        if fields["matrix_lr"] is not None:
            lr = lr / fields["lr"] * fields["matrix_lr"]
        return weight * (1 - lr * decay) - lr * scale * (left * values) @ right
