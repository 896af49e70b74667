"""What is shown of the traceback of a process that failed."""

import importlib
import re
import traceback
from pathlib import Path

import pytest
import torch

from tests.e2e.scripts import install
from titan_like.data.batch import map_tensors
from titan_like.data.loading.lengths import sample_length
from titan_like.verify import processes
from titan_like.verify.processes import error_in


def printed(error: Exception) -> str:
    return "loading\n" + "".join(traceback.format_exception(error)) + "a later warning\n"


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("too small: 8\nSet VERBOSE=1 for more"), "ValueError: too small: 8"),
        (ValueError("\n\n  too small\nSet VERBOSE=1 for more"), "ValueError: too small"),
        (
            RuntimeError("backend raised:\nValueError: too small\n\nSet"),
            "RuntimeError: backend raised: ValueError: too small",
        ),
        (AssertionError(), "AssertionError"),
    ],
)
def test_the_type_and_the_first_line_of_the_last_error(error: Exception, told: str) -> None:
    text = printed(raised(error, cause=raised(KeyError("cause\nof it"))))
    assert re.fullmatch(rf"{told} \(tests/unit/test_error_in\.py:\d+\)", error_in(text)), error_in(text)


def test_the_place_is_the_innermost_line_of_the_package() -> None:
    try:
        sample_length(None, None)  # type: ignore[arg-type]
    except AttributeError as error:
        text = printed(error)
    told = error_in(text)
    assert told.startswith("AttributeError: 'NoneType' object has no attribute")
    file, _, line = told.rpartition(" (")[2].removesuffix(")").rpartition(":")
    assert file == "titan_like/data/loading/lengths.py"
    source = Path(processes.__file__).parents[2] / file
    assert source.read_text().splitlines()[int(line) - 1].strip() in text


def test_the_place_is_in_a_package_that_adds_to_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.py").write_text("import json\n\n\ndef read(x):\n    return json.loads('{')\n")
    install(tmp_path, "lines", "titan_like.datasets", 'lines = "lines:Lines"\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as error:
        map_tensors(importlib.import_module("lines").read, torch.zeros(1))
    assert error_in(printed(error.value)).endswith(f" ({tmp_path}/lines.py:5)")


def test_without_a_traceback_there_is_no_error() -> None:
    assert error_in("") == error_in("error: training.steps = 0\n") == ""
