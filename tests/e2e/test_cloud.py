"""Checkpoints, data and Hugging Face folders on object storage: an S3 server on this machine, and fsspec's memory."""

import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect, died, launch, start_group
from tests.e2e.jobs import records, short, steps, train_on, wait_until
from tests.e2e.scripts import REPO, run_here
from tests.float64 import bound
from tests.unit.record_cases import write_records
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.checkpoint.step_folders import begin_checkpoint, checkpoint_path, complete_steps, sweep
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Data
from titan_like.config.urls import RemotePath, path_of
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.data.loading.open_source import open_source
from titan_like.data.readers.fetch import local_paths
from titan_like.data.source import DataRequest
from titan_like.models.registry import model_config
from titan_like.train.initial_weights import check_initial_weights

pytest.importorskip("s3fs")
TWO: dict[str, Any] = {"parallelism.zero_stage": 1, "checkpoint.async": True, "checkpoint.keep_latest": 2}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What lets this process and others use an S3 server with an empty bucket, s3://bucket."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    variables["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with RemotePath("s3://bucket").storage() as (system, path):
            system.mkdir(path)
        yield variables
    server.stop()


def objects(url: str) -> list[str]:
    """Everything below a URL, as paths relative to it."""
    with RemotePath(url).storage() as (system, path):
        return sorted(name.removeprefix(path).lstrip("/") for name in system.find(path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [1, 20])
def test_kills_at_random_instants_of_saves_lose_nothing(
    tmp_path: Path, environment: dict[str, str], kills: int
) -> None:
    """Two ranks save after every step, in the background."""
    url, dump, moments = f"s3://bucket/kills-{kills}", tmp_path / "dump", random.Random(kills)
    base_config(tmp_path, {})  # writes the text
    settings = TWO | {"training.steps": 4 + 4 * kills}
    wanted = collect(crash_worker.reference, 2, tmp_path, tmp_path / "straight", settings)[0]
    settings |= {"checkpoint.folder": url}
    newest, unfinished = 0, 0
    for _ in range(kills):
        job = start_group(crash_worker.train_with, 2, environment, tmp_path, dump, settings)
        wait_until(lambda reached=newest: len(steps(dump)) > reached + 2, 120)  # the one before is saved
        time.sleep(moments.uniform(0, 0.4))  # a step and its save take about that long
        job.kill()
        assert died(job.wait(120))
        complete = complete_steps(path_of(url))
        assert complete[-1] > newest and len(complete) <= 3, complete
        newest = complete[-1]
        unfinished += len({name.partition("/")[0] for name in objects(url)}) > len(complete)
    last = newest + 2
    launch(crash_worker.train_with, 2, environment, tmp_path, dump, settings | {"training.steps": last})
    starts = [json.loads(line) for line in (dump / "resumed.jsonl").read_text().splitlines()]
    print(f"{kills} kills, {unfinished} of them inside a save; resumed from {[start['step'] for start in starts]}")
    assert starts[-1]["step"] == newest
    for start in starts:
        assert start["digest"] == wanted[str(start["step"])], start["step"]
    assert steps(dump) == list(range(1, last + 1))
    assert complete_steps(path_of(url)) == [last - 1, last]
    assert {name.partition("/")[0] for name in objects(url)} == {f"step-{last - 1}", f"step-{last}"}


def test_a_run_on_object_storage(tmp_path: Path, environment: dict[str, str], capfd: pytest.CaptureFixture) -> None:
    """Data, checkpoints of two processes that one process resumes elsewhere, generation, export and import."""
    letters = random.Random(1)
    for name in ("a.txt", "deep/b.txt"):
        text = "".join(letters.choices("abcd \n", k=20_000))
        RemotePath(f"s3://bucket/text/{name}").write_bytes(text.encode())
    settings = [
        f"--job.config_file={REPO / 'train_configs/debug_gpt.toml'}", "--data.dataset=text",
        "--data.paths=s3://bucket/text", "--lr_scheduler.decay=constant", "--checkpoint.enable=true",
        "--checkpoint.interval=2",
    ]  # fmt: skip

    def run(processes: int, name: str, number: int, *more: str) -> str:
        log, arguments = tmp_path / f"{name}.txt", [*settings, *short(number), f"--job.dump_folder={tmp_path / name}"]
        return train_on(processes, log, [*arguments, *more], environment=environment)

    run(1, "straight", 6)
    run(2, "two", 4, "--checkpoint.folder=s3://bucket/run", "--checkpoint.hugging_face_interval=4")
    assert not list((tmp_path / "two").glob("checkpoint*"))
    more = "--checkpoint.keep_latest=2", "--checkpoint.hugging_face_interval=6"
    printed = run(1, "one", 6, "--checkpoint.folder=s3://bucket/run", *more)
    assert "resumed from s3://bucket/run/step-4" in printed and "saved s3://bucket/run/step-6" in printed
    found = records(tmp_path / "two") + records(tmp_path / "one")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    for record, wanted in zip(found, records(tmp_path / "straight"), strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=bound(dtype=torch.float32))
    assert complete_steps(path_of("s3://bucket/run")) == [4, 6]

    arguments = ("--checkpoint", "s3://bucket/run", "--prompt", "ab", "--max_new_tokens", "4")
    assert run_here("scripts/generate.py", *arguments) == 0
    assert run_here("scripts/convert.py", "to-hf", "--checkpoint=s3://bucket/run", "--output=s3://bucket/hf") == 0
    exported = objects("s3://bucket/hf")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(exported)
    folder = path_of("s3://bucket/run/hugging_face")
    assert complete_steps(folder) == [4, 6] and objects(f"{folder}/step-4") == objects(f"{folder}/step-6") == exported
    for name in exported:
        assert (folder / "step-6" / name).read_bytes() == path_of(f"s3://bucket/hf/{name}").read_bytes()
    assert run_here("scripts/convert.py", "from-hf", "--input=s3://bucket/hf", "--output=s3://bucket/imported") == 0
    weights = [CheckpointWeights(path_of(f"s3://bucket/{name}")) for name in ("run/step-6", "imported/step-0")]
    assert len({weight.read("layers.0.attention.qkv.weight").sum().item() for weight in weights}) == 1
    assert run_here("scripts/convert.py", "to-hf", "--checkpoint=s3://bucket/run", "--output=s3://bucket/hf") == 2
    assert "already exists" in capfd.readouterr().err
    for words in ([settings[0], "--checkpoint.initial_load_path=s3://bucket/hf"], ["--model.from=s3://bucket/hf"]):
        config = load_config(words)
        check_initial_weights(config, model_config(config.model))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_reads_objects_where_they_are(tmp_path: Path, environment: dict[str, str], workers: int) -> None:
    """Its samples are those of a copy, also in a worker that is forked after the objects were listed."""
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        path = write_records(tmp_path / "data" / name, [f"{name} {number}" for number in range(100)])
        RemotePath(f"s3://bucket/stream/{name}").write_bytes(path.read_bytes())
    taken = []
    for data in (str(tmp_path / "data"), "s3://bucket/stream"):
        section = Data(dataset="hf", paths=[data], num_readers=4, num_workers=workers)
        source = open_source(DataRequest(section, "train", 16, 0, 257, tmp_path / "cache"))
        loader = BackgroundLoader(source, GlobalSampler(0, 4, 0, 1), workers, torch.device("cpu"))
        taken.append([next(loader).tokens.tolist() for _ in range(40)])
        loader.close()
    assert taken[0] == taken[1] and not (tmp_path / "cache").exists()


def test_only_a_checkpoint_with_its_marker_is_one() -> None:
    folder = path_of("memory://marker/run")
    for name in ("step-1/run.json", "step-1/x", "step-2/x", "step-3.copy/x", "y"):
        (folder / name).write_bytes(b"{}")
    assert complete_steps(folder) == [1] and not complete_steps(path_of("memory://marker/none"))
    assert sweep(folder) == ["step-2"]
    assert [path.name for path in folder.iterdir()] == ["step-1", "step-3.copy", "y"]
    assert checkpoint_path(folder, 1).is_dir() and not checkpoint_path(folder, 2).exists()
    begin_checkpoint(folder, 1)  # after going back; what it replaces must not look complete
    assert not complete_steps(folder) and not checkpoint_path(folder, 1).exists()


def test_copies_of_data_are_those_on_the_server(tmp_path: Path) -> None:
    data = path_of("memory://data/set")
    for name in ("a.jsonl", "b.jsonl", "c.idx", "c.bin"):
        (data / name).write_bytes(name.encode())

    def contents(url: str) -> dict[str, str]:
        return {Path(path).name: Path(path).read_text() for path in local_paths([url], tmp_path)}

    assert contents(f"{data}/*.jsonl") == {"a.jsonl": "a.jsonl", "b.jsonl": "b.jsonl"}
    assert contents(f"{data}/c").keys() == contents(f"{data}/c.idx").keys() == {"c.idx", "c.bin"}
    assert local_paths(["x", str(data)], tmp_path)[0] == "x"
    (folder,) = map(Path, local_paths([str(data)], tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "b.jsonl", "c.bin", "c.idx"]
    (data / "a.jsonl").write_bytes(b"changed")
    assert contents(f"{data}/a.jsonl") == {"a.jsonl": "changed"}
    with pytest.raises(ConfigError, match=r'data.paths = "memory://data/none": no such file or folder'):
        local_paths(["memory://data/none"], tmp_path)


def test_names_are_no_patterns(tmp_path: Path) -> None:
    """Runs beside one in `run[1]`, which as a pattern would mean `run1`."""
    root = RemotePath("memory://literal")
    for name in ("run1/step-2/run.json", "run1/step-2/x", "run[1]/step-2/x", "run[1]/a.txt", "run1/a.txt"):
        (root / name).write_bytes(name.encode())
    sweep(root / "run[1]")  # which has no complete checkpoint
    (root / "run[1]" / "a.txt").rename(root / "run[1]" / "b.txt")
    assert objects(str(root)) == ["run1/a.txt", "run1/step-2/run.json", "run1/step-2/x", "run[1]/b.txt"]
    for url in (f"{root}/run[1]/b.txt", f"{root}/run[[]1]/*.txt", f"{root}/run[1]"):
        (copy,) = [Path(path) for path in local_paths([url], tmp_path)]
        text = copy if copy.is_file() else copy / "b.txt"
        assert text.read_text() == "run[1]/a.txt"
    with pytest.raises(ConfigError, match="no such file or folder"):
        local_paths([f"{root}/absent.txt"], tmp_path)
    (root / "run[1]" / "b.txt").write_bytes(b"run[2]/a.txt")  # as long as before
    (copy,) = local_paths([f"{root}/run[1]/b.txt"], tmp_path)
    assert Path(copy).read_text() == "run[2]/a.txt"
