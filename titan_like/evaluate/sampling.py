"""Sampling text from a model."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_like.config.errors import blamed_on, require
from titan_like.data.text.special_tokens import GENERATION_FILE, end_ids, read_json
from titan_like.data.text.tokenizer import Tokenizer
from titan_like.evaluate.inference import ParallelInference
from titan_like.models.batch import Batch
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.transformer import Transformer

# Defaults of transformers' generate(), and the limits of each field in generation_config.json.
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_LIMITS = dict.fromkeys(SAMPLING, (0.0, 1.0)) | {"temperature": (0.0, 1e4), "repetition_penalty": (1e-6, 1e6)}
_LIMITS["top_k"] = (0, 2**63 - 1)


def filter_logits(logits: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Mask logits [batch, vocab] with -inf for top-k, nucleus (arXiv 1904.09751) and min-p sampling (2407.01082).

    Keeps the ``top_k`` largest logits (0 keeps all), among those the smallest set whose probabilities sum to
    ``top_p``, and of these the tokens at least ``min_p`` times as probable as the first. Among equal logits the lowest
    token's comes first.
    """
    if min_p:
        floor = logits.amax(-1, keepdim=True) + math.log(min_p)
        return filter_logits(logits, top_k, top_p).masked_fill(logits < floor, float("-inf"))
    if not top_k and top_p >= 1.0:
        return logits
    ordered, order = logits.sort(descending=True, stable=True)
    if top_k:
        ordered[..., top_k:] = float("-inf")
    if top_p < 1.0:
        probabilities = ordered.softmax(-1)
        # A token stays while the more probable ones sum to less than top_p.
        dropped = probabilities.cumsum(-1) - probabilities >= top_p
        dropped[..., 0] = False  # also if top_p is 0 in float32
        ordered = ordered.masked_fill(dropped, float("-inf"))
    return ordered.scatter(-1, order, ordered)


def stop_ids(tokenizer: Tokenizer, path: Path) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and any that the files in the checkpoint's folder ``path`` name."""
    with blamed_on("checkpoint.folder", str(path), after="; correct it"):
        return tokenizer.stop_ids | frozenset(end_ids(path))


def generation_fields(path: Path) -> dict[str, Any]:
    """The fields of generation_config.json in the checkpoint's folder ``path`` that are not null; {} without it."""
    file = path / GENERATION_FILE
    with blamed_on("checkpoint.folder", str(file), after="; correct it"):
        fields = {name: value for name, value in read_json(file).items() if value is not None}
    for name, default in SAMPLING.items():
        least, most = _LIMITS[name]
        value = fields.get(name, default)
        what = "whole number" if isinstance(default, int) else "number"
        reason = f"has a {file.name} whose {name} is no {what} from {least:g} to {most:g}; correct it"
        require(type(value) in (int, type(default)) and least <= value <= most, "checkpoint.folder", str(path), reason)
    return fields


@dataclass(frozen=True)
class Sampling:
    """Settings of generation. `filter_logits` defines top-k, top-p and min-p."""

    max_new_tokens: int
    temperature: float = 1.0  # logits are divided by it; 0 chooses the most probable token
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # positive logits of tokens in the text are divided by it, others multiplied
    seed: int = 0
    stop_ids: Collection[int] = ()  # tokens that end the text


@torch.no_grad()
def generate(
    model: Transformer | ParallelInference,
    prompt: list[int],
    sampling: Sampling,
    *,
    prefix_lm: bool = False,
    encoder_tokens: list[int] | None = None,
    is_complete: Callable[[list[int]], bool] | None = None,
) -> list[int]:
    """Sample tokens after a prompt, until ``max_new_tokens`` or one of ``stop_ids``, which is not returned.

    ``is_complete`` is called with all new tokens after each of them, and ends the text if it returns true. The model
    sees at most the last max_seq_len tokens. With ``prefix_lm`` the tokens of the prompt see each other, as in a prefix
    in training. A model with an encoder reads all of ``encoder_tokens``, and the prompt is its decoder's. The
    repetition penalty is the same as in transformers (arXiv 1909.05858).
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    tokens = torch.tensor([prompt], device=device)
    memory = None if encoder_tokens is None else torch.tensor([encoder_tokens], device=device)
    encoder_len = None if encoder_tokens is None else len(encoder_tokens)
    model.eval()
    for _ in range(sampling.max_new_tokens):
        window = tokens[:, -model.config.max_seq_len :]
        document_mask = None
        if prefix_lm:
            prefix_end = len(prompt) - (tokens.shape[1] - window.shape[1])
            order = torch.arange(window.shape[1], device=device)[None]
            document_mask = KeyRanges(torch.zeros_like(order), (order + 1).clamp(min=prefix_end))
        inputs = window if memory is None else torch.cat((memory, window), 1)
        logits = model(Batch(inputs, document_mask=document_mask, encoder_len=encoder_len))[:, -1].float()  # [1, vocab]
        following = next_token(logits, tokens, sampling, generator)
        if following.item() in sampling.stop_ids:
            break
        tokens = torch.cat((tokens, following), dim=1)
        if is_complete is not None and is_complete(tokens[0, len(prompt) :].tolist()):
            break
    return tokens[0, len(prompt) :].tolist()


def next_token(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> torch.Tensor:
    """Choose the token after ``tokens``, int64 [1, seq], by its logits, [1, vocab]: int64 [1, 1]."""
    if sampling.repetition_penalty != 1:
        seen = logits.gather(1, tokens)
        seen = torch.where(seen < 0, seen * sampling.repetition_penalty, seen / sampling.repetition_penalty)
        logits = logits.scatter(1, tokens, seen)
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    filtered = filter_logits(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return torch.multinomial(filtered.softmax(-1), 1, generator=generator)
