"""In every layout a checkpoint's scores are those of transformers on the same weights."""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import base_config, launch
from tests.distributed.layouts import pipeline, sizes, tensor, zero
from tests.e2e.jobs import records
from tests.float64 import bound, exact_rope, in_float64
from tests.unit.hugging_face_cases import gpt_config, llama_config, random_model, reference_of, save_checkpoint
from titan_like.commands import convert, evaluate
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.text.tokenizer import ByteTokenizer
from titan_like.evaluate.inference import find_checkpoint, load_parallel_model
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.task import Window, ending_window, sliding_windows
from titan_like.parallel.mesh import build_mesh
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_for_inference, resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

SEQ_LEN, STRIDE, TARGETS = 24, 9, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline, tensor": pipeline() | tensor(),
    "data, tensor, zero 3": tensor(2, True) | zero(3),
    "replicas, interleaved": pipeline(2, "interleaved_1f1b") | {"parallelism.data_parallel_replicate_degree": 2},
    "data": zero(0),
}
# Windows of up to 12 tokens and longer ones have different rotary frequencies.
LONGROPE = {"type": "longrope", "factor": 2.0, "original_max_seq_len": 12}
LONGROPE |= {"short_factors": [1.0] * 8, "long_factors": [3.0] * 8}
FAMILIES = ("gpt", "llama")
MODELS = (*FAMILIES, "gpt prefix")  # the last with data.prefix_lm
CHOSEN = [
    ("gpt", "pipeline, tensor"),
    ("gpt", "data"),
    ("llama", "data, tensor, zero 3"),
    ("llama", "replicas, interleaved"),
    ("gpt prefix", "data, tensor, zero 3"),
]


@cache
def model_of(family: str):
    """Random weights; its dropout must be off."""
    is_gpt = family == "gpt"
    shape = gpt_config(num_layers=4, dropout=0.5) if is_gpt else llama_config(num_layers=4, rope_scaling=LONGROPE)
    return random_model(shape)


@cache
@in_float64()
def transformers_model(family: str):
    return reference_of(model_of(family))


@torch.no_grad()
@in_float64()
def log_probabilities(name: str, tokens: torch.Tensor, prefix: int) -> torch.Tensor:
    """transformers, on tokens [seq] of which the first ``prefix`` come before the targets: [seq, vocab]."""
    family, _, masked = name.partition(" ")
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    if masked:
        mask[:, :prefix] = True
    return transformers_model(family)(tokens[None], attention_mask=mask[None, None]).logits[0].log_softmax(-1)


def config_of(folder: Path, name: str, layout: dict[str, Any]) -> JobConfig:
    family, _, masked = name.partition(" ")
    shape = model_of(family).config.model_dump(mode="json", exclude_none=True)
    model = {"model.family": family, "model.flavor": "own", "model.flavors": {"own": shape}}
    run = {"job.dump_folder": str(folder / family), "data.prefix_lm": bool(masked), "training.dtype": "float64"}
    return base_config(folder, sizes(SEQ_LEN, 3, 12) | model | layout | run)


@cache
def continued(name: str) -> list[Window]:
    """Windows of several lengths, whose targets are what transformers' model finds most probable, except some."""
    generator = np.random.default_rng(1)
    windows = []
    for number in range(23):
        tokens = generator.integers(101, size=2 + number).tolist()
        for _ in range(TARGETS):
            tokens.append(int(log_probabilities(name, torch.tensor(tokens), 2 + number)[-1].argmax()))
        if number % 4 == 0:
            tokens[-1] = (tokens[-1] + 1) % 101
        windows.append(ending_window(tokens[:-TARGETS], tokens[-TARGETS:], SEQ_LEN))
    return windows


def windows_of(family: str) -> list[Window]:
    return sliding_windows(np.random.default_rng(0).integers(101, size=160), SEQ_LEN, STRIDE) + continued(family)


@exact_rope()
def scores_of(config: JobConfig, windows: list[Window], mesh: Any) -> torch.Tensor:
    device = torch.device("cpu")
    model = load_parallel_model(config, find_checkpoint(config), mesh, device)
    model.train()
    before = torch.get_rng_state()
    scores = torch.tensor(Scorer(config, model, mesh, device)(windows), dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(stage.module.training for stage in model.stages)
    return scores


Chosen = list[tuple[str, str, list[Window]]]  # model, layout and what is scored: transformers takes long to import


def score_train_and_evaluate(rank: int, folder: Path, chosen: Chosen) -> None:
    found = {}
    for family, name, windows in chosen:
        config = config_of(folder, family, LAYOUTS[name])
        degrees = resolve_settings(config, dist.get_world_size()).layout
        scores = scores_of(config, windows, build_mesh(degrees, "cpu"))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, scores)
        assert all(torch.equal(others, scores) for others in everywhere)
        found[f"{family} {name}"] = scores
    if rank == 0:
        torch.save(found, folder / "scores.pt")
    for name, tasks in itertools.product(("pipeline, tensor", "data, tensor, zero 3"), (TASKS, [])):
        Trainer(prepare_run(resolve_settings(training_config(folder, name, tasks)))).train()


