"""The mapping between mixtures of experts and Hugging Face's classes, some of the decoders'.

The norm of queries and keys decides which: Mixtral has none, Qwen3 one over each head, OLMoE one over all heads.
"""

from functools import partial

from titan_like.models.decoder.hugging_face import class_of, stored_parameters
from titan_like.models.decoder.hugging_face import from_fields as _from_fields
from titan_like.models.moe.config import MoEConfig

__all__ = ["ARCHITECTURES", "class_of", "from_fields", "stored_parameters"]

ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM"}
from_fields = partial(_from_fields, kind=MoEConfig)
