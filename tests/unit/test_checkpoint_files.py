"""Files of a checkpoint: what is written is what is on disk, and no flipped bit is loaded in silence."""

import json
import os
import random
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from titan_like.checkpoint.reader import TensorReader
from titan_like.checkpoint.saver import DurableFiles
from titan_like.checkpoint.step_folders import RunState, read_run_state, write_run_state
from titan_like.config.schema import JobConfig

CONFIG = JobConfig().model_dump(mode="json")
RUN = RunState(3, 24, 3072, 0, 1.0, 0, {"num_layers": 2}, CONFIG, recent_losses=[1 / 3, 1e-30, 2e22])


def test_files_are_on_disk_when_closed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    save(tmp_path / "a", tensors())
    assert {Path(path).name for path in flushed} == {"__0_0.distcp", ".metadata.tmp"}


def tensors():
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(16, 9),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(3),
        "empty": torch.empty(0),
    }


def save(folder, state):
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = DurableFiles(writer.save_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=writer, no_dist=True)


def load_tensors(folder, state, reader=TensorReader):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader(folder), no_dist=True)


def load(folder):
    """The numbers and tensors of a checkpoint, or why it is refused."""
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    run = read_run_state(folder)
    load_tensors(folder, loaded)
    return run, loaded


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json"])
def test_no_flipped_bit_is_loaded(tmp_path, name):
    save(tmp_path, tensors())
    write_run_state(tmp_path, RUN)
    whole = (tmp_path / name).read_bytes()
    chosen = random.Random(0)
    refused = 0
    for place in [*range(0, len(whole), max(1, len(whole) // 150))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chosen.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            run, loaded = load(tmp_path)
        except BaseException as error:  # torch's is no Exception
            assert not isinstance(error, KeyboardInterrupt | SystemExit)
            refused += 1
            continue
        # Some bytes mean nothing, such as those that fill up to a tensor's beginning.
        assert run == RUN, place
        assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors().items()), place
    assert refused > 50


def test_sentence_names_the_damaged_file(tmp_path):
    save(tmp_path, tensors())
    write_run_state(tmp_path, RUN)
    bytes_of = (tmp_path / "__0_0.distcp").read_bytes()
    place = bytes_of.index(tensors()["matrix"].numpy().tobytes())
    (tmp_path / "__0_0.distcp").write_bytes(bytes_of[: place + 7] + b"\x55" + bytes_of[place + 8 :])
    with pytest.raises(BaseException, match=r"__0_0\.distcp does not match its checksum"):
        load(tmp_path)


def test_file_of_another_checkpoint_is_refused(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, tensors())
        write_run_state(tmp_path / name, RUN)
    load(tmp_path / "b")
    (tmp_path / "b" / "__0_0.distcp").write_bytes((tmp_path / "a" / "__0_0.distcp").read_bytes())
    with pytest.raises(BaseException, match="is not this checkpoint's file"):
        load(tmp_path / "b")


def test_torch_reads_what_is_written(tmp_path):
    save(tmp_path, tensors())
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load_tensors(tmp_path, loaded, FileSystemReader)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors().items())


def test_run_file_written_by_hand_needs_no_checksum(tmp_path):
    save(tmp_path, tensors())
    write_run_state(tmp_path, RUN)
    numbers = json.loads((tmp_path / "run.json").read_text())
    numbers["step"] = 4
    (tmp_path / "run.json").write_text(json.dumps(numbers))
    with pytest.raises(ValueError, match=r"run\.json does not match its checksum"):
        read_run_state(tmp_path)
    del numbers["crc32"]
    (tmp_path / "run.json").write_text(json.dumps(numbers))
    assert read_run_state(tmp_path).step == 4


def test_run_file_that_is_not_of_its_folder_is_refused(tmp_path):
    for name in ("step-3", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(asdict(RUN) | {"step": 4}))
    with pytest.raises(ValueError, match=r"run.json .*is of step 4, and its folder is step-3"):
        read_run_state(tmp_path / "step-3")
    assert read_run_state(tmp_path / "copy").step == 4  # a copy may have any name


@pytest.mark.parametrize("config", [{}, [], None, {"model": {}}, CONFIG | {"model": {}}, CONFIG | {"training": None}])
def test_a_run_json_without_settings_is_refused(tmp_path, config):
    (tmp_path / "run.json").write_text(json.dumps(asdict(RUN) | {"config": config}))
    with pytest.raises(ValueError, match=r"^run\.json is not a run's: "):
        read_run_state(tmp_path)
