"""The shape of a mixture-of-experts model: a Llama whose MLPs are experts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from titan_like.models.config import WithHeadSize
from titan_like.models.llama.config import LlamaConfig


class MoEConfig(LlamaConfig, WithHeadSize):  # in this order: pydantic takes defaults from the first base
    """The shape of Mixtral (arXiv 2401.04088), OLMoE (2409.02060), DeepSeekMoE (2401.06066) and Qwen3 MoE (2505.09388).

    Raises:
        pydantic.ValidationError: as for every `LlamaConfig`, or the numbers of experts or of layers do not fit.
    """

    not_in_weights: ClassVar = LlamaConfig.not_in_weights | {
        "balance", "balance_coefficient", "bias_update_rate", "z_loss_coefficient"
    }  # fmt: skip

    num_experts: int = Field(gt=1, le=2**14, description="experts per layer")
    experts_per_token: int = Field(gt=0, description="experts that each token is routed to (top-k)")
    expert_ffn_hidden_size: int = Field(0, ge=0, le=2**23, description="width of one expert; 0 means ffn_hidden_size")
    num_shared_experts: int = Field(0, ge=0, le=2**10, description="number of shared experts (fused into one MLP)")
    num_dense_layers: int = Field(0, ge=0, description="first layers with a dense MLP of ffn_hidden_size")
    qk_norm: Literal["none", "head", "all"] = Field(
        "none", description="RMSNorm of queries and keys: of each head (Qwen3) or of all heads together (OLMoE)"
    )
    router_score: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="router scores: softmax over all experts, or the sigmoid of each logit"
    )
    renormalize: bool = Field(True, description="normalise the weights of a token's experts to sum to 1")
    routed_scaling: float = Field(1.0, gt=0, le=1e6, description="factor on the experts' weights, after renormalize")
    balance: Literal["none", "auxiliary", "bias"] = Field(
        "auxiliary", description="load balancing: an auxiliary loss, a bias on the scores for the choice alone, or none"
    )
    balance_coefficient: float = Field(0.01, ge=0, le=1e6, description="auxiliary loss coefficient")
    bias_update_rate: float = Field(
        0.001, ge=0, le=1e6, description="step by which the biases change after each update"
    )
    z_loss_coefficient: float = Field(0.0, ge=0, le=1e6, description="router z-loss coefficient")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        filled = super()._fill_defaults(values)  # type: ignore[operator]
        filled["expert_ffn_hidden_size"] = filled.get("expert_ffn_hidden_size") or filled["ffn_hidden_size"]
        if not filled.get("num_dense_layers"):  # no MLP has the width of dense ones
            filled["ffn_hidden_size"] = filled["expert_ffn_hidden_size"]
        return filled

    @model_validator(mode="after")
    def _check_head_dim(self) -> MoEConfig:
        if self.head_size % 2:
            raise ValueError(
                f"head_size {self.head_size} is odd, but rotary positions need pairs of dimensions; make it even"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> MoEConfig:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}; choose less"
            )
        if self.experts_per_token == 1 and self.renormalize:
            raise ValueError(
                "experts_per_token 1 with renormalize gives every expert the weight 1, from which the router learns "
                "nothing; set renormalize to false"
            )
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers {self.num_dense_layers} of num_layers {self.num_layers} leave no layer with "
                "experts; choose less, or the family llama"
            )
        return self

    @property
    def split_widths(self) -> dict[str, int]:
        """Tensor parallelism splits the MLPs of dense layers, and shared experts."""
        widths = {"ffn_hidden_size": self.ffn_hidden_size} if self.num_dense_layers else {}
        return widths | {"width of shared experts": self.num_shared_experts * self.expert_ffn_hidden_size}

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Dense layers, if there are any, and layers with experts."""
        counts = self.num_dense_layers, self.num_layers - self.num_dense_layers
        return counts if counts[0] else counts[1:]

    @property
    def active_parameters(self) -> int:
        """Trainable parameters, except those of experts that a token is not sent to."""
        expert = 3 * self.hidden_size * self.expert_ffn_hidden_size
        unused = (self.num_layers - self.num_dense_layers) * (self.num_experts - self.experts_per_token)
        return self.num_parameters() - unused * expert

    def with_layers(self, num_layers: int) -> dict[str, int]:
        """One dense layer, if there are any, and the others with experts."""
        return {"num_layers": num_layers, "num_dense_layers": min(self.num_dense_layers, 1)}

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Few, small experts. Heads together stay wider or narrower than the hidden states."""
        return super().shrunk(seq_len) | {
            "num_experts": min(self.num_experts, 5),  # odd, so that mistakes in their order show
            "experts_per_token": min(self.experts_per_token, 2),
            "expert_ffn_hidden_size": 24,
            **({} if self.num_dense_layers else {"ffn_hidden_size": 24}),
            "num_shared_experts": min(self.num_shared_experts, 2),
            "head_size": 32 if self.attention_size > self.hidden_size else 0,
        }
