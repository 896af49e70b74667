"""The fastest of a run's valid layouts that fits into a number of GPUs, and why the next best are slower."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from titan_like.config import JobConfig
from titan_like.config.load import edit, parse_overrides
from titan_like.config.options import OptionParser, as_installed
from titan_like.config.paths import to_toml
from titan_like.data.loading.batch_size import total_steps
from titan_like.metrics.console import ProgressLines
from titan_like.models.registry import model_config
from titan_like.models.shape import shape_of
from titan_like.planner.auto import described, differences, why_slower, why_too_large
from titan_like.planner.commands import outcome
from titan_like.planner.memory import MEMORY_MARGIN
from titan_like.planner.predict import Forecast, forecast
from titan_like.planner.profile import Profile
from titan_like.planner.search import Candidate, Counts, SearchResult, search
from titan_like.planner.search_space import SEARCHED, SLICE, STAGE_SIZES, set_keys

_TOO_LARGE_SHOWN = 3

Asked = tuple[JobConfig, Profile | None, float | None]  # a run, its profile and tokens, as `outcome.read_run` has them


def add_options(parser: OptionParser) -> None:
    """Add the options that are not settings of the run."""
    outcome.add_options_of_searches(parser, __doc__)
    text = "parameters: the run's flavor scaled to about this many, with the depth of its family"
    parser.add_number("--params", float, least=1, most=1e18, metavar="30e9", help=text)
    text = "GPUs of the job (default: the run's cluster)"
    parser.add_number("--gpus", int, least=1, most=1_000_000, help=text)
    parser.add_number("--top", int, least=1, default=10, help="combinations of tensor and pipeline degree to show")
    text = "where to write the run in its best layout, to train from"
    parser.add_path("--out", text, "FILE.toml", type=outcome.toml_option)


def run(options: argparse.Namespace, settings: list[str]) -> outcome.Outcome:
    """Search and describe the best layouts."""
    run = asked(options, settings)
    notes = [outcome.sized(model_config(run[0].model))] if options.params else []
    return answer(options, run, frozenset(parse_overrides(settings)), notes)


def asked(options: argparse.Namespace, settings: list[str]) -> Asked:
    """The run with the size, length and profile that the options give it."""
    config, profile, tokens = outcome.read_run(options, settings)
    if options.params is not None:
        overrides = shape_of(config.model, options.params, config.training.seq_len).overrides
        config = edit(config, {"model.overrides": overrides})
    if options.tokens is not None:
        lengths = {"steps": None, "samples": None, "epochs": None, "tokens": int(options.tokens)}
        config = edit(config, {f"training.{name}": value for name, value in lengths.items()})
    if options.profile:  # the layout found is then predicted and trained with the same profile
        path = Path(options.profile)
        config = edit(config, {"cluster.profile": str(path.resolve()) if path.is_file() else options.profile})
    return config, profile, tokens


def answer(options: argparse.Namespace, run: Asked, given: frozenset[str], notes: list[str]) -> outcome.Outcome:
    """Search, and describe the best layouts below the ``notes``. Keys that are ``given`` stay as the run has them."""
    config, profile, tokens = run
    fixed, show = given & {*SEARCHED, STAGE_SIZES}, ProgressLines()
    if config.parallelism.auto:
        fixed |= set_keys(config)

    def report(counts: Counts) -> None:
        show(f"{counts.valid:,} layouts, {counts.computed:,} step times computed …")

    result = search(config, options.gpus, profile, fixed, options.top, report)
    prediction = forecast(result.best.work, result.profile)
    layouts, (days_text, days) = reasons(result), outcome.length(prediction, tokens, options.price)
    notes = [*notes, *summary(result, prediction)]
    ends = [f"the best layout{days_text}"] if days else []
    text = "\n".join([*notes, "", *table(result.best, *layouts), *ends])
    files = {}
    if options.out:
        best, count, path = result.config, result.space.num_gpus, Path(options.out)
        on_gpus = outcome.gpus(count)
        if "job.description" not in given:
            size = outcome.billions(result.space.model.num_parameters())
            about = f"{best.model.family} {best.model.flavor}, {size} parameters, {on_gpus}"
            if tokens is not None:
                about += f", {outcome.billions(tokens)} tokens in {total_steps(best.training):,} steps"
            best = edit(best, {"job.description": about})
        head = [f"{best.job.config_file or 'A run'} in the layout that scripts/plan.py search found for {on_gpus}:"]
        for line in [*notes, *ends]:
            head += textwrap.wrap(line, 118, initial_indent="  ", subsequent_indent="    ")
        files[path] = run_as_toml(best, count, path, head)
    return outcome.Outcome(text, {"search": as_dict(result, *layouts) | days}, files=files)


def summary(result: SearchResult, prediction: Forecast) -> list[str]:
    """The best layout, the forecast for it, and how many layouts it is the best of."""
    counts, is_fastest = result.counts, result.best is result.fastest
    sliced = "parallelism.context_parallel_degree" not in result.space.fixed and result.best.work.context > 1
    slices = f"; a file that names no context degree gets slices of at least {SLICE:,} tokens" if sliced else ""
    which = "fastest" if is_fastest else "the simplest that predictions cannot tell from the fastest"
    return [
        described(prediction.work),
        f"predicted: {prediction}",
        f"{which} of {counts.valid:,} valid layouts on {outcome.gpus(result.space.num_gpus)}; {counts.too_large:,} of "
        f"them are known not to fit ({100 * MEMORY_MARGIN:.0f} % of the memory is kept free), and bounds show that the "
        f"others are slower{slices}",
    ]


Reasoned = list[tuple[Candidate, str]]  # with why each is not the best


def reasons(result: SearchResult) -> tuple[Reasoned, Reasoned]:
    """The ranked layouts, and layouts that would be faster but do not fit, with why they lose."""
    best = result.best
    ranked = [(other, "best" if other is best else why_slower(best, other, result.profile)) for other in result.ranked]
    too_large = result.too_large[:_TOO_LARGE_SHOWN]
    return ranked, [(other, why_too_large(best, other, result.usable_bytes)) for other in too_large]


def table(best: Candidate, ranked: Reasoned, too_large: Reasoned) -> list[str]:
    """The layouts, one a line."""
    return [
        f"{'':>3s} {'tensor':>7s} {'pipeline':>9s} {'schedule':23s} {'ZeRO':>4s} {'data':>12s} {'micro':>5s} "
        f"{'recompute':11s} {'step s':>9s} {'slower':>7s} {'GiB':>6s}  why",
        *(f"{number:3d} {_columns(candidate, best)}  {why}" for number, (candidate, why) in enumerate(ranked, 1)),
        *(f"{'-':>3s} {_columns(candidate, best)}  {why}" for candidate, why in too_large),
    ]


def _columns(candidate: Candidate, best: Candidate) -> str:
    work = candidate.work
    tensor = f"{work.tensor}{' sp' if work.sequence_parallel else ''}"
    pipeline = f"{work.pipeline}" + (f" × {work.virtual_stages}" if work.virtual_stages > 1 else "")
    data = f"{work.replicate} × {work.shard}" if work.replicate > 1 else f"{work.shard}"
    data += f" cp {work.context}" if work.context > 1 else ""
    data += f" ep {work.expert}" if work.expert > 1 else ""
    recompute = work.recompute + (f" 1/{work.recompute_every}" if work.recompute_every > 1 else "")
    schedule = work.schedule if work.pipeline > 1 else ""
    slower = f"{100 * (candidate.time.total / best.time.total - 1):+.1f} %"
    return (
        f"{tensor:>7s} {pipeline:>9s} {schedule:23s} {work.zero_stage:>4d} {data:>12s} {work.micro_batch_size:>5d} "
        f"{recompute:11s} {candidate.time.total:9.3f} {slower:>7s} {candidate.memory_bytes / 2**30:6.1f}"
    )


def as_dict(result: SearchResult, ranked: Reasoned, too_large: Reasoned) -> dict[str, Any]:
    """The result for JSON."""

    def entry(candidate: Candidate, why: str) -> dict[str, Any]:
        return {
            "settings": result.space.settings(candidate.work),
            "step_seconds": candidate.time._asdict(),
            "seconds_more": differences(result.best, candidate),
            "memory_bytes": candidate.memory_bytes,
            "why": why,
        }

    return {
        "gpus": result.space.num_gpus,
        "profile": result.profile.name,
        "valid": result.counts.valid,
        "too_large": result.counts.too_large,
        "computed": result.counts.computed,
        "usable_memory_bytes": result.usable_bytes,
        "ranked": [entry(*row) for row in ranked],
        "faster_but_too_large": [entry(*row) for row in too_large],
    }


def run_as_toml(config: JobConfig, num_gpus: int, path: Path, head: list[str]) -> str:
    """What a run's file and command line set, as a TOML for ``path`` that begins with the comment lines ``head``.

    Its cluster has as many nodes as the GPUs fill.
    """
    tree = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tree.setdefault("job", {}).pop("config_file", None)
    tree.get("parallelism", {}).pop("auto", None)
    cluster, per_node = tree.setdefault("cluster", {}), config.cluster.gpus_per_node
    cluster.pop("nodes", None)
    if per_node is not None and num_gpus % per_node == 0:
        cluster["nodes"] = num_gpus // per_node
    schema = "#:schema ./schema.json\n" if (path.parent / "schema.json").is_file() else ""
    return schema + to_toml(tree, [*map(as_installed, head)])
