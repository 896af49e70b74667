"""The shape of a Llama model: a decoder with the defaults."""

from titan_like.models.decoder.config import DecoderConfig


class LlamaConfig(DecoderConfig):
    """The shape of Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""
