"""The Python API: the program of docs/api.md as it is written there, and what importing the package loads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def run(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_program_of_the_page(tmp_path):
    page = (REPO / "docs" / "api.md").read_text(encoding="utf-8")
    (tmp_path / "program.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    told = run("program.py", cwd=tmp_path)
    assert re.search(r"^\d+\.\d s a step, \d+ TFLOP/s per GPU$", told, re.MULTILINE)
    assert (tmp_path / "outputs" / "api" / "metrics.jsonl").read_text().count("\n") == 20


def test_importing_the_package_loads_nothing(tmp_path):
    code = (
        "import sys, titan_like; print(*(n for n in sys.modules if n.startswith(('titan_like', 'torch', 'pydantic'))))"
    )
    assert run("-c", code, cwd=tmp_path).split() == ["titan_like"]


def test_every_name_is_there_whatever_was_imported_first(tmp_path):
    names = "load_config, predict, verify, resolve_settings, prepare_run, process_group, Trainer"
    code = f"import titan_like.verify.shrink\nfrom titan_like import {names}\nprint(*map(callable, ({names})))"
    assert run("-c", code, cwd=tmp_path).split() == 7 * ["True"]
    unknown = "import titan_like\ntry: titan_like.nothing\nexcept AttributeError as error: print(error)"
    assert run("-c", unknown, cwd=tmp_path) == "module 'titan_like' has no attribute 'nothing'\n"
