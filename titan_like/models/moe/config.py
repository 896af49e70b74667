"""The shape of a mixture-of-experts model: a decoder whose MLPs are experts."""

from pydantic import Field

from titan_like.models.decoder.config import DecoderConfig


class MoEConfig(DecoderConfig):
    """The shape of Mixtral (arXiv 2401.04088), OLMoE (2409.02060), DeepSeekMoE (2401.06066), Qwen3 MoE (2505.09388)."""

    num_experts: int = Field(gt=1, le=2**14, description="experts per layer")
    experts_per_token: int = Field(gt=0, description="experts that each token is routed to (top-k)")
