"""`parallelism.auto`, and the TOML that the search writes."""

import tomllib

import pytest

from tests.unit.test_planner_command import plan
from titan_like.config import ConfigError, load_config
from titan_like.config.paths import to_toml
from titan_like.planner.auto import choose_layout, with_chosen_layout
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run

BIG = ["--model.flavor=gpt2_124m", "--model.overrides.num_layers=4", "--training.steps=3", "--training.seq_len=1024",
       "--training.global_batch_size=24", "--training.dtype=bfloat16", "--training.micro_batch_size=1",
       "--activation_checkpoint.mode=none"]  # fmt: skip
AUTO = [*BIG, "--parallelism.auto=true"]


@pytest.mark.parametrize("world", [4, 6])
def test_choice_fits_any_number_of_processes_and_keeps_the_batch(world):
    config, told = choose_layout(load_config(AUTO), world, "NVIDIA A100-SXM4-80GB", 2)
    layout = resolve_settings(config, world).layout
    assert layout.num_processes == world
    assert not config.parallelism.auto
    assert config.training.global_batch_size == 24
    assert config.cluster.gpu is None, "what was found is no setting"
    assert "\n" not in told
    assert "layout chosen: " in told and "GiB; profile fsdp_a100 on A100-80GB" in told


def test_choice_is_the_search_s_and_the_same_again(tmp_path):
    config, _ = choose_layout(load_config(AUTO), 4, "A100", 2)
    assert choose_layout(load_config(AUTO), 4, "A100", 2)[0] == config
    target = tmp_path / "best.toml"
    done = plan("search", *BIG, "--cluster.gpu=A100", "--cluster.gpus_per_node=2", "--gpus", 4, "--out", target)
    assert done.returncode == 0, done.stderr
    written = load_config(["--job.config_file", str(target)])
    assert written.parallelism.model_dump(exclude={"auto"}) == config.parallelism.model_dump(exclude={"auto"})
    assert written.activation_checkpoint == config.activation_checkpoint
    assert written.training == config.training
    assert written.cluster.nodes == 2


def test_what_is_set_stays():
    kept = ["--parallelism.tensor_parallel_degree=2", "--parallelism.zero_stage=1"]
    config, _ = choose_layout(load_config([*AUTO, *kept]), 4, "A100", 2)
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.parallelism.zero_stage == 1
    assert config.training.micro_batch_size == 1


def test_named_gpu_comes_before_the_one_found():
    named = load_config([*AUTO, "--cluster.gpu=H100", "--cluster.gpus_per_node=4"])
    chosen = choose_layout(named, 4, "A100", 2)
    assert choose_layout(named, 4, None, None) == chosen
    assert "H100-80GB" in chosen[1]


@pytest.mark.parametrize(
    ("gpu", "per_node", "named"), [(None, 8, "parallelism.auto"), ("A100", None, "gpus_per_node"), ("RTX 1", 8, "gpu")]
)
def test_nothing_to_plan_for_is_one_sentence(gpu, per_node, named):
    with pytest.raises(ConfigError, match=named):
        choose_layout(load_config(AUTO), 4, gpu, per_node)


@pytest.mark.slow
def test_every_process_of_a_run_gets_the_layout_and_one_tells_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words " * 20000)
    settings = ["--parallelism.auto=true", "--cluster.gpu=A100", "--data.dataset=text", "--data.paths=text.txt",
                "--training.steps=2", "--training.global_batch_size=8", "--training.seq_len=64",
                "--activation_checkpoint.mode=none", "--training.micro_batch_size=2"]  # fmt: skip
    layouts, told = [], []
    for rank in range(4):
        names = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "GROUP_WORLD_SIZE": 1, "RANK": rank, "LOCAL_RANK": rank}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))
        layouts.append(prepare_run(resolve_settings(with_chosen_layout(load_config(settings), 4))).layout)
        told.append(capsys.readouterr().out.count("layout chosen"))
    assert layouts[0].num_processes == 4
    assert layouts == [layouts[0]] * 4
    assert told == [1, 0, 0, 0]


def test_dry_run_and_predict_take_the_chosen_layout(capsys):
    cluster = ["--cluster.gpu=A100", "--cluster.nodes=2", "--cluster.gpus_per_node=2", "--training.steps=1"]
    small = ["--parallelism.auto=true", "--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=2"]
    small += ["--activation_checkpoint.mode=none", "--parallelism.pipeline_schedule=1f1b"]
    no_data = ["--data.dataset=text", "--data.paths=/nowhere/*.txt"]
    chosen, _ = choose_layout(load_config([*small, *cluster]), 4, None, None)
    from titan_like.planner.dry_run import dry_run

    run = dry_run(load_config([*small, *cluster, *no_data, "--job.dry_run=true"]))
    assert chosen.parallelism.tensor_parallel_degree == 2
    assert run.mesh["tp"][1] == chosen.parallelism.tensor_parallel_degree
    assert run.mesh["pp"][1] == chosen.parallelism.pipeline_parallel_degree
    assert run.zero_stage == chosen.parallelism.zero_stage
    done = plan("predict", *small, *cluster)
    assert done.returncode == 0, done.stderr
    assert "tokens/s on 4 GPUs" in done.stdout


def test_settings_survive_being_written():
    tree = {
        "job": {"description": 'a "quoted" line\nand \\ more, ünïcode', "seed": 7, "deterministic": True},
        "model": {"flavors": {"my own": {"num_layers": 4, "norm_eps": 1e-06}}, "overrides": {}},
        "optimizer": {"lr": 6e-05, "betas": [0.9, 0.95]},
        "data": {"paths": ["a.txt", "b*.txt"]},
        "parallelism": {},
    }
    text = to_toml(tree, ["a head", ""])
    assert text.startswith("# a head\n#\n")
    assert tomllib.loads(text) == {section: table for section, table in tree.items() if table}
