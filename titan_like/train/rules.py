"""Rules that involve several settings, checked before any process group starts.

Each check raises a `ConfigError` with a hint if its rule is broken.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from titan_like.config.entry_points import find_dataset, format_of
from titan_like.config.errors import ConfigError, all_of, refuse, require
from titan_like.config.load import edit
from titan_like.config.schema import Float8, JobConfig, LoRA, Parallelism
from titan_like.data.loading.batch_size import NO_EPOCHS, check_length, check_rampup, rampup_batch_sizes
from titan_like.metrics.devices import find_device
from titan_like.metrics.writers import check_trackers
from titan_like.models.config import NUM_OPTIONS, TransformerConfig, has_experts
from titan_like.models.registry import model_config
from titan_like.optim.registry import check_optimizer
from titan_like.optim.schedule import check_decay, schedule_length
from titan_like.parallel.compile_scope import needs_layers
from titan_like.parallel.layout import Layout, resolve_layout
from titan_like.train.environment import number_of_processes
from titan_like.train.layout_rules import (
    batch_setting,
    check_context_parallel,
    check_expert_parallel,
    check_pipeline,
    check_sequence,
    check_stages,
    check_tensor_parallel,
)

_MOST_PASSES = 2**18  # forward passes of a step in all stages together; each is an entry in the schedule's table
_SHORTEST_PAIR = 5  # tokens of two sentences of one token each, with those around them

_LEARNS = {
    "causal": "predicts the next token",
    "mlm": "predicts masked tokens",
    "span_corruption": "predicts removed spans",
}
_ATTENTION = {"causal": "causal", "mlm": "bidirectional", "span_corruption": "encoder-decoder"}
# Objective → a family that has it, and the settings that concern it alone.
_ONLY_FOR = {
    "mlm": ("bert", ("data.mlm_probability", "data.mlm_whole_words", "data.mlm_max_ngram")),
    "span_corruption": ("t5", ("data.noise_density", "data.mean_noise_span_length", "training.decoder_seq_len")),
}


@dataclass(frozen=True)
class Settings:
    """A configuration whose rules hold, with the model and the layout that it describes."""

    config: JobConfig
    model: TransformerConfig
    layout: Layout


def check_rules(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse settings that contradict each other: raises the `ConfigError` of the first broken rule."""
    for error in broken_rules(config, model, layout):
        raise error


def broken_rules(config: JobConfig, model: TransformerConfig | None, layout: Layout | None) -> Iterator[ConfigError]:
    """Yield an error for each broken rule. Rules about the model or the layout are skipped if that is None."""
    if of_rampup := list(_errors_of([lambda: check_rampup(config.training)])):
        yield from of_rampup
        return  # the other rules need batch sizes
    rules: list[Callable[[], object]] = [
        partial(_check_length, config),
        partial(check_optimizer, config.optimizer),
        partial(find_dataset, config.data),
        *(partial(check, config) for check in (_check_precision, _check_health, _check_evaluation)),
    ]
    if model is not None:
        of_model = _check_compile, _check_masks, _check_tasks, _check_sentences, _check_experts, _check_recomputation
        rules += [partial(check, config, model) for check in (*of_model, _check_lora)]
    if layout is not None:
        rules += [partial(check, config, layout) for check in (_check_batches, _check_ranks, _check_compile_scope)]
    if model is not None and layout is not None:
        splits = check_tensor_parallel, check_expert_parallel, check_context_parallel, check_pipeline, check_sequence
        rules += [partial(check, config, model, layout) for check in (_check_cudagraphs, *splits)]
    yield from _errors_of(rules)


def _errors_of(rules: list[Callable[[], object]]) -> Iterator[ConfigError]:
    for rule in rules:
        try:
            rule()
        except ConfigError as error:
            yield error


def resolve_settings(config: JobConfig, world_size: int | None = None) -> Settings:
    """Resolve the model and the layout of a run, and check all rules; a `ConfigError` has a line for each broken one.

    ``world_size`` None: the number of processes is read from environment variables. Imports torch only for rules of
    adapters and of split positions.
    """
    resolved: dict[str, Any] = {"model": None, "layout": None}
    processes = number_of_processes() if world_size is None else world_size
    errors = [
        *_errors_of([lambda: resolved.update(model=model_config(config.model))]),
        *_errors_of([lambda: resolved.update(layout=resolve_layout(config.parallelism, processes))]),
        *broken_rules(config, resolved["model"], resolved["layout"]),
        *_errors_of([lambda: check_trackers(config.metrics), lambda: _check_float8(config)]),
        *_errors_of([lambda: config.cluster.gpu and find_device(config.cluster.gpu)]),
    ]
    if errors:
        raise all_of(errors)
    return Settings(config, resolved["model"], resolved["layout"])


