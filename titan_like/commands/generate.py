"""Continue a prompt: python scripts/generate.py --checkpoint outputs/debug_gpt --prompt "def main("

A t5 reads the prompt, in which <extra_id_0>, <extra_id_1>, … stand for missing spans, and writes the spans. With --chat
each line of the input is a message to a chat model, which answers it; the input's end ends the conversation.
Uses the newest checkpoint in --checkpoint FOLDER, or of the run that --job.config_file describes, or
--checkpoint.load_step N. Under torchrun the processes split the model in the run's layout; a single process loads the
whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan_like.config import JobConfig, load_config
from titan_like.config.entry_points import format_of
from titan_like.config.errors import RunError, first_line, require
from titan_like.config.load import edit, run_command
from titan_like.config.options import OptionParser, url_option, write_json
from titan_like.train.rules import check_predicts_next_token

if TYPE_CHECKING:
    from titan_like.data.text.tokenizer import Tokenizer
    from titan_like.evaluate.sampling import Sampling

_SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
_EXAMPLE = "190475083621"  # an answer that no conversation has


def build_parser() -> argparse.ArgumentParser:
    """The options that generation adds to the run's settings."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    meaning = "a run's dump folder, or one of its checkpoints; the run's settings are in it (no --job.config_file)"
    parser.add_path("--checkpoint", meaning, "FOLDER", type=url_option)
    parser.add_argument("--prompt", help="text to continue, for t5 to read, or with --chat the only message")
    parser.add_argument("--chat", action="store_true", help="converse by the tokenizer's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_number("--max_new_tokens", int, least=1, default=200, help="maximum number of tokens to generate")
    parser.add_number("--temperature", float, least=0, most=1e4, help="0 is greedy decoding (default: 0.8)")
    parser.add_number("--top_k", int, least=0, help="sample from the k most probable tokens (default: 0, from all)")
    meaning = "sample from the top tokens with this probability (default: 1); with --chat, generation_config.json's "
    meaning += "temperature, top_k and top_p are the defaults if it has do_sample"
    parser.add_number("--top_p", float, least=1e-6, most=1, help=meaning)
    parser.add_number("--seed", int, least=0, default=0, help="seed of the sampling")
    return parser


def main(argv: list[str]) -> int:
    """Load the model and print the prompt and its continuation."""
    options, settings = build_parser().parse_known_args(argv)
    config = load_config(settings) if options.checkpoint is None else None

    from titan_like.data.chat.template import read_template
    from titan_like.data.objectives.span_corruption import decode_with_sentinels, encode_with_sentinels, padding_of
    from titan_like.data.text.tokenizer import ByteTokenizer, decode_after, tokenizer_of
    from titan_like.evaluate.inference import config_of_checkpoint, find_checkpoint
    from titan_like.evaluate.sampling import SAMPLING, Sampling, generation_fields, stop_ids
    from titan_like.models.registry import model_config

    config = config or config_of_checkpoint(options.checkpoint, settings)
    model = model_config(config.model)
    if model.objective != "span_corruption":
        check_predicts_next_token(config, model)
    path = find_checkpoint(config)
    tokenizer = tokenizer_of(config.data)
    fields = generation_fields(path) if options.chat else {}
    defaults = SAMPLING | fields if fields.get("do_sample") else _SAMPLING
    chosen = {name: getattr(options, name) for name in _SAMPLING}
    chosen = {name: defaults[name] if value is None else value for name, value in chosen.items()}
    sampling = Sampling(options.max_new_tokens, seed=options.seed, stop_ids=stop_ids(tokenizer, path), **chosen)
    require(options.chat or options.system is None, "--system", options.system, "is for --chat; add that")
    if options.chat:
        require(model.is_causal, "--chat", True, "is for models that continue a text; leave it out")
        messages = chat(config, path, tokenizer, sampling, options)
        if os.environ.get("RANK", "0") == "0":
            write_json(options.json, {"checkpoint": str(path), "messages": messages})
        return 0
    options.prompt = "\n" if options.prompt is None else options.prompt
    if model.is_causal:
        parses_special = isinstance(tokenizer, ByteTokenizer) or not tokenizer.splits_special
        prompt, first = tokenizer.encode(options.prompt, parses_special).tolist(), tokenizer.first_ids
        by_template = format_of(config.data.dataset).is_chat and read_template(config.data.tokenizer) is not None
        if not by_template and prompt[: len(first)] != first:
            prompt = [*first, *prompt]
        prompt = prompt or [tokenizer.eod_id]
        tokens = sample(config, path, prompt, sampling)
        answer = options.prompt + (continuation := decode_after(tokenizer, prompt, tokens))
    else:
        prompt = [*encode_with_sentinels(tokenizer, options.prompt), tokenizer.eod_id][-model.max_seq_len :]
        start = [padding_of(config.data.tokenizer, tokenizer)]
        tokens = sample(config, path, start, sampling, prompt)
        answer = continuation = decode_with_sentinels(tokenizer, tokens)
    if os.environ.get("RANK", "0") != "0":
        return 0
    print(f"[{path}]", file=sys.stderr)
    print(answer)
    result = {"checkpoint": str(path), "prompt": options.prompt, "continuation": continuation, "tokens": tokens}
    write_json(options.json, result)
    return 0


def sample(
    config: JobConfig, path: Path, prompt: list[int], sampling: Sampling, encoder_tokens: list[int] | None = None
) -> list[int]:
    """Tokens after the prompt, in one process or, under torchrun, in the run's layout."""
    max_tokens = len(prompt) + sampling.max_new_tokens
    with opened(config, path, max_tokens, len(encoder_tokens or [])) as continue_prompt:
        return continue_prompt(prompt, sampling, encoder_tokens=encoder_tokens)


@contextmanager
def opened(config: JobConfig, path: Path, max_tokens: int, encoder_len: int = 0) -> Iterator[Callable[..., list[int]]]:
    """Open a checkpoint's model: a function like `generate`, for texts of at most ``max_tokens``."""
    import torch

    from titan_like.evaluate.inference import ParallelInference, load_for_inference, load_parallel_model
    from titan_like.evaluate.sampling import generate
    from titan_like.parallel.mesh import build_mesh
    from titan_like.train.environment import check_meeting, number_of_processes
    from titan_like.train.job import process_group
    from titan_like.train.rules import resolve_for_inference
    from titan_like.train.setup import select_device

    continue_prompt = partial(generate, prefix_lm=config.data.prefix_lm)
    world_size = number_of_processes()
    check_meeting()
    if world_size == 1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        yield partial(continue_prompt, load_for_inference(config, path, device))
        return
    config, shape, layout = resolve_for_inference(config, world_size)
    device = select_device(config.training.dtype)
    if encoder_len:  # the prompt's length need not divide evenly, and weights are split the same way
        config = edit(config, {"parallelism.sequence_parallel": False})
    with process_group(device):
        mesh = build_mesh(layout, device.type)
        parts = load_parallel_model(config, path, mesh, device)
        model = ParallelInference(config, parts, mesh, device, min(shape.max_seq_len, max_tokens), encoder_len)
        yield partial(continue_prompt, model)


def chat(
    config: JobConfig, path: Path, tokenizer: Tokenizer, sampling: Sampling, options: argparse.Namespace
) -> list[dict[str, str]]:
    """Answer messages, which are lines of the input, or --prompt alone; returns the conversation.

    The seed of each answer is one more than the previous answer's.
    """
    from titan_like.data.chat.template import read_template

    template = read_template(config.data.tokenizer)
    reason = f"data.tokenizer = {config.data.tokenizer} has no chat template; name an instruct model's tokenizer"
    require(template is not None, "--chat", True, reason)
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    is_first, shown = os.environ.get("RANK", "0") == "0", ""
    write = partial(template.apply_chat_template, **config.data.chat_template_kwargs | {"tokenize": False})
    encode = partial(tokenizer.encode, parses_special=True)

    def show(tokens: list[int]) -> bool:
        nonlocal shown
        text = tokenizer.decode(tokens)
        if is_first and not text.endswith("\ufffd"):  # which may be the beginning of a character
            print(text[len(shown) :], end="", flush=True)
            shown = text
        return False

    with opened(config, path, sys.maxsize) as continue_prompt:
        if is_first:
            print(f"[{path}]", file=sys.stderr)
        for message in iter(read_message, None) if options.prompt is None else [options.prompt]:
            messages.append({"role": "user", "content": message})
            try:
                text = write(messages, add_generation_prompt=True)
                example = write([*messages, {"role": "assistant", "content": _EXAMPLE}]).partition(_EXAMPLE)[0]
            except Exception as error:  # a template may raise anything
                raise RunError(f"the chat template refuses the conversation ({first_line(error)})") from error
            (prompt, opening), shown = (encode(part).tolist() for part in (text, example.removeprefix(text))), ""
            tokens = continue_prompt(prompt, sampling, is_complete=show)
            sampling = replace(sampling, seed=sampling.seed + 1)
            if is_first:
                print(tokenizer.decode(tokens)[len(shown) :], flush=True)
            # The template itself writes what begins a text, such as gpt-oss's channel, and not what is before that.
            begins = [at for at in range(len(tokens)) if tokens[at : at + len(opening)] == opening]
            if begins and tokenizer.special_ids.intersection(opening):
                tokens = tokens[begins[-1] + len(opening) :]
            messages.append({"role": "assistant", "content": tokenizer.decode(tokens)})
    return messages


def read_message() -> str | None:
    """The next line of rank 0's input that is not empty, on every rank; None at the end."""
    import torch.distributed as dist

    lines: list[str | None] = [""]
    if os.environ.get("RANK", "0") == "0":
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            lines = [next((line.rstrip("\r\n") for line in sys.stdin if line.strip()), None)]
            str(lines[0]).encode()
        except UnicodeError as error:
            raise RunError(f"a message is not UTF-8 ({first_line(error)}); convert it") from None
    if dist.is_initialized():
        dist.broadcast_object_list(lines)
    return lines[0]


run = partial(run_command, main)
