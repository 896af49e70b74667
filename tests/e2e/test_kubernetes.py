"""scripts/k8s: the manifests, and what their pods run, as two process groups of this machine."""

import functools
import operator
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models as training_operator

from tests.e2e.jobs import REPO, free_port, short, steps, wait_until
from titan_like.config import load_config
from titan_like.train.rules import resolve_settings

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


def manifests() -> list[dict[str, Any]]:
    files = sorted((REPO / "scripts" / "k8s").glob("*.yaml"))
    return [resource for path in files for resource in yaml.safe_load_all(path.read_text())]


def check_schema(value: Any, kind: str) -> None:
    """Refuse what a schema of the training operator does not have, or what Kubernetes refuses of a pod."""
    if kind == "V1PodTemplateSpec":
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **value}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    elif listed := re.fullmatch(r"list\[(\w+)\]|dict\(str, (\w+)\)", kind):
        for one in value.values() if isinstance(value, dict) else value:
            check_schema(one, listed[1] or listed[2])
    elif kind.startswith("KubeflowOrgV1"):
        schema = getattr(training_operator, kind)
        kinds = {key: schema.openapi_types[name] for name, key in schema.attribute_map.items()}
        assert value.keys() <= kinds.keys(), value.keys() - kinds.keys()
        for key in value.keys() - {"metadata"}:
            check_schema(value[key], kinds[key])
    else:
        assert isinstance(value, {"str": str, "int": int}[kind])


def check(resource: dict[str, Any]) -> None:
    if resource["kind"] == "PyTorchJob":
        check_schema(resource, "KubeflowOrgV1PyTorchJob")
        return
    model = getattr(trainer, f"TrainerV1alpha1{resource['kind']}")
    assert model.from_dict(resource).to_dict() == resource  # which leaves out what it does not know
    if resource["kind"] == "TrainingRuntime":
        for job in resource["spec"]["template"]["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}
            kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


def misspelt(resource: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there are keys of schemas, and not of free maps."""
    for key, value in resource.items() if isinstance(resource, dict) else enumerate(resource):
        if isinstance(value, dict | list) and key not in ("metadata", "limits", "torch"):
            yield from misspelt(value, (*path, key))
        if isinstance(key, str) and key not in ("apiVersion", "kind", "Worker", "nvidia.com/gpu"):
            yield (*path, key)


def test_manifests_have_their_published_schemas() -> None:
    kinds = [resource["kind"] for resource in manifests()]
    assert kinds == ["PyTorchJob", "TrainingRuntime", "TrainJob"]
    for number, resource in enumerate(manifests()):
        check(resource)
        for *path, key in misspelt(resource):
            broken = manifests()[number]
            part = functools.reduce(operator.getitem, path, broken)
            part[f"{key}s"] = part.pop(key)
            with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
                check(broken)


def test_pods_run_what_the_image_has() -> None:
    assert "COPY --chmod=755 scripts/k8s/run.sh /opt/titan_like/bin/titan-pod" in (REPO / "Dockerfile").read_text()
    operated, runtime, job = (resource["spec"] for resource in manifests())
    worker = operated["pytorchReplicaSpecs"]["Worker"]
    [node] = runtime["template"]["spec"]["replicatedJobs"]
    pods = worker["template"]["spec"], node["template"]["spec"]["template"]["spec"]
    for pod in pods:
        assert pod["terminationGracePeriodSeconds"] > 300
        [container] = pod["containers"]
        assert container["command"] == ["titan-pod"] and "workingDir" not in container
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert [pod["containers"][0]["name"] for pod in pods] == ["pytorch", "node"]
    elastic = operated["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    for arguments in (pods[0]["containers"][0]["args"], job["trainer"]["args"]):
        config = load_config(["--job.config_file", *arguments])
        resolve_settings(config, 16)
        assert config.checkpoint.enable and Path(config.job.dump_folder).parent == Path("/runs")
