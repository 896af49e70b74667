"""The mapping between Llama and Hugging Face's LlamaForCausalLM, one of the decoders' classes."""

from functools import partial

from titan_like.models.decoder.hugging_face import class_of, stored_parameters
from titan_like.models.decoder.hugging_face import from_fields as _from_fields
from titan_like.models.llama.config import LlamaConfig

__all__ = ["ARCHITECTURES", "class_of", "from_fields", "stored_parameters"]

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
from_fields = partial(_from_fields, kind=LlamaConfig)
