"""A URL is no path on this machine: s3://bucket/x must not become a folder s3:. Some settings take those of fsspec."""

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import titan_like.commands
from titan_like.commands import plan
from titan_like.config import ConfigError, JobConfig, load_config
from titan_like.config.load import setting
from titan_like.config.options import OptionParser, path_option, tokenizer_option
from titan_like.config.section import OptionalPath, OptionalUrl, PathList, PathText, TokenizerText, options_of
from titan_like.config.urls import RemotePath
from titan_like.evaluate.tasks import named_tasks
from titan_like.models.registry import model_config
from titan_like.planner.commands.outcome import toml_option

URLS = ("s3://bucket/x", "hf://org/name", "file:///x", "gcs://b/*.jsonl", "simplecache::s3://b/x", "memory://x.toml")
REFUSED = "is at {}://, which is not supported; name a path on this machine"
BAD = ("file:///x", "simplecache::s3://b/x", "bucket://x")  # where URLs may stand


def fields_of(table: type[BaseModel], name: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys below a table of the schema, those of tables in lists too: ``table[].key``."""
    for key, field in options_of(table).items():
        yield f"{name}{key}", field
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields_of(kind, f"{name}{key}{'' if kind is field.annotation else '[]'}.")


KEYS = {key: field for key, field in fields_of(JobConfig) if "." in key}
CHECKS = [get_args(kind)[1] for kind in (PathText, OptionalPath, OptionalUrl, PathList, TokenizerText)]
PATH_KEYS = [key for key, field in KEYS.items() if any(check in field.metadata for check in CHECKS)]
URL_KEYS = {"model.from", "checkpoint.folder", "checkpoint.initial_load_path", "data.paths"}
URL_OPTIONS = {"convert": {"--checkpoint", "--input", "--output"}, "generate": {"--checkpoint"}}
URL_OPTIONS["evaluate"] = URL_OPTIONS["generate"]
NO_PATHS = {
    "data.dataset",
    "evaluation.datasets",
    "lora.modules",
    "model.flavor",
    "model.ignore_fields",
}  # that say "files", among others
IS_PATH = re.compile(r"\b(path|folder|file|directory)s?\b", re.IGNORECASE)
COMMANDS = {name for _, name, _ in pkgutil.iter_modules(titan_like.commands.__path__)}
COMMANDS -= {"plan", "resumable"}  # which takes settings only
COMMANDS |= {f"plan {name}" for name in plan.COMMANDS}


def scheme(url: str) -> str:
    return url.partition("://")[0]


def test_every_key_that_holds_a_path_has_the_type_of_one() -> None:
    assert {"job.dump_folder", "checkpoint.folder", "data.paths", "data.tokenizer", "job.config_file"} <= set(PATH_KEYS)
    texts = {key for key, field in KEYS.items() if "str" in str(field.annotation) and "Literal" not in str(field)}
    named = {key for key in texts if IS_PATH.search(f"{key.replace('_', ' ')} {KEYS[key].description}")}
    assert named - NO_PATHS <= set(PATH_KEYS)


@pytest.mark.parametrize("key", [key for key in PATH_KEYS if "[]" not in key])
def test_a_url_is_no_path_in_a_setting(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", "file:/" if key in URL_KEYS else "s3:/")
    for given, url in [
        *((url, url) for url in (BAD if key in URL_KEYS else URLS)),
        ("$BUCKET/x", os.environ["BUCKET"] + "/x"),
    ]:
        with pytest.raises(ConfigError) as error:
            load_config([f"--{key}={given}"])
        assert str(error.value).startswith(f"{key} = ") and REFUSED.format(scheme(url)) in str(error.value)
        assert given in str(error.value) and "\n" not in str(error.value)
        assert ("of the Hugging Face hub as org/name" in str(error.value)) == url.startswith("hf:")


def test_what_only_looks_like_a_url_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("./s3://bucket/x", "s3:/bucket/x", "/a//b:c"):
        assert setting(load_config([f"--job.dump_folder={path}"]), "job.dump_folder") == path


@pytest.mark.parametrize("key", sorted(URL_KEYS - {"model.from"}))  # that one is opened at once
def test_settings_that_take_urls(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting(load_config([f"--{key}=memory://b/x"]), key) in ("memory://b/x", ["memory://b/x"])
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="is at gs://, which needs a package: Please install gcsfs"):
        load_config([f"--{key}=gs://b/x"])


def test_a_path_on_object_storage_is_none_of_this_machine() -> None:
    path = RemotePath("s3://bucket/run") / "step-1"
    assert (str(path), path.name, str(path.parent)) == ("s3://bucket/run/step-1", "step-1", "s3://bucket/run")
    for function in (open, os.mkdir, os.listdir, os.path.exists):
        with pytest.raises(TypeError, match="s3://bucket/run/step-1 is not on this machine"):
            function(path)


def test_paths_within_settings_are_none_either() -> None:
    for given in ('["a", "bucket://x"]', '[0.5, "a", 0.5, "bucket://x"]'):
        with pytest.raises(ConfigError, match=REFUSED.format("bucket")):
            load_config(["--data.paths", given])
    with pytest.raises(ConfigError, match=REFUSED.format("s3")):
        load_config(["--data.tokenizer=gpt2:a.json,s3://b/merges.txt"])
    with pytest.raises(ConfigError, match=REFUSED.format("s3")):
        named_tasks("evaluation.datasets", ["text=s3://b/x"], model_config(load_config([]).model))


def parsers(command: Callable[[list[str]], int], argv: list[str], patch: pytest.MonkeyPatch) -> list[OptionParser]:
    """The parser of a command and those of its subcommands."""

    def stop(self: OptionParser, *_: Any) -> None:
        raise StopIteration(self)

    with patch.context() as patched, pytest.raises(StopIteration) as stopped:
        patched.setattr(OptionParser, "parse_known_args", stop)
        command(argv)
    first = stopped.value.value
    below = [one for action in first._actions if isinstance(action.choices, dict) for one in action.choices.values()]
    return [first, *below]


def path_options(parser: OptionParser) -> Iterator[str]:
    """The options that are of a path's type, or whose name, placeholder or help says that they are paths."""
    for action in parser._actions:
        option = next(iter(action.option_strings), "")
        is_text = action.nargs != 0 and action.type is None and action.choices is None and option != "--task"
        says_so = IS_PATH.search(f"{option.replace('_', ' ')} {action.metavar} {action.help}")
        if action.type in (path_option, toml_option, tokenizer_option) or (option and is_text and says_so):
            yield option


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_url_is_no_path_in_an_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *words = name.split()
    command = importlib.import_module(f"titan_like.commands.{module}").main
    found = parsers(command, words, monkeypatch)
    options = [(parser, option) for parser in found for option in path_options(parser)]
    assert options
    for parser, option in options:
        for url in BAD if option in URL_OPTIONS.get(name, ()) else URLS:
            with pytest.raises(ConfigError) as error:
                parser.parse_known_args([f"{option}={url}" if option else url])
            assert option in str(error.value) and url in str(error.value), option
            assert REFUSED.format(scheme(url)) in str(error.value)
