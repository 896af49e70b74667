"""What is drawn for a sample: masked tokens, spans and prefixes are as `tests/reference` writes them, one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.mutations import draws, masks, pairs, spans
from tests.reference.objectives import sample_of
from titan_like.config import load_config
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
