import json
import math
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.test_console import RATES, UNKNOWN_PEAK
from tests.unit.test_console import record as record_of_console
from titan_like.config.errors import ConfigError
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.metrics.run_facts import run_facts, run_name
from titan_like.metrics.run_files import lacks_validation
from titan_like.metrics.writers import (
    JsonLinesWriter,
    MLflowWriter,
    TensorBoardWriter,
    build_writers,
    check_trackers,
    grouped,
)
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout

CONTRACT_KEYS = [
    "step", "loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens", "global_batch_size", "step_time_s",
    "data_time_s", "tokens_per_second", "tflops_per_device", "mfu_model", "mfu_causal", "hfu", "peak_memory_bytes",
    "skipped", "nan",
]  # fmt: skip


def record(step, **changes):
    own = {"loss": 5.0 / step, "grad_norm": 1.25, "lr": 1e-3 * step, "consumed_samples": 16 * step, "num_zeros": None}
    own |= {"consumed_tokens": 2**33 + 512 * step, "data_time_s": 0.25, "peak_memory_bytes": 2**34}
    return record_of_console(**{"step": step} | own | changes)


RECORDS = [
    record(1),
    record(2, num_zeros=3.0, loss_scale=65536.0),
    record(3, throughput=UNKNOWN_PEAK, loss=math.nan, grad_norm=math.inf, nan=1),
]


def write(writer, item):
    writer.write(item.step, item.as_dict())


def write_all(writer, records=RECORDS):
    for item in records:
        write(writer, item)
    writer.close()


def read_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_jsonl_has_the_contract_s_keys_in_order_and_null_for_what_json_lacks(tmp_path):
    write_all(JsonLinesWriter(tmp_path / "metrics.jsonl", 0, "ours"))
    first, second, third = read_lines(tmp_path / "metrics.jsonl")
    assert list(first) == list(third) == [*CONTRACT_KEYS, "run_id"]
    assert list(second) == [*CONTRACT_KEYS, "num_zeros", "loss_scale", "run_id"]
    given = vars(RECORDS[0]) | vars(RATES)
    assert first == {key: given[key] for key in CONTRACT_KEYS} | {"run_id": "ours"}
    assert [second[key] for key in ("num_zeros", "loss_scale")] == [3.0, 65536.0]
    unknown = [key for key, value in third.items() if value is None]
    assert unknown == ["loss", "grad_norm", "mfu_model", "mfu_causal", "hfu"]
    assert third["nan"] == 1


def test_a_validation_adds_to_its_step_s_line(tmp_path):
    path, added = tmp_path / "metrics.jsonl", {"validation_loss": 2.5, "text/perplexity": math.inf}
    writer = JsonLinesWriter(path, 0, "ours")
    write(writer, record(1))
    (before,) = read_lines(path)
    assert [lacks_validation(path, *of) for of in (("ours", 1), ("ours", 2), ("others", 1))] == [True, False, False]
    writer.close()
    writer = JsonLinesWriter(path, 1, "ours")  # a resumed run makes up for it
    writer.write(1, added)
    write(writer, record(2))
    writer.close()
    assert read_lines(path)[0] == before | added | {"text/perplexity": None}
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert not lacks_validation(path, "ours", 1)
    board = TensorBoardWriter(tmp_path / "board", 0, {})
    write(board, record(1))
    board.write(1, {"validation_loss": 2.5})
    board.close()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation/loss")] == [(1, 2.5)]
    assert len(events.Scalars("train/loss")) == 1