def resolve_for_inference(config: JobConfig, world_size: int) -> tuple[JobConfig, TransformerConfig, Layout]:
    """As `resolve_settings`, for a command that only reads a checkpoint: batches, data and optimizer play no part.

    Returns:
        The configuration in whose layout the checkpoint is loaded, without float8, the model, and that layout. A single
        process takes the whole model.
    """
    config = config.model_copy(update={"float8": Float8()})
    if world_size == 1:
        config = config.model_copy(update={"parallelism": Parallelism()})
    model, layout = model_config(config.model), resolve_layout(config.parallelism, world_size)
    if layout.context > 1:  # which is for training: here each process takes whole sequences
        layout = replace(layout, context=1, shard=layout.weight_shards)
        config = edit(config, layout.settings())
    check_tensor_parallel(config, model, layout)
    check_stages(config, model, layout)
    check_expert_parallel(config, model, layout)
    return config, model, layout


def _check_length(config: JobConfig) -> None:
    training = config.training
    given = config.job.config_file or training.steps or training.samples or training.tokens or training.epochs
    reason = "no configuration is given; name a TOML file, or one of the package's, as --job.config_file debug_gpt"
    require(given, "job.config_file", None, reason)
    check_length(training)
    is_stream = format_of(config.data.dataset).is_stream
    require(not is_stream or training.epochs is None, "training.epochs", training.epochs, NO_EPOCHS)
    # Otherwise `check_schedule` checks it, with the batch size of the run's start and the samples of an epoch.
    if not config.checkpoint.enable and training.epochs is None:
        check_decay(config.lr_scheduler, schedule_length(training))


