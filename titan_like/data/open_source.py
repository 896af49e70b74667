"""From [data] to the splits of its dataset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from titan_like.config.entry_points import load_entry
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, num_labels
from titan_like.data.blend import BlendedSource, shares_of
from titan_like.data.lengths import sample_length
from titan_like.data.registry import find_dataset
from titan_like.data.source import IGNORED_LABEL, UNKNOWN_LENGTH, DataRequest, Source
from titan_like.data.stream import BlendedStream, StreamSource
from titan_like.models.config import TransformerConfig


def open_data(config: JobConfig, model: TransformerConfig) -> dict[str, Source]:
    """Open the splits that the run reads. New data is tokenized.

    Raises:
        ConfigError: data is missing or unusable, or there is too little of it.
    """
    request = DataRequest(
        section=config.data,
        split="train",
        seq_len=sample_length(config, model).raw,
        seed=config.job.seed,
        vocab_size=model.vocab_size,
        cache_folder=Path(config.job.dump_folder) / "data_cache",
    )
    sources = {split: open_source(replace(request, split=split)) for split in ("train", "validation")}
    if len(sources["train"]) == 0:
        told = sources["train"].described(1, 1)
        problem = f"its training split has no samples{f' ({told})' if told else ''}; give it more data"
        raise ConfigError("data.dataset", config.data.dataset, problem)
    if config.evaluation.interval and len(sources["validation"]) == 0:
        problem = "leaves no whole sample for validation; give it more weight or set evaluation.interval to 0"
        raise ConfigError("data.split", config.data.split, problem)
    wanted = config.evaluation.steps * config.training.global_batch_size
    if config.evaluation.interval and len(sources["validation"]) == UNKNOWN_LENGTH:
        first = range(min(wanted, config.data.num_readers))  # a stream's readers take turns
        if not sum(int(num_labels(sources["validation"][index], ("tokens",))) for index in first):
            problem = f"the first {wanted} samples for validation are of readers that have none; raise it"
            raise ConfigError("evaluation.steps", config.evaluation.steps, problem)
    if config.data.sentence_objective == "next_sentence" and len(sources["train"]) == UNKNOWN_LENGTH:
        problem = "takes the second sentence from anywhere in the data, and a stream is only read in order"
        problem += '; use "sentence_order", or write the data with scripts/preprocess_data.py'
        raise ConfigError("data.sentence_objective", "next_sentence", problem)
    return sources


def open_source(request: DataRequest) -> Source:
    """One split of the dataset, or the blend of datasets, that [data] names.

    Raises:
        ConfigError: there is no such dataset, its class is none, its samples do not fit the run, or it refuses itself.
    """
    shares = shares_of(request.section.paths, one_source_each=request.section.dataset == "indexed")
    entry = find_dataset(request.section)
    dataset = load_entry("data.dataset", entry)
    if not (isinstance(dataset, type) and issubclass(dataset, Source)):
        raise ConfigError(
            "data.dataset", entry.name, f"{entry.value} is not a subclass of titan_like.data.source.Source"
        )
    sources = []
    for number, share in enumerate(shares):
        section = request.section.model_copy(update={"paths": share.paths})
        source: Source = dataset(replace(request, section=section, part=number))
        problem = _sample_problem(source.sample(0), request) if len(source) > 0 else None
        if problem is not None:
            raise ConfigError("data.dataset", entry.name, problem)
        sources.append(source)
    if len(sources) == 1:
        return sources[0]
    blend = BlendedStream if issubclass(dataset, StreamSource) else BlendedSource
    return blend(request, sources, [share.weight for share in shares])


def _sample_problem(sample: object, request: DataRequest) -> str | None:
    """The reason why a sample cannot belong to the run; None if it can."""
    if not set(Batch._fields) <= set(getattr(sample, "_fields", ())):
        return f"its samples are {type(sample).__name__}; return titan_like.data.batch.Batch(tokens, labels)"
    given = {name: x for name in ("tokens", "labels") if (x := getattr(sample, name)) is not None}
    for name, x in given.items():
        if x.dtype != torch.int64 or x.shape != (request.seq_len,):
            return f"the {name} of its samples are {x.dtype} {list(x.shape)}, not torch.int64 [{request.seq_len}]"
    tokens = torch.cat([x[x != IGNORED_LABEL] for x in given.values()])
    if tokens.min() < 0 or tokens.max() >= request.vocab_size:
        most = request.vocab_size - 1
        return f"its first sample has tokens from {tokens.min()} to {tokens.max()}, but the model's go from 0 to {most}"
    return None
