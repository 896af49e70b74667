"""EleutherAI's evaluation harness (the package lm_eval) on a checkpoint in any layout."""

import fnmatch
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist
from jinja2 import TemplateError  # installed with lm_eval
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan_like.config.errors import ConfigError, RunError, first_line, require
from titan_like.config.schema import DEFAULT_TOKENS
from titan_like.data.chat.template import read_template
from titan_like.data.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from titan_like.evaluate.inference import ParallelInference
from titan_like.evaluate.sampling import SAMPLING, Sampling, generate
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.task import ending_window
from titan_like.hugging_face.tokenizer import byte_tokenizer


class HarnessTasks(TaskManager):
    """The harness's tasks by name. Whatever it raises while it builds one of them becomes one sentence."""

    num_fewshot: int | None = None  # examples before each question, unless a task's file has 0
    runs_code = False  # whether tasks may run what the model writes

    def load(self, task_list: Any) -> Any:
        """Build tasks. Only an `OSError` is left as it is, such as the network's if data cannot be loaded."""
        try:
            loaded = super().load(task_list)
        except OSError:
            raise
        except Exception as error:  # each key of the file has errors of its own
            reason = f"the harness cannot build this ({type(error).__name__}: {first_line(error)})"
            raise ConfigError("--lm_eval", ",".join(task_list), f"{reason}; see its YAML file") from error
        for name, task in loaded["tasks"].items():
            reason = "runs code that the model writes, on this machine; allow that by --confirm_run_unsafe_code"
            require(self.runs_code or not getattr(task, "UNSAFE_CODE", False), "--lm_eval", name, reason)
            self._check_examples(name, task)
        return loaded

    def _check_examples(self, name: str, task: Any) -> None:
        of_task, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
        wanted = of_task if self.num_fewshot is None or of_task == 0 else self.num_fewshot
        if not wanted or sampler is None:
            return
        available = len(sampler.fewshot_indices or sampler.df)
        if task.fewshot_cfg.split == task.config.test_split:  # the question itself is no example
            available -= 1
        reason = f"{name} has {max(available, 0)} documents that can be examples; use at most that"
        require(wanted <= available, "--num_fewshot", wanted, reason)


