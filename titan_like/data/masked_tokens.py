"""Masked language modelling (arXiv 1810.04805, section 3.1): a model names the tokens of a sample that are hidden.

Of the tokens that are chosen, 80 % become the mask token, 10 % a random one, and 10 % stay. Only chosen tokens carry a
loss. Special tokens, such as the end of a document, are never chosen. As with Megatron-LM, whole words can be chosen
instead of tokens, and n-grams of up to `data.mlm_max_ngram` of them, each length n with a weight of 1/n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data
from titan_like.data.permutation import sample_generator
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.tokenizer import Tokenizer, check_ids

_MASKED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the others stay


@dataclass(frozen=True)
class MaskedTokens:
    """Chooses and replaces tokens. The draw depends only on the seed and the sample's number in the run.

    So every layout and every resumed run draws the same, and each epoch draws something else.
    """

    section: Data
    mask_id: int
    ordinary: np.ndarray  # int64 [n], the tokens that may be chosen, and from which random replacements are drawn
    joins: np.ndarray | None  # bool [2, vocab], see `Tokenizer.word_joins`; None: every token is a word

    def apply(self, sample: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        """A sample of next-token prediction, int64 [2, seq], as one of masked tokens: int64 [2, seq].

        A position to which the dataset gives no label is not chosen.
        """
        inputs, given = sample.numpy()
        random = sample_generator(b"masked tokens", seed, index)
        can_be = np.isin(inputs, self.ordinary) & (given != IGNORED_LABEL)
        chosen = self._choose(inputs, can_be, random)
        labels = np.where(chosen, inputs, IGNORED_LABEL)
        kind, others = random.random(len(inputs)), random.random(len(inputs))
        replacements = self.ordinary[(others * len(self.ordinary)).astype(np.int64)]
        replaced = np.where(kind < _MASKED, self.mask_id, np.where(kind < _MASKED + _RANDOM, replacements, inputs))
        return torch.from_numpy(np.stack((np.where(chosen, replaced, inputs), labels)))

    def _choose(self, inputs: np.ndarray, can_be: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """bool [seq]: `data.mlm_probability` of the tokens that can be chosen, at least one if there is any."""
        count = int(can_be.sum())
        left = max(1, round(count * self.section.mlm_probability)) if count else 0
        begins = np.flatnonzero(self._word_begins(inputs))
        ends = np.append(begins[1:], len(inputs))
        blocked = np.concatenate(([0], np.cumsum(~can_be)))  # tokens before each position that cannot be chosen
        # Words are tried in random order until enough tokens are chosen. Each draws a length n with weight 1/n, and the
        # longest span of at most n words that fits is taken.
        lengths = np.arange(1, self.section.mlm_max_ngram + 1)
        steps = np.cumsum(1 / lengths) / np.sum(1 / lengths)
        order = random.random(len(begins)).argsort(kind="stable")
        drawn = lengths[np.minimum(np.searchsorted(steps, random.random(len(begins)), "right"), len(lengths) - 1)]
        chosen = np.zeros(len(inputs), dtype=bool)
        for word in order.tolist():
            if left == 0:
                break
            for length in range(min(drawn[word], len(begins) - word), 0, -1):  # a shorter one where this does not fit
                begin, end = begins[word], ends[word + length - 1]
                if end - begin <= left and blocked[begin] == blocked[end] and not chosen[begin:end].any():
                    chosen[begin:end] = True
                    left -= int(end - begin)
                    break
        return chosen

    def _word_begins(self, inputs: np.ndarray) -> np.ndarray:
        """Whether a word begins at each token: bool [seq]."""
        begins = np.ones(len(inputs), dtype=bool)
        if self.joins is not None:
            begins[1:] = ~(self.joins[0, inputs[1:]] & self.joins[1, inputs[:-1]])
        return begins


def masked_tokens_of(section: Data, tokenizer: Tokenizer, vocab_size: int) -> MaskedTokens:
    """Masked language modelling as [data] and its tokenizer set it, for a model of ``vocab_size`` tokens.

    Raises:
        ConfigError: the tokenizer has no mask token, or one that the model lacks.
    """
    if tokenizer.mask_id is None:
        problem = "has no mask token, which a model of masked tokens needs; use a tokenizer with [MASK] or <mask>"
        raise ConfigError("data.tokenizer", section.tokenizer, problem)
    check_ids(section.tokenizer, f"its mask token is {tokenizer.mask_id}", tokenizer.mask_id, vocab_size)
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))
    joins = None
    if section.mlm_whole_words:
        joins = np.pad(tokenizer.word_joins(), ((0, 0), (0, vocab_size - tokenizer.vocab_size)))
    return MaskedTokens(section, tokenizer.mask_id, ordinary, joins)
