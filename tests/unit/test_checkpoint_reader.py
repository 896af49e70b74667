"""The metadata of a checkpoint is a pickle: nothing but descriptions of tensors may come out of it."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tests.unit.attacks import Call, place_at
from tests.unit.test_checkpoint_files import load_tensors as load
from tests.unit.test_checkpoint_files import save
from titan_like.checkpoint.reader import TensorReader
from titan_like.checkpoint.step_folders import REPLACED, UNFINISHED, complete_steps, leftover_bytes, sweep


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    return {
        "os.system": (Call(os.system, f"touch {mark}"), "posix.system"),
        "eval": (Call(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        "exec": (Call(exec, f"open({str(mark)!r}, 'w')"), "builtins.exec"),
        "getattr": (Call(getattr, _MEM_FORMAT_ENCODING, "__class__"), ""),
        "write_text of a path": (Call(Path.write_text, mark, "text"), ""),
        "torch.load": (Call(torch.load, str(mark)), "torch.serialization.load"),
        "torch.save": (Call(torch.save, 1, str(mark)), "torch.serialization.save"),
        "another class": (
            Call(FileSystemWriter, str(mark)),
            "torch.distributed.checkpoint.filesystem.FileSystemWriter",
        ),
    }


@pytest.mark.parametrize("name", attacks(Path()))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle_that_names_anything_else_is_refused_and_not_run(tmp_path: Path, name: str, protocol: int) -> None:
    save(tmp_path, {"weight": torch.ones(2)})
    metadata, mark = tmp_path / ".metadata", tmp_path / "mark"
    attack, named = attacks(mark)[name]
    harmless = pickle.loads(metadata.read_bytes())
    harmless.planner_data = attack  # deep inside what is otherwise right
    for content in (attack, harmless):
        metadata.write_bytes(pickle.dumps(content, protocol=protocol))
        with pytest.raises(pickle.UnpicklingError, match="not tensor metadata") as refusal:
            TensorReader(tmp_path).read_metadata()
        assert named in str(refusal.value).replace("__builtin__", "builtins")
        metadata.rename(tmp_path / "__0.metadata")  # where torch looks next
        with pytest.raises(CheckpointException):  # older torch words it in its own way
            load(tmp_path, {"weight": torch.zeros(2)})
    assert not mark.exists()


def test_members_of_enums_are_read_as_python_3_11_2_writes_them(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(2)})
    description = pickle.loads((tmp_path / ".metadata").read_bytes())
    description.planner_data = Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(description))
    assert TensorReader(tmp_path).read_metadata().planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize("name", ["Size.__class__", "dtype", "load", "nn", "float32.__class__"])
def test_torch_module_gives_its_types_of_elements_only(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x04\x8c\x05torch" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    )
    with pytest.raises(pickle.UnpicklingError, match="not tensor metadata"):
        TensorReader(tmp_path).read_metadata()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "..", "a/../../b", "", None, 5])
def test_tensor_outside_of_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    for folder in ("this", "other"):
        save(tmp_path / folder, {"weight": torch.ones(2)})
    place_at(tmp_path / "this", name)
    with pytest.raises(pickle.UnpicklingError, match="which is not a file in its folder"):
        TensorReader(tmp_path / "this").read_metadata()
    weight = torch.zeros(2)
    with pytest.raises(CheckpointException):
        load(tmp_path / "this", {"weight": weight})
    assert torch.equal(weight, torch.zeros(2))


def test_metadata_without_all_rows_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(2)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["weight"].chunks.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="leaves out parts of 'weight'"):
        TensorReader(tmp_path).read_metadata()


def test_metadata_written_by_python_3_13_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(2)})
    metadata = tmp_path / ".metadata"
    content = pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)
    assert b"cpathlib\nPosixPath\n" in content
    metadata.write_bytes(content.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"))
    loaded = {"weight": torch.zeros(2)}
    load(tmp_path, loaded)
    assert torch.equal(loaded["weight"], torch.ones(2))


@pytest.mark.parametrize("target", ["torch\nfloat32", "torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata"])
def test_pickle_that_changes_a_class_is_refused_and_changes_nothing(tmp_path: Path, target: str) -> None:
    save(tmp_path, {"weight": torch.ones(2)})
    # the class, (None, {"__truediv__": 1}), BUILD, POP; then what is otherwise right
    build = b"c" + target.encode() + b"\nN}S'__truediv__'\nI1\ns\x86b0"
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(build + pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)[2:])
    with pytest.raises(pickle.UnpicklingError, match="changes something that is not tensor metadata"):
        TensorReader(tmp_path).read_metadata()
    assert Path("/a") / "b" == Path("/a/b")


def test_only_names_that_a_save_gives_are_checkpoints(tmp_path: Path) -> None:
    for name in ("step-0", "step-10", "step-007", "step-00", "step-٣", "step--1", "step-", "step-4.old"):
        (tmp_path / name).mkdir()
    assert complete_steps(tmp_path) == [0, 10]


def test_what_a_sweep_will_remove_counts_as_room(tmp_path: Path) -> None:
    assert leftover_bytes(tmp_path / "absent") == leftover_bytes(tmp_path) == 0
    for name, size in (("step-1", 5), (f"step-2{UNFINISHED}", 70), (f"step-1{REPLACED}", 300)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(size))
    assert leftover_bytes(tmp_path) == 370


def test_sweep_touches_nothing_but_the_leftovers_of_saves(tmp_path: Path) -> None:
    for folder in ("step-1", f"step-2{REPLACED}", f"step-3{UNFINISHED}", f"mine{UNFINISHED}", f"mine{REPLACED}"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
    (tmp_path / f"metrics{UNFINISHED}").touch()  # a crash leaves it where checkpoint.folder is job.dump_folder
    sweep(tmp_path)
    kept = {f"metrics{UNFINISHED}", f"mine{REPLACED}", f"mine{UNFINISHED}", "step-1", "step-2"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert complete_steps(tmp_path) == [1, 2]
    sweep(tmp_path / "absent")
