"""EleutherAI's evaluation harness (the package lm_eval) on a checkpoint in any layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from jinja2 import TemplateError  # installed with lm_eval
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.errors import ConfigError, RunError, first_line, require
from titan_like.config.schema import DEFAULT_TOKENS, JobConfig
from titan_like.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from titan_like.evaluate.inference import ParallelInference
from titan_like.evaluate.sampling import generate
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.task import ending_window
from titan_like.hugging_face.tokenizer import byte_tokenizer
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
    """Find the harness's tasks, and the tasks that YAML files in ``folder`` describe.

    Returns:
        The names, in which patterns such as ``mmlu_*`` are filled in by single tasks, and what builds their tasks.

    Raises:
        ConfigError: no task has one of the names. The harness passes over a file that it cannot read.
    """
    manager = HarnessTasks(include_path=folder, include_defaults=False) if folder is not None else None
    if manager is None or not set(names) <= set(manager.all_subtasks):
        manager = HarnessTasks(include_path=folder)  # reads some ten thousand files of the harness
    chosen: dict[str, None] = {}
    for name in names:
        # The groups that a pattern matches would repeat their tasks, which the harness refuses.
        matches = [name] if name in manager.all_tasks else fnmatch.filter(manager.all_subtasks, name)
        matches = matches or fnmatch.filter(manager.all_tasks, name)
        chosen |= dict.fromkeys(matches)
        problem = "the harness has no such task; `lm-eval ls tasks` lists them, and --lm_eval_folder adds your own, if "
        problem += "their YAML files are valid"
        require(matches, "--lm_eval", name, problem)
    return list(chosen), manager


_MAX_NEW_TOKENS = 256  # the harness's own default
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_NEUTRAL = (None, False, 1)  # such as num_beams = 1


class CheckpointLM(TemplateLM):
    """A model for the harness. All processes that hold a part of it run the harness on the same tasks.

    It tokenizes, cuts and stops as the harness's class for Hugging Face models does, so that a checkpoint and its
    export get the same results. The model sees `training.seq_len` tokens at once.
    """

    def __init__(
        self,
        config: JobConfig,
        model: ParallelModel,
        mesh: DeviceMesh,
        device: torch.device,
        tokenizer: Tokenizer,
        stop_ids: Container[int],
    ) -> None:
        """``model`` comes from `titan_like.evaluate.inference.load_parallel_model`. ``stop_ids`` end a text."""
        super().__init__()
        self._scorer = Scorer(config, model, mesh, device)
        self._inference = ParallelInference(config, model, mesh, device, config.training.seq_len)
        self._seq_len, self._device = config.training.seq_len, device
        if isinstance(tokenizer, ByteTokenizer):
            tokenizer = HuggingFaceTokenizer(byte_tokenizer(), "byte", DEFAULT_TOKENS)
        self._tokenizer = tokenizer
        self._prefix_lm, self._stop_ids = config.data.prefix_lm, stop_ids

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        """Token ids of a text, in which special tokens count as such.

        By default with what the tokenizer puts around every text, unless the text begins with that itself.
        """
        tokens = self._tokenizer.encode(string, parses_special=True).tolist()
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._written(self.prefix_token_id))
        return [*self._tokenizer.first_ids, *tokens, *self._tokenizer.last_ids] if add_special_tokens else tokens

    def _written(self, token: int) -> str:
        return self._tokenizer.decode([token], skips_special=False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score the second list of each request after the first: log-probability, and whether all are most probable."""
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
        settings = normalize_gen_kwargs(settings | {"until": settings.get("until") or []}, _MAX_NEW_TOKENS)
        stops = handle_stop_sequences(settings.pop("until"), self._written(self.eot_token_id))
        limit = settings.pop("max_gen_toks")
        if limit >= self._seq_len:
            raise RunError(f"a task generates {limit} tokens, which leaves no context in training.seq_len; raise that")
        extra = {name: value for name, value in settings.items() if name not in _SAMPLING and value not in _NEUTRAL}
        if extra:
            listed = ", ".join(f"{name} = {value}" for name, value in extra.items())
            raise RunError(f"a task sets {listed} in generation_kwargs, which is not supported; take it out")
        # The harness looks for a stop sequence in its number of tokens and two more.
        sizes = {stop: len(self.tok_encode(stop, add_special_tokens=False)) + 2 for stop in stops}

        def is_complete(new: list[int]) -> bool:
            ends = (stop in self._tokenizer.decode(new[-size:], skips_special=False) for stop, size in sizes.items())
            return new[-1] in self._stop_ids or any(ends)

        tokens = generate(
            self._inference,
            (self.tok_encode(context) or [self.prefix_token_id])[-(self._seq_len - limit) :],
            limit,
            device=self._device,
            temperature=settings.get("temperature", 1.0) if settings["do_sample"] else 0.0,
            top_k=settings.get("top_k", 0),
            top_p=settings.get("top_p", 1.0),
            prefix_lm=self._prefix_lm,
            is_complete=is_complete,
        )
        text: str = postprocess_generated_text(self._tokenizer.decode(tokens), stops, None)
        return text


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
        results = evaluator.simple_evaluate(
            model, tasks=list(names), task_manager=manager, num_fewshot=num_fewshot, limit=limit, **options
        )
    except OSError as error:  # the network's errors among them
        raise RunError(f"the harness cannot load its data ({first_line(error)})") from error
    except TemplateError as error:
        problem = f"a template of {', '.join(names)} cannot be filled in ({first_line(error)}); correct the YAML file"
        raise RunError(f"--lm_eval: {problem}") from error
    return dict(results or {})
