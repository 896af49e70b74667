"""Check that each rank of a layout reads the samples of the user's own dataset that it should, without training.

Sample i of a split is what one process reads as sample i. Trainers of the layout read the dataset of the real
configuration with their own loaders: without data workers, with them, and resumed from their own checkpoint. Their
model is the small run's, because it computes nothing.
"""

import multiprocessing
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.config.errors import ConfigError, RunError
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config
from titan_like.parallel.axes import num_microbatches
from titan_like.parallel.layout import Layout, resolve_layout
from titan_like.train.setup import Run, open_run_data
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import DATA, RESUME, Key, Reference, Report, Row
from titan_like.verify.processes import Member
from titan_like.verify.shrink import Small
from titan_like.verify.watch import digest, samples_of

WORKERS = "data.num_workers"  # the name of checks with data workers; those of a resumed run have `RESUME`
_MOST_WORKERS = 3  # of each rank: enough for any order of them to show


def read_alone(member: Member, small: Small) -> Reference | str:
    """The samples that a layout reads, read by one process; or why they cannot be read here."""
    own = small.own_data
    assert own is not None
    multiprocessing.set_start_method(None, force=True)  # a run's own; processes of a group have that of their server
    try:
        sources, masks = open_run_data(_with_cache(own, member.folder), model_config(own.model))
        size = _num_steps(own) * _batch_size(own, small.config)
        sizes = {"train": 2 * size}
        if own.evaluation.interval > 0:
            unit = own.training.micro_batch_size * Layout.of(small.config.parallelism).data_parallel
            sizes["validation"] = -(-min(size, len(sources["validation"])) // unit) * unit
        digests = {split: [digest(masks.over(sources[split])[i]) for i in range(n)] for split, n in sizes.items()}
    except (ConfigError, RunError) as error:
        return str(error)
    return Reference(small, Path(), {}, [], {}, {DATA: {}}, own_data=digests)


def observe_data(member: Member, reference: Reference, layout: JobConfig, _: str) -> Report:
    """Compare the samples that a rank of a layout reads with the ones that one process reads."""
    report, own = Report(DATA, member.rank), reference.small.own_data
    assert own is not None
    multiprocessing.set_start_method(None, force=True)
    workers = min(own.data.num_workers, _MOST_WORKERS)
    for name, count in [("", 0), *([(WORKERS, workers)] if workers else []), (RESUME, workers)]:
        trainer = Trainer(_run(member, own, layout, count))
        begin = _num_steps(own) if name == RESUME else 0
        reason = f"resumed from step {trainer.state.step}, not {begin}"
        report.require(trainer.state.step == begin, Key(begin, Row.CHECKPOINTS, name), reason)
        for split in reference.own_data if name != RESUME else ("train",):
            _read(trainer, report, name, split, reference, begin)
        if name != RESUME:
            trainer.state.step = _num_steps(own)
            trainer.state.consumed_samples = _num_steps(own) * trainer.config.training.global_batch_size
            trainer.state.save(is_last=True)
        wrong = torch.tensor(float(not all(check.ok for check in report.checks.values())), device=trainer.run.device)
        dist.all_reduce(wrong)
        if wrong:
            break
    return report


def _read(trainer: Trainer, report: Report, name: str, split: str, reference: Reference, begin: int) -> None:
    """Read the microbatches of some steps of a split, after step ``begin``, as the trainer does, and check each."""
    training, workers, digests = trainer.config.training, trainer.config.data.num_workers, reference.own_data[split]
    size, ranks, numbers = training.micro_batch_size, trainer.dp_size, dict[str, int]()
    for number, value in enumerate(digests):
        numbers.setdefault(value, number)
    per_step = training.global_batch_size // (size * ranks)
    which = f" of a run that resumed after step {begin}" if begin else "" if split == "train" else f" of {split}"
    # Held-out samples end where one process's do, rounded up to microbatches of all data ranks of the whole layout.
    rounded = size * Layout.of(reference.small.config.parallelism).data_parallel
    least = trainer.config.evaluation.steps * per_step
    least, read = least if split == "train" else (len(digests) - rounded) // (size * ranks) + 1, 0
    with closing(trainer.load_data() if split == "train" else trainer.validator.load(split)) as data:
        for count, batch in enumerate(islice(data, trainer.config.evaluation.steps * per_step)):
            step, microbatch = begin + count // per_step + 1, count % per_step
            first = (step - 1) * training.global_batch_size + (microbatch * ranks + trainer.dp_rank) * size
            found = [digest(sample) for sample in samples_of(batch)]
            drawn = [numbers.get(value, "that one process never reads") for value in found]
            worker = f", data worker {count % workers} of {workers}" if workers else ""
            where = f"data rank {trainer.dp_rank} of {ranks}{worker}, step {step}{which}, microbatch {microbatch}"
            message = f"{where}: reads samples {drawn[:4]}, not {list(range(first, first + size))[:4]}"
            report.require(found == digests[first : first + size], Key(step, Row.DATA, name), message)
            read = count + 1
    if read < least:
        message = f"data rank {trainer.dp_rank} of {ranks}: reads {read} microbatches{which}, not {least}"
        report.require(False, Key(begin + read // per_step + 1, Row.DATA, name), message)


def _num_steps(own: JobConfig) -> int:
    """Steps before a run stops, and after it has resumed: every data worker reads in both."""
    return 2 + min(own.data.num_workers, _MOST_WORKERS)


def _batch_size(own: JobConfig, layout: JobConfig) -> int:
    """The samples of a step: as many microbatches as in the small run, each of the run's own size."""
    degrees = Layout.of(layout.parallelism)
    return own.training.micro_batch_size * num_microbatches(layout.training, degrees) * degrees.data_parallel


def _with_cache(own: JobConfig, folder: Path) -> JobConfig:
    """The run's own configuration, with its folder only if that has files for the dataset already."""
    has_cache = Path(own.job.dump_folder, "data_cache").exists()
    return own if has_cache else edit(own, {"job.dump_folder": str(folder)})


def _run(member: Member, own: JobConfig, layout: JobConfig, workers: int) -> Run:
    folder, lengths = member.folder / f"data-{workers}", {"steps": 10**6, "samples": None, "tokens": None}
    values = {
        "job.dump_folder": str(folder),
        **{f"training.{key}": value for key, value in lengths.items()},
        "training.batch_size_rampup": None,
        "training.micro_batch_size": own.training.micro_batch_size,
        "training.global_batch_size": _batch_size(own, layout),
        "checkpoint.enable": True,
        "evaluation.interval": 0,
        "evaluation.steps": _num_steps(own),
        "compile.enable": False,
        "compile.cudagraphs": False,
    }
    section = own.data.model_copy(update={"num_workers": workers})
    config = edit(layout.model_copy(update={"data": section}), values)
    sources, masks = open_run_data(_with_cache(own, member.folder), model_config(own.model))
    return Run(
        config=config,
        model=model_config(config.model),
        layout=resolve_layout(config.parallelism, member.world_size),
        device=torch.device(member.device),
        datasets=sources,
        masks=masks,
    )
