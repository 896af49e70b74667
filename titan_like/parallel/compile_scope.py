"""What a compiled graph holds: one layer, or the whole model. Imports no torch."""

from collections.abc import Iterator
from typing import Literal

from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.parallel.layout import Layout

# With "auto", models that the host may limit, and whose cold compilation takes less than a minute on one core.
MOST_LAYERS = 24
MOST_PARAMETERS = 10**9


def compile_scope(config: JobConfig, model: TransformerConfig, layout: Layout) -> Literal["layers", "model"]:
    """What `compile.scope` means for a run. "auto" keeps what several processes overlap with the backward pass."""
    if config.compile.scope != "auto":
        return config.compile.scope
    is_small = len(model.layer_kinds) <= MOST_LAYERS and model.num_parameters() <= MOST_PARAMETERS
    is_our_own = all(kind.__module__.startswith("titan_like.") for kind in (type(model), *model.named_classes))
    # A GPU's masks of blocks are made outside of layers. No graph has held them on one yet.
    cores = (core for kind in model.parts.kinds for core in kind.cores)
    has_blocks = any(core.window or core.has_softcap for core in cores) or getattr(model, "attention_sinks", False)
    has_blocks |= config.data.reset_attention_mask
    fits = is_small and is_our_own and layout.num_processes == 1 and not has_blocks
    return "model" if fits and not any(applies for applies, _ in needs_layers(config, layout)) else "layers"


def needs_layers(config: JobConfig, layout: Layout) -> Iterator[tuple[bool, str]]:
    """Whether each of the things applies that one graph cannot hold, and a message that names it."""
    parallelism, section = config.parallelism, config.activation_checkpoint
    degrees = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context}
    degrees |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
    for name, degree in degrees.items():
        yield degree > 1, f"does not support parallelism.{name}_parallel_degree = {degree}"
    shards = parallelism.zero_stage >= 2 and layout.num_processes > 1
    yield shards, f"does not support ZeRO {parallelism.zero_stage}, which communicates between layers"
    yield section.mode == "budget", 'does not support activation_checkpoint.mode = "budget", a share of each layer'
    yield config.float8.enable, "does not support float8.enable"
    yield section.offload, "does not support activation_checkpoint.offload, which works between layers"


def compile_seconds(scope: Literal["layers", "model"], num_layers: int) -> int:
    """CPU seconds that the first step compiles with empty caches, as measured for GPT and Llama without a GPU."""
    return 30 if scope == "layers" else round(2.6 + 0.17 * num_layers) * 10
