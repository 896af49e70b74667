"""Names of the hub stand for folders; no test asks the hub."""

from pathlib import Path

import huggingface_hub
import pytest

from titan_like.config import ConfigError
from titan_like.hugging_face.folder import local_folder


def test_a_path_is_itself_and_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> str:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in ("org/name", "model", "/a/b", "a/b/c", "./a", "../a/b"):
        assert local_folder(path, "--input") == Path(path)


def test_a_name_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, asked = [], []

    def download(name: str, local_files_only: bool = False, **_: object) -> str:
        asked.append((name, local_files_only))
        if local_files_only and not there:
            raise FileNotFoundError
        there.append(name)
        return str(tmp_path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert local_folder("org/name", "--input") == local_folder("org/name", "--input") == tmp_path
    assert asked == [("org/name", True), ("org/name", False), ("org/name", True)]


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("Name or service not known\nmore")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(ConfigError) as caught:
        local_folder("org/name", "checkpoint.initial_load_path")
    assert str(caught.value) == (
        'checkpoint.initial_load_path = "org/name": no such folder, nor can the Hugging Face hub give it '
        "(Name or service not known); name a folder that is there"
    )
