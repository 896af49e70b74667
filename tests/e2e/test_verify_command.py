"""scripts/verify.py as a user runs it: its exit code, what it prints, what it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.mutations import layers
from tests.e2e.scripts import PLAIN, REPO, Script, run_here
from titan_like.verify import verify as verify_module
from titan_like.verify.processes import Group, Prepare
from titan_like.verify.verify import Verifier

CONFIG = ["--job.config_file", str(REPO / "train_configs" / "debug_gpt.toml")]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]


def verify(*arguments: str, product: Path = REPO, sees_gpus: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command of a folder, from another one."""
    command = [sys.executable, str(product / "scripts" / "verify.py"), *CONFIG, *arguments]
    environment = dict(os.environ) if sees_gpus else dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPO, env=environment)


def verify_forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `verify`, in a process that need not import the product first."""
    return Script("scripts/verify.py", [*CONFIG, *arguments]).wait(timeout=300)


def copy_with(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the product with one place changed."""
    for name in ("titan_like", "scripts"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "titan_like" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def test_same_layout_ends_with_0_and_writes_json(tmp_path: Path) -> None:
    result = verify_forked("--steps", "2", "--json", str(tmp_path / "verdict.json"), *PIPELINE)
    assert result.returncode == 0, result.stdout + result.stderr
    limits, *kinds, conclusion = result.stdout.splitlines()
    sizes = "3 of 4 layers, 3 of 4 samples in a microbatch, 160 of 256 positions, 2 of 4 heads, 16 of 128 hidden units"
    assert limits == f"smaller than the run: {sizes}, 57 of 257 tokens of the vocabulary"
    names = ("float64", "float32", "dropout", "resume")
    assert [line.split()[:2] for line in kinds] == [[name, "same"] for name in names], kinds
    assert conclusion.startswith("same: this layout computes the training of one process")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["outcome"] == "same"
    assert verdict["first_difference"] is None and verdict["blame"] is None and verdict["place"] is None
    degrees = {"pipeline": 2, "replicate": 1, "shard": 1, "context": 1, "tensor": 1, "expert": 1}
    degrees |= {"expert_tensor": 1, "virtual_stages": 1}
    assert verdict["layout"] == degrees | {"schedule": "1f1b", "sequence_parallel": False}
    rows = {(check["kind"], check["row"], check["step"]) for check in verdict["checks"]}
    # Two updates, and between them a step that is not finite; then one with large logits.
    wanted = {("float64", "gradients", 1), ("float64", "gradients", 3), ("float32", "updates from these gradients", 1)}
    wanted |= {
        ("float64", "loss of longer sequences with large logits", 1),
        ("resume", "weights", 3),
        ("dropout", "share that dropout keeps, and its scale", 1),
    }
    assert wanted <= rows
    assert ("float64", "gradients", 2) not in rows
    assert all(check["ok"] for check in verdict["checks"])


def test_bug_in_the_product_ends_with_1_and_names_parameter_and_axis(tmp_path: Path) -> None:
    forgets_the_sum = copy_with(tmp_path, "parallel/model.py", "            total += other", "            pass")
    options = ["--steps", "2", "--verbose", "--json", str(tmp_path / "verdict.json")]
    result = verify(*options, *PIPELINE, product=forgets_the_sum)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"^gradients \(float64\) +DIFFERENT .* embedding.weight$", result.stdout, re.MULTILINE)
    assert "\ndifferent: gradients in step 1 (float64): embedding.weight: differs by" in result.stdout
    assert "\nat fault: pipeline_parallel (" in result.stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["outcome"] == "different"
    assert verdict["first_difference"]["parameter"] == "embedding.weight"
    assert verdict["blame"]["axis"] == "pipeline_parallel"


def test_running_out_of_time_ends_with_3() -> None:
    result = verify_forked("--timeout", "0.01", *PIPELINE)
    assert result.returncode == 3, result.stdout + result.stderr
    assert "\nundecided: the reference, on one process: it was not over in time" in result.stdout
    assert "different" not in result.stdout


def test_sigterm_leaves_no_process_and_no_folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    compiler = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))}  # torch's, which is to stay
    command = [sys.executable, str(REPO / "scripts" / "verify.py"), *CONFIG, *PIPELINE]
    process = subprocess.Popen(command, cwd=REPO, env=PLAIN | compiler | {"TMPDIR": str(tmp_path)})
    while not list(tmp_path.glob("processes-*/log-1.txt")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    assert (process.wait(timeout=60), list(tmp_path.iterdir())) == (143, [])
    for stdout in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):  # another user's, or one that has ended
            assert str(tmp_path) not in os.readlink(stdout)


@pytest.mark.parametrize(
    ("mutation", "error"),
    [
        (layers.positions_of_a_dimension_that_tokens_lack, "IndexError: .*"),
        (layers.attention_fails, "ValueError: no kernel takes this: heads of 8 dimensions"),
    ],
)
def test_bug_in_the_model_is_nobody_elses(
    mutation: Prepare, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_module, "Verifier", partial(Verifier, start=partial(Group, prepare=mutation)))
    code = run_here("scripts/verify.py", "--json", str(tmp_path / "verdict.json"), *CONFIG, *PIPELINE)
    out, err = capfd.readouterr()
    assert code == 1, out + err
    told = rf"one process alone fails: {error} \(titan_like/models/[a-z_/]+\.py:\d+\)"
    assert re.search(rf"^different: the layout runs \(float64\): {told} \(\d+ s\)$", out, re.MULTILINE), out
    assert re.fullmatch(told, json.loads((tmp_path / "verdict.json").read_text())["first_difference"]["detail"])
    assert "\nat fault: one_process (" in out
    assert "Traceback" not in err


def test_bad_input_ends_with_2_and_one_sentence() -> None:
    for arguments, words in (
        (["--steps", "1"], ["--steps", "at least 2"]),
        (["--parallelism.tensor_parallel_degree", "3"], ["parallelism.tensor_parallel_degree", "3"]),
        (["--json", "/no/such/folder/verdict.json"], ["--json", "folder"]),
        (["--gpus", "--parallelism.tensor_parallel_degree", "2"], ["--gpus", "this machine has"]),
    ):
        result = verify_forked(*arguments)
        assert result.returncode == 2, result.stdout + result.stderr
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
        assert all(word in result.stderr for word in words), result.stderr
        assert result.stdout == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("data", [1, 2])
def test_same_on_gpus(data: int) -> None:
    if torch.cuda.device_count() < data:
        pytest.skip(f"needs {data} GPUs")
    result = verify("--gpus", "--steps", "2", "--parallelism.data_parallel_shard_degree", str(data), sees_gpus=True)
    assert result.returncode == 0, result.stdout + result.stderr