@pytest.mark.parametrize("start", [0, 2, 5, 9])
def test_resuming_drops_later_steps_and_a_torn_line(tmp_path, start):
    path = tmp_path / "metrics.jsonl"
    write_all(JsonLinesWriter(path, 0, "ours"), [record(step) for step in range(1, 6)])
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before) + before[0][: len(before[0]) // 2])
    writer = JsonLinesWriter(path, start, "ours")
    assert path.read_text() == "".join(before[:start])  # byte for byte
    write_all(writer, [record(start + 1)])
    assert [line["step"] for line in read_lines(path)] == [*range(1, min(start, 5) + 1), start + 1]
    aside = ["metrics.1.jsonl"] if start == 0 else []  # a run that starts anew loses nothing
    assert sorted(found.name for found in tmp_path.glob("*.jsonl")) == [*aside, "metrics.jsonl"]


def test_a_run_that_ended_before_its_first_step_has_no_file_of_its_own(tmp_path):
    for _ in range(2):
        JsonLinesWriter(tmp_path / "metrics.jsonl", 0, "ours").close()
    assert [found.name for found in tmp_path.glob("*.jsonl")] == ["metrics.jsonl"]


def test_each_run_goes_on_with_its_own_file(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def steps(name):
        return [line["step"] for line in read_lines(tmp_path / name)]

    write_all(JsonLinesWriter(path, 0, "first"), [record(step) for step in range(1, 7)])
    write_all(JsonLinesWriter(path, 0, "second"), [record(step) for step in range(1, 4)])
    write_all(JsonLinesWriter(path, 6, "first"), [record(7)])
    assert steps("metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7] and steps("metrics.2.jsonl") == [1, 2, 3]
    write_all(JsonLinesWriter(path, 2, "second"), [record(3), record(4)])
    assert steps("metrics.jsonl") == [1, 2, 3, 4] and steps("metrics.3.jsonl") == [1, 2, 3, 4, 5, 6, 7]
    write_all(JsonLinesWriter(path, 9, "from elsewhere"), [record(10)])
    assert steps("metrics.jsonl") == [10] and steps("metrics.4.jsonl") == [1, 2, 3, 4]
    write_all(JsonLinesWriter(path, 0, "died before its first step"), [])
    write_all(JsonLinesWriter(path, 4, "second"), [record(5)])
    assert steps("metrics.jsonl") == [1, 2, 3, 4, 5]
    path.write_text('{"step": 10}\n')  # of a version that does not say whose it is
    write_all(JsonLinesWriter(path, 10, "from elsewhere"), [record(11)])
    assert steps("metrics.jsonl") == [10, 11]


def test_lines_after_the_step_that_a_user_goes_back_to_are_kept_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_all(JsonLinesWriter(path, 0, "ours"), [record(step) for step in range(1, 6)])
    whole = path.read_bytes()
    for _ in range(2):  # the second time nothing is lost
        JsonLinesWriter(path, 2, "ours", goes_back=True).close()
        assert [line["step"] for line in read_lines(path)] == [1, 2]
        assert [found.name for found in tmp_path.glob("metrics.*.jsonl")] == ["metrics.1.jsonl"]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == whole
    write_all(JsonLinesWriter(path, 2, "ours"), [record(3)])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_steps_for_which_a_full_disk_has_no_room_are_left_out(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path, 0, "ours")
    write(writer, record(1))
    file, full = writer._file, MagicMock(wraps=writer._file)
    full.write = lambda data: file.write(data if data == b"}\n" else data[:10])  # a block has room for as little
    writer._file = full
    writer.write(1, {"validation_loss": 2.5})
    write(writer, record(2))
    write(writer, record(3))
    before = read_lines(path)
    assert [line["step"] for line in before] == [1] and "validation_loss" not in before[0]
    assert capsys.readouterr().out == f"{path} cannot be written (No space left on device) and lacks steps\n"
    writer._file = file
    writer.write(3, {"validation_loss": 2.5})
    write(writer, record(4))
    writer.close()
    assert read_lines(path)[:2] == [*before, {"step": 3, "validation_loss": 2.5, "run_id": "ours"}]
    assert [line["step"] for line in read_lines(path)] == [1, 3, 4]


@pytest.mark.parametrize("damage", ["{}", "5", '{"step": "x"}', "\udcff\udcfe\0"])
def test_a_whole_last_line_without_its_newline_is_kept_and_what_is_no_line_dropped(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 2}}', errors="surrogateescape")
    write_all(JsonLinesWriter(path, 9, "ours"), [record(3)])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def numbers(item):
    return {grouped(key): value for key, value in item.as_dict().items() if value is not None}


def test_a_run_s_name_and_facts(monkeypatch):
    monkeypatch.delenv("WANDB_NAME", raising=False)
    config = JobConfig.model_validate(
        {"model": {"family": "llama", "flavor": "debug"}, "parallelism": {"zero_stage": 3}}
    )
    layout, model = Layout(pipeline=2, shard=4, tensor=8), model_config(config.model)
    assert run_name(config, layout) == "llama-debug-pp2-dp4-tp8-zero3"
    assert run_name(config, Layout()) == "llama-debug"
    facts = run_facts(config, model, layout)
    assert facts["model"]["flavor"] == "debug" and facts["shape"]["num_layers"] == model.num_layers
    assert (facts["parameters"], facts["world_size"]) == (model.num_parameters(), 64)
    assert facts["layout"]["tensor"] == 8 and facts["versions"]["torch"]
    monkeypatch.setenv("WANDB_NAME", "theirs")
    assert run_name(config, layout) == "theirs"
    assert run_name(edit(config, {"metrics.run_name": "ours"}), layout) == "ours"


def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch, capsys):
    tracking = pytest.importorskip("mlflow.tracking")
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    config = JobConfig.model_validate({"metrics": {"mlflow": True}})
    check_trackers(config.metrics)
    facts = config.model_dump(mode="json") | {"world_size": 8, "layout": {}}
    for records in (RECORDS[:2], RECORDS[2:]):
        write_all(MLflowWriter(config, "ours", "a name", facts), records)
    MLflowWriter(config, "another", "a name", facts).close()
    client = tracking.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("titan_like").experiment_id])
    (run,) = [run for run in runs if run.data.tags["titan_like.run_id"] == "ours"]
    assert len(runs) == 2 and run.info.run_name == "a name" and run.info.status == "FINISHED"
    assert run.data.params["training.seq_len"] == str(config.training.seq_len)
    assert run.data.params["world_size"] == "8"
    blend = MLflowWriter(config, "another", "a name", facts)
    blend.write(1, {"samples/data/c++/*.txt": 3.0})  # the first is sent at once
    assert client.get_run(blend._run).data.metrics == {"samples/data/c__/_.txt": 3.0}
    history = client.get_metric_history(run.info.run_id, "train/lr")
    assert [(one.step, one.value) for one in history] == [(item.step, item.lr) for item in RECORDS]
    writer = MLflowWriter(config, "ours", "a name", facts)
    writer._client = MagicMock()
    writer._client.log_batch.side_effect = MlflowException("no answer")
    for item in RECORDS:
        write(writer, item)
    writer.close()
    assert capsys.readouterr().out.count("MLflow cannot be written (no answer) and gets no more figures") == 1
    assert writer._client.log_batch.call_count == 1 and not writer._client.set_terminated.called
    monkeypatch.setattr("titan_like.metrics.writers.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"metrics\.mlflow = true: needs MLflow: pip install"):
        check_trackers(config.metrics)


def tensorboard_scalars(folder):
    """{step: {key: value}} of what survives."""
    events = EventAccumulator(str(folder)).Reload()
    steps = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            assert key not in steps.setdefault(event.step, {}), f"{key} twice at step {event.step}"
            steps[event.step][key] = event.value
    return steps


def test_tensorboard_has_the_same_keys_and_values(tmp_path):
    write_all(TensorBoardWriter(tmp_path, 0, {"training": {"seq_len": 77}}))
    (text,) = EventAccumulator(str(tmp_path)).Reload().Tensors("configuration/text_summary")
    assert b'"seq_len": 77' in text.tensor_proto.string_val[0]
    found = tensorboard_scalars(tmp_path)
    assert list(found) == [1, 2, 3]
    for item in RECORDS:  # TensorBoard keeps float32
        assert found[item.step] == pytest.approx(numbers(item), rel=2**-24, nan_ok=True)


GONE = [(OSError(28, "No space left on device"), "No space left on device"), (RuntimeError("gone"), "gone")]
STAND_INS = {  # the setting, what makes the tracker, and what sends figures to it
    "tensorboard": ("torch.utils.tensorboard.SummaryWriter", "add_scalar"),
    "wandb": ("wandb.init", "log"),
    "mlflow": ("mlflow.tracking.MlflowClient", "log_batch"),
}


@pytest.mark.parametrize(("error", "reason"), GONE)
@pytest.mark.parametrize("setting", STAND_INS)
def test_a_tracker_that_goes_away_is_named_once_and_gets_nothing_more(
    tmp_path, monkeypatch, capsys, setting, error, reason
):
    if setting == "mlflow":
        pytest.importorskip("mlflow")
    make, send = STAND_INS[setting]
    stand_in = MagicMock(**{"return_value.starting_step": 0})
    monkeypatch.setattr(make, stand_in)
    monkeypatch.setattr("titan_like.metrics.writers._MLFLOW_SECONDS", -1.0)
    config = JobConfig.model_validate({"metrics": {setting: True}, "job": {"dump_folder": str(tmp_path)}})
    writers = build_writers(config, model_config(config.model), Layout(), 0, "ours")
    for item in RECORDS:
        for writer in writers:
            write(writer, item)
        if item.step == 1:
            sent = getattr(stand_in.return_value, send)
            sent.reset_mock()
            sent.side_effect = error
    for writer in writers:
        writer.close()
    assert sent.call_count == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f" cannot be written ({reason}) and gets no more figures; metrics.jsonl has them")
    assert [item["step"] for item in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