FILES = {
    "fox.txt": "the quick brown fox jumps over the lazy dog " * 7,
    "set.txt": "the dog sat on the mat and the fox on the log " * 15,
    "words.txt": " \n = A fox = \n \n The quick , brown fox ( a @-@ b ) jumps . \n" * 5,
    "last.jsonl": "".join(json.dumps({"text": f"{'and so ' * n}on"}) + "\n" for n in range(1, 14)),
}
TASKS = ["text=fox.txt", "wikitext103=words.txt", "lambada=last.jsonl"]
FIGURES = {
    *("text/loss", "text/perplexity", "text/bits_per_byte", "lambada/accuracy", "lambada/perplexity"),
    *("wikitext103/word_perplexity", "wikitext103/loss", "wikitext103/perplexity"),
}


def training_config(folder: Path, layout: str, tasks: list[str]) -> JobConfig:
    (folder / "runs").mkdir(exist_ok=True)
    settings = (
        LAYOUTS[layout]
        | sizes(32, 4, 16, 4)
        | {
            "checkpoint.enable": True,
            "metrics.log_interval": 2,
            "evaluation.interval": 2,
            "evaluation.steps": 1,
            "evaluation.sets": [{"name": "dog", "paths": [str(folder / "set.txt")]}],
            "training.dtype": "float64",
            "evaluation.datasets": [f"{spec.partition('=')[0]}={folder / spec.partition('=')[2]}" for spec in tasks],
            "model.overrides": {"dropout": 0.2, "num_layers": 2},
            "job.dump_folder": str(folder / "runs" / f"{layout} {len(tasks)}"),
        }
    )
    return base_config(folder, settings)


def evaluate_on_harness(rank: int, folder: Path) -> None:
    """On two processes: each imports it, which takes long."""
    config = edit(training_config(folder, "pipeline, tensor", TASKS), {"parallelism.tensor_parallel_degree": 1})
    found = run_on_harness(config, build_mesh(resolve_settings(config, 2).layout, "cpu"), folder)
    (folder / f"harness {rank}.json").write_text(json.dumps(found))


