"""The dry run's numbers against hand arithmetic, and its refusals."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.e2e.scripts import run_here
from titan_like.checkpoint.step_folders import RunState
from titan_like.config import load_config
from titan_like.models.registry import model_config
from titan_like.planner.dry_run import DryRun, dry_run
from titan_like.planner.dry_run_page import format_dry_run

REPO = Path(__file__).parents[2]
# gpt debug: 4 layers of hidden size 128, 257 tokens padded to 384, 1024 positions, tied tables.
LAYER, TABLE, POSITIONS = 12 * 128**2 + 13 * 128, 384 * 128, 1024 * 128
PP2_TP2 = ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
EIGHT = ["--cluster.nodes=2", "--cluster.gpus_per_node=4"]
BATCH = ["--training.micro_batch_size=4", "--training.global_batch_size=32"]
NO_DATA = ["--data.dataset=text", "--data.paths=/nowhere/*.txt"]  # to look for some takes longer than all else


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does any dry run start a process group that is real."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    start = dist.init_process_group

    def only_fake(backend: str, **options: Any) -> None:
        assert backend == "fake", "a process group was started"
        start(backend, **options)

    monkeypatch.setattr(dist, "init_process_group", only_fake)


def plan(*settings: str, rank: int = 0) -> DryRun:
    fixed = ["--training.steps=5", "--job.dry_run", f"--job.dry_run_rank={rank}"]
    return dry_run(load_config([*fixed, *NO_DATA, *settings]))


def layer_on_two(number: int) -> dict[str, tuple[int, ...]]:
    """A layer's parameters on one of two tensor-parallel processes."""
    local = {
        "attention_norm.weight": (128,), "attention_norm.bias": (128,), "mlp_norm.weight": (128,),
        "mlp_norm.bias": (128,), "attention.qkv.weight": (192, 128), "attention.qkv.bias": (192,),
        "attention.proj.weight": (128, 64), "attention.proj.bias": (128,), "mlp.fc1.weight": (256, 128),
        "mlp.fc1.bias": (256,), "mlp.fc2.weight": (128, 256), "mlp.fc2.bias": (128,),
    }  # fmt: skip
    return {f"layers.{number}.{name}": shape for name, shape in local.items()}


def test_places_of_all_ranks() -> None:
    """Tensor-parallel neighbours differ by 1, data-parallel ones by 2, stages by 4; nodes hold four."""
    for rank in range(8):
        run = plan(*PP2_TP2, *EIGHT, *BATCH, rank=rank)
        stage, shard, tensor = rank // 4, rank // 2 % 2, rank % 2
        assert run.mesh == {"pp": (stage, 2), "dp_replicate": (0, 1), "dp_shard": (shard, 2), "tp": (tensor, 2)}
        assert run.node == (rank // 4, rank % 4)
        assert [report.layers for report in run.stages] == [(2 * stage, 2 * stage + 1)]


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 8), ("sgd", 0)])
def test_bytes_are_4_4_and_8_for_each_parameter(optimizer: str, moments: int) -> None:
    run = plan(*PP2_TP2, *EIGHT, *BATCH, f"--optimizer.name={optimizer}", rank=7)
    layer = sum(prod(shape) for shape in layer_on_two(0).values())
    here = 2 * layer + TABLE // 2 + 256
    assert run.state == (here, 4 * here, 4 * here, moments * here)
    assert here == 223_872
    # float32 and ZeRO 0: nothing is there twice but the table's gradient, before it is added to earlier microbatches'.
    assert run.peak[:4] == (4 * here, 4 * here + 2 * TABLE, moments * here, 0)
    assert run.num_parameters == 4 * LAYER + TABLE + POSITIONS + 256


@pytest.mark.parametrize(("size", "here"), [(4, 2), (3, 8)])  # of 8 experts; 3 ranks cut some
def test_adafactor_keeps_columns_of_each_expert_here(size: int, here: int) -> None:
    zero = ["--parallelism.zero_stage=3", f"--parallelism.data_parallel_shard_degree={size}"]
    batch = ["--training.global_batch_size=48", "--training.micro_batch_size=2"]
    run = plan("--model.family=moe", "--optimizer.name=adafactor", *zero, *batch)
    # What is predicted leaves out a number for each matrix of 4 layers.
    assert run.state.optimizer - run.peak.optimizer == 4 * 3 * here * 4


