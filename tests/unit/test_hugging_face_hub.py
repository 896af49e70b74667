"""Names of the hub stand for folders; no test asks the hub."""

from pathlib import Path

import huggingface_hub
import pytest

from titan_like.hugging_face.folder import local_folder


def test_a_path_is_itself_and_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> str:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in ("org/name", "model", "/a/b", "a/b/c", "./a", "../a/b"):
        assert local_folder(path, "--input") == Path(path)
