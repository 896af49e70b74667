"""Opens the dataset, or the blend of datasets, of each split of a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan_like.config.entry_points import find_dataset, format_of, load_entry
from titan_like.config.errors import ConfigError, require
from titan_like.config.schema import HELD_OUT, Data, JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading.batch_size import NO_EPOCHS
from titan_like.data.loading.blend import BlendedSource, Phase, shares_of
from titan_like.data.loading.lengths import sample_length
from titan_like.data.loading.stream import BlendedStream, StreamSource
from titan_like.data.readers.fetch import local_paths
from titan_like.data.readers.files import find_indexed
from titan_like.data.source import IGNORED_LABEL, UNKNOWN_LENGTH, DataRequest, Source
from titan_like.models.config import TransformerConfig


def open_data(config: JobConfig, model: TransformerConfig, trains: bool = True) -> dict[str, Source]:
    """Open the run's splits, "train" only if it ``trains``, and `evaluation.sets` as validation/NAME.

    Raises a `ConfigError` if data is missing, unusable or too short.
    """
    request = DataRequest(
        section=config.data,
        split="train",
        seq_len=sample_length(config, model).raw,
        seed=config.job.seed,
        vocab_size=model.vocab_size,
        cache_folder=Path(config.job.dump_folder) / "data_cache",
    )
    splits = ("train", "validation") if trains else ("validation",)
    sources = {split: open_source(replace(request, split=split)) for split in splits}
    validation = sources["validation"]
    train = sources.get("train", validation)
    is_stream = len(train) == UNKNOWN_LENGTH
    is_validated = config.evaluation.interval > 0 and not config.evaluation.sets
    description = train.described(1, 1) if len(train) == 0 else None
    reason = f"its training split has no samples{f' ({description})' if description else ''}; give it more data"
    require(len(train) > 0 or not trains, "data.dataset", config.data.dataset, reason)
    reason = "leaves no whole sample for validation; give it more weight or set evaluation.interval to 0"
    require(not is_validated or len(validation) > 0, "data.split", config.data.split, reason)
    require(not is_stream or config.training.epochs is None, "training.epochs", config.training.epochs, NO_EPOCHS)
    objective = config.data.sentence_objective
    reason = "needs second sentences from anywhere in the data, but a stream is read in order; use "
    reason += '"sentence_order", or write the data with scripts/preprocess_data.py'
    require(not is_stream or objective != "next_sentence", "data.sentence_objective", objective, reason)
    for entry in config.evaluation.sets:
        key = f"evaluation.sets.{entry.name}.paths"
        try:
            source = open_source(replace(request, split="validation", section=held_out(config.data, entry.paths)))
        except ConfigError as error:
            error.args = (str(error).replace("data.paths", key, 1),)
            raise
        require(len(source) > 0, key, entry.paths, "has no whole sample of training.seq_len; give it more data")
        sources[f"validation/{entry.name}"] = source
    return sources


def held_out(section: Data, paths: list[Any]) -> Data:
    """[data] of one of `evaluation.sets`, with all samples in the validation split."""
    dataset = section.dataset if format_of(section.dataset).has_files else "text"
    return section.model_copy(update={"dataset": dataset, "paths": paths, "split": HELD_OUT})


def open_source(request: DataRequest) -> Source:
    """One split of the dataset, or the blend of datasets, that [data] names."""
    shares = shares_of(request.section.paths)
    entry = find_dataset(request.section)
    dataset = load_entry("data.dataset", entry)
    is_source = isinstance(dataset, type) and issubclass(dataset, Source)
    reason = f"{entry.value} is not a subclass of titan_like.data.source.Source"
    require(is_source, "data.dataset", entry.name, reason)
    sources, weights = list[Source](), list[float | None]()
    for share in shares:
        opened = list[Source]()
        is_stream = format_of(request.section.dataset).is_stream  # which reads parts of files where they are
        local = share.paths if is_stream else local_paths(share.paths, request.cache_folder)
        datasets = find_indexed(local, "data.paths") if format_of(request.section.dataset).is_tokenized else []
        for paths in [[path] for path in datasets] or [local]:
            section = request.section.model_copy(update={"paths": paths})
            source: Source = dataset(replace(request, section=section, part=len(sources) + len(opened)))
            if len(source) > 0:
                _check_sample(source.sample(0), request, entry.name)
            opened.append(source)
        total = max(1, sum(map(len, opened)))
        # Several datasets divide the weight of their folder in proportion to their samples.
        weights += [share.weight and share.weight * (len(source) / total) for source in opened]
        sources += opened
    if len(sources) == 1:
        return sources[0]
    if issubclass(dataset, StreamSource):
        return BlendedStream(request, sources, weights, request.section.num_readers)
    return BlendedSource(request, sources, weights)


def phases_of(source: Source) -> list[Phase]:
    """The phases of a run up to the current blend."""
    if not isinstance(source, BlendedSource):
        return [Phase(0, [source.fingerprint], [1])]
    return list(source.phases) or [Phase(0, [part.fingerprint for part in source.sources], source.blend.shares)]


def continue_after(source: Source, phases: Sequence[Phase]) -> BlendedSource:
    """``source`` as the blend of the last of a run's ``phases``, continued from the earlier ones."""
    sources = list(source.sources) if isinstance(source, BlendedSource) else [source]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(key for phase in phases for key in phase.keys))}
    for place, key in enumerate(phases[-1].keys):  # a source's order depends on its first number in the run
        request = replace(sources[place].request, part=numbers[key])
        sources[place] = sources[place] if request == sources[place].request else type(sources[place])(request)
    kind = BlendedStream if isinstance(sources[0], StreamSource) else BlendedSource
    readers = source.request.section.num_readers if kind is BlendedStream else 1
    blend = kind(source.request, sources, phases[-1].shares, readers)
    blend.continue_after(phases)
    return blend


def _check_sample(sample: Any, request: DataRequest, dataset: str) -> None:
    """Raise a `ConfigError` if a sample cannot belong to the run."""
    is_batch = set(Batch._fields) <= set(getattr(sample, "_fields", ()))
    reason = f"its samples are {type(sample).__name__}; return titan_like.data.batch.Batch(tokens, labels)"
    require(is_batch, "data.dataset", dataset, reason)
    fields = {name: x for name in ("tokens", "labels") if (x := getattr(sample, name)) is not None}
    for name, x in fields.items():
        fits = x.dtype == torch.int64 and x.shape == (request.seq_len,)
        reason = f"the {name} of its samples are {x.dtype} {list(x.shape)}, not torch.int64 [{request.seq_len}]"
        require(fits, "data.dataset", dataset, reason)
    tokens, last = torch.cat([x[x != IGNORED_LABEL] for x in fields.values()]), request.vocab_size - 1
    reason = f"its first sample has tokens from {tokens.min()} to {tokens.max()}, but the model's go from 0 to {last}"
    require(tokens.min() >= 0 and tokens.max() <= last, "data.dataset", dataset, reason)