def find_tasks(
    names: Sequence[str], folder: str | None, num_fewshot: int | None = None, runs_code: bool = False
) -> tuple[list[str], HarnessTasks]:
    """Find the harness's tasks, and the tasks that YAML files in ``folder`` describe.

    ``num_fewshot`` and ``runs_code`` are `HarnessTasks`'s. Returns the names, in which patterns such as ``mmlu_*`` are
    filled in by single tasks, and what builds their tasks. Raises a `ConfigError` if no task has one of the names. The
    harness skips files that it cannot read.
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
        reason = "the harness has no such task; `lm-eval ls tasks` lists them, and --lm_eval_folder adds your own, if "
        reason += "their YAML files are valid"
        require(matches, "--lm_eval", name, reason)
    manager.num_fewshot, manager.runs_code = num_fewshot, runs_code
    return list(chosen), manager


_MAX_NEW_TOKENS = 256  # the harness's own default
_SEED = 1234  # the harness's own default for torch
# Fields of generation_config.json that would change the text, too.
_REFUSED = (
    *("num_beams", "penalty_alpha", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "top_h"),
    *("min_length", "min_new_tokens", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale"),
)


class CheckpointLM(TemplateLM):
    """A model for the harness. All processes that have a part of it run the harness on the same tasks.

    It tokenizes, cuts and stops as the harness's class for Hugging Face models does, so that a checkpoint and its
    export get the same results. The model sees `training.seq_len` tokens at once.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        generation: dict[str, Any] | None = None,
        template: str | bool | None = None,
        seed: int | None = None,
    ) -> None:
        """``scorer`` has the model, and its configuration and layout. ``stop_ids`` end a text.

        ``generation`` has the fields of the model's generation_config.json, and ``template`` may name one of several
        chat templates. The text that is sampled for a request depends on ``seed`` and on the request.
        """
        super().__init__()
        config = scorer.config
        self._scorer = scorer
        self._seq_len = config.training.seq_len
        self._inference = ParallelInference(config, scorer.model, scorer.mesh, scorer.device, self._seq_len)
        self._prefix_lm = config.data.prefix_lm
        self._spec = config.data.tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            tokenizer = HuggingFaceTokenizer(byte_tokenizer(), "byte", DEFAULT_TOKENS)
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._generation = generation or {}
        self._template_name = template if isinstance(template, str) else None
        self._seed = _SEED if seed is None else seed
        self.computes = False  # True while the model runs: what is raised then is no fault of the harness

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        """Token ids of a text, in which special tokens count as such unless the tokenizer's folder says otherwise.

        By default with what the tokenizer puts around every text, unless the text begins with that itself.
        """
        tokens = self._tokenizer.encode(string, parses_special=not self._tokenizer.splits_special).tolist()
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
        self.computes = True
        scores = self._scorer(windows)
        self.computes = False
        pairs = zip(scores, windows, strict=True)
        return [(score.log_probability, score.num_right == window.num_targets) for score, window in pairs]

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
        """Continue texts until a stop sequence, the end of the document or the maximum number of tokens.

        What is sampled depends on the seed, the request and how often it was made before, and on no other request.
        """
        texts, earlier = list[str](), Counter[str]()
        for context, settings in (request.args for request in requests):
            key = json.dumps([self._seed, context, settings], sort_keys=True, default=str)
            digest = hashlib.blake2b(f"{earlier[key]} {key}".encode(errors="surrogatepass"), digest_size=8).digest()
            texts.append(self._continue(context, settings, int.from_bytes(digest) // 2))
            earlier[key] += 1
        return texts

    def _continue(self, context: str, settings: dict[str, Any], seed: int) -> str:
        settings = normalize_gen_kwargs(settings | {"until": settings.get("until") or []}, _MAX_NEW_TOKENS)
        stops = handle_stop_sequences(settings.pop("until"), self._written(self.eot_token_id))
        limit, draws = settings.pop("max_gen_toks"), settings.pop("do_sample")
        if limit >= self._seq_len:
            raise RunError(f"a task generates {limit} tokens, which leaves no context in training.seq_len; raise that")
        fields = {name: value for name, value in self._generation.items() if name in (*SAMPLING, *_REFUSED)} | settings
        for name, value in fields.items():
            if name not in SAMPLING and value and value != 1:  # such as num_beams = 1
                by = f"a task sets {name} = {value} in generation_kwargs"
                by = by if name in settings else f"generation_config.json has {name} = {value}"
                raise RunError(f"{by}, which is not supported; take it out")
        chosen: dict[str, Any] = {
            name: default if fields.get(name) is None else type(default)(fields[name])
            for name, default in SAMPLING.items()
        }
        if not draws:
            chosen["temperature"] = 0.0
        # The harness looks for a stop sequence in its number of tokens and two more.
        sizes = {stop: len(self.tok_encode(stop, add_special_tokens=False)) + 2 for stop in stops}

        def is_complete(new: list[int]) -> bool:
            ends = (stop in self._tokenizer.decode(new[-size:], skips_special=False) for stop, size in sizes.items())
            return new[-1] in self._stop_ids or any(ends)

        prompt = (self.tok_encode(context) or [self.prefix_token_id])[-(self._seq_len - limit) :]
        sampling = Sampling(limit, seed=seed, **chosen)
        self.computes = True
        tokens = generate(self._inference, prompt, sampling, prefix_lm=self._prefix_lm, is_complete=is_complete)
        self.computes = False
        text: str = postprocess_generated_text(self._tokenizer.decode(tokens), stops, None)
        return text

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer that has the chat template."""
        return self._spec

    @cached_property
    def _template(self) -> Any:
        tokenizer = read_template(self._spec)
        name, key = self._template_name, "--apply_chat_template"
        reason = f"data.tokenizer = {self._spec} has no chat template; leave it out, or name an instruct tokenizer"
        require(tokenizer is not None, key, name or True, reason)
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        reason = f"the tokenizer has no chat template of this name, but {', '.join(named) or 'one without a name'}"
        require(name is None or name in named, key, name, reason)
        return tokenizer

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the tokenizer's template; without system messages if it refuses them."""
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        options |= {"continue_final_message": not add_generation_prompt, "chat_template": self._template_name}
        try:
            return str(self._template.apply_chat_template(chat_history, **options))
        except TemplateError:
            turns = [message for message in chat_history if message["role"] != "system"]
            return str(self._template.apply_chat_template(turns, **options))


def run_harness(model: TemplateLM, names: Sequence[str], manager: HarnessTasks, **options: Any) -> dict[str, Any]:
    """Run the harness. Every process calls this. ``options`` are more arguments of its `simple_evaluate`.

    The first process of each machine gets what the harness returns, with the figures of each task under "results", and
    others get an empty table. Raises a `ConfigError` if a task may not run, or has too few documents for examples, and
    a `RunError` if the data of a task cannot be loaded, or a template or function of it fails.
    """
    if dist.get_rank() != 0:
        options["bootstrap_iters"] = 0  # errors are printed on rank 0
    try:
        results = evaluator.simple_evaluate(model, tasks=list(names), task_manager=manager, **options)
    except (ConfigError, RunError):
        raise
    except OSError as error:  # the network's errors among them
        raise RunError(f"the harness cannot load its data ({first_line(error)})") from error
    except TemplateError as error:
        reason = f"a template of {', '.join(names)} cannot be filled in ({first_line(error)}); correct the YAML file"
        raise RunError(f"--lm_eval: {reason}") from error
    except Exception as error:  # functions of a task may raise anything
        if getattr(model, "computes", False):
            raise
        reason = f"{', '.join(names)} cannot be processed ({type(error).__name__}: {first_line(error)})"
        raise RunError(f"--lm_eval: {reason}; correct the functions or settings of the task") from error
    return dict(results or {})
