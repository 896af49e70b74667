"""Evaluate a checkpoint: python scripts/evaluate.py --checkpoint outputs/debug_gpt --task text=FILE

Tasks: validation (the loss of the run's validation split and sets), text=FILE (perplexity and bits per byte),
wikitext103=FILE (perplexity per word), lambada=FILE (last words), race=FOLDER (multiple choice, for a BERT that was
fine-tuned to choose), and with --lm_eval tasks of EleutherAI's evaluation harness.
Uses the newest checkpoint in --checkpoint FOLDER, or of the run that --job.config_file describes, or
--checkpoint.load_step N. Under torchrun the processes split the model in the run's layout; a single process loads the
whole model. The model sees training.seq_len tokens at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_like.config import JobConfig, load_config
from titan_like.config.errors import boolean_of, require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, url_option, write_json
from titan_like.config.paths import check_folder
from titan_like.train.rules import check_predicts_next_token

if TYPE_CHECKING:
    from titan_like.evaluate.scoring import Progress
    from titan_like.evaluate.task import TextSettings
    from titan_like.evaluate.tasks import NamedTask

_VALIDATION = "validation"  # as a task: the run's validation split and evaluation.sets
_SECONDS_BETWEEN_LINES = 10
_BOOL = ("true", "false")
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_OF_HARNESS = (  # as the harness's function calls them
    *("num_fewshot", "limit", "apply_chat_template", "system_instruction", "fewshot_as_multiturn"),
    "confirm_run_unsafe_code",
)


def build_parser() -> argparse.ArgumentParser:
    """The options that evaluation adds to the run's settings."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    meaning = "a run's dump folder, or one of its checkpoints; the run's settings are in it (no --job.config_file)"
    parser.add_path("--checkpoint", meaning, "FOLDER", type=url_option)
    meaning = "a task and its file, or validation; may be repeated (default: what the run scores as it trains)"
    parser.add_argument("--task", metavar="NAME=PATH", action="append", default=[], help=meaning)
    meaning = "tokens from one window of a text to the next (default: half of training.seq_len; all of it: disjoint)"
    parser.add_number("--stride", int, least=1, help=meaning)
    parser.add_argument("--lm_eval", metavar="TASKS", help="tasks of the evaluation harness, with commas between them")
    parser.add_path("--lm_eval_folder", "folder with YAML files of tasks", "FOLDER")
    parser.add_number("--num_fewshot", int, least=0, help="examples before each question of --lm_eval")
    parser.add_number("--limit", int, least=1, help="score only the first documents of each task of --lm_eval")
    meaning = "apply the tokenizer's chat template, or the named one of several, to the prompts of --lm_eval"
    parser.add_argument("--apply_chat_template", nargs="?", const=True, metavar="NAME", help=meaning)
    parser.add_argument("--system_instruction", metavar="TEXT", help="begins every prompt of --lm_eval")
    meaning = "examples are earlier turns of the conversation (default: true with --apply_chat_template)"
    parser.add_argument("--fewshot_as_multiturn", type=_boolean, nargs="?", choices=_BOOL, const="true", help=meaning)
    meaning = "let tasks of --lm_eval run what the model writes, on this machine"
    parser.add_argument("--confirm_run_unsafe_code", action="store_true", default=None, help=meaning)
    parser.add_number("--seed", int, least=0, help="seed of all that --lm_eval draws, as of lm-eval (default: its own)")
    return parser


def _boolean(text: str) -> str:
    return boolean_of(text) or text


def check_options(options: argparse.Namespace) -> None:
    """Refuse the first option that is wrong."""
    require(options.lm_eval != "", "--lm_eval", "", "names no task; give names with commas between them")
    reason = 'the package lm_eval is not installed; run pip install "titan_like[lm-eval]"'
    require(not options.lm_eval or find_spec("lm_eval") is not None, "--lm_eval", options.lm_eval, reason)
    for name in (*_OF_HARNESS, "lm_eval_folder", "seed"):
        value = getattr(options, name)
        require(value is None or options.lm_eval, f"--{name}", value, "is for --lm_eval only; add that or leave it out")
    reason = "names no chat template; without a name it is the tokenizer's own"
    require(options.apply_chat_template != "", "--apply_chat_template", "", reason)
    if (turns := options.fewshot_as_multiturn) is not None:
        reason = "turns are for --apply_chat_template; add that, or leave it out"
        require(turns == "false" or options.apply_chat_template, "--fewshot_as_multiturn", turns, reason)
        options.fewshot_as_multiturn = turns == "true"
    if folder := options.lm_eval_folder:
        reason = "is not a folder; name one with YAML files"
        require(os.path.isdir(folder), "--lm_eval_folder", folder, reason)
        check_folder("--lm_eval_folder", Path(folder).rglob("*"))


