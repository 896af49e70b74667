"""Masked language modelling: words, tokenizers, and what cannot be masked. What is drawn is in test_draws.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests.unit.tokenizer_cases import llama_2, save_words, trained
from titan_like.config import ConfigError
from titan_like.config.schema import Data, JobConfig
from titan_like.data.batch import Batch
from titan_like.data.objectives.masked_tokens import MaskedTokens, masked_tokens_of
from titan_like.data.objectives.masks import masks_of
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer
from titan_like.models.bert.config import BertConfig

BERT = BertConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=258, max_seq_len=8)


LANGUAGES = {
    "English": "The quick brown fox doesn't jump over 12345 lazy dogs; they've   said: (see http://a.example/b_c?d=1).\n",
    "French": "L'été à Évreux, où l'élève dîne déjà : « ça coûte 3 € », s'écria-t-il. À côté, être aimé ici.\n",
    "Russian": "Мама мыла раму, а папа читал газету «Правда» и пил чай. Ёлка, объём - 2024 год! Привет всем.\n",
    "Chinese": "今天天气很好，我们去公园散步。北京大学的学生们正在努力学习准备考试价格是100元明天再来看看吧\n",
    "code": "def f(a_b, c):\n\treturn [x**2 for x in range(1000)]  # 😀 done\n",
}
SPECIAL = ["[UNK]", "</s>", "[MASK]"]
LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPACES = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
TEXTS = [text for text in LANGUAGES.values() for _ in range(3)]


def learned(model: Any, pre_tokenizer: Any, **settings: Any) -> Tokenizer:
    return trained(model, TEXTS, 350, SPECIAL, pre_tokenizer=pre_tokenizer, **settings)


def bpe(pre_tokenizer: Any, **settings: Any) -> Tokenizer:
    return learned(models.BPE(**settings), pre_tokenizer, **settings)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": lambda: bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES])),
    "Llama 2": lambda: llama_2([text.replace("公", "") for text in TEXTS], 350, SPECIAL),
    "Metaspace": lambda: bpe(pre_tokenizers.Metaspace()),
    "Unigram": lambda: learned(models.Unigram(), SPACES, unk_token="[UNK]"),
    "CLIP": lambda: bpe(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES]), end_of_word_suffix="</w>"),
    "WordPiece": lambda: learned(models.WordPiece(unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer()),
    "WordLevel": lambda: learned(models.WordLevel(unk_token="[UNK]"), pre_tokenizers.Whitespace()),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    file = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    KINDS[request.param]().save(file)
    built = build_tokenizer(file)
    assert isinstance(built, HuggingFaceTokenizer)
    return built


def word_numbers(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a text, and the number of the word that each is of, as the tokenizer's own pre-tokenization counts."""
    found = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.pre_tokenizer is not None:
        return np.array(found.ids), np.array(found.word_ids)
    return np.array(found.ids), np.cumsum([token.startswith("▁") for token in found.tokens])


@pytest.mark.parametrize("language", LANGUAGES)
def test_words_are_those_of_the_pre_tokenizer(tokenizer: HuggingFaceTokenizer, language: str) -> None:
    ids, number = word_numbers(tokenizer.tokenizer, LANGUAGES[language] * 8)
    begins = np.diff(number, prepend=-1) != 0
    assert np.array_equal(tokenizer.words(ids)[0], begins)
    inside = int(np.flatnonzero(~begins)[0]) if not begins.all() else 1
    beside_others = [ids[inside - 1], tokenizer.eod_id, ids[inside], tokenizer.vocab_size + 7, ids[inside]]
    assert tokenizer.words(np.array(beside_others))[0].all()


@pytest.mark.parametrize(
    "text", ["今" * 300, "https://a.example/" + "b7/" * 100, "今天天气很好我们去公园散步北京大学 " * 16, "a" * 300]
)
def test_words_that_are_too_long_are_cut(text: str, tmp_path: Path) -> None:
    """None may be chosen whole, or too few words are short."""
    file = str(tmp_path / "tokenizer.json")
    KINDS["GPT-2"]().save(file)
    for tokenizer in (build_tokenizer(file), ByteTokenizer()):
        tokens = torch.from_numpy(tokenizer.encode(text))
        masked, rows = masked_tokens_of(Data(mlm_whole_words=True), tokenizer, 800), Batch(tokens, tokens)
        chosen = torch.stack([masked.apply(rows, 3, index)[1] != IGNORED_LABEL for index in range(200)])
        assert (chosen.sum(1) == round(0.15 * len(tokens))).all()
        assert (chosen.float().mean(0) - 0.15).abs().mean() < 0.05  # everywhere in the text


def test_tokens_that_do_not_tell_words_are_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "tokenizer.json")
    bpe(pre_tokenizers.Whitespace()).save(file)
    section = Data(tokenizer=file, mlm_whole_words=True)
    with pytest.raises(ConfigError, match=r"data.mlm_whole_words = true: .*do not mark where words begin; set it to f"):
        masks_of(JobConfig(data=section), BERT.model_copy(update={"vocab_size": 800}))


def test_what_cannot_be_masked_is_one_sentence(tmp_path) -> None:
    file = save_words(tmp_path, ["</s>", "a"])
    with pytest.raises(ConfigError, match=r"data.tokenizer.*has no mask token.*use a tokenizer with \[MASK\]"):
        masks_of(JobConfig(data=Data(tokenizer=file)), BERT)
    with pytest.raises(ConfigError, match=r"its mask token is 257.*vocab_size is 257.*vocab_size to 258"):
        masks_of(JobConfig(), BERT.model_copy(update={"vocab_size": 257}))
    assert isinstance(masks_of(JobConfig(), BERT).objective, MaskedTokens)
