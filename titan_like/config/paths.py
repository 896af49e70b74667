"""Paths in settings, and the settings files that they name: parsing TOML, and writing it."""

import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from titan_like.config.errors import ConfigError, RunError, boolean_of, first_line, require
from titan_like.config.urls import RemotePath, StorageError, is_url, scheme_refusal

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")
SHIPPED = Path(__file__).parents[1] / "train_configs"


def expanded(text: str, takes_urls: bool = False) -> str:
    """A path with ``~``, ``$NAME`` and ``${NAME}`` replaced, as a shell would.

    Raises a `ValueError` if the path is empty, names an environment variable that is not set, or is a URL that is not
    allowed here or not supported; the message is the predicate of a sentence.
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
        if takes_urls:
            reason = scheme_refusal(scheme)
        else:
            hub = ", or a repository of the Hugging Face hub as org/name where one is allowed" if scheme == "hf" else ""
            reason = f"is at {scheme}://, which is not supported; name a path on this machine{hub}"
        if reason:
            raise ValueError(reason)
    return path


def unreadable_reason(path: Path, may_stream: bool = False) -> str | None:
    """Why a file cannot be read, as the predicate of a sentence; None if it can be read.

    Only regular files are allowed: pipes and devices have no end, or wait for a writer. ``may_stream`` also allows a
    pipe that this process was started with, such as /dev/stdin or a shell's <(…), which is read once.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:  # the latter: a name with a null character
        return f"cannot be read ({getattr(error, 'strerror', error)})"
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    if not stat.S_ISREG(mode) and not (may_stream and stat.S_ISFIFO(mode) and _DESCRIPTOR.fullmatch(str(path))):
        return "is a pipe, socket or device, not a file"
    return None if isinstance(path, RemotePath) or os.access(path, os.R_OK) else "cannot be read (Permission denied)"


@contextmanager
def user_file(
    path: Path, refuse: Callable[[str], Exception], what: str = "cannot be read", may_stream: bool = False
) -> Iterator[None]:
    """Open and parse a user's file in this context, which turns any exception into one error.

    Args:
        path: the file. The body does not run if `unreadable_reason` refuses it.
        refuse: makes the error, from the predicate of a sentence about the file, such as "does not exist".
        what: the predicate if its content cannot be parsed; the parser's reason follows in brackets.
        may_stream: as in `unreadable_reason`.
    """
    reason = None if isinstance(path, RemotePath) else unreadable_reason(path, may_stream)  # storage has only files
    if reason is None:
        try:
            yield
            return
        except (ConfigError, RunError, StorageError):
            raise
        except FileNotFoundError:
            reason = "does not exist"
        except UnicodeDecodeError as error:
            reason = f"byte {error.start} is not valid UTF-8"
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error})"
        except Exception as error:  # each parser has its own
            reason = f"{what} ({first_line(error)})"
    raise refuse(reason) from None


def check_folder(key: str, paths: Iterable[Path]) -> None:
    """Refuse broken links, pipes and devices among the content of a folder that is to be read."""
    for path in paths:
        require(path.exists(), key, str(path), "is a broken link; remove it")
        is_usual = path.is_file() or path.is_dir()
        require(is_usual, key, str(path), "is a pipe, socket or device, not a file; remove it")


def blaming(key: str, value: object, hint: str) -> Callable[[str], ConfigError]:
    """The ``refuse`` of `user_file` for a file that a setting names."""
    return lambda reason: ConfigError(key, value, f"{reason}; {hint}")


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, with a `ValueError` also for nesting that is too deep and numbers that are too long."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(first_line(error)) from None


def find_config(path: str) -> str:
    """The TOML file of a run: ``path``, ``path``.toml, or the shipped file of this name.

    NAME, NAME.toml and train_configs/NAME.toml name the same shipped file. Existing paths come first. Raises a
    `ConfigError` if there is no such file, but shipped files have similar names.
    """
    name = path.removeprefix("train_configs/").removesuffix(".toml")
    if os.path.lexists(path) or "/" in name:
        return path
    if os.path.isfile(f"{path}.toml"):
        return f"{path}.toml"
    shipped = {file.stem: str(file) for file in SHIPPED.glob("*.toml")}
    if name not in shipped and (similar := difflib.get_close_matches(name, shipped)):
        reason = f"no such file; give the path of a TOML file, or a shipped one's name, such as {', '.join(similar)}"
        raise ConfigError("job.config_file", path, reason)
    return shipped.get(name, path)


def read_toml(path: str, key: str = "job.config_file") -> dict[str, Any]:
    """Parse a TOML file, which setting ``key`` names. Raises a `ConfigError` if that fails."""
    text = ""

    def refusal(reason: str) -> ConfigError:
        if reason == "does not exist":
            return ConfigError(key, path, "no such file; give the path of a TOML file")
        return ConfigError(key, path, f"{reason}; {_hint(text, reason)}")

    with user_file(Path(path), refusal, "not valid TOML", may_stream=True):
        text = Path(path).read_text(encoding="utf-8").removeprefix("\ufeff")
        tree = tomli.loads(text)
        str(tree)  # fails if a hexadecimal integer is too long to be written out
        return tree


def _hint(text: str, reason: str) -> str:
    """The hint for a file that is not TOML, or for the line at which the parser stopped."""
    if not text:
        return "save the file as UTF-8" if "UTF-8" in reason else "give a readable TOML file"
    place = re.search(r"at line (\d+)", reason)
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
