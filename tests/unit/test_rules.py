"""What rules refuse, in a sentence that names the key, the value and the cure."""

import shlex

import pytest

from titan_like.config import ConfigError, load_config
from titan_like.parallel.compile_scope import compile_scope
from titan_like.train.rules import resolve_settings

SHORT = {
    "--LATENT": "--model.family=decoder --model.flavor=debug_latent --model.overrides",
    "--BERT.": "--model.family=bert --model.overrides.",
    "--BERT ": "--model.family=bert ",
    "--CHATS": "--data.dataset=conversations --data.paths=chats.jsonl",
}
# Processes and settings => parts of the sentence. A run has one step where its length is not set.
REFUSED = """
# models
1 --model.family=gtp => model.family ; "gtp" ; did you mean gpt?
1 --model.flavor=debgu => model.flavor ; "debgu" ; did you mean debug?
1 --model.overrides.hidden_sise=64 => model.overrides.hidden_sise = 64 ; did you mean hidden_size?
1 --model.overrides.n_layer=2 => model.overrides.n_layer = 2 ; did you mean num_layers?
1 --model.overrides.hidden_size=x => model.overrides.hidden_size ; "x" ; integer
1 --model.overrides.hidden_size.x=1 => model.overrides.hidden_size ; integer
1 --model.overrides.num_layers=0 => model.overrides.num_layers = 0 ; greater than 0
1 --model.overrides.num_attention_heads=5 => 5 ; does not divide hidden_size 128 ; choose a divisor
1 --model.overrides.num_kv_heads=3 => num_kv_heads 3 ; does not divide num_attention_heads 4
1 --model.family=llama --model.overrides.hidden_size=60 => = 15 is odd ; even
1 --model.family=llama '--model.overrides.rope_scaling={factor = 8.0, low_freq_factor = 4.0, \
high_freq_factor = 4.0, original_max_seq_len = 16}' \
=> model.overrides.rope_scaling ; low_freq_factor 4.0 must be below high_freq_factor 4.0
1 --model.flavor=a --model.flavors.a.hidden_size=8 --model.flavors.a.num_attention_heads=1 \
--model.flavors.a.vocab_size=9 --model.flavors.a.max_seq_len=8 => model.flavors.a.num_layers ; required
1 --model.family=t5 --model.overrides.num_position_buckets=32 --model.overrides.max_position_distance=16 \
=> max_position_distance 16 ; at least 17
1 --model.family=t5 --model.overrides.num_position_buckets=7 --model.overrides.max_position_distance=2 \
=> max_position_distance 2 ; at least 4
1 --model.family=t5 --model.overrides.head_size=0 --model.overrides.num_attention_heads=5 \
=> num_attention_heads 5 does not divide hidden_size 128 ; head_size
1 --model.family=t5 --model.overrides.num_layers=5 --model.overrides.num_decoder_layers=5 \
=> num_decoder_layers 5 of num_layers 5 leave a stack without layers
1 --model.family=moe --model.overrides.experts_per_token=9 => experts_per_token 9 is more than num_experts 8
1 --model.family=moe --model.overrides.experts_per_token=1 => experts_per_token 1 with renormalize
1 --model.family=moe --model.overrides.num_dense_layers=4 \
=> num_dense_layers 4 of num_layers 4 leave no layer with experts
1 --model.family=moe --model.overrides.head_size=7 => = 7 is odd
1 --model.family=decoder --model.overrides.num_dense_layers=1 => num_dense_layers 1 needs experts ; num_experts
1 --model.family=decoder --model.overrides.num_experts=4 => num_experts 4 needs experts_per_token
1 --model.family=decoder --model.overrides.rotary_fraction=0.07 => head_size 48 · rotary_fraction 0.07 = 3 is odd
1 --model.family=decoder '--model.overrides.layer_pattern=["a"]' '--model.overrides.kinds={b = {window = 4}}' \
=> no layer of kind b
1 --model.family=decoder '--model.overrides.layer_pattern=["a", "full"]' => kind a ; kinds.a, such as its window
1 --model.family=decoder --model.overrides.router_groups=2 => router_groups 2 needs experts ; router_groups = 1
1 --model.family=decoder --model.overrides.expert_bias=true => expert_bias true needs experts ; expert_bias = false
1 --model.family=decoder --model.overrides.kv_lora_rank=16 \
=> model.overrides = {'kv_lora_rank': 16}: latent attention needs nope_head_size
1 --model.family=decoder '--model.overrides.rope_scaling={rope_type = "yarn", factor = 2.0}' \
=> model.overrides.rope_scaling.rope_type = "yarn": unknown field; did you mean type?
1 --model.family=decoder --model.overrides.kinds.full.windo=3 => kinds.full.windo = 3: unknown field ; window?
1 --model.family=decoder --model.overrides.gated=false --model.overrides.activation=clamped_swiglu \
=> clamped_swiglu ; set gated to true
1 --model.family=decoder --model.overrides.norm=layer --model.overrides.qk_norm=all => qk_norm "all" ; set norm to rms
1 --model.family=decoder --model.overrides.norm_after_rope=true --model.overrides.qk_norm=none \
=> norm_after_rope ; set qk_norm to "head" or "all"
1 --model.family=decoder --model.overrides.norm=layer_no_weight --model.overrides.norm_offset=true \
=> norm_offset is added to a weight, which norm layer_no_weight lacks
1 --model.family=decoder --model.overrides.query_temperature=0.1 => query_temperature_period go together ; set both
1 --LATENT.kv_lora_rank=0 => q_lora_rank 48 needs latent attention; set kv_lora_rank, or q_lora_rank = 0
1 --LATENT.rope_head_size=0 => needs nope_head_size, rope_head_size and value_head_size ([16, 0, 16])
1 --LATENT.head_size=32 => the first two make up head_size (32)
1 --model.family=decoder --model.overrides.qk_norm=heads --model.overrides.norm_offset=true \
=> qk_norm "heads" has plain weights ; set norm_offset = false
1 --model.family=decoder '--model.overrides.kinds.full={window=4,chunk=4}' \
=> kinds.full has a window of 4 and chunks of 4 ; leave one of them out
1 --model.family=decoder --model.overrides.query_temperature_of=unrotated => need query_temperature
1 --model.family=decoder --model.overrides.activation=xielu => activation xielu needs an MLP without a gate
1 --LATENT.num_kv_heads=2 => latent attention has no num_kv_heads 2; leave it at 4
1 --LATENT.rotary_fraction=0.5 => latent attention has no rotary_fraction 0.5
1 --LATENT.attention_bias=qkv => latent attention has no attention_bias "qkv"; use "none" or "all"
1 --LATENT.router_groups=3 => router_groups 3 must divide num_experts 8
1 --LATENT.router_groups=8 --model.overrides.router_top_groups=8 \
=> router_groups 8 must divide num_experts 8 in groups of 2
1 --LATENT.experts_per_token=5 => must have experts_per_token (5) experts
1 --model.family=llama '--model.overrides.rope_scaling={type = "yarn", factor = 8.0}' \
=> yarn scaling needs original_max_seq_len
# lengths and batches; the batch is of 16 samples
1 '--training.batch_size_rampup=[4, 4]' --training.samples=100 => [4, 4] ; [start, increment, samples]
1 '--training.batch_size_rampup=[0, 4, 10]' --training.samples=100 => three positive integers
1 '--training.batch_size_rampup=[8, 0, 10]' --training.tokens=9999 => three positive integers
1 '--training.batch_size_rampup=[32, 8, 10]' --training.samples=100 => end at global_batch_size (16)
1 '--training.batch_size_rampup=[8, 3, 10]' --training.steps=100 => end at global_batch_size (16)
1 '--training.batch_size_rampup=[12, 4, 10]' --training.steps=9 => batch_size_rampup ; 12 ; 8 or 16
1 '--training.batch_size_rampup=[8, 8, 99]' --training.samples=7 => training.samples = 7 ; at least 8
1 --training.epochs=2 --training.steps=9 => training.steps | samples | tokens | epochs ; 'epochs': 2.0 ; exactly one
1 --training.epochs=2 --data.dataset=hf --data.paths=x => training.epochs = 2.0: the length of a stream is not known
1 --training.tokens=4095 => training.tokens = 4095 ; at least 4096
1 --training.steps=9 --lr_scheduler.warmup_steps=6 --lr_scheduler.decay_steps=5 \
=> lr_scheduler.decay_steps = 5 ; before the warm-up of 6
1 --training.steps=9 --lr_scheduler.decay=wsd --lr_scheduler.decay_steps=10 \
=> lr_scheduler.decay_steps = 10 ; at most 9
# validation sets
1 '--evaluation.sets={name="a/b", paths="x"}' --evaluation.interval=1 => evaluation.sets.name = "a/b" ; letters, digits
1 '--evaluation.sets=[{name="a", paths="x"}, {name="a", paths="y"}]' --evaluation.interval=1 => "a": names two sets
1 '--evaluation.sets={name="a", paths="x"}' => evaluation.sets = ['a'] ; set evaluation.interval
2 '--profiling.trace_ranks=[0, 2]' => profiling.trace_ranks = [0, 2] ; the job's ranks are 0 to 1
# adapters
1 --lora.alpha=8 => lora.alpha = 8.0 ; there are no adapters; set lora.rank
1 --lora.rank=4 --lora.modules=q_prj => lora.modules ; "q_prj" fits no linear module ; attn.c_attn
1 --lora.rank=4 --lora.modules=embedding => fits no linear module
1 --lora.rank=4 --lora.modules=0.mlp.fc1 => fits no linear module
1 --lora.rank=4 --model.family=moe '--lora.modules=["mlp.experts.gate"]' => fits no linear module
1 --lora.rank=4 --model.family=moe --model.overrides.num_dense_layers=1 '--lora.modules=["mlp.gate"]' \
=> leaves out all modules of some layers
1 --lora.rank=4 --model.family=bert --model.overrides.sentence_head=pair --data.sentence_objective=next_sentence \
=> lora.rank = 4 ; the head (pair) of bert would not be trained
1 --lora.rank=4 --model.family=moe --model.overrides.balance=bias => model.overrides.bias_update_rate = 0
2 --lora.rank=4 --lora.dropout=0.1 --parallelism.tensor_parallel_degree=2 --compile.enable=true \
=> compile.enable = true ; needs sequence parallelism with tensor parallelism and dropout
# CUDA graphs
2 --compile.cudagraphs=true => compile.cudagraphs = true ; needs one process, and this layout has 2
1 --compile.cudagraphs=true --model.family=moe => does not support moe, whose experts
1 --compile.cudagraphs=true --activation_checkpoint.mode=full => activation_checkpoint.mode = "full" ; set it to false
1 --compile.cudagraphs=true --data.reset_attention_mask=true => document masks (data.reset_attention_mask)
1 --compile.cudagraphs=true --data.prefix_lm=true => prefixes (data.prefix_lm)
1 --compile.cudagraphs=true --model.family=bert --model.overrides.sentence_head=pair \
--data.sentence_objective=sentence_order => heads that predict tokens and pair
# one graph for the whole model
2 --compile.enable=true --compile.scope=model --parallelism.tensor_parallel_degree=2 \
=> compile.scope = "model": does not support parallelism.tensor_parallel_degree = 2; set it to "auto" or "layers"
2 --compile.enable=true --compile.scope=model --parallelism.pipeline_parallel_degree=2 => pipeline_parallel_degree = 2
2 --compile.enable=true --compile.scope=model --parallelism.context_parallel_degree=2 => context_parallel_degree = 2
2 --compile.enable=true --compile.scope=model --model.family=moe --parallelism.expert_parallel_degree=2 \
=> expert_parallel_degree = 2
2 --compile.enable=true --compile.scope=model --parallelism.zero_stage=2 => compile.scope ; ZeRO 2
1 --compile.enable=true --compile.scope=model --activation_checkpoint.mode=full --activation_checkpoint.offload=true \
=> compile.scope ; activation_checkpoint.offload
1 --compile.enable=true --compile.scope=model --activation_checkpoint.mode=budget --activation_checkpoint.budget=0 \
=> compile.scope ; "budget"
# optimizers
1 '--optimizer.betas=[0.9, 1.0]' => optimizer.betas ; below 1
1 --optimizer.clip_threshold=0 => optimizer.clip_threshold
1 --optimizer.beta1=1 => optimizer.beta1
1 --optimizer.adjust_lr=adamw => optimizer.adjust_lr
1 --optimizer.name=muonn => did you mean muon?
1 --optimizer.relative_step=true => adamw does not use it; leave it out, or set optimizer.name to adafactor
1 --optimizer.name=adafactor --optimizer.matrix_lr=0.02 => optimizer.matrix_lr = 0.02: adafactor does not use it
1 --optimizer.name=muon --optimizer.beta1=0.9 => optimizer.beta1 = 0.9: muon does not use it
# objectives
1 --model.family=llama --data.prefix_lm=true '--model.overrides.kinds={full = {window = 4}}' \
=> data.prefix_lm ; layers with a window
1 --data.prefix_lm_loss=all => data.prefix_lm_loss ; data.prefix_lm to true
4 --model.family=t5 --parallelism.tensor_parallel_degree=4 --parallelism.sequence_parallel=true \
=> training.decoder_seq_len = 58: not divisible by context × tensor degrees = 4 ; as 60
1 --model.family=t5 --training.seq_len=2000 => training.seq_len = 2000: the model's max_seq_len is 1024
1 --model.family=t5 --data.reset_attention_mask=true => t5 has only encoder-decoder attention
1 --model.family=t5 --data.prefix_lm=true => t5 has only encoder-decoder attention
1 --model.family=t5 --data.eod_mask_loss=true => t5 predicts removed spans, never
1 --model.family=t5 --data.mlm_max_ngram=3 => which this does not change; leave it out, or train bert
1 --model.family=t5 --evaluation.interval=1 '--evaluation.datasets=["text=README.md"]' \
=> t5 predicts removed spans, but these predict the next token
1 --model.family=gpt --data.noise_density=0.2 => gpt predicts the next token, which this does not change ; train t5
1 --model.family=gpt --data.mean_noise_span_length=5 => gpt predicts the next token, which this does not change
1 --model.family=gpt --training.decoder_seq_len=64 => gpt predicts the next token, which this does not change
1 --model.family=gpt --data.mlm_whole_words=true => gpt predicts the next token, which this does not change
1 --model.family=bert --data.prefix_lm=true => bert has only bidirectional attention over whole samples
1 --model.family=bert --data.eod_mask_loss=true => bert predicts masked tokens, never the first token of the next doc
# pairs of sentences and questions
1 --model.family=gpt --data.sentence_objective=sentence_order => needs a head for pairs of sentences
1 --BERT --data.sentence_objective=sentence_order => set model.overrides.sentence_head to "pair"
1 --BERT.sentence_head=pair => nothing trains this head; set data.sentence_objective to "sentence_order"
1 --BERT.sentence_head=choice => data.dataset = "stdlib": race and sentence_head "choice" go together
1 --BERT --data.dataset=race => data.dataset = "race": race and sentence_head "choice" go together
1 --BERT.sentence_head=pair --data.sentence_objective=sentence_order --training.seq_len=4 \
=> two sentences need 5 tokens; use at least that
1 --BERT.sentence_head=choice --data.dataset=race --training.micro_batch_size=6 --training.global_batch_size=24 \
=> a question is 4 samples ; multiple
1 --BERT.sentence_head=choice --model.overrides.tied_embeddings=true => has no output matrix to tie; set tied_emb
1 --BERT.sentence_head=pair --data.sentence_objective=sentence_order --model.overrides.num_token_types=1 \
=> needs two token types; set num_token_types
# conversations
1 --CHATS --model.family=bert => bert ; and cannot be fine-tuned on answers
1 --CHATS --model.family=t5 => t5 ; and cannot be fine-tuned on answers
1 --CHATS --data.reset_position_ids=true => data.reset_attention_mask = false: conversations share a sample
1 --CHATS --data.reset_attention_mask=true => data.reset_position_ids = false: conversations share a sample
1 --CHATS --data.reset_attention_mask=true --data.reset_position_ids=true --data.prefix_lm=true \
=> data.prefix_lm = true: a random prefix would take answers out of the loss
1 --CHATS --data.reset_attention_mask=true --data.reset_position_ids=true --data.eod_mask_loss=true \
=> data.eod_mask_loss = true: an end of document before an answer would take answers out of the loss
# pipelines
2 --parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_schedule=interleaved_1f1b \
=> pipeline_schedule ; virtual_stages_per_rank of at least 2 ; use 1f1b
2 --parallelism.pipeline_parallel_degree=2 --parallelism.virtual_stages_per_rank=2 \
=> virtual_stages_per_rank = 2 ; use 1 or interleaved_1f1b
2 --parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_schedule=zbv_zero_bubble \
--parallelism.virtual_stages_per_rank=3 => virtual_stages_per_rank = 3 ; exactly 2 ; use 2
8 --parallelism.pipeline_parallel_degree=8 => pipeline_parallel_degree = 8 ; 8 stages for 4 layers ; at most 4
2 --parallelism.pipeline_parallel_degree=2 '--parallelism.pipeline_layers=[1, 2]' \
=> pipeline_layers = [1, 2] ; must be 2 numbers ; sum to the 4 layers
1 '--parallelism.pipeline_layers=[4]' => pipeline_layers ; there is one stage
1 --parallelism.sequence_parallel=true => sequence_parallel ; raise parallelism.tensor_parallel_degree
2 --parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_schedule=interleaved_1f1b \
--parallelism.virtual_stages_per_rank=2 --training.micro_batch_size=2 --training.global_batch_size=6 \
=> global_batch_size = 6 ; multiples of pipeline_parallel_degree (2) ; use 2 or 4 ; such as 1f1b
# context parallelism
2 --parallelism.context_parallel_degree=2 --model.overrides.dropout=0.1 => set model.overrides.dropout = 0 (it is 0.1)
2 --model.family=llama --parallelism.context_parallel_degree=2 --training.seq_len=1022 \
=> not divisible by 2 × context_parallel_degree = 4
2 --model.family=llama --parallelism.context_parallel_degree=2 --float8.enable=true => set float8.enable to false
2 --model.family=llama --parallelism.context_parallel_degree=2 --parallelism.context_parallel_method=ulysses \
--model.overrides.num_kv_heads=1 => key-value heads on
2 --model.family=t5 --parallelism.context_parallel_degree=2 --parallelism.context_parallel_method=ring \
--training.decoder_seq_len=64 --model.overrides.dropout=0 => position biases
# ranks that share key-value heads
4 --model.family=llama --parallelism.tensor_parallel_degree=4 --model.overrides.qk_norm=all \
=> tensor_parallel_degree = 4: does not divide the model's num_kv_heads (2), and qk_norm "all" does not support
5 --model.family=llama --parallelism.tensor_parallel_degree=5 --model.overrides.num_attention_heads=10 \
--model.overrides.head_size=16 --model.overrides.ffn_hidden_size=320 => num_kv_heads (2); use a divisor or a multiple
# experts; debug has 8
2 --model.family=moe --parallelism.tensor_parallel_degree=2 \
=> sequence_parallel = false: MoE with tensor parallelism
1 --model.family=moe --model.overrides.ffn_hidden_size=64 => no layer of moe debug is dense
6 --model.family=moe --model.overrides.num_experts=6 --float8.enable=true --parallelism.expert_parallel_degree=3 \
--parallelism.tensor_parallel_degree=2 --parallelism.sequence_parallel=true --training.global_batch_size=48 \
=> expert_parallel_degree = 3: does not fit float8 experts with tensor_parallel_degree = 2
2 --model.family=moe --float8.enable=true --parallelism.tensor_parallel_degree=2 --parallelism.sequence_parallel=true \
--parallelism.expert_tensor_parallel_degree=2 => expert_tensor_parallel_degree = 2: does not support float8
3 --model.family=moe --parallelism.expert_parallel_degree=3 --training.global_batch_size=48 \
=> degree = 3: does not divide the model's num_experts (8)
6 --model.family=moe --parallelism.expert_parallel_degree=4 --training.global_batch_size=48 \
=> degree = 4: does not divide shard × context × tensor
2 --model.family=moe --parallelism.expert_parallel_degree=2 --activation_checkpoint.mode=selective \
=> activation_checkpoint.mode = "selective": does not work with split experts
2 --model.family=moe --parallelism.tensor_parallel_degree=2 --parallelism.sequence_parallel=true \
--parallelism.expert_tensor_parallel_degree=4 \
=> parallelism.expert_tensor_parallel_degree = 4: must be 1 or tensor_parallel_degree (2)
2 --model.family=moe --parallelism.tensor_parallel_degree=2 --parallelism.sequence_parallel=true \
--parallelism.expert_tensor_parallel_degree=2 --model.overrides.expert_ffn_hidden_size=33 \
=> expert_tensor_parallel_degree = 2: does not divide the model's expert_ffn_hidden_size (33)
2 --model.family=moe --parallelism.tensor_parallel_degree=2 --parallelism.sequence_parallel=true \
--parallelism.expert_tensor_parallel_degree=2 --parallelism.expert_parallel_degree=2 \
=> expert_parallel_degree = 2: does not divide shard × context = 1·1 = 1; use a divisor of it
3 --model.family=decoder --model.flavor=debug_biases --model.overrides.num_attention_heads=6 \
--model.overrides.num_kv_heads=3 --model.overrides.head_size=16 --model.overrides.expert_ffn_hidden_size=48 \
--parallelism.tensor_parallel_degree=3 --parallelism.expert_tensor_parallel_degree=3 --training.seq_len=48 \
--parallelism.sequence_parallel=true => does not divide the model's hidden_size (128)
2 --model.family=llama --parallelism.expert_parallel_degree=2 \
=> parallelism.expert_parallel_degree = 2: llama has no experts; use 1
1 --model.family=llama --activation_checkpoint.mode=experts => llama has no experts to recompute
1 --activation_checkpoint.budget=0.5 => activation_checkpoint.budget = 0.5 ; mode = "budget"
1 --activation_checkpoint.mode=budget --compile.enable=true => activation_checkpoint.budget ; from 0 to 1
1 --activation_checkpoint.mode=budget --activation_checkpoint.budget=0 => compile.enable to true
1 --activation_checkpoint.mode=budget --activation_checkpoint.budget=0 --compile.enable=true \
--model.overrides.dropout=0.1 => activation_checkpoint.mode ; dropout = 0 (it is 0.1)
1 --activation_checkpoint.mode=selective --activation_checkpoint.offload=true => activation_checkpoint.offload ; compile
""".replace("\\\n", "").strip()


