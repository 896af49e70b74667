"""Continue a prompt: python scripts/generate.py --checkpoint outputs/debug_gpt --prompt "def main("

A t5 reads the prompt, in which <extra_id_0>, <extra_id_1>, … stand for missing spans, and writes the spans.
Uses the newest checkpoint in --checkpoint FOLDER, or of the run that --job.config_file describes, or
--checkpoint.load_step N. Under torchrun the processes split the model in the run's layout; a single process loads the
whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan_like.config import load_config
from titan_like.config.load import edit, run_command
from titan_like.config.options import OptionParser, url_option, write_json
from titan_like.train.rules import check_predicts_next_token

if TYPE_CHECKING:
    from titan_like.config.schema import JobConfig
    from titan_like.evaluate.inference import ParallelInference
    from titan_like.models.transformer import Transformer


def build_parser() -> argparse.ArgumentParser:
    """The options that generation adds to the run's settings."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    meaning = "a run's dump folder, or one of its checkpoints; the run's settings are in it (no --job.config_file)"
    parser.add_path("--checkpoint", meaning, "FOLDER", type=url_option)
    parser.add_argument("--prompt", default="\n", help="text to continue, or for t5 to read")
    parser.add_number("--max_new_tokens", int, least=1, default=200, help="maximum number of tokens to generate")
    parser.add_number(
        "--temperature", float, least=0, most=1e4, default=0.8, help="0 takes the most probable token (default: 0.8)"
    )
    parser.add_number("--top_k", int, least=0, default=0, help="sample from the k most probable tokens; 0 uses all")
    parser.add_number(
        "--top_p", float, least=1e-6, most=1, default=1.0, help="sample from the top tokens with this probability"
    )
    parser.add_number("--seed", int, least=0, default=0, help="seed of the sampling")
    return parser


def main(argv: list[str]) -> int:
    """Load the model and print the prompt and its continuation."""
    options, settings = build_parser().parse_known_args(argv)
    config = load_config(settings) if options.checkpoint is None else None

    from titan_like.data.chat import read_template
    from titan_like.data.span_corruption import decode_with_sentinels, encode_with_sentinels, padding_of
    from titan_like.data.tokenizer import decode_after, tokenizer_of
    from titan_like.evaluate.inference import config_of_checkpoint, find_checkpoint
    from titan_like.evaluate.sampling import stop_ids
    from titan_like.models.registry import model_config

    config = config or config_of_checkpoint(options.checkpoint, settings)
    model = model_config(config.model)
    if model.objective != "span_corruption":
        check_predicts_next_token(config, model)
    path = find_checkpoint(config)
    tokenizer = tokenizer_of(config.data)
    ends = stop_ids(tokenizer, path)
    if model.is_causal:
        prompt, first = tokenizer.encode(options.prompt, parses_special=True).tolist(), tokenizer.first_ids
        by_template = config.data.dataset == "conversations" and read_template(config.data.tokenizer) is not None
        if not by_template and prompt[: len(first)] != first:
            prompt = [*first, *prompt]
        prompt = prompt or [tokenizer.eod_id]
        tokens = sample(config, path, prompt, ends, options)
        answer = options.prompt + (continuation := decode_after(tokenizer, prompt, tokens))
    else:
        prompt = [*encode_with_sentinels(tokenizer, options.prompt), tokenizer.eod_id][-model.max_seq_len :]
        start = [padding_of(config.data.tokenizer, tokenizer)]
        tokens = sample(config, path, start, ends, options, prompt)
        answer = continuation = decode_with_sentinels(tokenizer, tokens)
    if os.environ.get("RANK", "0") != "0":
        return 0
    print(f"[{path}]", file=sys.stderr)
    print(answer)
    result = {"checkpoint": str(path), "prompt": options.prompt, "continuation": continuation, "tokens": tokens}
    write_json(options.json, result)
    return 0


def sample(
    config: JobConfig,
    path: Path,
    prompt: list[int],
    ends: Container[int],
    options: argparse.Namespace,
    encoder_tokens: list[int] | None = None,
) -> list[int]:
    """Tokens after the prompt, until one of ``ends``; in one process or, under torchrun, in the run's layout."""
    import torch

    from titan_like.evaluate.inference import ParallelInference, load_for_inference, load_parallel_model
    from titan_like.evaluate.sampling import generate
    from titan_like.parallel.mesh import build_mesh
    from titan_like.train.environment import check_meeting, number_of_processes
    from titan_like.train.job import process_group
    from titan_like.train.rules import resolve_for_inference
    from titan_like.train.setup import select_device

    def continue_prompt(model: Transformer | ParallelInference, device: torch.device) -> list[int]:
        return generate(
            model,
            prompt,
            options.max_new_tokens,
            device=device,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop_ids=ends,
            prefix_lm=config.data.prefix_lm,
            encoder_tokens=encoder_tokens,
        )

    world_size = number_of_processes()
    check_meeting()
    if world_size == 1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return continue_prompt(load_for_inference(config, path, device), device)
    config, shape, layout = resolve_for_inference(config, world_size)
    device = select_device(config.training.dtype)
    max_tokens, encoder_len = min(shape.max_seq_len, len(prompt) + options.max_new_tokens), len(encoder_tokens or [])
    if encoder_tokens is not None:  # the prompt's length need not divide evenly, and weights are split the same way
        config = edit(config, {"parallelism.sequence_parallel": False})
    with process_group(device):
        mesh = build_mesh(layout, device.type)
        model = load_parallel_model(config, path, mesh, device)
        return continue_prompt(ParallelInference(config, model, mesh, device, max_tokens, encoder_len), device)


run = partial(run_command, main)
