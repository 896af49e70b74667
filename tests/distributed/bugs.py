"""Layouts, and the planted bugs with what shows them."""

from pathlib import Path

from tests.distributed.mutations import (
    context,
    dropout,
    encoder_decoder,
    experts,
    float8,
    gradients,
    latent,
    layers,
    linear,
    lora,
    masks,
    optimizers,
    pairs,
    runs,
    spans,
    updates,
    windows,
)
from titan_like.verify.compare import DROPOUT, EXACT, RESUME, SINGLE, Row
from titan_like.verify.processes import Prepare

REPO = Path(__file__).parents[2]
GPT, LLAMA = (str(REPO / f"train_configs/debug_{family}.toml") for family in ("gpt", "llama"))
ONE = ["--parallelism.data_parallel_shard_degree", "1"]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", *ONE]
DATA = ["--parallelism.data_parallel_shard_degree", "2"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2", *ONE]
SEQUENCE = [*TENSOR, "--parallelism.sequence_parallel", "true"]
ZERO_3 = [*DATA, "--parallelism.zero_stage", "3"]
ZERO_0 = [*DATA, "--parallelism.zero_stage", "0"]
ZERO_1 = [*DATA, "--parallelism.zero_stage", "1"]
HSDP = [
    *["--parallelism.data_parallel_replicate_degree", "2", "--training.global_batch_size", "16"],
    *[*DATA, "--parallelism.zero_stage", "2"],
]
INTERLEAVED = [
    *["--parallelism.pipeline_schedule", "interleaved_1f1b", "--parallelism.virtual_stages_per_rank", "2"],
    *PIPELINE,
]
THREE_VIRTUAL = [
    *["--model.overrides.num_layers", "6", "--training.global_batch_size", "16", *INTERLEAVED[:2], *PIPELINE],
    *["--parallelism.virtual_stages_per_rank", "3"],
]
ZERO_BUBBLE = ["--parallelism.pipeline_schedule", "zbv_zero_bubble", "--training.global_batch_size", "32", *PIPELINE]
ASYNCHRONOUS = ["--checkpoint.async", "true", *ONE]
TWELVE = [*DATA, "--training.global_batch_size", "48"]  # microbatches, of two processes
ACCUMULATION = ["--training.global_batch_size", "16", *ONE]
RECOMPUTATION = ["--activation_checkpoint.mode", "full", *ONE]
BUDGET = ["--activation_checkpoint.mode", "budget", "--activation_checkpoint.budget"]
OFFLOAD = ["--activation_checkpoint.offload", "true"]
LLAMA_TENSOR = ["--job.config_file", LLAMA, "--parallelism.zero_stage", "0", *TENSOR]
LLAMA_TENSOR_4 = [*LLAMA_TENSOR, "--parallelism.tensor_parallel_degree", "4"]  # two ranks for each key-value head
LORA = ["--job.config_file", LLAMA, "--lora.rank", "4", "--parallelism.zero_stage", "0"]
ADAPTER_DROPOUT = [*LORA, "--lora.dropout", "0.1"]
LLAMA_SEQUENCE = [*LLAMA_TENSOR, "--parallelism.sequence_parallel", "true"]

CONTEXT = ["--job.config_file", LLAMA, "--parallelism.context_parallel_degree", "2"]
RING, ULYSSES = ([*CONTEXT, "--parallelism.context_parallel_method", method, *ONE] for method in ("ring", "ulysses"))
GATHER = [*CONTEXT, "--parallelism.context_parallel_method", "all_gather", *ONE]
FOUR, NO_DROPOUT = ["--parallelism.context_parallel_degree", "4"], ["--model.overrides.dropout", "0"]
GROUPS = ["--model.overrides.num_kv_heads", "4"]

PADDING = ["--parallelism.tensor_parallel_degree", "4", *ONE]
FLOAT16, BFLOAT16 = (["--training.dtype", dtype, *ONE] for dtype in ("float16", "bfloat16"))
THREE_MICROBATCHES = [*BFLOAT16, "--training.global_batch_size", "32"]
RAMPUP = ["--training.batch_size_rampup", "[8,8,64]", "--training.global_batch_size", "32", *ONE]
COMPILED = ["--compile.enable", "true", *ONE]
DECAY = ["--lr_scheduler.decay_steps", "400", *ONE]

DOCUMENTS = [
    *["--data.reset_position_ids", "true", "--data.reset_attention_mask", "true"],
    *["--data.eod_mask_loss", "true", "--data.prefix_lm", "true"],
]
LLAMA_MASKS = ["--job.config_file", LLAMA, *DOCUMENTS]
BERT = ["--job.config_file", str(REPO / "train_configs/debug_bert.toml")]
BERT_LAYOUT = [*PIPELINE, "--parallelism.tensor_parallel_degree", "2", "--parallelism.sequence_parallel", "true"]
T5 = ["--job.config_file", str(REPO / "train_configs/debug_t5.toml")]
PAIRS = ["--job.config_file", str(REPO / "train_configs/debug_bert_pairs.toml")]
RACE = ["--job.config_file", str(REPO / "train_configs/race.toml")]
NEXT = [*PAIRS, "--data.sentence_objective", "next_sentence"]
# Rotary positions are relative, so they show only where tokens see other documents.
POSITIONS = ["--job.config_file", LLAMA, "--data.reset_position_ids", "true"]

MOE = ["--job.config_file", str(REPO / "train_configs/debug_moe.toml")]
CHATS = ["--data.dataset", "conversations", "--data.paths", '["chats.jsonl"]', *DOCUMENTS[:4]]
BIASED = ["--model.overrides.balance", "bias", "--model.overrides.router_score", "sigmoid"]
SHARED = ["--model.overrides.num_shared_experts", "1", "--model.overrides.num_dense_layers", "1"]
EXPERTS = [*MOE, "--parallelism.expert_parallel_degree", "2"]
SPLIT_EXPERTS = [*MOE, *SEQUENCE, "--parallelism.expert_tensor_parallel_degree", "2"]
EXPERTS_OF_FOUR = [*EXPERTS, "--parallelism.data_parallel_shard_degree", "4", "--training.global_batch_size", "16"]
DECODER, PARALLEL, OTHER_KINDS = (
    ["--job.config_file", LLAMA, "--model.family", "decoder", "--model.flavor", flavor]
    for flavor in ("debug", "debug_parallel", "debug_kinds")
)
GRANITE = ["--job.config_file", LLAMA, "--model.family", "decoder", "--model.flavor", "granite4_h_small"]
LINEAR = ["--job.config_file", LLAMA, "--model.family", "decoder", "--model.flavor", "debug_linear"]
LATENT = [*MOE, "--model.family", "decoder", "--model.flavor", "debug_latent"]
BIASES = [*MOE, "--model.family", "decoder", "--model.flavor", "debug_biases"]
Z_LOSS = ["--model.overrides.z_loss_coefficient", "0.1"]

KINDS = ["--model.overrides.layer_pattern", '["near","near","full"]', "--model.overrides.kinds", "{near={window=24}}"]
TURNS = [*KINDS[:1], '["near","full"]', *KINDS[2:]]  # as in Gemma 2
CAPPED = ["--model.overrides.attention_softcap", "2"]
SINKS = ["--model.overrides.attention_sinks", "true"]
WINDOWS = [*KINDS, *CAPPED, *SINKS]  # layers take turns; every second one of four stages is the other kind

FLOAT8 = ["--float8.enable", "true"]
FLOAT8_ROWS = [*FLOAT8, "--float8.recipe", "rowwise"]
FLOAT8_EXPERTS = [*FLOAT8, "--float8.filter", '["layers.*.attention"]']

ADAFACTOR, MUON = (["--optimizer.name", name] for name in ("adafactor", "muon"))

LLAMA_ONE, LLAMA_STAGES = (["--job.config_file", LLAMA, *layout] for layout in (ONE, PIPELINE))
REDUCED_IN_BFLOAT16 = [*ZERO_1, *BFLOAT16[:2], "--training.reduce_dtype", "bfloat16"]
MANY_MASKED = [*PAIRS, "--data.mlm_probability", "0.5", *ONE]
PP, TP, CP, ETP = "pipeline_parallel", "tensor_parallel", "context_parallel", "expert_tensor_parallel"
CORE, CROSS = "layers.0.attention.core", "layers.3.cross_attention:"

# Each bug with a layout that shows it, the axis at fault, the row of the first difference, and how the name of the
# parameter or module at fault begins. `verify` finds those of an axis. Those of one_process are found by
# tests/reference/test_training.py, which lists a few more in `BY_TESTS`. Those of data are in
# tests/reference/test_samples.py and tests/unit/test_draws.py, those of other batches in
# tests/unit/test_resumed_length.py.
BUGS = [
    (gradients.tied_tables_not_summed, PIPELINE, "pipeline_parallel", Row.GRADIENT, "embedding.weight"),
    (gradients.norm_of_one_stage, PIPELINE, "pipeline_parallel", Row.NORM, ""),
    (gradients.last_microbatch_dropped, PIPELINE, "pipeline_parallel", Row.GRADIENT, "the loss"),
    (gradients.last_stage_not_updated, PIPELINE, "pipeline_parallel", Row.WEIGHT, "embedding.weight"),
    (layers.same_start_on_every_stage, PIPELINE, "pipeline_parallel", Row.INITIAL, "layers."),
    (runs.validation_without_last_microbatch, PIPELINE, "pipeline_parallel", Row.VALIDATION, ""),
    (gradients.gradient_never_sent, PIPELINE, "pipeline_parallel", Row.RUNS, ""),
    (updates.bad_gradients_known_to_their_holder, PIPELINE, "pipeline_parallel", Row.SKIPPED, ""),
    (gradients.receives_never_awaited, INTERLEAVED, "pipeline_parallel", Row.RUNS, ""),
    (layers.stages_after_the_fourth_in_reverse, THREE_VIRTUAL, "pipeline_schedule", Row.LOSS, "layers."),
    (gradients.weight_products_of_one_microbatch_lost, ZERO_BUBBLE, "pipeline_schedule", Row.GRADIENT, "layers."),
    (gradients.third_samples_of_microbatches_lost, DATA, "one_process", Row.LOSS, "the loss"),
    (layers.rotary_table_ends_at_128, LLAMA_ONE, "one_process", Row.LARGE_LOSS, CORE),
    (layers.rotary_table_of_later_stages_ends_at_128, LLAMA_STAGES, PP, Row.LARGE_LOSS, "layers.2.attention.core"),
    (layers.learned_positions_end_at_128, DATA, "one_process", Row.LARGE_LOSS, "position"),
    (gradients.tokens_of_one_process, DATA, "data_parallel", Row.LOSS, "the loss"),
    (gradients.gradients_averaged_over_data, DATA, "data_parallel", Row.GRADIENT, "norm.bias"),
    (runs.ends_before_its_first_step, DATA, "one_process", Row.RUNS, ""),
    (runs.crash_at_the_end, DATA, "data_parallel", Row.ENDS, ""),
    (runs.data_of_one_process_shifted, ZERO_3, "data_parallel", Row.SAMPLES, ""),
    (gradients.one_shard_not_updated, ZERO_1, "zero_stage", Row.WEIGHT, "embedding.weight"),
    (updates.bad_gradients_known_to_their_holder, ZERO_1, "zero_stage", Row.SKIPPED, ""),
    (gradients.replicas_not_summed, HSDP, "replicas", Row.GRADIENT, "norm.bias"),
    (gradients.loss_times_microbatches, ACCUMULATION, "accumulation", Row.GRADIENT, "the loss"),
    (gradients.microbatches_after_the_fourth_lost, TWELVE, "accumulation", Row.LOSS, ""),
    (context.positions_by_rank, GATHER, "context_parallel", Row.LOSS, "layers.0.attention.core"),
    (context.mask_by_local_position, [*GATHER, *DOCUMENTS], "context_parallel", Row.LOSS, "layers.0.attention.core"),
    (context.labels_of_the_shard_shifted, GATHER, "context_parallel", Row.LOSS, "the loss"),
    (context.chunks_swapped, GATHER, "context_parallel", Row.LOSS, "layers.0.attention.core"),
    (context.keys_gradient_of_the_last_rank_dropped, GATHER, "context_parallel", Row.GRADIENT, "layers."),
    (context.heads_come_back_in_reverse, [*ULYSSES, *GROUPS], "context_parallel", Row.LOSS, "layers.0.attention.core"),
    (context.losses_counted_by_each, GATHER, "context_parallel", Row.LOSS, "the loss"),
    (context.gradients_summed_over_data_alone, [*GATHER, *ZERO_0[2:]], "context_parallel", Row.GRADIENT, "output"),
    (context.gradients_averaged_over_shards, [*GATHER, *ZERO_3[2:]], "zero_stage", Row.GRADIENT, "output"),
    (context.attention_merged_in_bfloat16, [*GATHER, *BFLOAT16[:2]], "context_parallel", Row.SUMS, "attention"),
    (context.ring_gradients_in_bfloat16, [*RING, *BFLOAT16[:2]], "context_parallel", Row.SUMS, "gradients of keys"),
    (context.backward_ring_stands_still, RING, "context_parallel", Row.GRADIENT, "layers."),
    (context.last_step_of_the_ring_skipped, RING, "context_parallel", Row.LOSS, "layers.0.attention.core"),
    (context.denominators_merged_in_bfloat16, RING, "context_parallel", Row.LOSS, "layers.0.attention.core"),
    (context.bidirectional_ring_skips_later_chunks, [*BERT, *RING[2:], *NO_DROPOUT], CP, Row.LOSS, CORE),
    (layers.row_bias_added_by_each, TENSOR, "tensor_parallel", Row.GRADIENT, "layers."),
    (layers.row_bias_added_by_each, [*PARALLEL, *TENSOR], TP, Row.GRADIENT, "layers."),
    (layers.heads_of_a_rank_normalised_alone, [*OTHER_KINDS, *TENSOR], TP, Row.LOSS, "layers.0.attention"),
    (layers.slope_of_the_soft_cap_forgotten, [*DECODER, *TENSOR], TP, Row.GRADIENT, "the loss"),
    (layers.mlps_of_later_stages_not_scaled, [*DECODER, *PIPELINE], PP, Row.LOSS, "layers."),
    (layers.softmax_of_own_vocabulary, TENSOR, "tensor_parallel", Row.LOSS, "the loss"),
    (layers.key_heads_of_the_next_group, LLAMA_TENSOR, "tensor_parallel", Row.LOSS, "layers.0.attention.core"),
    (layers.key_head_of_the_next_rank, LLAMA_TENSOR_4, TP, Row.LOSS, "layers.0.attention"),
    (layers.gradients_of_a_shared_head_not_summed, LLAMA_TENSOR_4, TP, Row.GRADIENT, "layers."),
    (gradients.partial_gradients_not_summed, SEQUENCE, "sequence_parallel", Row.GRADIENT, "norm.bias"),
    (gradients.all_gathers_gradient_not_summed, SEQUENCE, "sequence_parallel", Row.GRADIENT, "the loss"),
    (layers.positions_begin_anew_in_each_part, LLAMA_SEQUENCE, "sequence_parallel", Row.LOSS, "layers.0.attention"),
    (layers.shard_of_padding_is_nan, PADDING, "tensor_parallel", Row.LOSS, "the loss"),
    (layers.softmax_without_maximum, TENSOR, "tensor_parallel", Row.LARGE_LOSS, "the loss"),
    (layers.later_blocks_of_shards_misplaced, TENSOR, "tensor_parallel", Row.INITIAL, "embedding.weight"),
    (layers.later_blocks_of_shards_misplaced, ZERO_3, "zero_stage", Row.INITIAL, "embedding.weight"),
    (updates.bad_gradients_kept, ACCUMULATION, "one_process", Row.SKIPPED, ""),
    (updates.learning_rate_waits_in_skipped_steps, DATA, "one_process", Row.RATE, ""),
    (updates.end_of_decay_forgotten, DECAY, "one_process", Row.RATE, ""),
    (runs.validation_takes_training_samples, DATA, "one_process", Row.SAMPLES, ""),
    (runs.validation_on_everything, DATA, "one_process", Row.VALIDATION, ""),
    (updates.gradients_not_unscaled, FLOAT16, "one_process", Row.STATE, "embedding.weight"),
    (updates.clip_applied_twice, ONE, "one_process", Row.WEIGHT, "embedding.weight"),
    (updates.clip_not_applied, ONE, "one_process", Row.WEIGHT, "embedding.weight"),
    (updates.skip_ignored_for_vectors, ONE, "one_process", Row.SKIPPED, "layers.0.attention_norm"),
    (updates.copies_written_before_weights, BFLOAT16, "one_process", Row.FRESH, ""),
    (updates.vectors_decay, BFLOAT16, "one_process", Row.UPDATE, "layers.0.attention_norm.weight"),
    (dropout.same_dropout_everywhere, DATA, "data_parallel", Row.MASKS_DIFFER, ""),
    (dropout.same_dropout_everywhere, SEQUENCE, "sequence_parallel", Row.MASKS_DIFFER, ""),
    (dropout.same_dropout_everywhere, PIPELINE, "pipeline_parallel", Row.MASKS_DIFFER, ""),
    (dropout.same_dropout_in_all_heads, TENSOR, "tensor_parallel", Row.MASKS_DIFFER, ""),
    (dropout.dropout_drawn_anew_in_recomputation, RECOMPUTATION, "recompute", Row.MASKS_AGAIN, ""),
    (dropout.dropout_halved_in_split_attention, TENSOR, "tensor_parallel", Row.KEPT, "layers.0.attention.core"),
    (dropout.dropout_halved_in_later_stages, PIPELINE, "pipeline_parallel", Row.KEPT, "layers."),
    (dropout.dropout_scale_lost_in_split_sequences, SEQUENCE, "sequence_parallel", Row.KEPT, ""),
    (dropout.activations_dropped_in_validation, DATA, "one_process", Row.KEPT, ""),
    (runs.last_norm_stays_in_evaluation_mode, ONE, "one_process", Row.MODE, "norm"),
    (runs.resumed_without_moments, ONE, "resume", Row.WEIGHT, "embedding.weight"),
    (runs.resumed_without_moments_where_the_layout_stays, DATA, "resume", Row.WEIGHT, "embedding.weight"),
    (runs.resumed_shards_without_moments, ZERO_1, "zero_stage", Row.WEIGHT, "embedding.weight"),
    (updates.clipped_by_another_norm_in_half_types, [*DATA, *BFLOAT16[:2]], "data_parallel", Row.STATE, ""),
    (runs.later_saves_hold_the_first_one_s_values, ASYNCHRONOUS, "resume", Row.LOSS, ""),
    (runs.updates_do_not_wait_for_copies, ASYNCHRONOUS, "resume", Row.LOSS, ""),
    (masks.later_blocks_of_documents_miss_a_key, [*DOCUMENTS, *ONE], "one_process", Row.LOSS, "layers.0.attention"),
    (encoder_decoder.encoder_s_bias_in_the_first_stage_alone, [*T5, *PIPELINE], "pipeline_parallel", Row.RUNS, ""),
    (runs.resumed_from_the_oldest, DATA, "resume", Row.CHECKPOINTS, ""),
    (runs.oldest_checkpoints_kept, ONE, "resume", Row.CHECKPOINTS, ""),
    (runs.skipped_steps_forgotten_when_resumed, DATA, "resume", Row.SKIPPED, ""),
    (runs.cursor_goes_back_after_a_skipped_step, DATA, "resume", Row.SAMPLES, ""),
    (runs.numbers_of_the_next_step, ONE, "one_process", Row.LOSS, "the loss"),
    (runs.cursor_of_full_batches, RAMPUP, "resume", Row.SAMPLES, ""),
    (gradients.last_unit_not_all_reduced, ZERO_0, "data_parallel", Row.GRADIENT, "norm.bias"),
    (gradients.norm_of_one_shard, ZERO_1, "zero_stage", Row.NORM, ""),
    (gradients.tied_table_counted_twice, PIPELINE, "pipeline_parallel", Row.NORM, ""),
    (gradients.recomputation_rounds, RECOMPUTATION, "recompute", Row.GRADIENT, "layers."),
    (gradients.offloaded_tensors_read_before_they_are_back, [*OFFLOAD, *ONE], "offload", Row.GRADIENT, "layers."),
    (gradients.offloaded_tensors_read_before_they_are_back, [*OFFLOAD, *ZERO_3], "offload", Row.GRADIENT, "layers."),
    (gradients.offloaded_tensors_of_the_layer_below, [*OFFLOAD, *SEQUENCE], "offload", Row.GRADIENT, "layers."),
    (dropout.same_dropout_in_every_step, ONE, "one_process", Row.MASKS_DIFFER, ""),
    (dropout.same_dropout_everywhere, [*ADAPTER_DROPOUT, *GATHER[2:]], CP, Row.MASKS_DIFFER, "layers.0.attention.qkv"),
    (dropout.dropout_drawn_anew_in_recomputation, [*ADAPTER_DROPOUT, *RECOMPUTATION], "recompute", Row.MASKS_AGAIN, ""),
    (dropout.random_state_restored_by_rank, [*ADAPTER_DROPOUT, *DATA], "resume", Row.DROPOUT_RESUMED, ""),
    (dropout.random_state_restored_by_rank, DATA, "resume", Row.DROPOUT_RESUMED, ""),
    (dropout.random_state_restored_by_rank, TENSOR, "resume", Row.DROPOUT_RESUMED, ""),
    (dropout.resumed_ranks_share_no_dropout, TENSOR, "tensor_parallel", Row.DROPOUT_RESUMED, ""),
    (dropout.dropout_scale_lost_in_bfloat16, [*SEQUENCE, *BFLOAT16[:2]], "sequence_parallel", Row.KEPT, ""),
    (dropout.dropout_scale_lost_in_a_half_type, BFLOAT16, "one_process", Row.KEPT, ""),
    (dropout.compiled_layers_never_drop, COMPILED, "compile", Row.DROPOUT_AGAIN, ""),
    (dropout.seed_of_each_trainer, DATA, "one_process", Row.DROPOUT_AGAIN, ""),
    (gradients.gradients_reduced_in_bfloat16, [*TENSOR[:2], *ZERO_1, *BFLOAT16[:2]], "data_parallel", Row.SUMS, ""),
    (gradients.gradients_kept_in_bfloat16, [*TENSOR, *BFLOAT16[:2]], "accumulation", Row.SUMS, ""),
    (gradients.gradients_of_complete_units_lost, THREE_MICROBATCHES, "accumulation", Row.SUMS, ""),
    (gradients.table_gets_the_last_chunk_s_gradient, BFLOAT16, "one_process", Row.GRADIENT, "embedding.weight"),
    (gradients.gradients_reduced_in_float32, REDUCED_IN_BFLOAT16, "data_parallel", Row.SUMS, "gradients"),
    (gradients.losses_summed_in_bfloat16, BFLOAT16, "one_process", Row.SUMS, "loss"),
    (gradients.norm_in_float16, FLOAT16, "one_process", Row.SUMS, "gradient norm"),
    (layers.row_sum_too_large_in_half_types, [*TENSOR, *BFLOAT16[:2]], TP, Row.GRADIENT, "layers.0.attention.proj"),
    (layers.softmax_combined_in_bfloat16, [*TENSOR, *BFLOAT16[:2]], TP, Row.SUMS, "loss of these logits"),
    (runs.loss_scale_lost_when_resumed, FLOAT16, "resume", Row.RESUMED, ""),
    (updates.weights_rounded_to_bfloat16, BFLOAT16, "one_process", Row.UPDATE, "embedding.weight"),
    (updates.betas_swapped, ONE, "one_process", Row.WEIGHT, "embedding.weight"),
    (runs.replicas_draw_the_same_samples, HSDP, "replicas", Row.SAMPLES, ""),
    (masks.later_stages_attend_causally, [*DOCUMENTS, *PIPELINE], "pipeline_parallel", Row.LOSS, "layers."),
    (masks.later_stages_count_positions_through, [*POSITIONS, *PIPELINE], "pipeline_parallel", Row.LOSS, "layers."),
    (masks.recomputation_attends_causally, [*DOCUMENTS, *RECOMPUTATION], "recompute", Row.GRADIENT, "layers."),
    (masks.first_part_of_positions_everywhere, [*DOCUMENTS, *SEQUENCE], "sequence_parallel", Row.LOSS, "position"),
    (masks.second_half_of_heads_sees_all_documents, [*LLAMA_MASKS, *TENSOR], "tensor_parallel", Row.LOSS, "layers.0"),
    (masks.documents_leak, [*DOCUMENTS, *ONE], "one_process", Row.LOSS, "layers.0.attention"),
    (masks.masks_drawn_by_each_process, [*LLAMA_MASKS, *ZERO_3], "data_parallel", Row.SAMPLES, ""),
    (masks.masks_drawn_by_each_process, [*T5, *DATA], "data_parallel", Row.SAMPLES, ""),
    (spans.the_same_spans_in_every_sample_of_validation, [*T5, *DATA], "one_process", Row.VALIDATION, ""),
    (gradients.tied_tables_not_summed, [*T5, *PIPELINE], "pipeline_parallel", Row.GRADIENT, "encoder_bias.table"),
    (encoder_decoder.causal_buckets_in_the_encoder, [*T5, *ONE], "one_process", Row.LOSS, "encoder_bias"),
    (encoder_decoder.decoder_sees_the_future, [*T5, *ONE], "one_process", Row.LOSS, "layers.2.attention"),
    (encoder_decoder.encoder_s_norm_touches_the_decoder, [*T5, *PIPELINE], "pipeline_parallel", Row.LOSS, "layers.1"),
    (encoder_decoder.cross_attention_reads_what_is_not_normalised, [*T5, *PIPELINE], PP, Row.LOSS, "layers.1"),
    (encoder_decoder.parts_not_shared_out_alike, [*T5, *SEQUENCE], "sequence_parallel", Row.LOSS, "embedding"),
    (encoder_decoder.gradient_of_the_encoder_s_output_not_summed, [*T5, *TENSOR], TP, Row.GRADIENT, CROSS),
    (encoder_decoder.biases_of_other_heads, [*T5, *TENSOR], "tensor_parallel", Row.LOSS, "encoder_bias"),
    (pairs.types_dropped, [*PAIRS, *ONE], "one_process", Row.LOSS, "embedding_norm"),
    (pairs.padding_is_seen, [*PAIRS, *ONE], "one_process", Row.LOSS, "layers.0.attention"),
    (pairs.pairs_drawn_by_each_process, [*NEXT, *ZERO_3], "data_parallel", Row.SAMPLES, ""),
    (pairs.pairs_divided_by_tokens, MANY_MASKED, "one_process", Row.LOSS, "the loss"),
    (pairs.pairs_weigh_as_much_as_tokens, [*PAIRS, *ONE], "one_process", Row.GRADIENT, "the loss"),
    (pairs.losses_under_each_other_s_names, [*PAIRS, *ONE], "one_process", Row.LOSS, "the loss"),
    (pairs.each_rank_takes_its_own_first_token, [*PAIRS, *SEQUENCE], "sequence_parallel", Row.LOSS, "first_token"),
    (pairs.first_token_gets_no_gradient, [*PAIRS, *SEQUENCE], "sequence_parallel", Row.GRADIENT, "first_token"),
    (pairs.gradients_of_the_pooler_summed, [*PAIRS, *SEQUENCE], "sequence_parallel", Row.GRADIENT, "pair"),
    (masks.mask_of_the_first_sample_for_all, [*LLAMA_MASKS, *ONE], "one_process", Row.LOSS, "layers.0.attention"),
    (masks.validation_attends_causally, [*DOCUMENTS, *DATA], "one_process", Row.VALIDATION, ""),
    (masks.prefixes_drawn_from_the_start_when_resumed, [*DOCUMENTS, *DATA], "resume", Row.SAMPLES, ""),
    (windows.windows_by_number_in_the_stage, [*LLAMA_STAGES, *TURNS], PP, Row.LOSS, "layers."),
    (windows.windows_by_number_in_the_stage, [*OTHER_KINDS, *PIPELINE], PP, Row.LOSS, "layers."),
    (windows.windows_one_key_short, [*LLAMA_ONE, *WINDOWS], "one_process", Row.LOSS, CORE),
    (windows.capped_after_the_mask, [*LLAMA_ONE, *WINDOWS], "one_process", Row.LOSS, CORE),
    (windows.slope_of_the_cap_forgotten, [*LLAMA_ONE, *WINDOWS], "one_process", Row.GRADIENT, "layers."),
    (windows.windows_by_local_position, [*GATHER, *WINDOWS, *DOCUMENTS[:4]], "context_parallel", Row.LOSS, CORE),
    (windows.windows_by_local_position, [*RING, *WINDOWS, *DOCUMENTS[:4]], "context_parallel", Row.LOSS, CORE),
    (windows.sinks_dropped_on_the_last_rank, [*LLAMA_TENSOR, *WINDOWS], "tensor_parallel", Row.LOSS, CORE),
    (
        windows.sinks_of_the_first_heads_everywhere,
        [*ULYSSES, *GROUPS, *WINDOWS],
        "context_parallel",
        Row.GRADIENT,
        "layers.",
    ),
    (windows.sinks_gradient_of_one_rank, [*RING, *WINDOWS], "context_parallel", Row.GRADIENT, "layers."),
    (windows.slope_of_the_cap_forgotten_by_the_ring, [*RING, *WINDOWS], "context_parallel", Row.GRADIENT, "layers."),
    (optimizers.row_means_of_own_columns, [*ADAFACTOR, *TENSOR], "tensor_parallel", Row.WEIGHT, "layers.0"),
    (optimizers.column_means_of_own_rows, [*ADAFACTOR, *ZERO_3], "zero_stage", Row.WEIGHT, "embedding.weight"),
    (optimizers.clipped_by_the_norm_of_a_shard, [*ADAFACTOR, *ZERO_1], "zero_stage", Row.WEIGHT, "embedding.weight"),
    (optimizers.skipped_steps_counted_as_updates, [*ADAFACTOR, *DATA], "one_process", Row.WEIGHT, "embedding.weight"),
    (optimizers.shards_orthogonalised_alone, [*MUON, *ZERO_3], "zero_stage", Row.WEIGHT, "layers.0"),
    (optimizers.parts_put_together_in_reverse, [*MUON, *SEQUENCE], "tensor_parallel", Row.WEIGHT, "layers.0"),
    (optimizers.sharded_stacks_taken_for_one_matrix, [*MOE, *MUON, *ZERO_3], "zero_stage", Row.WEIGHT, "layers."),
    (optimizers.sharded_stacks_taken_for_one_matrix, [*MOE, *ADAFACTOR, *ZERO_3], "zero_stage", Row.WEIGHT, "layers."),
    (optimizers.factor_not_applied_to_matrices, [*MUON, *BFLOAT16], "one_process", Row.STATE, "layers."),
    (optimizers.momentum_forgotten_in_later_stages, [*MUON, *PIPELINE], "pipeline_parallel", Row.WEIGHT, "layers."),
    (experts.weights_not_renormalised, [*MOE, *ONE], "one_process", Row.LOSS, "layers.0.mlp"),
    (experts.scores_in_half_types, [*MOE, *BFLOAT16], "one_process", Row.SUMS, "layers.0.mlp.router"),
    (experts.bias_in_the_weights, [*MOE, *BIASED, *ONE], "one_process", Row.LOSS, "layers.0.mlp"),
    (experts.shared_experts_twice, [*MOE, *SHARED, *ONE], "one_process", Row.LOSS, "layers.1.mlp"),
    (experts.results_in_another_order, [*MOE, *ONE], "one_process", Row.LOSS, "layers.0.mlp"),
    (experts.loads_of_each_process, [*MOE, *ZERO_0], "data_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.loads_of_each_process, [*MOE, *BIASED, *GATHER[2:]], "context_parallel", Row.LOSS, "layers."),
    (experts.loads_of_skipped_steps, [*MOE, *ONE], "one_process", Row.GRADIENT, "layers.1.mlp"),
    (experts.figures_of_all_steps, [*MOE, *ONE], "one_process", Row.FIGURES, "balance_loss"),
    (experts.first_weights_in_half_types, [*MOE, *BFLOAT16], "one_process", Row.FRESH, ""),
    (experts.loads_change_before_copies, [*MOE, *ASYNCHRONOUS], "resume", Row.GRADIENT, "layers.1.mlp"),
    (experts.loads_forgotten_when_resumed, [*MOE, *DATA], "resume", Row.GRADIENT, "layers.1.mlp"),
    (experts.balance_times_microbatches, [*MOE, *ACCUMULATION], "accumulation", Row.GRADIENT, "layers.1.mlp"),
    (experts.later_stages_without_balance, [*MOE, *PIPELINE], "pipeline_parallel", Row.GRADIENT, "layers.2.mlp"),
    (experts.norm_without_other_ranks_experts, [*EXPERTS, *DATA], "expert_parallel", Row.NORM, ""),
    (experts.norm_without_other_ranks_experts, [*EXPERTS, *SEQUENCE], "expert_parallel", Row.NORM, ""),
    (experts.experts_averaged_over_their_group, EXPERTS_OF_FOUR, "expert_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.experts_gradients_doubled, [*EXPERTS, *DATA], "expert_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.partial_sums_of_split_experts, SPLIT_EXPERTS, ETP, Row.LOSS, "layers.0.mlp"),
    (experts.split_experts_summed_over_tensor_ranks, SPLIT_EXPERTS, ETP, Row.GRADIENT, "layers.1.mlp"),
    (experts.norm_of_split_experts_of_each_rank, SPLIT_EXPERTS, ETP, Row.NORM, ""),
    (experts.routers_not_summed_over_tensor_ranks, [*MOE, *SEQUENCE], "tensor_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.padding_of_the_first_rank, [*MOE, *CHATS, *SEQUENCE], "tensor_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.experts_not_summed, [*EXPERTS_OF_FOUR, *ZERO_0[2:]], "expert_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.rows_returned_as_they_were_sorted, [*EXPERTS, *DATA], "expert_parallel", Row.LOSS, "layers.0.mlp"),
    (experts.empty_experts_left_out, [*EXPERTS, *DATA], "expert_parallel", Row.LARGE_LOSS, "layers.0.mlp"),
    (experts.balance_times_expert_ranks, [*EXPERTS, *DATA], "expert_parallel", Row.GRADIENT, "layers.1.mlp"),
    (experts.experts_of_the_wrong_rank, [*EXPERTS, *DATA], "expert_parallel", Row.LOSS, "layers.0.mlp"),
    (latent.key_of_the_first_tensor_rank, [*LATENT, *SEQUENCE], TP, Row.GRADIENT, "layers."),
    (linear.steps_of_the_first_tensor_rank, [*LINEAR, *TENSOR], TP, Row.GRADIENT, "layers."),
    (linear.shared_rows_of_the_first_tensor_rank, [*GRANITE, *TENSOR], TP, Row.GRADIENT, "layers."),
    (latent.groups_of_local_experts, [*LATENT, *EXPERTS[2:], *DATA], "expert_parallel", Row.LOSS, "layers.1.mlp"),
    (latent.next_labels_shifted_once, [*LATENT, *ONE], "one_process", Row.LOSS, "the loss"),
    (latent.next_labels_of_the_shard_shifted, [*LATENT, *GATHER[2:]], CP, Row.LOSS, "layers."),
    (latent.next_tokens_of_the_shard, [*LATENT, *GATHER[2:]], CP, Row.LOSS, "next_embedding"),
    (gradients.tied_tables_not_summed, [*LATENT, *PIPELINE], PP, Row.GRADIENT, "embedding.weight"),
    (latent.down_biases_added_by_each, [*BIASES, *SPLIT_EXPERTS[2:]], ETP, Row.GRADIENT, "layers."),
    (float8.each_shard_has_its_own_scale, [*FLOAT8, *ZERO_3], "zero_stage", Row.LOSS, "layers.0.attention.qkv"),
    (float8.each_rank_scales_its_own_part, [*FLOAT8, *TENSOR], TP, Row.LOSS, "layers.0.attention.qkv"),
    (float8.each_rank_scales_its_own_part, [*MOE, *FLOAT8_EXPERTS, *SEQUENCE], TP, Row.LOSS, "layers.0.mlp"),
    (float8.one_scale_for_all_experts, [*EXPERTS, *FLOAT8_EXPERTS, *DATA], "expert_parallel", Row.LOSS, "layers.0.mlp"),
    (float8.one_scale_for_all_microbatches, [*EXPERTS, *FLOAT8_EXPERTS, *DATA], "expert_parallel", Row.LOSS, ""),
    (float8.scale_of_the_tensor_before, [*MOE, *FLOAT8_EXPERTS, *DATA], "data_parallel", Row.LARGE_LOSS, ""),
    (lora.adapters_scaled_twice, [*LORA, *ONE], "one_process", Row.GRADIENT, ""),
    (lora.whole_halves_not_summed, [*LORA, *TENSOR], "tensor_parallel", Row.GRADIENT, "layers.1.mlp.down"),
    (lora.adapters_of_rows_added_by_each, [*LORA, *SEQUENCE], "tensor_parallel", Row.GRADIENT, "layers.1.mlp.down"),
    # Scales that are powers of 2 matter only to numbers that are too small for float8.
    (float8.each_rank_scales_its_own_part, [*FLOAT8_ROWS, *SEQUENCE], "tensor_parallel", Row.GRADIENT, ""),
]


def kind_of(mutation: Prepare, layout: list[str], axis: str, row: str) -> str:
    """The kind of run that shows a bug; one suffices, and is faster."""
    if (row != Row.RESUMED and axis == "resume") or mutation in (
        runs.resumed_shards_without_moments,
        dropout.resumed_ranks_share_no_dropout,
        gradients.microbatches_after_the_fourth_lost,
    ):
        return RESUME
    if mutation is runs.numbers_of_the_next_step:  # here alone some steps are not logged
        return SINGLE
    if mutation.__module__ == dropout.__name__:
        return DROPOUT
    if "--training.dtype" in layout:
        return layout[1 + layout.index("--training.dtype")]
    return EXACT
