"""What the Dockerfile names is there. Building the image needs a daemon, so no test does that."""

import json
import re
import shlex
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[2]
# Instructions as (name, the rest of the line), with continued lines joined.
LINES = re.sub(r"\\\n\s*", "", (REPO / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]


def told(name):
    return [rest for step, rest in STEPS if step == name]


def test_copied_files_are_there_and_not_ignored():
    everything, *kept, caches = (REPO / ".dockerignore").read_text().split("\n")[1:-1]
    copied = {source for rest in told("COPY") for source in shlex.split(rest)[:-1] if source[:2] != "--"}
    assert (everything, caches) == ("*", "**/__pycache__")
    assert {f"!{source}" for source in copied} == set(kept)
    assert all((REPO / source).exists() for source in copied)
    # The link inside the package leads to a folder that is copied as well.
    assert (REPO / "titan_like" / "train_configs").resolve() == REPO / "train_configs"


def test_wheel_is_installed_with_extras_that_exist_for_a_plain_user():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\.whl\)\[([\w,-]+)\]", " ".join(told("RUN")))
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert json.loads(told("ENTRYPOINT")[0])[0] in project["scripts"]
    assert told("USER")[-1] != "root" and not told("USER")[-1].startswith("0")
    assert all(re.search(r":\d+\.\d+\.\d+-", image) for image in told("FROM") if not image.startswith("base"))