def main(argv: list[str]) -> int:
    """Load the model, score the tasks and print their results."""
    options, settings = build_parser().parse_known_args(argv)
    check_options(options)
    config = load_config(settings) if options.checkpoint is None else None

    from titan_like.checkpoint.loader import is_checkpoint
    from titan_like.evaluate.inference import config_of_checkpoint, find_checkpoint
    from titan_like.evaluate.task import TextSettings
    from titan_like.evaluate.tasks import named_tasks
    from titan_like.models.registry import model_config

    config = config or config_of_checkpoint(options.checkpoint, settings)
    # Refuse what cannot be scored before weights are looked for.
    shape = model_config(config.model)
    key, specs = "--task", options.task
    if not specs and not options.lm_eval:
        key, specs = "evaluation.datasets", [*config.evaluation.datasets]
        specs += [_VALIDATION] if config.evaluation.interval else []
        reason = "there is nothing to evaluate; give --task NAME=PATH, --task validation or --lm_eval TASKS"
        require(specs, "--task", None, reason)
    validates, specs = _VALIDATION in specs, [spec for spec in specs if spec != _VALIDATION]
    if "choice" not in shape.predictions and (specs or options.lm_eval):
        check_predicts_next_token(config, shape)
    named = named_tasks(key, specs, shape)
    slides = any(task.kind.slides for task in named)
    reason = "is for the tasks text and wikitext103 only; leave it out"
    require(options.stride is None or slides, "--stride", options.stride, reason)
    windows = TextSettings.of(config.training.seq_len, options.stride)
    reason = f"longer than training.seq_len = {windows.seq_len}; use at most that"
    require(windows.stride <= windows.seq_len, "--stride", windows.stride, reason)
    reason = "its tasks predict tokens, and this model chooses answers"
    require(not options.lm_eval or shape.is_causal, "--lm_eval", options.lm_eval, reason)
    path = find_checkpoint(config)
    has_data = is_checkpoint(path) or {"dataset", "paths"} & config.data.model_fields_set
    reason = "the folder says nothing of a run's data; give --data.dataset and --data.paths"
    require(has_data or not validates, "--task", _VALIDATION, reason)
    results, of_harness = score(config, path, named, windows, options, validates)
    # Every process has the results; one of them reports.
    if os.environ.get("RANK", "0") != "0":
        return 0
    stride = f", stride {windows.stride}" if slides else ""
    print(f"[{path}] windows of {windows.seq_len} tokens{stride}", file=sys.stderr)
    if results:
        print(format_results(results))
    if of_harness:
        from lm_eval.utils import make_table

        print(make_table(of_harness))
    of_tasks = {"lm_eval": of_harness["results"]} if of_harness else {}
    write_json(options.json, {"checkpoint": str(path), **vars(windows), "results": results, **of_tasks})
    return 0


def score(
    config: JobConfig,
    path: Path,
    named: list[NamedTask],
    windows: TextSettings,
    options: argparse.Namespace,
    validates: bool,
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Score the tasks in one process or, under torchrun, in the run's layout.

    Returns task → figure → value, and what the harness returns if it is asked for.
    """
    from titan_like.data.text.tokenizer import tokenizer_of
    from titan_like.evaluate.inference import load_parallel_model
    from titan_like.evaluate.scoring import Scorer
    from titan_like.evaluate.tasks import open_tasks, run_tasks
    from titan_like.parallel.mesh import build_mesh
    from titan_like.train.environment import check_meeting, number_of_processes
    from titan_like.train.job import process_group
    from titan_like.train.layout_rules import check_sequence
    from titan_like.train.rules import resolve_for_inference
    from titan_like.train.setup import select_device
    from titan_like.train.validation import score_held_out

    world_size = number_of_processes()
    check_meeting()
    config, shape, layout = resolve_for_inference(config, world_size)
    check_sequence(config, shape, layout)
    tokenizer = tokenizer_of(config.data, shape.vocab_size)
    tasks = open_tasks(named, tokenizer, windows)
    names = options.lm_eval.split(",") if options.lm_eval else []
    if names:
        from titan_like.evaluate.harness import CheckpointLM, find_tasks, run_harness
        from titan_like.evaluate.sampling import generation_fields, stop_ids

        runs_code = bool(options.confirm_run_unsafe_code)
        if runs_code:
            os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")  # which such tasks want, too
        names, manager = find_tasks(names, options.lm_eval_folder, options.num_fewshot, runs_code)
    device = select_device(config.training.dtype)
    with process_group(device):
        mesh = build_mesh(layout, device.type)
        model = load_parallel_model(config, path, mesh, device)
        progress = progress_of if os.environ.get("RANK", "0") == "0" else None
        scorer = Scorer(config, model, mesh, device)
        results = run_tasks(tasks, scorer, progress)
        results |= score_held_out(scorer) if validates else {}
        if not names:
            return results, {}
        arguments = dict.fromkeys(_SEEDS, options.seed) | {name: getattr(options, name) for name in _OF_HARNESS}
        given = {name: value for name, value in arguments.items() if value is not None}
        template, seed = options.apply_chat_template, options.seed
        ends, generation = stop_ids(tokenizer, path), generation_fields(path)
        harness_model = CheckpointLM(scorer, tokenizer, ends, generation, template, seed)
        return results, run_harness(harness_model, names, manager, **given)


def progress_of(name: str) -> Progress:
    """Print a task's progress to stderr now and then."""
    from titan_like.metrics.console import ProgressLines, format_duration

    began, show = time.monotonic(), ProgressLines(_SECONDS_BETWEEN_LINES)

    def report(done: int, total: int) -> None:
        remaining = format_duration((time.monotonic() - began) / done * (total - done))
        show(f"{name}: {done:,} of {total:,} windows, about {remaining} left")

    return report


def format_results(results: dict[str, dict[str, float]]) -> str:
    """A table with a line for each figure of each task."""
    rows = [
        (task, figure, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
        for task, figures in results.items()
        for figure, value in figures.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


run = partial(run_command, main)
