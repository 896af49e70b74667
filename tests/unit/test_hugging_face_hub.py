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