@pytest.mark.parametrize("case", [line for line in REFUSED.splitlines() if not line.startswith("#")])
def test_what_rules_refuse(case: str) -> None:
    given, _, words = case.partition("=> ")
    for name, long in SHORT.items():
        given = given.replace(name, long)
    processes, *settings = shlex.split(given)
    has_length = any(
        word.startswith(("--training.s", "--training.tokens", "--training.e")) and "seq" not in word
        for word in settings
    )
    with pytest.raises(ConfigError) as error:
        resolve_settings(load_config([*settings, *([] if has_length else ["--training.steps=1"])]), int(processes))
    assert all(word in str(error.value) for word in words.split(" ; ")), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("processes", "arguments", "scope"),
    [
        (1, [], "model"),
        (1, ["--model.family=t5", "--model.flavor=debug"], "model"),
        (1, ["--parallelism.zero_stage=3", "--activation_checkpoint.mode=full"], "model"),
        (1, ["--model.flavor=gpt2_1558m"], "layers"),
        (1, ["--activation_checkpoint.mode=full", "--activation_checkpoint.offload=true"], "layers"),
        (2, [], "layers"),
        (2, ["--compile.scope=model"], "model"),
        (1, ["--data.reset_attention_mask=true"], "layers"),
    ],
)
def test_small_models_on_one_process_are_one_graph(processes: int, arguments: list[str], scope: str) -> None:
    config = load_config(["--training.steps=1", "--compile.enable=true", *arguments])
    settings = resolve_settings(config, processes)
    assert compile_scope(config, settings.model, settings.layout) == scope
