"""A Llama is a decoder with the defaults. Families of one's own extend it under these names."""

from titan_like.models.decoder.model import Decoder as Llama
from titan_like.models.decoder.model import DecoderLayer as LlamaLayer
from titan_like.models.decoder.model import build

__all__ = ["Llama", "LlamaLayer", "build"]
