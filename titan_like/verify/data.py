"""The run's own data, read on several ranks with data workers and resumed on others, against its definition."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from titan_like.config.errors import ConfigError, RunError, first_line
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data import blend, raw_text, shards, stream_reader
from titan_like.data.batch import Batch
from titan_like.data.blend import shares_of
from titan_like.data.loader import BackgroundLoader, GlobalSampler, State, merge_states
from titan_like.data.masks import Masks
from titan_like.data.packed import corpus_folder, corpus_job
from titan_like.models.registry import model_config
from titan_like.train.setup import open_run_data
from titan_like.verify.data_sources import define
from titan_like.verify.masks import sample_of
from titan_like.verify.processes import Member
from titan_like.verify.token_ids import TokenIds, ids_of_tokenizer
from titan_like.verify.watch import digest, samples_of

_RELAY = ((4, 0), (1, 2), (2, 1))  # ranks, and data workers of each
_PART = 16  # samples that each of them reads
_WINDOW = _PART * len(_RELAY)
_MOST_TEXT = 16 << 20  # bytes that are tokenized for this
_SMALL = [
    *((blend, "BLOCK", 24), (stream_reader, "_BATCH", 256)),
    *((raw_text, "_PIECE", 1 << 14), (raw_text, "_CHUNK", 1 << 12), (raw_text, "_ROWS", 5), (shards, "_ROWS", 5)),
]


class Found(NamedTuple):
    """What the check found."""

    covered: str = ""  # the samples that were read
    problem: str | None = None  # the first sample that is wrong, in words
    unchecked: str | None = None  # why nothing was read


def check_data(member: Member, config: JobConfig) -> Found:
    """Read some samples of a run's data, in blocks so short that many end within these samples."""
    multiprocessing.set_start_method(None, force=True)  # a run's own; processes of a group have that of their server
    try:
        if not _has_tokens(config):
            config = edit(config, {"job.dump_folder": str(member.folder)})
        with short_blocks():
            return compare_with_definition(config)
    except (ConfigError, RunError) as error:
        return Found(unchecked=str(error))


def _has_tokens(config: JobConfig) -> bool:
    """Whether the run's text has been tokenized into its cache.

    Raises:
        ConfigError: it has not, and there is much of it.
    """
    section, cache_folder = config.data, Path(config.job.dump_folder, "data_cache")
    if section.dataset not in ("stdlib", "text", "conversations"):
        return False
    shares = shares_of(section.paths, one_source_each=False)
    jobs = [corpus_job(section.model_copy(update={"paths": share.paths})) for share in shares]
    if all(corpus_folder(job, cache_folder).exists() for job in jobs):
        return True
    if sum(file.stat().st_size for job in jobs for file in job.files) > _MOST_TEXT:
        raise ConfigError("data.paths", section.paths, f"more than {_MOST_TEXT >> 20} MiB, and not tokenized yet")
    return False


@contextmanager
def short_blocks() -> Iterator[None]:
    """Make blends' blocks and files' pieces short."""
    with ExitStack() as stack:
        for module, name, value in _SMALL:
            stack.enter_context(patch.object(module, name, value))
        yield


def compare_with_definition(config: JobConfig) -> Found:
    """Compare the beginning of both splits, and the samples around the end of an epoch, with their definition.

    One rank reads all of them. Then `_RELAY` does, in which other ranks resume after each part.

    Raises:
        ConfigError: the data is missing or unusable.
        RunError: it cannot be read.
    """
    model, section, covered = model_config(config.model), config.data, list[str]()
    (sources, masks), micro_batch = open_run_data(config, model), min(2, config.training.micro_batch_size)
    ids = ids_of_tokenizer(section) if section.tells_documents_apart or not model.is_causal else TokenIds()
    for split in ("train", "validation"):
        source, defined = sources[split], define(config, split)
        if len(source) != len(defined):
            return Found(problem=f"{split}: {len(source)} samples, and should be {len(defined)}")
        wanted = cache(partial(sample_of, defined, config, ids))
        try:
            stored = pickle.dumps(source)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError("data.dataset", section.dataset, f"cannot be copied ({first_line(error)})") from None
        for start in sorted({0, max(0, defined.epoch_end - _WINDOW // 2)}) if len(source) else ():
            covered.append(f"{start}–{start + _WINDOW - 1} of {split}")
            parts = [(start + _PART * number, _PART, *ranks) for number, ranks in enumerate(_RELAY)]
            state: State = {}
            for first, size, ranks, workers in [(start, _WINDOW, 1, 0), *parts]:
                copies = [pickle.loads(stored) for _ in range(ranks)]
                for copy in copies:
                    copy.load_state_dict(state)
                masked = list(map(masks.over, copies))
                samples, reached = read(masked, first, size, micro_batch, workers)
                state = reached if size < _WINDOW else {}
                found = dict(enumerate(samples, start=first))
                due = range(first, first + size)
                wrong = [i for i in sorted({*due, *found}) if i not in found or digest(found[i]) != digest(wanted(i))]
                if wrong or len(found) > size:
                    where = f"{split}, read by {ranks} ranks with {workers} workers each from sample {first} on"
                    return Found(problem=f"{where}: samples {wrong[:4]} of {size} are wrong")
    return Found(f"samples {', '.join(covered)}")


def read(copies: list[Masks], first: int, size: int, micro_batch: int, workers: int) -> tuple[list[Batch], State]:
    """The samples that ranks with a copy of the data each take, in the order of the stream, and the state of the data
    after them.
    """
    taken, states = list[list[Batch]](), list[State]()
    for rank, samples in enumerate(copies):  # one after the other: a fork beside running threads may hang
        sampler = GlobalSampler(first, micro_batch, rank, len(copies), first + size)
        with closing(BackgroundLoader(samples, sampler, workers, torch.device("cpu"))) as loader:
            taken.append(list(loader))
            states.append(loader.state)
    turns = (batch for turn in zip_longest(*taken) for batch in turn if batch is not None)
    ordered = [sample for batch in turns for sample in samples_of(batch)]
    return ordered, merge_states(states)