QUESTIONS = [("the quick", [" brown fox", " fox", "zzz"], 0), ("a dog", [" jumps", " e"], 1), ("", ["e ", "q"], 0)]
HARNESS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}],
    },
    "continuation": {
        "output_type": "generate_until", "doc_to_text": "the quick brown {{text}}", "doc_to_target": "{{choices[0]}}",
        # The model repeats itself, which stops it.
        "generation_kwargs": {"until": [3 * c for c in ascii_lowercase], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def run_on_harness(config: JobConfig, mesh: Any, folder: Path) -> dict[str, Any]:
    from titan_like.evaluate.harness import CheckpointLM, find_tasks, run_harness

    device = torch.device("cpu")
    model = load_parallel_model(config, find_checkpoint(config), mesh, device)
    lm = CheckpointLM(Scorer(config, model, mesh, device), ByteTokenizer(), ByteTokenizer.stop_ids)
    found = run_harness(lm, *find_tasks(list(HARNESS), str(folder / "tasks")))
    return {"results": found["results"], "samples": answers_of(found)} if found else {}


def answers_of(found: Any) -> list[Any]:
    """The model's answer to each request."""
    return [sample["resps"] for task in HARNESS for sample in found["samples"][task]]


def write_harness_tasks(folder: Path) -> None:
    (folder / "tasks").mkdir()
    lines = [json.dumps({"text": text, "choices": choices, "gold": gold}) for text, choices, gold in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    data = {"data_files": {"test": str(folder / "questions.jsonl")}}
    for name, task in HARNESS.items():
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(source | task))  # JSON is YAML


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder in which all processes did everything, and what they printed."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    write_harness_tasks(folder)
    for family in FAMILIES:
        save_checkpoint(folder / family / "checkpoint", model_of(family))
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"HF_HOME": "", "HF_DATASETS_CACHE": "/datasets"}.items():
            patch.setenv(key, f"{folder}/hf{value}")
        patch.setenv("HF_HUB_OFFLINE", "1")
        chosen = [(model, layout, windows_of(model)) for model, layout in CHOSEN]
        yield folder, launch(score_train_and_evaluate, 4, folder, chosen)[0].printed


@pytest.mark.exhaustive
def test_the_harness_finds_the_same_on_a_checkpoint_and_on_its_export(trained: tuple[Path, str]) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from titan_like.evaluate.harness import find_tasks

    folder, _ = trained
    launch(evaluate_on_harness, 2, folder)
    ours = json.loads((folder / "harness 0.json").read_text())
    config = training_config(folder, "pipeline, tensor", TASKS)
    arguments = ["to-hf", "--checkpoint", f"{config.job.dump_folder}/checkpoint", "--output", str(folder / "export")]
    assert convert.main(arguments) == 0
    theirs = HFLM(pretrained=str(folder / "export"), max_length=32, batch_size=1, device="cpu", dtype="float64")
    _, manager = find_tasks(list(HARNESS), str(folder / "tasks"))
    found = lm_eval.simple_evaluate(theirs, tasks=list(HARNESS), task_manager=manager)

    within = bound(dtype=torch.float32)  # which the export's weights are in
    for answer, expected in zip(ours["samples"], answers_of(found), strict=True):
        assert np.shape(answer) == np.shape(expected)
        for one, other in zip(np.ravel(answer).tolist(), np.ravel(expected).tolist(), strict=True):
            assert one == other if isinstance(other, str) else one == pytest.approx(other, rel=within)
    for task, figures in found["results"].items():
        assert ours["results"][task].keys() == figures.keys()
        for figure, value in figures.items():
            if isinstance(value, float):
                assert ours["results"][task][figure] == pytest.approx(value, rel=within)


@pytest.mark.parametrize("layout", ["pipeline, tensor", "data, tensor, zero 3"])
def test_evaluation_during_training(trained: tuple[Path, str], layout: str) -> None:
    folder, printed = trained
    config = training_config(folder, layout, TASKS)
    configs = config, training_config(folder, layout, [])
    lines, without = (records(Path(one.job.dump_folder)) for one in configs)
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == [line[key] for line in without]
    assert [FIGURES & line.keys() for line in lines] == [set(), FIGURES, set(), FIGURES]
    assert lines[1]["text/perplexity"] > 1.1 * lines[3]["text/perplexity"]
    for line in (lines[1], lines[3]):
        assert f" | validation loss {line['validation_loss']:.4f}\n" in printed
        assert f" | text/loss {line['text/loss']:.4f} | " in printed
    assert FIGURES.isdisjoint(key for line in without for key in line)

    # The script finds the same in one process, from the checkpoint of the last step.
    arguments = ["--job.dump_folder", config.job.dump_folder, "--training.seq_len=32", "--training.micro_batch_size=5"]
    arguments += ["--model.overrides.dropout=0.2", "--model.overrides.num_layers=2", "--training.dtype=float64"]
    arguments += ["--json", str(folder / "found.json")]
    for spec in config.evaluation.datasets:
        arguments += ["--task", spec]
    assert evaluate.main(arguments) == 0
    told = json.loads((folder / "found.json").read_text())
    assert (told["seq_len"], told["stride"], Path(told["checkpoint"]).name) == (32, 16, "step-4")
    for figure in FIGURES:
        task, _, name = figure.partition("/")
        assert told["results"][task][name] == pytest.approx(lines[3][figure], rel=bound()), figure
    assert told["results"]["lambada"]["passages"] == 13

    # Also of held-out data: by default what the run itself validates with.
    arguments = ["--checkpoint", config.job.dump_folder, "--json", str(folder / "found.json")]
    assert evaluate.main(arguments) == 0
    results = json.loads((folder / "found.json").read_text())["results"]
    assert set(results) == {"validation", "validation/dog", "text", "wikitext103", "lambada"}
    for split, key in (("validation", "validation_loss"), ("validation/dog", "validation_loss/dog")):
        assert results[split]["loss"] == pytest.approx(lines[3][key], rel=bound())
    assert results["text"]["loss"] == told["results"]["text"]["loss"]


@pytest.fixture(scope="module")
def scores(trained: tuple[Path, str]) -> dict[str, torch.Tensor]:
    folder, _ = trained
    found = torch.load(folder / "scores.pt", weights_only=True)
    with process_group(torch.device("cpu")):
        for family in MODELS:
            config, _, layout = resolve_for_inference(config_of(folder, family, LAYOUTS["pipeline, tensor"]), 1)
            found[f"{family} one process"] = scores_of(config, windows_of(family), build_mesh(layout, "cpu"))
    return found


@cache
def scores_by_transformers(name: str) -> list[tuple[float, int]]:
    """Of each window: the log probability of its targets, and how many of them are the most probable."""
    scores = []
    for window in windows_of(name):
        tokens, targets = torch.from_numpy(window.tokens), torch.from_numpy(window.tokens[-window.num_targets :])
        likely = log_probabilities(name, tokens[:-1], len(tokens) - len(targets))[-len(targets) :]
        right = (likely.argmax(-1) == targets).sum().item()
        scores.append((likely.gather(1, targets[:, None]).sum().item(), int(right)))
    return scores


@pytest.mark.parametrize(("family", "layout"), [*((family, "one process") for family in MODELS), *CHOSEN])
def test_scores_are_those_of_transformers(scores: dict[str, torch.Tensor], family: str, layout: str) -> None:
    for expected, (found, right) in zip(
        scores_by_transformers(family), scores[f"{family} {layout}"].tolist(), strict=True
    ):
        assert (found, right) == (pytest.approx(expected[0], rel=bound()), expected[1])
    assert {TARGETS - 1, TARGETS} <= set(scores[f"{family} {layout}"][-23:, 1].int().tolist())
