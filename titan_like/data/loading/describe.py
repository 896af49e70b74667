"""What is known of a run's data before it starts."""

from pathlib import Path

from titan_like.config.entry_points import DATASETS, format_of
from titan_like.config.paths import unreadable_reason
from titan_like.config.schema import JobConfig
from titan_like.data.loading.batch_size import in_samples, total_samples
from titan_like.data.loading.blend import shares_of
from titan_like.data.loading.open_source import held_out, open_data
from titan_like.data.objectives.masks import masks_of
from titan_like.data.readers.files import named_paths
from titan_like.data.readers.indexed import prefix_of
from titan_like.data.text.packed import corpus_files, corpus_folder, corpus_job, split_weights
from titan_like.data.text.tokenizer import is_on_hub, tokenizer_files, tokenizer_of
from titan_like.models.config import TransformerConfig


def describe_data(config: JobConfig, model: TransformerConfig) -> tuple[JobConfig, str]:
    """What is known of the data without tokenizing it. It may be on another machine.

    Returns the settings, with `training.epochs` in samples if the data can be counted, and a line. Raises a
    `ConfigError` if the settings cannot be right for any data, or the data at hand is unfit.
    """
    section = config.data
    if section.dataset not in DATASETS:  # only the class of a user's own dataset can count it
        return _counted(config, model)
    split_weights(section.split)
    sections = [section, *(held_out(section, dataset.paths) for dataset in config.evaluation.sets)]
    sources = [data.model_copy(update={"paths": share.paths}) for data in sections for share in shares_of(data.paths)]
    data_format = format_of(section.dataset)
    is_corpus = not data_format.is_tokenized and not data_format.is_stream
    if is_corpus and data_format.has_files and not section.paths:
        corpus_files(section)  # raises ConfigError
    spec = section.tokenizer
    named = [Path(spec)] if is_on_hub(spec) else tokenizer_files(spec)
    if section.tokenizer.startswith("gpt2:") and len(named) != 2:
        tokenizer_of(section)  # raises ConfigError
    absent = [str(path) for path in named if unreadable_reason(path) == "does not exist"]
    files = [name for source in sources if format_of(source.dataset).has_files for name in source.paths]
    absent += [name for name in files if _is_absent(name, data_format.is_tokenized)]
    if absent:
        return config, f"not looked at: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not on this machine"
    if data_format.is_tokenized:
        return _counted(config, model)
    tokenizer_of(section, model.vocab_size)
    masks_of(config, model)  # raises ConfigError where a token is missing
    if data_format.is_stream:
        open_data(config, model)  # reads the first sample
        return config, f"a stream, read by {section.num_readers} readers, so its samples are not counted"
    jobs, cache = [corpus_job(source) for source in sources], Path(config.job.dump_folder) / "data_cache"
    new = [job for job in jobs if not corpus_folder(job, cache).exists()]
    if new:
        return config, f"{sum(len(job.files) for job in new):,} files, not tokenized yet, so not counted"
    return _counted(config, model)


def _is_absent(name: str, is_tokenized: bool) -> bool:
    files = [f"{prefix_of(name)}{ending}" for ending in (".idx", ".bin")] if is_tokenized else []
    return not any(map(named_paths, [name, *files]))


def _counted(config: JobConfig, model: TransformerConfig) -> tuple[JobConfig, str]:
    samples = len(open_data(config, model)["train"])
    config = config.model_copy(update={"training": in_samples(config.training, samples)})
    return config, f"{samples:,} training samples, {total_samples(config.training) / samples:.3g} passes over them"
