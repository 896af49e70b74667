"""Finding the tasks of EleutherAI's evaluation harness, with one sentence about a YAML file that it cannot use."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lm_eval.tasks import TaskManager

from titan_like.config.errors import ConfigError, first_line


class HarnessTasks(TaskManager):
    """The harness's tasks by name. Whatever it raises while it builds one of them becomes one sentence."""

    def load(self, task_list: Any) -> Any:
        """Build tasks.

        Raises:
            ConfigError: a YAML file does not describe a task.
            OSError: data cannot be loaded; the network's errors among them.
        """
        try:
            return super().load(task_list)
        except OSError:
            raise
        except Exception as error:  # each key of the file has errors of its own
            problem = f"the harness cannot build this ({type(error).__name__}: {first_line(error)})"
            raise ConfigError("--lm_eval", ",".join(task_list), f"{problem}; see its YAML file") from error


def find_tasks(names: Sequence[str], folder: str | None) -> tuple[list[str], HarnessTasks]:
    """Find the harness's tasks, and those that YAML files in ``folder`` describe.

    Returns:
        The names, in which patterns such as ``mmlu_*`` are filled in by single tasks, and what builds their tasks.

    Raises:
        ConfigError: there is no task of one of the names, or a file in the folder cannot be used.
    """
    files = {}
    for path in sorted(Path(folder).rglob("*.yaml")) if folder is not None else ():
        if ".ipynb_checkpoints" in path.parts:  # which the harness does not read
            continue
        try:
            files[path] = _read_yaml(path)
        except ValueError as error:
            raise ConfigError("--lm_eval_folder", folder, f"{path} {error}; correct it") from None
    manager = HarnessTasks(include_path=folder, include_defaults=False) if folder is not None else None
    groups = [content for content in files.values() if "group" in content]  # which may name any task
    if manager is None or groups or not set(names) <= set(manager.all_subtasks):
        manager = HarnessTasks(include_path=folder)  # reads some ten thousand files of the harness
    wanted: dict[str, None] = {}
    for name in names:
        # The groups that a pattern matches would repeat their tasks, which the harness refuses.
        matches = [name] if name in manager.all_tasks else fnmatch.filter(manager.all_subtasks, name)
        matches = matches or fnmatch.filter(manager.all_tasks, name)
        wanted |= dict.fromkeys(matches)
        if not matches:
            problem = "the harness has no such task; `lm-eval ls tasks` lists them, --lm_eval_folder adds your own"
            raise ConfigError("--lm_eval", name, problem)
    for path, content in files.items():
        is_group = "group" in content and not {"dataset_path", "output_type"} & content.keys()  # else it describes them
        members = content.get("task") if is_group else None
        for member in members if isinstance(members, list) else ():
            if isinstance(member, str) and member not in manager.all_tasks:
                problem = f'{path} names a task "{member}", which does not exist; correct it'
                raise ConfigError("--lm_eval_folder", folder, problem)
    return list(wanted), manager


class _Loader(yaml.SafeLoader):
    """Reads a task's file without importing the functions that it names."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


def _read_yaml(path: Path) -> dict[str, Any]:
    """The content of a task's file. The harness itself leaves out files that it cannot read, without a word.

    Raises:
        ValueError: what is wrong with the file, as the predicate of a sentence.
    """
    try:
        content = yaml.load(path.read_bytes(), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())  # YAML's errors have several lines, of which the first says little
        raise ValueError(f"cannot be read ({problem})") from None
    if not isinstance(content, dict):
        raise ValueError("is not a table of keys and values")
    if not isinstance(content.get("task", ""), str | list):
        raise ValueError(f"has a task {content['task']!r}, which is not a text")
    if not isinstance(content.get("group", ""), str):
        raise ValueError(f"has a group {content['group']!r}, which is not a text")
    included = content.get("include", [])
    for name in included if isinstance(included, list) else [included]:
        if not (path.parent / str(name)).is_file():
            raise ValueError(f"includes {name}, which is not a file")
    return content
