import contextlib
import io
import json

import pytest
import torch

from tests.unit.test_planner_command import plan
from titan_like.planner.commands import microbenchmark
from titan_like.planner.commands.microbenchmark import _PRODUCTS_CPU, Timed, with_products
from titan_like.planner.profile import load_profile
from titan_like.planner.trace.program import Gemm, Pass


def test_products_give_back_the_constants_that_made_their_times(tmp_path):
    path = tmp_path / "mine.toml"
    quick = 'device = "CPU"\ngpus_per_node = 1\nnode_bandwidth = 0\n[device_table]\nmemory_gib = 8\n'
    path.write_text(
        quick
        + "memory_bandwidth = 1e4\nnvlink = 1\nmultiprocessors = 1\ntensor_element = 1\npeak = { float32 = 0.1 }\n"
    )
    start = load_profile(str(path))
    true, products = start.changed(gemm_efficiency=0.62, gemm_depth=80.0), []
    for tokens, inputs, outputs in _PRODUCTS_CPU:
        sizes = (tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)
        linear = Timed(Pass({Gemm(*three, 1, False, 16): 1 for three in sizes}), 1.0)
        products.append(linear._replace(seconds=linear.predicted("float32", true)))
    found = with_products(start, products, "float32")
    # Depths are tried 15 % apart.
    assert found.gemm_depth == pytest.approx(80, rel=0.08)
    assert found.gemm_efficiency == pytest.approx(0.62, rel=0.03)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_microbenchmark_writes_a_profile_that_predict_and_calibrate_take(tmp_path, monkeypatch):
    monkeypatch.setattr(microbenchmark, "_SECONDS", 0.01)
    monkeypatch.setattr(microbenchmark, "_PRODUCTS_CPU", ((64, 128, 64), (64, 64, 256)))
    monkeypatch.setattr(microbenchmark, "_LAYERS_CPU", ((1, 32, 64, 2),))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    out, target = tmp_path / "mine.toml", tmp_path / "plan.json"
    progress = io.StringIO()
    with contextlib.redirect_stderr(progress):
        done = plan("microbenchmark", "--out", out)
    assert done.returncode == 0, done.stderr
    assert progress.getvalue().splitlines()[0].endswith("memory")
    profile = load_profile(str(out))
    assert profile.device.is_cpu and profile.name == "mine"
    assert profile.device.memory_bytes > 2**30
    assert min(profile.gemm_efficiency, profile.attention_efficiency, profile.memory_efficiency) > 0
    assert profile.overhead_bytes > 1e8  # an interpreter with PyTorch
    assert not profile.node_bandwidth
    done = plan("predict", "--job.config_file", "train_configs/debug_gpt.toml", "--profile", out, "--json", target)
    assert done.returncode == 0, done.stderr
    assert "profile mine on CPU" in done.stdout
    assert json.loads(target.read_text())["predict"]["step_seconds"]["total"] > 0
    done = plan("calibrate", "--profile", out, "--points", tmp_path / "no.json")
    assert "--points" in done.stderr  # it is past the profile


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_reaches_a_good_part_of_its_data_sheet(tmp_path):
    out = tmp_path / "mine.toml"
    done = plan("microbenchmark", "--out", out)
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(out))
    assert not profile.device.is_cpu
    assert profile.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0.3 < profile.gemm_efficiency <= 1
