"""Rules about layouts and models. Each raises a `ConfigError` with a hint if it is broken."""

from titan_like.config.errors import refuse, require
from titan_like.config.schema import JobConfig
from titan_like.data.loading.batch_size import rampup_batch_sizes
from titan_like.data.loading.lengths import sample_length
from titan_like.models.config import TransformerConfig, has_experts
from titan_like.parallel.layout import Layout
from titan_like.parallel.schedules.tables import SCHEDULES, check_schedule


def check_sequence(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a length that is above the model's maximum, that the layout cannot split, or too short for its spans."""
    length = sample_length(config, model)
    for key, size in (("training.seq_len", length.encoder), ("training.decoder_seq_len", length.decoder)):
        reason = f"the model's max_seq_len is {model.max_seq_len}; lower it or raise model.overrides.max_seq_len"
        require(size <= model.max_seq_len, key, size, reason)
        reason = f"not divisible by 2 × context_parallel_degree = {layout.context_chunks}; use a multiple of it"
        require(size % layout.context_chunks == 0, key, size, reason)
        shards = layout.sequence_shards
        hint = f"use a multiple of it, such as {-(-size // shards) * shards}"
        reason = f"not divisible by context × tensor degrees = {shards} (sequence_parallel); {hint}"
        require(size % shards == 0, key, size, reason)


def check_tensor_parallel(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a degree that does not divide the model's matrices, and sequence parallelism with a degree of 1."""
    sizes = {"num_attention_heads": model.num_attention_heads, **model.split_widths}
    shares_heads = layout.ranks_per_kv_head(model.num_kv_heads) > 1
    sizes |= {} if shares_heads else {"num_kv_heads": model.num_kv_heads}
    for name, size in sizes.items():
        reason = f"does not divide the model's {name} ({size}); use a divisor of it"
        require(size % layout.tensor == 0, "parallelism.tensor_parallel_degree", layout.tensor, reason)
    if shares_heads:
        check_shared_heads(config, model, layout)
    if layout.tensor > 1:
        model.check_tensor_parallel()
    rows = -(-model.padded_vocab_size // layout.tensor)  # on every process except the last, which takes the remainder
    refuse(config,
        (rows * (layout.tensor - 1) >= model.padded_vocab_size, "parallelism.tensor_parallel_degree",
         f"leaves ranks without a row of the vocabulary ({model.padded_vocab_size}); use a smaller one"),
        (config.parallelism.sequence_parallel and layout.tensor == 1, "parallelism.sequence_parallel",
         "needs tensor parallelism; raise parallelism.tensor_parallel_degree or set it to false"))  # fmt: skip
    if layout.sequence_parallel:
        from titan_like.parallel.whole_sequences import needs_whole_sequences  # imports torch

        reason = needs_whole_sequences(model, in_blocks=True) or ""
        hint = "outside of TP blocks a rank has only a part of each; set it to false"
        require(not reason, "parallelism.sequence_parallel", True, f"{config.model.family}: {reason}, but {hint}")


def check_shared_heads(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse more tensor ranks than key-value heads where they cannot share them."""
    ranks, owner = layout.ranks_per_kv_head(model.num_kv_heads), model.owner_of_kv_heads
    key, reason = (
        "parallelism.tensor_parallel_degree",
        f"does not divide the model's num_kv_heads ({model.num_kv_heads})",
    )
    refuse(config,
        (owner, key, f"{reason}, and {owner} does not support several ranks per key-value head; use a divisor of it"),
        (layout.tensor % model.num_kv_heads, key, f"{reason}; use a divisor or a multiple of it"),
        (model.head_dim % ranks, key,
         f"gives {ranks} ranks to each key-value head, which do not divide its head_dim ({model.head_dim}); use a "
         "smaller one"))  # fmt: skip


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
    section, pipeline, counts = config.parallelism, layout.pipeline, config.parallelism.pipeline_layers
    schedule, virtual = section.pipeline_schedule, section.virtual_stages_per_rank
    prescribed = SCHEDULES[schedule].stages  # on each rank
    stages, layers = len(layout.stage_ranks), len(model.layer_kinds)
    refuse(config,
        (virtual > 1 and (pipeline == 1 or prescribed == 1), "parallelism.virtual_stages_per_rank",
         "needs pipeline_parallel_degree > 1 and an interleaved schedule; use 1 or interleaved_1f1b"),
        (pipeline == 1 and counts is not None, "parallelism.pipeline_layers",
         "there is one stage; leave it out or raise pipeline_parallel_degree"),
        (pipeline > 1 and virtual == 1 and prescribed is None, "parallelism.pipeline_schedule",
         "needs virtual_stages_per_rank of at least 2; raise it or use 1f1b"),
        (virtual > 2 and prescribed == 2, "parallelism.virtual_stages_per_rank",
         f"{schedule} has exactly 2 stages per rank; use 2 or leave it out"),
        (stages > layers, "parallelism.pipeline_parallel_degree",
         f"{stages} stages for {layers} layers; use at most {layers} stages"),
        (counts is not None and (len(counts) != stages or min(counts) < 1 or sum(counts) != layers),
         "parallelism.pipeline_layers",
         f"must be {stages} numbers of at least 1 (one per stage) that sum to the {layers} layers"))  # fmt: skip


def check_expert_parallel(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse a degree that does not divide the model's experts, and layouts that experts do not support."""
    degree, key = layout.expert, "parallelism.expert_parallel_degree"
    tensor, tensor_key = config.parallelism.expert_tensor_parallel_degree, "parallelism.expert_tensor_parallel_degree"
    if not has_experts(model):
        for own_key, own_degree in ((key, degree), (tensor_key, tensor)):
            require(own_degree <= 1, own_key, own_degree, f"{config.model.family} has no experts; use 1")
        return
    width, hidden, experts = model.expert_ffn_hidden_size, model.hidden_size, model.num_experts
    float8, selective = config.float8.enable, config.activation_checkpoint.mode == "selective"
    # Each stage makes the groups that gather its own matrices, and all processes must make the same groups.
    may_lack_experts = layout.pipeline > 1 and len(model.dense_layers) > 0
    ranks = layout.token_shards // layout.expert_tensor
    factors = f"shard × context × tensor = {layout.shard}·{layout.context}·{layout.tensor} = {ranks}"
    factors = factors if tensor == 1 else f"shard × context = {layout.shard}·{layout.context} = {ranks}"
    refuse(config,
        (tensor not in (1, layout.tensor), tensor_key, f"must be 1 or tensor_parallel_degree ({layout.tensor})"),
        (width % tensor, tensor_key,
         f"does not divide the model's expert_ffn_hidden_size ({width}); use 1, or another tensor_parallel_degree"),
        (model.expert_bias and hidden % tensor, tensor_key,
         f"does not divide the model's hidden_size ({hidden}), of which each rank adds a part of the experts' biases; "
         "use 1, or another tensor_parallel_degree"),
        (tensor > 1 and config.optimizer.name == "muon" and may_lack_experts, tensor_key,
         "muon does not support it in a pipeline of layers with and without experts; use 1, or adamw"),
        (experts % degree, key, f"does not divide the model's num_experts ({experts}); use a divisor of it"),
        (ranks % degree, key, f"does not divide {factors}; use a divisor of it"),
        (layout.tensor > 1 and not layout.sequence_parallel, "parallelism.sequence_parallel",
         "MoE with tensor parallelism needs sequence parallelism; set it to true"),
        (float8 and degree % layout.tensor and layout.tensor % degree, key,
         f"does not fit float8 experts with tensor_parallel_degree = {layout.tensor}, which keep the rows of each "
         "microbatch together; use a divisor or a multiple of it, or set float8.enable to false"),
        (float8 and tensor > 1, tensor_key, "does not support float8; use 1, or set float8.enable to false"),
        # FSDP2 gathers split experts within the layer, which torch's selective checkpoints do not expect to recompute.
        (selective and layout.splits_experts, "activation_checkpoint.mode",
         'does not work with split experts or tensor parallelism; use "experts", "full" or "none"'))  # fmt: skip


def check_context_parallel(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse context parallelism, or the method asked for, with a model that it cannot run."""
    degree, method = layout.context, config.parallelism.context_parallel_method
    if degree == 1:
        return
    from titan_like.parallel.whole_sequences import needs_whole_sequences  # imports torch

    dropout, family = getattr(model, "dropout", 0), config.model.family
    heads = max(1, model.num_kv_heads // layout.tensor)  # of keys and values on each rank
    degree_key, method_key = "parallelism.context_parallel_degree", "parallelism.context_parallel_method"
    needs_whole = needs_whole_sequences(model, in_blocks=False)
    refuse(config,
        (dropout, degree_key, f"does not support dropout; set model.overrides.dropout = 0 (it is {dropout})"),
        ({"pair", "choice"} & {*model.predictions}, degree_key,
         f"does not support heads for pairs and choices; use 1, or {family} without that head"),
        (config.float8.enable, degree_key, "does not support float8; use 1, or set float8.enable to false"),
        (model.has_decoder and method in ("ulysses", "ring"), method_key,
         f'does not support the position biases of {family}; use "all_gather"'),
        (method == "ulysses" and heads % degree, method_key,
         f"needs a multiple of {degree} key-value heads on each rank, not {heads}; use a divisor as "
         'context_parallel_degree, or "all_gather" or "ring"'),
        (needs_whole, degree_key,
         f"{family}: {needs_whole}, but a rank has only its CP shard of each, and AttentionCore alone sees the others; "
         "use 1 (docs/families.md)"))  # fmt: skip
