import json
import signal
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from tests.unit.test_writers import RECORDS, numbers, read_lines, record, tensorboard_scalars, write, write_all
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.metrics.writers import (
    MLflowWriter,
    RunEnd,
    WandbWriter,
    build_writers,
    check_trackers,
    go_back,
)
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    """A user who never logged in, at a terminal, where every question fails the test."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    folders = {"HOME": home, "WANDB_CONFIG_DIR": home / "config", "WANDB_CACHE_DIR": home / "cache"}
    for name, value in {**folders, "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, str(value))

    def refuse(*_args, **_kwargs):
        raise AssertionError("wandb asked")

    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: True)
    for name in ("builtins.input", "getpass.getpass", "wandb.errors.term.terminput", "wandb.util.prompt_choices"):
        monkeypatch.setattr(name, refuse)
    return home


def wandb_config(mode, **metrics):
    return JobConfig.model_validate({"metrics": {"wandb": True, "wandb_mode": mode} | metrics, "job": {"seed": 99}})


def test_wandb_has_the_same_keys_and_values_and_goes_on_offline_in_the_same_run(tmp_path, no_key, monkeypatch):
    logged, log = [], wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda run, values, step: logged.append((step, values)) or log(run, values, step)
    )
    for records in (RECORDS[:2], RECORDS[2:]):
        write_all(WandbWriter(wandb_config("auto"), tmp_path, "ours", "a name", {"world_size": 8}), records)
    assert [step for step, _ in logged] == [1, 2, 3]
    for item, (_, values) in zip(RECORDS, logged, strict=True):
        assert values == pytest.approx(numbers(item), nan_ok=True)
    wandb.teardown()  # ends the process that writes them
    folders = {path.name for path in (tmp_path / "wandb").glob("*run-*")}
    assert folders and all(name.startswith("offline-run-") and name.endswith("-ours") for name in folders)


@pytest.mark.parametrize(
    ("key", "mode", "expected"),
    [
        (None, "auto", "offline"),
        ("environment", "auto", "online"),
        ("netrc", "auto", "online"),
        ("other host", "auto", "offline"),
        ("environment", "offline", "offline"),
        ("environment", "online", "online"),
    ],
)
def test_wandb_is_online_only_with_a_key(tmp_path, no_key, monkeypatch, key, mode, expected):
    if key == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    elif key is not None:
        host = "api.wandb.ai" if key == "netrc" else "example.com"
        (no_key / ".netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
        (no_key / ".netrc").chmod(0o600)
    asked = []
    monkeypatch.setattr(wandb, "init", lambda **settings: asked.append(settings["mode"]))
    config = wandb_config(mode)
    check_trackers(config.metrics)
    WandbWriter(config, tmp_path, "ours", "a name", {})
    assert asked == [expected]


def test_online_without_a_key_is_refused(no_key):
    with pytest.raises(ConfigError, match=r'metrics\.wandb_mode = "online": no wandb key .* use "offline"'):
        check_trackers(wandb_config("online").metrics)
    check_trackers(JobConfig.model_validate({"metrics": {"wandb_mode": "online"}}).metrics)  # wandb is off


def wandb_records(folder):
    """The records of wandb's offline files, one file after the other. They are in the format of LevelDB's log."""
    records = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (room := 2**15 - at % 2**15) < 7:  # the end of a block
                at += room
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or its last part
                records.append(wandb_internal_pb2.Record.FromString(record))
                record = b""
    return records


def wandb_steps(folder):
    return [record.history.step.num for record in wandb_records(folder) if record.HasField("history")]


@pytest.fixture(params=["refuses", "hangs", 500, 401])
def failing_server(request, no_key, monkeypatch):
    """The address of a server on loopback that fails in one way. Trackers go there with a key, and wait little."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            if request.param == "hangs":
                over.wait(60)
            self.send_response(500 if request.param == "hangs" else request.param)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_):
            pass

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        if request.param == "refuses":
            server.shutdown()
            server.server_close()
        address, waits = (
            f"http://127.0.0.1:{port}",
            ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT", "WANDB_HTTP_TIMEOUT"),
        )
        for name, value in {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, **dict.fromkeys(waits, "1")}.items():
            monkeypatch.setenv(name, value)
        wandb.teardown()  # a process that has read other variables
        yield address
        over.set()
        wandb.teardown()
        server.shutdown()


