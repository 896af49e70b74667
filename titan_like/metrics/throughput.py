"""Tokens per second, TFLOP/s and utilisation from the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from titan_like.config.schema import ActivationCheckpoint
from titan_like.metrics.flops import hardware_flops_per_token, megatron_flops_per_token, model_flops_per_token
from titan_like.models.config import TransformerConfig


@dataclass(frozen=True)
class Throughput:
    """Rates of one step. Utilisations are shares of the peak, or None if the peak is not known."""

    tokens_per_second: float
    tflops_per_device: float  # Megatron-LM's convention
    mfu_model: float | None
    mfu_causal: float | None
    hfu: float | None


@dataclass(frozen=True)
class ThroughputMeter:
    """Computes rates; holds everything that they depend on except time."""

    model: TransformerConfig
    seq_len: int
    recompute: ActivationCheckpoint
    num_devices: int
    peak_tflops: float | None
    decoder_seq_len: int = 0

    def measure(self, tokens: int, seconds: float) -> Throughput:
        """Rates of a step that took ``seconds`` for ``tokens`` tokens on all devices together."""
        per_device = tokens / seconds / self.num_devices / 1e12
        sizes, decoder = (self.model, self.seq_len), self.decoder_seq_len

        def utilisation(flops_per_token: float) -> float | None:
            return None if self.peak_tflops is None else flops_per_token * per_device / self.peak_tflops

        return Throughput(
            tokens_per_second=tokens / seconds,
            tflops_per_device=megatron_flops_per_token(*sizes, self.recompute, decoder) * per_device,
            mfu_model=utilisation(model_flops_per_token(*sizes, decoder_seq_len=decoder)),
            mfu_causal=utilisation(model_flops_per_token(*sizes, causal=True, decoder_seq_len=decoder)),
            hfu=utilisation(hardware_flops_per_token(*sizes, self.recompute, decoder)),
        )