UNEVEN = ["--parallelism.data_parallel_shard_degree=3", "--training.global_batch_size=48"]
V_SHAPED = ["--parallelism.pipeline_schedule=zbv_zero_bubble", "--parallelism.virtual_stages_per_rank=2"]
LLAMA = ["--model.family=llama"]
LAYOUTS = {
    "gpt": [*PP2_TP2, *UNEVEN, "--parallelism.zero_stage=3"],
    "gpt in a V": [*PP2_TP2, *UNEVEN, *V_SHAPED, "--parallelism.zero_stage=1"],
    "llama in half": [*LLAMA, *PP2_TP2, *UNEVEN, "--parallelism.zero_stage=2", "--training.dtype=bfloat16"],
    "llama, tables apart": [*LLAMA, *UNEVEN, "--parallelism.zero_stage=3"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "optimizer"), list(zip(LAYOUTS.values(), ("adamw", "adafactor", "muon", "adafactor"), strict=True))
)
def test_parts_of_all_ranks_make_the_whole(settings: list[str], optimizer: str) -> None:
    """Shards over three are uneven. What is split lies once on the ranks of a stage; what is not, on each."""
    settings = [*settings, "--training.micro_batch_size=4", f"--optimizer.name={optimizer}"]
    world = plan(*settings).world_size
    found: dict[tuple[int, str], int] = defaultdict(int)
    whole: dict[tuple[int, str], int] = {}
    for rank in range(world):
        run = plan(*settings, rank=rank)
        if run.mesh["dp_shard"][0] < 2:  # the peak is that of the first shard, and the last one is the smallest
            assert (run.state.parameters, run.state.optimizer) == (run.peak.parameters, run.peak.optimizer)
        else:
            assert run.state.parameters < run.peak.parameters
        assert run.state.optimizer == 8 * run.state.num_parameters or optimizer != "adamw"
        for stage in run.stages:
            for p in stage.parameters:
                copies = 1 if "tp" in p.split else run.mesh["tp"][1]
                found[stage.index, p.name] += prod(p.local_shape) / copies
                whole[stage.index, p.name] = prod(p.shape)
    assert found == whole
    table_twice = sum(name == "embedding.weight" for _, name in whole) == 2
    assert sum(whole.values()) == run.num_parameters + table_twice * TABLE


def test_page() -> None:
    page = format_dry_run(plan(*PP2_TP2, *EIGHT, *BATCH, rank=7)).splitlines()
    assert page[0] == (
        "gpt debug: 973,568 parameters, 5 steps of 32 samples × 256 tokens, data parallel 1 × 2, ZeRO 0; "
        "160 samples, 40,960 tokens"
    )
    assert page[3] == (
        "rank 7 of 8 processes: pp 1 of 2, dp_replicate 0 of 1, dp_shard 1 of 2, tp 1 of 2, node 1, GPU 3"
    )
    assert "layers.2–3" in page
    assert "  attention.qkv.weight    384 × 128  192 × 128  rows over tp" in page
    assert "  mlp.fc2.weight          128 × 512  128 × 256  columns over tp" in page
    assert "parameters here: 223,872 of 973,568 (23 %)" in page
    assert "memory: parameters 874.5 KiB, optimizer 1.708 MiB; 2.562 MiB between steps" in page
    assert "order: F0 B0 F1 B1 F2 B2 F3 B3" in page
    assert "tp (2)        all_reduce  activations                    36     18 MiB" in page


def train(capfd: pytest.CaptureFixture[str], *settings: str) -> tuple[Any, str, str]:
    dry = [] if "--job.dry_run=false" in settings else ["--job.dry_run=true"]
    return run_here("train.py", "--training.steps=5", *dry, *settings), *capfd.readouterr()


