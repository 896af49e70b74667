"""Span corruption: T5's definition by brute force, lengths, and what cannot be corrupted."""

from itertools import product
from pathlib import Path

import pytest

from tests.unit.tokenizer_cases import save_words
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Data, JobConfig
from titan_like.data.loading.lengths import SampleLength, raw_length, sample_length, span_counts, targets_length
from titan_like.data.objectives.masks import masks_of
from titan_like.data.text.tokenizer import build_tokenizer
from titan_like.models.config import TransformerConfig


class EncoderDecoder(TransformerConfig):
    objective = "span_corruption"


MODEL = EncoderDecoder(num_layers=2, hidden_size=8, num_attention_heads=1, vocab_size=359, max_seq_len=2048)


def lengths_of_t5(inputs_length: int, density: float, mean: float) -> tuple[int, int]:
    """`random_spans_helper` of T5's code: (tokens of a window, length of its targets)."""

    def lengths(tokens: int) -> tuple[int, int]:
        noise = round(tokens * density)
        spans = round(noise / mean)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length - 1
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    return tokens, lengths(tokens)[1]


@pytest.mark.parametrize(("density", "mean"), list(product((0.05, 0.15, 0.3, 0.5), (1.0, 1.5, 3.0, 10.0))))
def test_lengths_are_those_of_t5(density: float, mean: float) -> None:
    section = Data(noise_density=density, mean_noise_span_length=mean)
    for encoder in [*range(3, 200), 512, 2048]:
        raw, (theirs, targets) = raw_length(encoder, section), lengths_of_t5(encoder, density, mean)
        noise, spans = span_counts(raw, section)
        assert raw - noise + spans + 1 == encoder and min(noise, spans) > 0
        if round(round(theirs * density) / mean) > 0:  # T5's code counts no span in shorter ones, but makes one
            assert (raw, targets_length(raw, section)) == (theirs, targets)


def test_lengths_of_the_paper_s_run() -> None:
    config = load_config(["--training.seq_len=512"])
    assert sample_length(config, MODEL) == SampleLength(raw=568, encoder=512, decoder=114)
    assert span_counts(568, config.data) == (85, 28)
    longer = load_config(["--training.seq_len=512", "--training.decoder_seq_len=128"])
    assert sample_length(longer, MODEL) == SampleLength(568, 512, 128)


def test_sentinels_and_padding_of_tokenizers(tmp_path: Path) -> None:
    ours = build_tokenizer("byte")
    assert (ours.pad_id, ours.sentinel_ids) == (258, list(range(259, 359)))
    tokens = ["<pad>", "</s>", "a", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>", "<extra_id_4>"]
    theirs = build_tokenizer(save_words(tmp_path, tokens))
    assert (theirs.pad_id, theirs.eod_id, theirs.sentinel_ids) == (0, 1, [5, 4, 3])


def test_what_cannot_be_corrupted_is_one_sentence(tmp_path: Path) -> None:
    def refusal(model: TransformerConfig = MODEL, **values: dict) -> str:
        with pytest.raises(ConfigError) as error:
            masks_of(JobConfig.model_validate(values), model)
        return str(error.value)

    few = save_words(tmp_path, ["<pad>", "</s>", "<extra_id_0>"])
    told = refusal(data={"tokenizer": few}, training={"seq_len": 512})
    assert "has 1 sentinels" in told and "each of a sample's 28 spans needs one" in told
    no_padding = save_words(tmp_path, ["</s>", *(f"<extra_id_{number}>" for number in range(9))])
    assert "has no padding token" in refusal(data={"tokenizer": no_padding}, training={"seq_len": 64})
    small = MODEL.model_copy(update={"vocab_size": 257})
    assert "its padding and sentinels go up to 272, but the model's vocab_size is 257" in refusal(small)
    assert "set model.overrides.vocab_size to 273" in refusal(small)
    assert "training.seq_len = 2: " in refusal(training={"seq_len": 2})
    told = refusal(training={"seq_len": 512, "decoder_seq_len": 113})
    assert "training.decoder_seq_len = 113: the targets of 512 encoder positions need 114" in told
    told = refusal(data={"noise_density": 0.7, "mean_noise_span_length": 1.0})
    assert "data.noise_density = 0.7: " in told and "raise data.mean_noise_span_length" in told
