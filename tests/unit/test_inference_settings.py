"""What commands that read a checkpoint accept: layouts, folders, and files for their results."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import titan_like
from tests.unit.hugging_face_cases import save_checkpoint
from titan_like.commands import evaluate, generate
from titan_like.config import ConfigError, load_config
from titan_like.config.errors import RunError
from titan_like.config.options import check_output_file, json_text, write_json
from titan_like.config.schema import Model
from titan_like.evaluate.inference import config_of_checkpoint, find_checkpoint, load_for_inference
from titan_like.evaluate.sampling import Sampling
from titan_like.evaluate.sampling import generate as continuation
from titan_like.models.registry import build_model, model_config
from titan_like.train.rules import resolve_for_inference, resolve_settings

RUN = ["--training.steps=1", "--training.global_batch_size=8", "--training.micro_batch_size=4"]
FIT_TO_READ = {  # settings that no training run could have with that number of processes
    "a global batch that three processes cannot share": (3, []),
    "a pipeline with fewer microbatches than stages": (
        4,
        ["pipeline_parallel_degree=4", "pipeline_schedule=zbv_zero_bubble"],
    ),
}


@pytest.mark.parametrize("case", FIT_TO_READ)
def test_training_only_rules_do_not_keep_a_checkpoint_from_being_read(case: str) -> None:
    world_size, layout = FIT_TO_READ[case]
    layout = [f"--parallelism.{setting}" for setting in layout]
    config = load_config([*RUN, "--model.overrides.num_layers=8", "--evaluation.datasets=text=a.txt", *layout])
    with pytest.raises(ConfigError):
        resolve_settings(config, world_size)
    found, _, degrees = resolve_for_inference(config, world_size)
    assert found == config
    assert degrees.pipeline * degrees.data_parallel == world_size


def test_rules_of_the_layout_hold_for_reading_too() -> None:
    for settings in (["tensor_parallel_degree=3"], ["pipeline_parallel_degree=3", "pipeline_layers=[1,1,1]"]):
        config = load_config([*RUN, *(f"--parallelism.{setting}" for setting in settings)])
        with pytest.raises(ConfigError, match=settings[-1].partition("=")[0]):
            resolve_for_inference(config, 3)
        assert resolve_for_inference(config, 1)[2].tensor == 1  # one process takes the whole model
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        resolve_for_inference(load_config([*RUN, "--parallelism.tensor_parallel_degree=2"]), 3)


def test_a_folder_without_checkpoints_is_told_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "run" / "step-20").mkdir(parents=True)
    (tmp_path / "run" / "step-20" / "run.json").write_text("{}")
    told = {
        "hf": "is a Hugging Face folder, not a checkpoint; set model.from to it",
        "run/step-20": f"is a checkpoint itself; leave out checkpoint.load_step, or name the folder {tmp_path}/run",
        "none": "no such folder; train with checkpoint.enable first",
        ".": "contains no checkpoint (only hf, run); train with checkpoint.enable first",
    }
    for folder, problem in told.items():
        for step in ([], ["--checkpoint.load_step=3"])[folder == "run/step-20" :]:
            with pytest.raises(ConfigError) as error:
                find_checkpoint(load_config([*RUN, f"--checkpoint.folder={tmp_path / folder}", *step]))
            assert f'checkpoint.folder = "{tmp_path / folder}": {problem}' in str(error.value)


@pytest.fixture
def dump_folder(tmp_path: Path) -> Path:
    """A run's, with two checkpoints and a copy of the older one. It trained in a layout of 8 processes."""
    small: dict[str, Any] = {"family": "gpt", "overrides": {"num_layers": 1, "hidden_size": 32}}
    layout = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4}
    for step in (1, 2):
        model = build_model(model_config(Model(**small)), "gpt")
        model.init_weights(seed=step)
        path = save_checkpoint(tmp_path / "run" / "checkpoint", model, step, model=small, parallelism=layout)
        run = json.loads((path / "run.json").read_text())
        run["config"]["training"]["of_an_older_version"] = 3
        run["config"]["job"]["config_file"] = "moved_away.toml"
        (path / "run.json").write_text(json.dumps(run))
    shutil.copytree(tmp_path / "run" / "checkpoint" / "step-1", tmp_path / "best")
    return tmp_path / "run"


FOLDERS = {"run": 2, "run/checkpoint": 2, "run/checkpoint/step-1": 1, "best": 1, "run --checkpoint.load_step=1": 1}