# Settings => what is refused
REFUSALS = """
--cluster.nodes=2 --cluster.gpus_per_node=4 --job.dry_run_rank=8 => job.dry_run_rank = 8: the job has 8 processes; use 0
--cluster.nodes=2 => cluster.gpus_per_node = (not set): cluster.nodes is 2; say how many GPUs each of them has
--cluster.gpu=V100 --training.dtype=bfloat16 => training.dtype = "bfloat16": V100 has no bfloat16 arithmetic; use "float
--json /nowhere/plan.json => --json = "/nowhere/plan.json": not a file in a folder that you may write to; name one
--job.dry_run=false --json plan.json => --json = "plan.json": only a dry run writes it; add --job.dry_run true or leave
""".strip().splitlines()


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_is_one_sentence(capfd: pytest.CaptureFixture[str], case: str) -> None:
    settings, _, sentence = case.partition(" => ")
    code, out, err = train(capfd, *settings.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(f"error: {sentence}")


def test_another_machine_s_files_are_only_noted(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    away = [*EIGHT, *BATCH, *NO_DATA, "--job.dump_folder=/dev/null/out"]
    path = tmp_path / "plan.json"
    code, out, err = train(capfd, *away, "--json", str(path))
    assert (code, err) == (0, "")
    assert "data: not looked at: /nowhere/*.txt is not on this machine" in out
    assert 'not checked on this machine: job.dump_folder = "/dev/null/out": the folder cannot be created' in out
    tree = json.loads(path.read_text())
    assert tree["schedule"]["actions"] == ["F0:0", "B0:0"]
    assert tree["state"]["parameters"] == 4 * 973_568
    assert not (tmp_path / "outputs").exists()


def test_a_checkpoint_of_another_run_is_only_noted(tmp_path: Path) -> None:
    config = load_config(["--training.steps=5"])
    shape = model_config(config.model).model_dump(mode="json")
    state = RunState(3, 48, 0, 0, 1.0, 0, shape, config.model_dump(mode="json"))
    folder = tmp_path / "outputs" / "checkpoint" / "step-3"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(asdict(state)))
    saves = "--checkpoint.enable=true"
    assert plan(saves, "--data.dataset=stdlib", "--data.paths=[]").notes == []
    (note,) = plan("--data.dataset=stdlib", "--data.paths=[]", "--model.overrides.vocab_size=50257").notes
    assert note.startswith("the model's vocabulary has 50,257 tokens and the tokenizer 257: ")
    (note,) = plan(saves, "--optimizer.name=muon").notes
    assert note.startswith(
        'the run itself will not start: optimizer.name = "muon": outputs/checkpoint/step-3 was saved'
    )


def test_a_stream_is_read_but_not_counted(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "text"}\n' * 2000)
    stream = ["--data.dataset=hf", "--lr_scheduler.warmup_steps=2", f"--job.dump_folder={tmp_path / 'out'}"]
    code, out, _ = train(capfd, *stream, f"--data.paths={path}", "--data.text_key=body")
    assert code == 0
    assert "data: a stream, read by 16 readers, so its samples are not counted\n" in out
    code, _, err = train(capfd, *stream, f"--data.paths={path}")
    assert (code, err) == (
        2,
        f'error: data.paths = "{path}:1": the record has no text under "text"; correct it, set data.text_key, or '
        'set data.bad_lines to "skip"\n',
    )
    for setting in ("--data.paths=org/name", "--data.tokenizer=org/name"):  # the hub is not asked
        code, out, _ = train(capfd, *stream, f"--data.paths={path}", setting)
        assert code == 0
        assert "data: not looked at: org/name is not on this machine\n" in out


def test_number_of_processes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """From the cluster, else the launcher, else the degrees."""
    degrees = [*PP2_TP2, "--parallelism.data_parallel_shard_degree=2"]
    assert plan(*degrees, *BATCH).world_size == 8
    assert plan(*PP2_TP2).world_size == 4  # as few as they allow
    assert plan(*PP2_TP2, "--training.global_batch_size=64", *EIGHT).world_size == 8
    monkeypatch.setenv("WORLD_SIZE", "16")
    _, out, _ = train(capfd, *PP2_TP2, "--training.global_batch_size=64", *NO_DATA)
    assert "rank 0 of 16 processes: " in out


# A child's ru_maxrss is never below what its parent had when it started it; this is of the program alone.
RUN_AND_TELL_PEAK = """
import pathlib, runpy, sys
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_trillion_parameters_on_3072_processes(tmp_path: Path) -> None:
    """A middle stage of two layers, in a process of its own whose memory is measured."""
    rank, path = 32 * 48 + 8, tmp_path / "plan.json"  # stage 32, second shard, first tensor-parallel process
    settings = ["--job.config_file=train_configs/gpt_1t.toml", "--job.dry_run", f"--job.dry_run_rank={rank}"]
    command = [sys.executable, "-c", RUN_AND_TELL_PEAK, *settings, "--json", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)[0]) < 1024 * 1024

    tree, hidden = json.loads(path.read_text()), 25_600
    assert tree["num_parameters"] == 128 * (12 * hidden**2 + 13 * hidden) + (51_200 + 2_048 + 2) * hidden
    assert tree["mesh"] == {"pp": [32, 64], "dp_replicate": [0, 1], "dp_shard": [1, 6], "tp": [0, 8]}
    assert tree["node"] == [193, 0]
    # Rows over six processes, rounded up; columns or rows over eight before that.
    row, wide, qkv = ceil(hidden / 6), ceil(hidden / 2 / 6), ceil(3 * hidden / 8 / 6)
    matrices = (qkv + wide) * hidden + row * (hidden // 8 + hidden // 2)
    here = 2 * (matrices + 6 * row + qkv + wide)
    assert tree["state"]["num_parameters"] == here
    sizes = [tree["state"][kind] for kind in ("parameters", "gradients", "optimizer")]
    assert sizes == [4 * here, 4 * here, 8 * here]
    assert tree["schedule"]["counts"] == {"F": 512, "B": 512}
    assert tree["schedule"]["in_flight"] == 64 - 32
    calls = {(c["kind"], c["what"]): c["calls"] for c in tree["traffic"] if c["group"] == "tp"}
    # Of every microbatch and layer: 2 sums forward, 2 backward, 1 while it is computed again.
    assert calls == {("all_reduce", "activations"): 512 * 2 * 5}
