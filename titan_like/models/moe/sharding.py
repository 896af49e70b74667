"""The family's tensor-parallel plan: that of Llama outside the MLPs. Experts are not split yet (`train.rules`)."""

from titan_like.models.llama.sharding import TENSOR_PARALLEL_PLAN as _LLAMA

_OF_MLP = "layers.*.mlp."
TENSOR_PARALLEL_PLAN = {name: style for name, style in _LLAMA.items() if not name.startswith(_OF_MLP)}
