"""Rules that say which layouts suit a model, each of which raises a `ConfigError` that says what to change."""

from __future__ import annotations

from titan_like.config.errors import require
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import rampup_batch_sizes
from titan_like.data.lengths import sample_length
from titan_like.models.config import TransformerConfig, has_experts
from titan_like.parallel.layout import Layout
from titan_like.parallel.schedules.tables import SCHEDULES, check_schedule


def check_sequence(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a length that is above the model's maximum, that the layout cannot split, or too short for its spans."""
    length = sample_length(config, model)
    for key, size in (("training.seq_len", length.encoder), ("training.decoder_seq_len", length.decoder)):
        problem = f"the model's max_seq_len is {model.max_seq_len}; lower it or raise model.overrides.max_seq_len"
        require(size <= model.max_seq_len, key, size, problem)
        problem = f"not divisible by 2 × context_parallel_degree = {layout.context_chunks}; use a multiple of it"
        require(size % layout.context_chunks == 0, key, size, problem)
        shards = layout.sequence_shards
        cure = f"use a multiple of it, such as {-(-size // shards) * shards}"
        problem = f"not divisible by context × tensor degrees = {shards} (sequence_parallel); {cure}"
        require(size % shards == 0, key, size, problem)


def check_tensor_parallel(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a degree that does not divide the model's matrices, and sequence parallelism with a degree of 1."""
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_kv_heads": model.num_kv_heads,
        **model.split_widths,
    }
    for name, size in sizes.items():
        problem = f"does not divide the model's {name} ({size}); use a divisor of it"
        require(size % layout.tensor == 0, "parallelism.tensor_parallel_degree", layout.tensor, problem)
    rows = -(-model.padded_vocab_size // layout.tensor)  # on every process except the last, which takes the remainder
    problem = f"leaves ranks without a row of the vocabulary ({model.padded_vocab_size}); use a smaller one"
    has_rows = rows * (layout.tensor - 1) < model.padded_vocab_size
    require(has_rows, "parallelism.tensor_parallel_degree", layout.tensor, problem)
    problem = "needs tensor parallelism; raise parallelism.tensor_parallel_degree or set it to false"
    is_split = not config.parallelism.sequence_parallel or layout.tensor > 1
    require(is_split, "parallelism.sequence_parallel", True, problem)
    if layout.sequence_parallel:
        from titan_like.parallel.whole_sequences import needs_whole_sequences  # imports torch

        problem = needs_whole_sequences(model, in_blocks=True) or ""
        cure = "outside of TP blocks a rank has only a part of each; set it to false"
        require(not problem, "parallelism.sequence_parallel", True, f"{config.model.family}: {problem}, but {cure}")


def check_pipeline(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a schedule that cannot run with this number of stages, layers and microbatches."""
    check_stages(config, model, layout)
    if layout.pipeline == 1:
        return
    for size in rampup_batch_sizes(config.training):
        microbatches = size // (config.training.micro_batch_size * layout.data_parallel)
        refusal = check_schedule(layout.schedule, layout.pipeline, layout.virtual_stages, microbatches)
        require(refusal is None, *batch_setting(config, size), refusal or "")


def batch_setting(config: JobConfig, size: int) -> tuple[str, object]:
    """The setting, with its value, from which a global batch of ``size`` comes."""
    key = "global_batch_size" if size == config.training.global_batch_size else "batch_size_rampup"
    return f"training.{key}", getattr(config.training, key)


def check_stages(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Check that the schedule and the layers fit the number of stages."""
    section, pipeline = config.parallelism, layout.pipeline
    schedule, virtual = section.pipeline_schedule, section.virtual_stages_per_rank
    prescribed = SCHEDULES[schedule].stages  # on each rank
    problem = "needs pipeline_parallel_degree > 1 and an interleaved schedule; use 1 or interleaved_1f1b"
    can_interleave = pipeline > 1 and prescribed != 1
    require(virtual == 1 or can_interleave, "parallelism.virtual_stages_per_rank", virtual, problem)
    if pipeline == 1:
        problem = "there is one stage; leave it out or raise pipeline_parallel_degree"
        require(section.pipeline_layers is None, "parallelism.pipeline_layers", section.pipeline_layers, problem)
        return
    problem = "needs virtual_stages_per_rank of at least 2; raise it or use 1f1b"
    require(virtual > 1 or prescribed is not None, "parallelism.pipeline_schedule", schedule, problem)
    problem = f"{schedule} has exactly 2 stages per rank; use 2 or leave it out"
    require(virtual <= 2 or prescribed != 2, "parallelism.virtual_stages_per_rank", virtual, problem)
    stages, layers = len(layout.stage_ranks), len(model.layer_kinds)
    problem = f"{stages} stages for {layers} layers; use at most {layers} stages"
    require(stages <= layers, "parallelism.pipeline_parallel_degree", pipeline, problem)
    counts = section.pipeline_layers
    problem = f"must be {stages} numbers of at least 1 (one per stage) that sum to the {layers} layers"
    fits = counts is None or (len(counts) == stages and min(counts) > 0 and sum(counts) == layers)
    require(fits, "parallelism.pipeline_layers", counts, problem)


def check_expert_parallel(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a degree that does not divide the model's experts, and layouts that experts do not support."""
    degree, key = layout.expert, "parallelism.expert_parallel_degree"
    tensor, tensor_key = config.parallelism.expert_tensor_parallel_degree, "parallelism.expert_tensor_parallel_degree"
    if not has_experts(model):
        for own_key, own_degree in ((key, degree), (tensor_key, tensor)):
            require(own_degree <= 1, own_key, own_degree, f"{config.model.family} has no experts; use 1")
        return
    problem = f"must be 1 or tensor_parallel_degree ({layout.tensor})"
    require(tensor in (1, layout.tensor), tensor_key, tensor, problem)
    width = model.expert_ffn_hidden_size
    problem = f"does not divide the model's expert_ffn_hidden_size ({width}); use 1, or another tensor_parallel_degree"
    require(width % tensor == 0, tensor_key, tensor, problem)
    problem = f"does not divide the model's hidden_size ({model.hidden_size}), of which each rank adds a part of the "
    fits = not model.expert_bias or model.hidden_size % tensor == 0
    require(fits, tensor_key, tensor, f"{problem}experts' biases; use 1, or another tensor_parallel_degree")
    # Each stage makes the groups that gather its own matrices, and all processes must make the same groups.
    may_lack_experts = layout.pipeline > 1 and getattr(model, "num_dense_layers", 0) > 0
    problem = "muon does not support it in a pipeline of layers with and without experts; use 1, or adamw"
    require(tensor == 1 or config.optimizer.name != "muon" or not may_lack_experts, tensor_key, tensor, problem)
    problem = f"does not divide the model's num_experts ({model.num_experts}); use a divisor of it"
    require(model.num_experts % degree == 0, key, degree, problem)
    ranks = layout.token_shards // layout.expert_tensor
    factors = f"shard × context × tensor = {layout.shard}·{layout.context}·{layout.tensor} = {ranks}"
    factors = factors if tensor == 1 else f"shard × context = {layout.shard}·{layout.context} = {ranks}"
    require(ranks % degree == 0, key, degree, f"does not divide {factors}; use a divisor of it")
    problem = "MoE with tensor parallelism needs sequence parallelism; set it to true"
    require(layout.tensor == 1 or layout.sequence_parallel, "parallelism.sequence_parallel", False, problem)
    problem = f"does not fit float8 experts with tensor_parallel_degree = {layout.tensor}, which keep the rows of each "
    problem += "microbatch together; use a divisor or a multiple of it, or set float8.enable to false"
    fits = degree % layout.tensor == 0 or layout.tensor % degree == 0
    require(fits or not config.float8.enable, key, degree, problem)
    problem = "does not support float8; use 1, or set float8.enable to false"
    require(tensor == 1 or not config.float8.enable, tensor_key, tensor, problem)
    # FSDP2 gathers split experts within the layer, which torch's selective checkpoints do not expect to recompute.
    problem = 'does not work with split experts or tensor parallelism; use "experts", "full" or "none"'
    works = not layout.splits_experts or config.activation_checkpoint.mode != "selective"
    require(works, "activation_checkpoint.mode", "selective", problem)


def check_context_parallel(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse context parallelism, or the method asked for, with a model that it cannot run."""
    degree, method = layout.context, config.parallelism.context_parallel_method
    if degree == 1:
        return
    dropout, family, key = getattr(model, "dropout", 0), config.model.family, "parallelism.context_parallel_degree"
    require(dropout == 0, key, degree, f"does not support dropout; set model.overrides.dropout = 0 (it is {dropout})")
    problem = f"does not support heads for pairs and choices; use 1, or {family} without that head"
    require({"pair", "choice"}.isdisjoint(model.predictions), key, degree, problem)
    problem = "does not support float8; use 1, or set float8.enable to false"
    require(not config.float8.enable, key, degree, problem)
    key, problem = "parallelism.context_parallel_method", f"does not support the position biases of {family}"
    problem = f'{problem}; use "all_gather"'
    require(not model.has_decoder or method not in ("ulysses", "ring"), key, method, problem)
    heads = model.num_kv_heads // layout.tensor
    problem = f"needs a multiple of {degree} key-value heads on each rank, not {heads}; use"
    problem = f'{problem} a divisor as context_parallel_degree, or "all_gather" or "ring"'
    require(method != "ulysses" or heads % degree == 0, key, method, problem)
    from titan_like.parallel.whole_sequences import needs_whole_sequences  # imports torch

    problem = needs_whole_sequences(model, in_blocks=False) or ""
    cure = "a rank has only its CP shard of each, and AttentionCore alone sees the others; use 1 (docs/families.md)"
    require(not problem, "parallelism.context_parallel_degree", degree, f"{family}: {problem}, but {cure}")
