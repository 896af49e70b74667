"""EleutherAI's evaluation harness (the package lm_eval) on a checkpoint in any layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import yaml
from jinja2 import TemplateError  # which lm_eval brings
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.distributed.device_mesh import DeviceMesh

from titan_like.checkpoint.inference import ParallelInference
from titan_like.config.errors import ConfigError, RunError, first_line
from titan_like.config.schema import JobConfig
from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.sampling import generate
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.task import ending_window
from titan_like.parallel.model import ParallelModel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


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


_MAX_NEW_TOKENS = 256  # the harness's own default


class CheckpointLM(TemplateLM):
    """A model for the harness. All processes that hold a part of it run the harness on the same tasks.

    It tokenizes, cuts and stops as the harness's class for Hugging Face models does, so that a checkpoint and its
    export get the same results. The model sees `training.seq_len` tokens at once.
    """

    def __init__(
        self, config: JobConfig, model: ParallelModel, mesh: DeviceMesh, device: torch.device, tokenizer: Tokenizer
    ) -> None:
        """``model`` comes from `titan_like.checkpoint.inference.load_parallel_model`."""
        super().__init__()
        self._scorer = Scorer(config, model, mesh, device)
        self._inference = ParallelInference(config, model, mesh, device, config.training.seq_len)
        self._tokenizer, self._seq_len, self._device = tokenizer, config.training.seq_len, device
        self._prefix_lm = config.data.prefix_lm

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return [*self._tokenizer.first_ids, self.eot_token_id][0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        """Token ids of a text, by default with the tokens that the tokenizer puts before every text."""
        tokens, first = self._tokenizer.encode(string).tolist(), self._tokenizer.first_ids
        is_there = tokens[: len(first)] == first
        return tokens if is_there or add_special_tokens is False else [*first, *tokens]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score the second list of each request after the first: log-probability, and whether all are most probable.

        Raises:
            RunError: a text to score does not fit the window.
        """
        try:
            windows = [ending_window(context, target, self._seq_len) for _, context, target in requests]
        except ValueError as error:
            raise RunError(f"a task does not fit training.seq_len: {error}") from None
        scores = zip(self._scorer(windows), windows, strict=True)
        return [(score.log_probability, score.num_right == window.num_targets) for score, window in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in the harness's windows."""
        pieces: list[tuple[int, list[int], list[int]]] = []  # (request, context, targets)
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self._seq_len, context_len=1):
                pieces.append((number, *make_disjoint_window(pair)))
        totals = [0.0] * len(requests)
        for (number, _, _), (log_probability, _) in zip(pieces, self._loglikelihood_tokens(pieces), strict=True):
            totals[number] += log_probability
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until a stop sequence, the end of the document or the maximum number of tokens."""
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = settings.get("max_gen_toks", _MAX_NEW_TOKENS)
        if most >= self._seq_len:
            raise RunError(f"a task generates {most} tokens, which leaves no context in training.seq_len; raise that")
        samples = settings.get("do_sample", settings.get("temperature", 0) > 0)
        tokens = generate(
            self._inference,
            (self.tok_encode(context) or [self.prefix_token_id])[-(self._seq_len - most) :],
            most,
            device=self._device,
            temperature=settings.get("temperature", 1.0) if samples else 0.0,
            top_k=settings.get("top_k", 0),
            top_p=settings.get("top_p", 1.0),
            eod_id=self.eot_token_id,
            prefix_lm=self._prefix_lm,
            is_complete=lambda new: any(stop in self._tokenizer.decode(new) for stop in stops),
        )
        text = self._tokenizer.decode(tokens)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def run_harness(
    model: TemplateLM, names: Sequence[str], manager: HarnessTasks, num_fewshot: int | None, limit: int | None
) -> dict[str, Any]:
    """Run the harness. Every process calls this.

    Returns:
        What the harness returns, with the figures of each task under "results". Empty except in the first process of
        each machine.

    Raises:
        RunError: the data of a task cannot be loaded, or a template in its YAML file is wrong.
    """
    options: dict[str, Any] = {} if dist.get_rank() == 0 else {"bootstrap_iters": 0}  # errors are printed on rank 0
    try:
        found = evaluator.simple_evaluate(
            model, tasks=list(names), task_manager=manager, num_fewshot=num_fewshot, limit=limit, **options
        )
    except OSError as error:  # the network's errors among them
        raise RunError(f"the harness cannot load its data ({first_line(error)})") from error
    except TemplateError as error:
        problem = f"a template of {', '.join(names)} cannot be filled in ({first_line(error)}); correct the YAML file"
        raise RunError(f"--lm_eval: {problem}") from error
    return dict(found or {})