def _check_batches(config: JobConfig, layout: Layout) -> None:
    training = config.training
    unit = training.micro_batch_size * layout.data_parallel
    for size in rampup_batch_sizes(training):
        below = size // unit * unit
        nearest = f"{below} or {below + unit}" if below else str(unit)
        reason = (
            f"a global batch of {size} is not divisible by micro_batch_size × data-parallel size = "
            f"{training.micro_batch_size} × {layout.data_parallel} = {unit}; use a multiple such as {nearest}"
        )
        require(size % unit == 0, *batch_setting(config, size), reason)
    stages, size = len(layout.stage_ranks), training.global_batch_size
    reason = (
        f"gives {size // unit:,} microbatches of {training.micro_batch_size} × {layout.data_parallel} samples in "
        f"each of {stages} stages, above the limit of {_MOST_PASSES:,} in all; lower it or raise micro_batch_size"
    )
    require(stages * (size // unit) <= _MOST_PASSES, "training.global_batch_size", size, reason)


def _check_health(config: JobConfig) -> None:
    reason = 'goes back to a checkpoint; set checkpoint.enable to true or use "skip"'
    is_kept = config.checkpoint.enable or not config.health.rewinds
    require(is_kept, "health.loss_spike_action", "rewind", reason)


def _check_evaluation(config: JobConfig) -> None:
    section = config.evaluation
    names = [part.name for part in section.sets]
    keeps_best, key = config.checkpoint.keep_best, "checkpoint.keep_best"
    refuse(config,
        (keeps_best and not config.checkpoint.enable, key, "needs checkpoints; set checkpoint.enable to true"),
        (keeps_best and not section.interval, key, "compares validation losses; set evaluation.interval"),
        (section.patience and not section.interval, "evaluation.patience",
         "counts validations, but there is none; set evaluation.interval"))  # fmt: skip
    reason = "are scored at each validation, but there is none; set evaluation.interval"
    for key, value in (("datasets", section.datasets), ("sets", names)):
        require(not value or section.interval, f"evaluation.{key}", value, reason)
    for name in names:
        reason = "must be letters, digits, dots, hyphens and underscores, and begin with a letter or a digit"
        require(re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII), "evaluation.sets.name", name, reason)
        require(names.count(name) == 1, "evaluation.sets.name", name, "names two sets; give each a name of its own")


def _check_tasks(config: JobConfig, model: TransformerConfig) -> None:
    tasks = config.evaluation.datasets
    if "choice" in model.predictions or any(spec.startswith("race=") for spec in tasks):
        return  # what a model with this head can do is checked with the tasks
    reason = f"{config.model.family} {_LEARNS[model.objective]}, but these predict the next token; leave it out"
    require(not tasks or model.is_causal, "evaluation.datasets", config.evaluation.datasets, reason)


def check_predicts_next_token(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse a family that is not causal, for a command that needs a model of the next token."""
    reason = f"{_LEARNS[model.objective]}, not the next token; choose a causal family, such as gpt or llama"
    require(model.is_causal, "model.family", config.model.family, reason)


def _check_precision(config: JobConfig) -> None:
    dtype, reduce_dtype = config.training.dtype, config.training.reduce_dtype
    reason = f'gradients of {dtype} training are summed in {dtype}; set it to "float32" or change training.dtype'
    require(reduce_dtype == "float32" or "16" in dtype, "training.reduce_dtype", reduce_dtype, reason)


def _check_float8(config: JobConfig) -> None:
    reason = 'needs torchao; pip install "titan_like[float8]", or set it to false'
    require(not config.float8.enable or find_spec("torchao") is not None, "float8.enable", True, reason)


def _check_compile(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse combinations with tensor parallelism that torch cannot compile."""
    layout, selective = Layout.of(config.parallelism), config.activation_checkpoint.mode == "selective"
    compiles = config.compile.enable and layout.tensor > 1
    refuse(config,
        (compiles and selective, "activation_checkpoint.mode",
         'cannot be compiled with tensor parallelism; use "full" or "none", or set compile.enable to false'),
        (compiles and (getattr(model, "dropout", 0) or config.lora.dropout) > 0 and not layout.sequence_parallel,
         "compile.enable",
         "needs sequence parallelism with tensor parallelism and dropout; set sequence_parallel to true"))  # fmt: skip


def _check_compile_scope(config: JobConfig, layout: Layout) -> None:
    """Refuse one graph for the whole model where something has to work between layers."""
    for applies, reason in needs_layers(config, layout) if config.compile.enable else ():
        refused = config.compile.scope == "model" and applies
        require(not refused, "compile.scope", "model", f'{reason}; set it to "auto" or "layers"')


def _check_recomputation(config: JobConfig, model: TransformerConfig) -> None:
    section, dropout, compiles = config.activation_checkpoint, getattr(model, "dropout", 0), config.compile.enable
    by_budget, key = section.mode == "budget", "activation_checkpoint.budget"
    refuse(config,
        (not by_budget and section.budget is not None, key,
         'only activation_checkpoint.mode = "budget" reads it; set that, or leave it out'),
        # Selective checkpoints keep products in a cache of their own, and not where autograd saves tensors.
        (section.offload and section.mode == "selective" and not compiles, "activation_checkpoint.offload",
         "does not reach what selective recomputation keeps; set compile.enable to true, or use another mode"),
        (by_budget and section.budget is None, key, 'mode "budget" needs it; set a number from 0 to 1'),
        (by_budget and not compiles, "activation_checkpoint.mode",
         "it is the compiler that keeps to a budget; set compile.enable to true"),
        (by_budget and dropout, "activation_checkpoint.mode",
         f"torch would recompute dropout with other random numbers; set model.overrides.dropout = 0 (it is {dropout}), "
         "or use another mode"))  # fmt: skip


def _check_cudagraphs(config: JobConfig, model: TransformerConfig, layout: Layout) -> None:
    """Refuse what a graph cannot hold: collectives, the random state of recomputation, shapes made from data."""
    family, data = config.model.family, config.data
    mode, processes, heads = config.activation_checkpoint.mode, layout.num_processes, list(model.predictions)
    refusals = {
        f"needs one process, and this layout has {processes}": processes > 1,
        f"does not support {family}, whose experts get another number of tokens in each step": has_experts(model),
        f'does not support activation_checkpoint.mode = "{mode}"': mode != "none",
        "does not support activation_checkpoint.offload": config.activation_checkpoint.offload,
        "does not support document masks (data.reset_attention_mask)": data.reset_attention_mask,
        "does not support prefixes (data.prefix_lm)": data.prefix_lm,
        f"does not support heads that predict {' and '.join(heads)}": heads != ["tokens"],
    }
    for reason, applies in refusals.items() if config.compile.cudagraphs else ():
        require(not applies, "compile.cudagraphs", True, f"{reason}; set it to false")


def _check_ranks(config: JobConfig, layout: Layout) -> None:
    ranks, reason = config.profiling.trace_ranks, f"the job's ranks are 0 to {layout.num_processes - 1}"
    require(max(ranks, default=0) < layout.num_processes, "profiling.trace_ranks", ranks, reason)


def _check_experts(config: JobConfig, model: TransformerConfig) -> None:
    """Refuse what does not support stacked expert weights."""
    if not has_experts(model):
        reason = f"{config.model.family} has no experts to recompute; use one of the other modes"
        require(config.activation_checkpoint.mode != "experts", "activation_checkpoint.mode", "experts", reason)
        return
    family = config.model.family
    given = config.model.overrides.get("ffn_hidden_size")
    reason = f"no layer of {family} {config.model.flavor} is dense; set model.overrides.expert_ffn_hidden_size"
    require(given in (None, 0, model.ffn_hidden_size), "model.overrides.ffn_hidden_size", given, reason)


def _check_lora(config: JobConfig, model: TransformerConfig) -> None:
    section, family = config.lora, config.model.family
    for key in ("alpha", "dropout", "modules"):
        value, reason = getattr(section, key), "there are no adapters; set lora.rank, or leave it out"
        require(section.rank or value == getattr(LoRA(), key), f"lora.{key}", value, reason)
    if not section.rank:
        return
    from titan_like.parallel.lora import check_adapters  # imports torch

    check_adapters(model, section, family)
    heads = [head for head in model.predictions if head not in ("tokens", "mtp")]  # the latter has a layer
    reason = f"trains adapters alone, and the head ({', '.join(heads)}) of {family} would not be trained; set it to 0"
    require(not heads, "lora.rank", section.rank, reason)
    trains_bias = has_experts(model) and model.balance == "bias" and model.bias_update_rate > 0
    reason = "changes the frozen router's biases; set model.overrides.bias_update_rate = 0"
    require(not trains_bias, "model.overrides.balance", "bias", reason)
    mode = config.activation_checkpoint.mode
    reason = 'is not supported with activation_checkpoint.mode = "budget"; set it to 0'
    require(not section.dropout or mode != "budget", "lora.dropout", section.dropout, reason)


def _check_masks(config: JobConfig, model: TransformerConfig) -> None:
    section, family, learns = config.data, config.model.family, _LEARNS[model.objective]
    is_chat, only = format_of(section.dataset).is_chat, not model.supports_masks
    only_whole = f"{family} has only {_ATTENTION[model.objective]} attention over whole samples; leave it out"
    apart = "conversations share a sample and must not see each other; set it to true"
    refuse(config,
        (is_chat and only, "data.dataset",
         f"{family} {learns} and cannot be fine-tuned on answers; choose gpt, llama, moe or decoder"),
        (is_chat and not section.reset_position_ids, "data.reset_position_ids", apart),
        (is_chat and not section.reset_attention_mask, "data.reset_attention_mask", apart),
        (is_chat and section.prefix_lm, "data.prefix_lm",
         "a random prefix would take answers out of the loss; set it to false"),
        (is_chat and section.eod_mask_loss, "data.eod_mask_loss",
         "an end of document before an answer would take answers out of the loss; set it to false"),
        (only and section.reset_position_ids, "data.reset_position_ids", only_whole),
        (only and section.reset_attention_mask, "data.reset_attention_mask", only_whole),
        (only and section.prefix_lm, "data.prefix_lm", only_whole),
        (section.prefix_lm and any(core.window for kind in model.parts.kinds for core in kind.cores), "data.prefix_lm",
         f"{family} has layers with a window, which is causal; leave it out"),
        (section.prefix_lm and not getattr(model, "supports_prefixes", True), "data.prefix_lm",
         f"{family} has layers with a recurrence, which is causal; leave it out"),
        (section.eod_mask_loss and not model.is_causal, "data.eod_mask_loss",
         f"{family} {learns}, never the first token of the next document; leave it out"))  # fmt: skip
    for objective, (example, keys) in _ONLY_FOR.items():
        for key in keys if model.objective != objective else ():
            name, _, field = key.partition(".")
            value = getattr(getattr(config, name), field)
            reason = f"{family} {learns}, which this does not change; leave it out, or train {example}"
            require(value == type(getattr(config, name)).model_fields[field].default, key, value, reason)
    reason = "there is no prefix; set data.prefix_lm to true or leave it out"
    require(section.prefix_lm_loss != "all" or section.prefix_lm, "data.prefix_lm_loss", "all", reason)


def _check_sentences(config: JobConfig, model: TransformerConfig) -> None:
    """The head of the first token and the data that trains it go together."""
    objective, dataset, training = config.data.sentence_objective, config.data.dataset, config.training
    head = "pair" if "pair" in model.predictions else "choice" if "choice" in model.predictions else "none"
    reason = 'needs a head for pairs of sentences; set model.overrides.sentence_head to "pair" (bert), or leave it out'
    require(objective == "none" or head == "pair", "data.sentence_objective", objective, reason)
    reason = 'nothing trains this head; set data.sentence_objective to "sentence_order" or "next_sentence"'
    require(head != "pair" or objective != "none", "model.overrides.sentence_head", "pair", reason)
    reason = 'race and sentence_head "choice" go together; set model.overrides.sentence_head or data.dataset to that'
    require((head == "choice") == format_of(dataset).has_options, "data.dataset", dataset, reason)
    reason = f"two sentences need {_SHORTEST_PAIR} tokens; use at least that"
    require(head == "none" or training.seq_len >= _SHORTEST_PAIR, "training.seq_len", training.seq_len, reason)
    reason = f"a question is {NUM_OPTIONS} samples, one per option; use a multiple of {NUM_OPTIONS}"
    divides = head != "choice" or training.micro_batch_size % NUM_OPTIONS == 0
    require(divides, "training.micro_batch_size", training.micro_batch_size, reason)
