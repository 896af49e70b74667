"""The Python API: the program of docs/api.md as it is written there, and what importing the package loads."""

import re
import subprocess
import sys

import pytest

import titan_like
from tests.e2e.scripts import REPO, Script

# Of the kinds of runs that `verify` compares, one is enough.
ONE_KIND = """
from functools import partial
from titan_like.verify import verify as module
module.Verifier = partial(module.Verifier, kinds=["float64"])
"""


@pytest.mark.slow
def test_program_of_the_page(tmp_path):
    """In a process that has imported titan_like.verify, which hides no name of the API."""
    page = (REPO / "docs" / "api.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(ONE_KIND + "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    done = Script(str(program), [], cwd=tmp_path).wait()
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+\.\d s a step, \d+ TFLOP/s per GPU$", done.stdout, re.MULTILINE)
    assert (tmp_path / "outputs" / "api" / "metrics.jsonl").read_text().count("\n") == 20


def test_importing_the_package_loads_nothing():
    code = (
        "import sys, titan_like; print(*(n for n in sys.modules if n.startswith(('titan_like', 'torch', 'pydantic'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["titan_like"]


def test_the_public_api_is_listed():
    assert {"Trainer", "load_config", "verify"} <= {*dir(titan_like)} == {*titan_like.__all__}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'titan_like' has no attribute 'nothing'"):
        titan_like.nothing  # noqa: B018