def test_a_checkpoint_names_its_own_run(dump_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, step in FOLDERS.items():
        folder, *settings = words.split()
        model, tokenizer = titan_like.load(folder, *settings, device="cpu")
        expected = build_model(model_config(Model(family="gpt", overrides={"num_layers": 1, "hidden_size": 32})), "gpt")
        expected.init_weights(seed=step)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        options = ["--max_new_tokens=5", "--temperature=0", "--prompt=ab", "--json=a.json"]
        assert generate.main(["--checkpoint", folder, *settings, *options]) == 0
        sampling = Sampling(5, temperature=0, stop_ids=tokenizer.stop_ids)
        tokens = continuation(model, tokenizer.encode("ab").tolist(), sampling)
        assert json.loads(Path("a.json").read_text())["tokens"] == tokens
    (tmp_path / "text").write_text("abc" * 20)
    assert evaluate.main(["--checkpoint=run", "--task=text=text", "--training.seq_len=32", "--json=a.json"]) == 0
    assert json.loads(Path("a.json").read_text())["seq_len"] == 32
    config = config_of_checkpoint("run", [])
    assert resolve_for_inference(config, 4)[2].shard == 2  # data-parallel processes are those that there are


def test_a_folder_that_names_no_run(dump_folder: Path, tmp_path: Path) -> None:
    told = {
        "none": '--checkpoint = ".*/none": no such folder; name a step-N folder, a folder of them, or the dump folder',
        "best/run.json": '--checkpoint = ".*/best/run.json": is a file; name a step-N folder',
        "": r"contains no checkpoint \(only best, run\); name a step-N folder",
        "run --checkpoint.load_step=3": "checkpoint.load_step = 3: no such checkpoint in .*/checkpoint; there are 1, 2",
        "best --job.config_file=debug_gpt": "it holds the run's configuration; leave out --job.config_file",
        "best --training.lr=1": "training.lr = 1: unknown key",
    }
    for words, problem in told.items():
        folder, *settings = words.split(" ")
        with pytest.raises(ConfigError, match=problem):
            config_of_checkpoint(str(tmp_path / folder), settings)
    (dump_folder / "checkpoint" / "step-2" / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"step-2 cannot be loaded \(.*\); set checkpoint.load_step to 1$"):
        config_of_checkpoint(str(dump_folder), [])


@pytest.mark.parametrize("steps", [(20,), (20, 40, 60)])
def test_what_to_do_about_a_damaged_checkpoint_is_possible(steps: tuple[int, ...], tmp_path: Path) -> None:
    config = load_config([*RUN, f"--checkpoint.folder={tmp_path}"])
    for step in steps:
        (tmp_path / f"step-{step}").mkdir()
    path = tmp_path / f"step-{steps[-1]}"
    told = "there is no other in that folder; name another folder"
    told = "set checkpoint.load_step to 20 or 40" if len(steps) > 1 else told
    with pytest.raises(RunError) as failed:  # there is no run.json
        load_for_inference(config, path, torch.device("cpu"))
    assert str(failed.value).startswith(f"{path} cannot be loaded (") and str(failed.value).endswith(f"); {told}")
    (path / "run.json").write_text("step 60")
    with pytest.raises(RunError, match=r"cannot be loaded \(run.json is not JSON: "):
        load_for_inference(config, find_checkpoint(config), torch.device("cpu"))


def test_results_replace_nothing_but_json(tmp_path: Path) -> None:
    names = ("text.txt", "metrics.jsonl", "old.json")
    for name in names:
        (tmp_path / name).write_text(name)
    for name in names[:-1]:
        with pytest.raises(ConfigError, match=r"exists and is not a [.]json file; choose another path"):
            check_output_file("--json", str(tmp_path / name))
    write_json(str(tmp_path / "old.json"), {})
    assert {name: (tmp_path / name).read_text() for name in names} == {n: n for n in names[:-1]} | {"old.json": "{}\n"}
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_harness_task_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness_tasks = without_own_tasks(monkeypatch)
    for number in (1, 2):  # !function is not followed before the task is built
        (tmp_path / f"{number}.yaml").write_text(f"task: mine_{number}\ndoc_to_text: !function nowhere.text")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [mine_1, mine_2]")
    (tmp_path / "lost.yaml").write_text("group: lost\ntask: [none]")
    names, tasks = harness_tasks.find_tasks(["*", "all", "mine_1"], str(tmp_path))
    assert names == ["mine_1", "mine_2", "all"]  # a pattern stands for single tasks
    told = r'--lm_eval = "mine_2": the harness cannot build this \(ImportError: .*\'nowhere\'.*\); see its YAML file'
    with pytest.raises(ConfigError, match=told):
        tasks.load(["mine_2"])
    with pytest.raises(ConfigError, match=r'--lm_eval = "lost": the harness cannot build this'):
        tasks.load(["lost"])


def without_own_tasks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that finds the harness's tasks, without the thousands that it comes with."""
    pytest.importorskip("lm_eval")
    from titan_like.evaluate import harness as harness_tasks

    few = partial(harness_tasks.HarnessTasks, include_defaults=False)
    monkeypatch.setattr(harness_tasks, "HarnessTasks", few)
    return harness_tasks


def test_json_has_no_infinity() -> None:
    found = {"a": [1, math.inf, {"b": (math.nan, 0.5)}], "c": "inf", "d": True}
    assert json.loads(json_text(found), parse_constant=pytest.fail) == {
        "a": [1, None, {"b": [None, 0.5]}],
        "c": "inf",
        "d": True,
    }


HARNESS_ONLY = {
    "--limit 3": "--limit = 3: is for --lm_eval only",
    "--lm_eval a --limit 0": "--limit = 0: must be at least 1",
    "--num_fewshot -1": "--num_fewshot = -1: must be at least 0",
    "--lm_eval=": '--lm_eval = "": names no task',
    "--lm_eval_folder .": '--lm_eval_folder = ".": is for --lm_eval only',
    "--lm_eval a --lm_eval_folder ./none": '--lm_eval_folder = "./none": is not a folder',
    "--lm_eval a --apply_chat_template=": '--apply_chat_template = "": names no chat template',
    "--lm_eval a --fewshot_as_multiturn yes": '--fewshot_as_multiturn = "true": turns are for --apply_chat_template',
}


@pytest.mark.parametrize("arguments", HARNESS_ONLY)
def test_options_of_the_harness(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "find_spec", lambda name: name)  # as if it were installed
    with pytest.raises(ConfigError) as error:
        evaluate.check_options(evaluate.build_parser().parse_args(arguments.split()))
    assert str(error.value).startswith(HARNESS_ONLY[arguments])
