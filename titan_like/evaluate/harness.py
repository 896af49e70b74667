"""EleutherAI's evaluation harness (the package lm_eval) on a checkpoint in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from jinja2 import TemplateError  # which lm_eval brings
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.distributed.device_mesh import DeviceMesh

from titan_like.checkpoint.inference import ParallelInference
from titan_like.config.errors import RunError, first_line
from titan_like.config.schema import JobConfig
from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.harness_tasks import HarnessTasks
from titan_like.evaluate.sampling import generate
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.windows import ending_window
from titan_like.parallel.model import ParallelModel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

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
