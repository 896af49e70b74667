"""Masked language modelling: words, tokenizers, and what cannot be masked. Its distribution is in test_draws.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Data, JobConfig
from titan_like.data.masked_tokens import MaskedTokens, masked_tokens_of
from titan_like.data.masks import masks_of
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.tokenizer import ByteTokenizer, build_tokenizer
from titan_like.models.bert.config import BertConfig
from titan_like.train.rules import resolve_settings

END = ByteTokenizer.eod_id
SEQ = 400
BERT = BertConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=258, max_seq_len=8)


def sample(number: int) -> torch.Tensor:
    tokens = torch.randint(256, (SEQ + 1,), generator=torch.Generator().manual_seed(number))
    tokens[torch.arange(SEQ + 1) % 50 == 7] = END
    return torch.stack((tokens[:-1], tokens[1:]))


def byte_masks(**settings: object) -> MaskedTokens:
    return masked_tokens_of(Data.model_validate(settings), ByteTokenizer(), 258)


def test_what_is_drawn_stays_the_same_in_every_process_and_version() -> None:
    """A change breaks the resuming of runs."""
    _, labels = byte_masks().apply(sample(1), 3, 10)
    assert (labels != IGNORED_LABEL).nonzero().flatten()[:6].tolist() == [1, 2, 8, 17, 20, 28]


def test_positions_without_a_label_and_samples_of_special_tokens_alone_are_left_as_they_are() -> None:
    masked, one = byte_masks(mlm_probability=1.0), sample(1)
    one[1, :300] = IGNORED_LABEL
    inputs, labels = masked.apply(one, 3, 0)
    assert torch.equal(inputs[:300], one[0, :300]) and (labels[:300] == IGNORED_LABEL).all()
    assert torch.equal(labels[300:] == IGNORED_LABEL, one[0, 300:] == END)
    ends = torch.full((2, 8), END)
    assert torch.equal(masked.apply(ends, 3, 0), torch.stack((ends[0], torch.full((8,), IGNORED_LABEL))))
    short = torch.tensor([[65, END, END], [END, END, END]])
    assert masked_tokens_of(Data(), ByteTokenizer(), 258).apply(short, 3, 0)[1].tolist() == [
        65,
        IGNORED_LABEL,
        IGNORED_LABEL,
    ]


def test_whole_words_and_n_grams_are_chosen_together() -> None:
    text = "".join(f"word_{number} " * (number % 3) + "a,b " for number in range(60))
    tokens = torch.from_numpy(ByteTokenizer().encode(text)).long()
    before = torch.stack((tokens[:-1], tokens[1:]))
    inside = torch.tensor([chr(token).isalnum() or chr(token) == "_" for token in before[0].tolist()])
    begins = torch.ones_like(inside)
    begins[1:] = ~(inside[1:] & inside[:-1])
    word = begins.cumsum(0)
    runs = {1: [], 3: []}
    for most, lengths in runs.items():
        masked = byte_masks(mlm_whole_words=True, mlm_max_ngram=most)
        for index in range(200):
            chosen = masked.apply(before, 3, index)[1] != IGNORED_LABEL
            assert int(chosen.sum()) <= round(0.15 * len(inside))
            whole = torch.zeros(int(word.max()) + 1).scatter_add_(0, word, chosen.float())
            sizes = torch.bincount(word)
            assert set(zip(whole.tolist(), sizes.tolist(), strict=True)) <= {
                (part, size) for size in set(sizes.tolist()) for part in (0.0, float(size))
            }
            picked = (whole > 0).tolist()
            lengths += [len(run) for run in "".join("x" if p else " " for p in picked).split()]
    mean = {most: sum(lengths) / len(lengths) for most, lengths in runs.items()}
    # n = 1, 2, 3 with weights 1, 1/2, 1/3 has a mean of 18/11; neighbours that are chosen apart lengthen both.
    assert 1 <= mean[1] < 1.4 < 1.6 < mean[3] < 2.2


def tokenizer_file(folder, tokens: list[str], kind: type) -> str:
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(kind(vocab, unk_token="[UNK]") if kind is models.WordPiece else kind(vocab, []))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_words_and_special_tokens_of_a_word_piece_vocabulary(tmp_path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##s", "the", ","]
    file = tokenizer_file(tmp_path, tokens, models.WordPiece)
    tokenizer = build_tokenizer(file)
    assert (tokenizer.eod_id, tokenizer.mask_id, tokenizer.special_ids) == (3, 4, frozenset(range(5)))
    masked = masked_tokens_of(Data(tokenizer=file, mlm_whole_words=True), tokenizer, 12)
    assert masked.ordinary.tolist() == [5, 6, 7, 8, 9]
    begins = masked._word_begins(np.array([5, 6, 7, 8, 9, 5, 5, 7, 3, 6]))
    assert begins.tolist() == [True, False, False, True, True, True, True, False, True, True]


def test_words_of_a_byte_level_vocabulary(tmp_path) -> None:
    tokens = ["<|endoftext|>", "<mask>", "Ġthe", "re", "Ġ", "Ċ", ",", "_x"]
    file = tokenizer_file(tmp_path, tokens, models.BPE)
    masked = masked_tokens_of(Data(tokenizer=file, mlm_whole_words=True), build_tokenizer(file), 8)
    assert masked.mask_id == 1 and masked.ordinary.tolist() == [2, 3, 4, 5, 6, 7]
    begins = masked._word_begins(np.array([2, 3, 7, 4, 3, 6, 3, 5, 3, 2]))
    assert begins.tolist() == [True, False, False, True, True, True, True, True, True, True]


def test_what_cannot_be_masked_is_one_sentence(tmp_path) -> None:
    file = tokenizer_file(tmp_path, ["</s>", "a"], models.BPE)
    with pytest.raises(ConfigError, match=r"data.tokenizer.*has no mask token.*use a tokenizer with \[MASK\]"):
        masks_of(JobConfig(data=Data(tokenizer=file)), BERT)
    with pytest.raises(ConfigError, match=r"its mask token is 257.*vocab_size is 257.*vocab_size to 258"):
        masks_of(JobConfig(), BERT.model_copy(update={"vocab_size": 257}))
    for family, setting, words in (
        (
            "gpt",
            "--data.mlm_whole_words=true",
            "gpt predicts the next token, which this does not change; leave it out, or train bert",
        ),
        ("bert", "--data.prefix_lm=true", "bert has only bidirectional attention over whole samples"),
        (
            "bert",
            "--data.eod_mask_loss=true",
            "bert names masked tokens from both sides, never the first token of the next document",
        ),
        (
            "bert",
            "--evaluation.datasets=[text=README.md]",
            "bert names masked tokens from both sides, but these predict",
        ),
    ):
        config = load_config([f"--model.family={family}", "--training.steps=1", setting])
        with pytest.raises(ConfigError, match=words):
            resolve_settings(config, 1)
    assert isinstance(masks_of(JobConfig(), BERT).objective, MaskedTokens)
