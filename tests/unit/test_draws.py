"""What is drawn for a sample: masked tokens, spans and prefixes are as their definition says, one by one as
`tests/reference` writes them, and masked tokens in their distribution by BERT's paper.

Counts may be as far from their expectation as Bernstein's inequality allows independent draws with a probability of one
in a million. Where draws exclude one another, as the chosen tokens of a sample do, they deviate less.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.mutations import draws, masks, pairs, spans
from tests.reference.objectives import sample_of
from titan_like.config import load_config
from titan_like.config.schema import Data
from titan_like.data.batch import Batch, collate
from titan_like.data.objectives.masked_tokens import MaskedTokens, masked_tokens_of
from titan_like.data.objectives.masks import prefix_ends
from titan_like.data.objectives.span_corruption import noise_mask
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import ByteTokenizer
from titan_like.models.registry import model_config
from titan_like.verify.samples import ids_of_samples, masks_of_run, training_samples
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.watch import digest

CONFIGS = Path(__file__).parents[2] / "train_configs"
BERT = ["--job.config_file", str(CONFIGS / "debug_bert.toml")]
PAIRS = ["--job.config_file", str(CONFIGS / "debug_bert_pairs.toml")]
GPT = ["--job.config_file", str(CONFIGS / "debug_gpt.toml")]
OBJECTIVES = {
    "masked tokens": BERT,
    "half of the tokens": [*BERT, "--data.mlm_probability=0.5"],
    "words": [*BERT, "--data.mlm_whole_words=true", "--data.mlm_probability=0.4"],
    "n-grams": [*BERT, "--data.mlm_whole_words=true", "--data.mlm_max_ngram=3", "--data.mlm_probability=0.4"],
    "words that are cut": [*BERT, "--data.mlm_whole_words=true", "--data.mlm_probability=0.1"],
    "pairs": PAIRS,
    "next sentences": [*PAIRS, "--data.sentence_objective=next_sentence"],
    "spans": ["--job.config_file", str(CONFIGS / "debug_t5.toml")],
    "prefixes": [*GPT, "--data.prefix_lm=true"],
    "prefixes with a loss": [*GPT, "--data.prefix_lm=true", "--data.prefix_lm_loss=all"],
    "documents": [*GPT, *(f"--data.{key}=true" for key in ("reset_attention_mask", "reset_position_ids", "prefix_lm"))],
    "ends without a loss": [*GPT, "--data.eod_mask_loss=true", "--data.reset_position_ids=true"],
}


def are_as_described(objective: str, seed: int = 5) -> bool:
    """Whether the product makes the samples of the definition."""
    config = load_config([*OBJECTIVES[objective], f"--job.seed={seed}"])
    small = shrink(config, resolve(config, None), Options(3)).config
    samples = training_samples(small)
    made, rows = masks_of_run(small).over(samples), range(40)
    ids = ids_of_samples(model_config(small.model).vocab_size)
    return all(digest(made[index]) == digest(sample_of(samples, small, ids, index)) for index in rows)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_samples_are_as_the_reference_writes_them(objective: str) -> None:
    assert are_as_described(objective)


MASKED = ["masked tokens", "words", "pairs"]
BUGS: list[tuple[Callable, list[str]]] = [
    (draws.draws_ignore_the_sample, ["masked tokens", "pairs", "spans", "prefixes"]),
    (draws.draws_ignore_the_seed, ["masked tokens", "pairs", "spans", "prefixes"]),
    (draws.loss_on_replaced_tokens_alone, MASKED),
    (draws.every_chosen_token_is_masked, MASKED),
    (draws.random_tokens_never_come, MASKED[:2]),
    (draws.the_first_tokens_are_masked, MASKED),
    (draws.special_tokens_are_masked, ["pairs"]),
    (draws.spans_are_all_of_one_length, ["spans"]),
    (draws.spans_begin_a_token_early, ["spans"]),
    (draws.prefixes_take_half_at_most, ["prefixes"]),
    (masks.prefix_one_token_short, ["prefixes", "documents"]),
    (masks.replaced_tokens_are_their_own_labels, ["masked tokens"]),
    (spans.decoder_sees_what_it_writes, ["spans"]),
    (spans.padding_carries_a_loss, ["spans"]),
    (pairs.classes_swapped, ["pairs", "next sentences"]),
]


@pytest.mark.parametrize(("bug", "objective"), [(bug, one) for bug, objectives in BUGS for one in objectives])
def test_bugs_are_found(bug: Callable, objective: str) -> None:
    with bug():
        assert not are_as_described(objective)


def near(found: float, probability: float, draws: int) -> bool:
    """Whether a count of independent draws is as near to its expectation as all but one in a million are."""
    log, variance = math.log(2e6), draws * probability * (1 - probability)
    return abs(found - probability * draws) <= log / 3 + math.sqrt(log**2 / 9 + 2 * variance * log)


SEQ, SAMPLES = 100, 2000
END, MASK = ByteTokenizer.eod_id, ByteTokenizer.mask_id


@pytest.mark.parametrize("ngram", [1, 3])
def test_fifteen_percent_are_chosen_of_which_80_10_and_10(ngram: int) -> None:
    masked = masked_tokens_of(Data(mlm_max_ngram=ngram), ByteTokenizer(), 258)
    tokens = torch.arange(SEQ + 1) * 7 % 256
    tokens[::20] = END  # five that are never chosen
    sample, ordinary = Batch(tokens[:-1], tokens[1:].clone()), torch.ones(SEQ, dtype=torch.bool)
    sample.labels[90:] = IGNORED_LABEL  # nor are those that the dataset gives no label
    ordinary[::20] = ordinary[90:] = False
    inputs, labels, *_ = collate([masked.apply(sample, 3, index) for index in range(SAMPLES)])
    chosen = labels != IGNORED_LABEL
    each = round(0.15 * int(ordinary.sum()))  # exactly so many in each sample
    assert (chosen.sum(1) == each).all() and not chosen[:, ~ordinary].any()
    assert torch.equal(labels[chosen], sample[0].expand(SAMPLES, -1)[chosen])
    assert torch.equal(inputs[~chosen], sample[0].expand(SAMPLES, -1)[~chosen])
    total = SAMPLES * each
    is_mask, stays = inputs == MASK, inputs == sample[0]
    assert near(int((is_mask & chosen).sum()), 0.8, total)
    assert near(int((stays & chosen).sum()), 0.1 + 0.1 / 256, total)  # a random token may be the same
    others = inputs[chosen & ~is_mask & ~stays]
    assert near(len(others), 0.1 * 255 / 256, total) and others.max() < 256
    counts = torch.bincount(others, minlength=256)
    assert all(near(int(count), 1 / 256, len(others)) for count in counts)
    if ngram == 1:  # longer ones fit the middle of a text better
        assert all(near(int(count), each / int(ordinary.sum()), SAMPLES) for count in chosen[:, ordinary].sum(0))


def drawn_masked(seed: int, index: int) -> object:
    masked: MaskedTokens = masked_tokens_of(Data(), ByteTokenizer(), 258)
    return digest(masked.apply(Batch(torch.arange(SEQ), torch.arange(SEQ)), seed, index))


def drawn_spans(seed: int, index: int) -> object:
    return noise_mask(200, 30, 10, seed, index).tobytes()


def drawn_prefixes(seed: int, index: int) -> object:
    return tuple(prefix_ends(torch.arange(2000) // 50 * 50, seed, index).tolist())


@pytest.mark.parametrize("draw", [drawn_masked, drawn_spans, drawn_prefixes])
def test_draws_depend_on_the_seed_and_the_sample_s_number_and_so_on_the_epoch(draw: Callable) -> None:
    # The sample at a position has another number in every epoch: 7, 7 + n, 7 + 2 · n, … of n samples an epoch.
    found = {draw(seed, index) for seed in range(20) for index in (0, 1, 7, 7 + 50, 7 + 100, 2**33, 2**33 + 7)}
    assert len(found) == 20 * 7
    assert draw(3, 7) == draw(3, 7)
