"""WikiText-103's word-level perplexity of a model whose tokens are not words.

WikiText-103 (arXiv 1609.07843) is published as words between spaces, and models that read words are compared by their
perplexity per word. Megatron-LM (arXiv 1909.08053, appendix E) gives a model with tokens of its own ordinary text, and
divides the loss of that text by the number of words that were there before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from titan_like.data.tokenizer import Tokenizer
from titan_like.evaluate.files import read_records, read_text
from titan_like.evaluate.task import Task, TaskError, TextSettings
from titan_like.evaluate.text import check_long_enough, exponential, text_results
from titan_like.evaluate.windows import Score, sliding_windows

# What to write instead of what, in this order. Megatron-LM has one more rule, which is meant to join an apostrophe and
# a digit. As written it applies only to an apostrophe and a digit between slashes, which WikiText does not contain.
_JOINED = {
    "s '": "s'",  # the players ' goals
    " @-@ ": "-",
    " @,@ ": ",",
    " @.@ ": ".",
    " : ": ": ",
    " ; ": "; ",
    " . ": ". ",
    " ! ": "! ",
    " ? ": "? ",
    " , ": ", ",
}
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))  # no spaces right inside these
_REMAINING = {
    "= = = =": "====",  # headings
    "= = =": "===",
    "= =": "==",
    " ° ": "°",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def detokenize(text: str) -> str:
    """Turn WikiText's words between spaces into ordinary text."""
    for written, meant in _JOINED.items():
        text = text.replace(written, meant)
    for opening, closing in _PAIRS:
        end = re.escape(closing)
        text = re.sub(rf"{re.escape(opening)}\s*([^{end}]*?)\s*{end}", rf"{opening}\1{closing}", text)
    for written, meant in _REMAINING.items():
        text = text.replace(written, meant)
    return text


def read_published(path: Path) -> str:
    """The text of a split as published: the file itself, or the lines in its records, as on Hugging Face's hub.

    The hub's records have nothing in place of the lines that hold a single space.

    Raises:
        TaskError: the file is not UTF-8, or its records are not lines.
        OSError: the file cannot be read.
    """
    records = read_records(path)
    if records is None:
        return read_text(path)
    for number, line in records:
        if line and not line.endswith("\n"):
            raise TaskError(f"has a text without a line end in record {number}; WikiText's records are lines")
    return "".join(line or " \n" for _, line in records)


def count_words(text: str) -> int:
    """The number of words of a text as published. Words are between single spaces, so a line end counts as a word.

    That is how Megatron-LM counts; the test split of WikiText-103 has 245,566.
    """
    return len(text.strip().split(" "))


def wikitext_task(name: str, text: str, tokenizer: Tokenizer, settings: TextSettings) -> Task:
    """The perplexity per word of a split of WikiText-103 or WikiText-2, as it is published.

    Raises:
        TaskError: the text has fewer than two tokens.
    """
    tokens, num_words = tokenizer.encode(detokenize(text)), count_words(text)
    check_long_enough(min(len(tokens), num_words))

    def results(scores: Sequence[Score]) -> dict[str, float]:
        loss = -math.fsum(score.log_probability for score in scores)  # nats
        by_word = {"words": num_words, "word_perplexity": exponential(loss / (num_words - 1))}
        return by_word | text_results(loss, len(tokens) - 1)

    return Task(name, sliding_windows(tokens, settings.seq_len, settings.stride), results)
