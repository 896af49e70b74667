"""scripts/k8s: the manifest, and what its pods run, as two process groups of this machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.e2e.jobs import REPO, free_port, short, steps, wait_until

STEPS = 40
SETTINGS = [*short(STEPS), "--checkpoint.interval=100000"]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two of them."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPO), "NPROC": "1",
        "CUDA_VISIBLE_DEVICES": "", "PET_NNODES": "2:2", "PET_MAX_RESTARTS": "0", "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "PET_RDZV_ID": "test",
    }  # fmt: skip
    dump = f"--job.dump_folder={tmp_path}"
    command = ["bash", str(REPO / "scripts/k8s/run.sh"), "train_configs/debug_gpt.toml", dump, *SETTINGS]
    with open(tmp_path / "log", "ab") as log:
        pods = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for _ in range(2)]
    yield pods
    for pod in pods:
        pod.kill()
        pod.wait()
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            if dump.encode() in arguments.read_bytes().split(b"\0"):
                os.kill(int(arguments.parent.name), signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the pods are Linux")
def test_all_pods_save_when_one_is_to_go(pods: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    wait_until(lambda: len(steps(tmp_path)) >= 5, 180, (tmp_path / "log").read_text)
    pods[1].send_signal(signal.SIGTERM)
    assert [pod.wait(timeout=120) for pod in pods] == [143, 143]  # torchrun alone would wait 5 minutes for the other
    stopped = steps(tmp_path)[-1]
    assert 5 <= stopped < STEPS
    log = (tmp_path / "log").read_text()
    assert f" saved {tmp_path}/checkpoint/step-{stopped}\n" in log
    assert f" stopped by SIGTERM after step {stopped}\n" in log


def test_the_manifest() -> None:
    job = yaml.safe_load((REPO / "scripts/k8s/pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job["spec"]) <= {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    elastic, workers = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert elastic["rdzvBackend"] == "c10d"
    assert elastic["minReplicas"] <= workers["replicas"] <= elastic["maxReplicas"]
    assert all(
        set(setting) == {"key", "value"} and isinstance(setting["value"], str) for setting in elastic["rdzvConf"]
    )
    pod = workers["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 300
    [container] = pod["containers"]
    assert container["name"] == "pytorch"
    script = container["command"][-1]
    assert (REPO / script).is_file()
    assert (REPO / container["args"][0]).is_file()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
