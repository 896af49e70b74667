"""Paths in settings, and the settings files that they name: parsing TOML, and writing it."""

from __future__ import annotations

import difflib
import os
import re
import stat
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from titan_like.config.errors import ConfigError, boolean_of, require
from titan_like.config.urls import RemotePath, is_url, scheme_problem

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
SHIPPED = Path(__file__).parents[1] / "train_configs"


def expanded(text: str, takes_urls: bool = False) -> str:
    """A path with ``~``, ``$NAME`` and ``${NAME}`` replaced, as a shell would.

    Raises:
        ValueError: the path is empty, names an environment variable that is not set, or is a URL where none may stand,
            or whose kind is unknown or lacks its package; the message is the predicate of a sentence.
    """
    for plain, braced in _VARIABLE.findall(text):
        name = plain or braced
        if not name.isidentifier():
            raise ValueError(f"has ${{{braced}}}, which names no environment variable; write the path out")
        if name not in os.environ:
            raise ValueError(f"names the environment variable {name}, which is not set; set it or write the path out")
    path = os.path.expanduser(_VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], text))
    if not path.strip():
        raise ValueError("is empty; name a path")
    if is_url(path):
        scheme = path.partition("://")[0]
        cure = ", or a repository of the Hugging Face hub as org/name where one may stand" * (scheme == "hf")
        problem = f"is at {scheme}://, which is not supported; name a path on this machine{cure}"
        if refusal := scheme_problem(scheme) if takes_urls else problem:
            raise ValueError(refusal)
    return path


def file_problem(path: Path) -> str | None:
    """Why a file cannot be read, as the predicate of a sentence; None if it can."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if is_folder:
        return "is a folder, not a file"
    return None if isinstance(path, RemotePath) or os.access(path, os.R_OK) else "cannot be read (Permission denied)"


def find_config(path: str) -> str:
    """The TOML file of a run: the one at ``path``, else the one that the package has under this name.

    NAME, NAME.toml and train_configs/NAME.toml name the same file of the package. They are looked up only if nothing
    in the file system has that path, or that path and ".toml".

    Raises:
        ConfigError: there is neither, but the package has files with similar names.
    """
    name = path.removeprefix("train_configs/").removesuffix(".toml")
    if os.path.lexists(path) or "/" in name:
        return path
    if os.path.isfile(f"{path}.toml"):
        return f"{path}.toml"
    shipped = {file.stem: str(file) for file in SHIPPED.glob("*.toml")}
    if name not in shipped and (similar := difflib.get_close_matches(name, shipped)):
        problem = f"no such file; give the path of a TOML file, or a shipped one's name, such as {', '.join(similar)}"
        raise ConfigError("job.config_file", path, problem)
    return shipped.get(name, path)


def read_toml(path: str, key: str = "job.config_file") -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 or not TOML; ``key`` is the setting that names it.
    """
    problem, text = file_problem(Path(path)), ""
    require(problem != "does not exist", key, path, "no such file; give the path of a TOML file")
    require(problem is None, key, path, f"{problem}; give a readable TOML file")
    try:
        text = Path(path).read_text(encoding="utf-8").removeprefix("\ufeff")
        return tomli.loads(text)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not valid UTF-8; save the file as UTF-8"
    except ValueError as error:  # TOMLDecodeError, or Python's, for example for a date that does not exist
        problem = f"not valid TOML ({error}); {_cure(text, str(error))}"
    raise ConfigError(key, path, problem)


def _cure(text: str, message: str) -> str:
    """What to do about the line that the parser stopped at."""
    place = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    if place and int(place[1]) <= len(lines):
        word = re.search(r"=\s*(\w+)\s*(?:#.*)?$", lines[int(place[1]) - 1])
        if word and (meant := boolean_of(word[1])):
            return f"write {meant} instead of {word[1]}"
    return "correct that line"


def to_toml(tree: dict[str, dict[str, Any]], head: list[str]) -> str:
    """Settings by section and key as TOML, without empty sections, after the comment lines ``head``."""
    comments = [f"# {line}".rstrip() for line in head]
    tables = [tomli_w.dumps({section: table}) for section, table in tree.items() if table]
    return "\n".join([*comments, "", *tables])