@pytest.mark.slow
def test_wandb_logs_offline_where_its_server_does_not_answer(tmp_path, failing_server, capsys):
    config = wandb_config("auto")
    check_trackers(config.metrics)
    for records in (RECORDS[:2], RECORDS[2:]):  # the run, and its next start
        write_all(WandbWriter(config, tmp_path, "ours", "a name", {"world_size": 8}), records)
    wandb.teardown()
    assert wandb_steps(tmp_path) == [1, 2, 3]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith(" wandb gets no figures (") for line in lines)
    assert all(line.endswith(f"wandb sync {tmp_path}/wandb/offline-run-*-ours") for line in lines)


ENDS = [
    (RunEnd(), 0, False, "FINISHED", "finished"),
    (RunEnd(1, reason="RunError: the disk is full"), 1, False, "FAILED", "RunError: the disk is full"),
    (RunEnd(signal=signal.SIGTERM), 143, True, "KILLED", "stopped by SIGTERM"),
    (RunEnd(signal=signal.SIGINT, reason="diverged"), 255, False, "KILLED", "stopped by SIGINT; diverged"),
]


@pytest.mark.parametrize(("end", "code", "preempted", "status", "shown"), ENDS, ids=lambda value: str(value)[:12])
def test_trackers_show_how_a_run_ended(tmp_path, no_key, monkeypatch, end, code, preempted, status, shown):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    writers = [
        WandbWriter(wandb_config("offline"), tmp_path, "ours", "a name", {}),
        MLflowWriter(wandb_config("offline"), "ours", "a name", {"layout": {}}),
    ]
    for writer in writers:
        write(writer, RECORDS[0])
        writer.close(end)
    wandb.teardown()
    records = wandb_records(tmp_path)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [code]
    assert any(record.HasField("preempting") for record in records) == preempted
    summaries = [update for record in records for update in record.summary.update if update.key == "end"]
    assert [json.loads(update.value_json) for update in summaries] == [shown]
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("titan_like").experiment_id])
    assert run.info.status == status and run.data.metrics["train/lr"] == RECORDS[0].lr
    assert run.data.tags["titan_like.end"] == shown and run.data.tags["titan_like.exit_code"] == str(end.exit_code)


def test_steps_that_are_trained_again_replace_the_earlier_ones_or_a_line_says_so(tmp_path, no_key, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    metrics = {"tensorboard": True, "wandb": True, "wandb_mode": "offline", "mlflow": True}
    config = JobConfig.model_validate({"metrics": metrics, "job": {"dump_folder": str(tmp_path)}})
    parts = config, model_config(config.model), Layout()

    def log(writers, steps, rate):
        for step in steps:
            for writer in writers:
                write(writer, record(step, lr=rate))

    writers = build_writers(*parts, 0, "ours")
    log(writers, range(1, 6), 1.0)
    assert capsys.readouterr().out == ""
    go_back(writers, 3)
    log(writers, range(4, 7), 2.0)
    assert capsys.readouterr().out == " the earlier figures of steps 4 to 5 stay in wandb and MLflow\n"
    for writer in writers:
        writer.close()
    writers = build_writers(*parts, 5, "ours")  # another start, from the checkpoint of step 5
    assert capsys.readouterr().out == " the earlier figures of step 6 stay in wandb and MLflow\n"
    log(writers, [6], 3.0)
    for writer in writers:
        writer.close()
    wandb.teardown()
    rates = {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 3.0}
    assert {line["step"]: line["lr"] for line in read_lines(tmp_path / "metrics.jsonl")} == rates
    assert {step: values["train/lr"] for step, values in tensorboard_scalars(tmp_path / "tensorboard").items()} == rates
    assert wandb_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 6]
