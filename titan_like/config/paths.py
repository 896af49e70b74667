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

from titan_like.config.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # of Linux
_MOST_BYTES = 64 << 20  # size of a settings file
_SHIPPED = Path(__file__).parents[1] / "train_configs"


def expanded(text: str) -> str:
    """A path with ``~``, ``$NAME`` and ``${NAME}`` replaced, as a shell would.

    Raises:
        ValueError: the path is empty, contains a null character, is too long, or names an environment
            variable that is not set.
    """
    if "\0" in text:
        raise ValueError("contains a null character, which no path can; remove it")
    for plain, braced in _VARIABLE.findall(text):
        name = plain or braced
        if not name.isidentifier():
            raise ValueError(f"has ${{{braced}}}, which names no environment variable; write the path out")
        if name not in os.environ:
            raise ValueError(f"names the environment variable {name}, which is not set; set it or write the path out")
    path = os.path.expanduser(_VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], text))
    if not path.strip():
        raise ValueError("is empty; name a path")
    written = os.fsencode(path)
    if any(len(name) > _LONGEST_NAME for name in written.split(b"/")) or len(written) > _LONGEST_PATH:
        raise ValueError(f"is longer than any file's name ({_LONGEST_NAME} bytes) or path; shorten it")
    return path


def file_problem(path: Path) -> str | None:
    """Why a file cannot be read, as the predicate of a sentence; None if it can.

    It does not open the file, so it cannot hang on a pipe or a device. A file that does not exist cannot be read.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISREG(mode):
        return f"is {_KINDS.get(stat.S_IFMT(mode), 'of an unknown kind')}, not a file"
    return None if os.access(path, os.R_OK) else "cannot be read (Permission denied)"


def writing_problem(path: Path) -> str | None:
    """Why a file cannot be written, as the predicate of a sentence; None if it can, or does not exist yet."""
    problem = file_problem(path)
    if problem == "does not exist":
        folder = os.path.dirname(os.path.realpath(path))
        is_usable = os.access(folder, os.W_OK) or not path.is_symlink()  # a run's own folders may be still to be made
        return None if is_usable else f"is a link into {folder}, where no file can be created"
    if problem is None and not os.access(path, os.W_OK):
        return "cannot be written (Permission denied)"
    return problem


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
    shipped = {file.stem: str(file) for file in _SHIPPED.glob("*.toml")}
    if name not in shipped and (near := difflib.get_close_matches(name, shipped)):
        problem = f"no such file; give the path of a TOML file, or a shipped one's name, such as {', '.join(near)}"
        raise ConfigError("job.config_file", path, problem)
    return shipped.get(name, path)


def _read_settings(path: str, key: str) -> str:
    """The text of a settings file, without a byte-order mark."""
    problem = file_problem(Path(path))
    if problem == "does not exist":
        raise ConfigError(key, path, "no such file; give the path of a TOML file")
    if problem is not None:
        raise ConfigError(key, path, f"{problem}; give a readable TOML file")
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise ConfigError(key, path, f"is larger than {_MOST_BYTES >> 20} MiB; give a TOML file")
        return Path(path).read_text(encoding="utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not valid UTF-8; save the file as UTF-8"
        raise ConfigError(key, path, problem) from None
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read ({error.strerror}); give a readable TOML file") from None


_WORDS = {"True": "true", "False": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}


def read_toml(path: str, key: str = "job.config_file") -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 or not TOML; ``key`` is the setting that names it.
    """
    text = _read_settings(path, key)
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        problem = f"not valid TOML ({error}); {_cure(text, str(error))}"
    except RecursionError:
        problem = "brackets are nested too deeply; at most some hundred levels can be read"
    except ValueError as error:  # such as a date that does not exist, or a number of thousands of digits
        problem = f"not valid TOML ({error}); correct that value"
    raise ConfigError(key, path, problem)


def _cure(text: str, message: str) -> str:
    """What to do about the line that the parser stopped at."""
    place = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    if place and int(place[1]) <= len(lines):
        word = re.search(r"=\s*(\w+)\s*(?:#.*)?$", lines[int(place[1]) - 1])
        if word and word[1] in _WORDS:
            return f"write {_WORDS[word[1]]} instead of {word[1]}"
    return "correct that line"


def to_toml(tree: dict[str, dict[str, Any]], head: list[str]) -> str:
    """Settings by section and key as TOML, without empty sections, after the comment lines ``head``."""
    comments = [f"# {line}".rstrip() for line in head]
    tables = [tomli_w.dumps({section: table}) for section, table in tree.items() if table]
    return "\n".join([*comments, "", *tables])
