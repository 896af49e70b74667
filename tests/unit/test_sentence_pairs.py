"""Pairs of sentences: where they come from, their classes and labels, and that every layout draws the same."""

import pytest
import torch

from tests.unit.tokenizer_cases import save_words
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Data, JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading.open_source import open_data
from titan_like.data.objectives.masks import Masks, masks_of
from titan_like.data.objectives.sentence_pairs import PairTokens, SentencePairs
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import ByteTokenizer, build_tokenizer
from titan_like.models.bert.config import BertConfig
from titan_like.models.config import TransformerConfig

END, FIRST, SEPARATOR, PADDING = 256, 258, 259, 260
SEQ = 60
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 261, "max_seq_len": SEQ}
BERT = BertConfig.model_validate(SHAPE | {"sentence_head": "pair"})


class Windows:
    """Sample i has tokens that count up from 2000·i, so that each says where it is from, and documents end in it."""

    def __init__(self, ends: tuple[int, ...] = (25,), size: int = 50, labelled: int = 1 << 30) -> None:
        self.ends, self.size, self.labelled = ends, size, labelled

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        tokens = 2000 * (index + 1) + torch.arange(SEQ)
        tokens[list(self.ends)] = END
        labels = tokens if index < self.labelled else torch.full_like(tokens, IGNORED_LABEL)
        return Batch(tokens, labels)


def pairs(objective: str) -> SentencePairs:
    return SentencePairs(objective, PairTokens(FIRST, SEPARATOR, PADDING), END)


def test_samples_without_labels_or_text_have_no_class() -> None:
    for objective in ("sentence_order", "next_sentence"):
        for index in range(40, 50):  # past the end of held-out data
            past = pairs(objective).make(Windows(labelled=40), index, 3)
            assert past.sample_labels == IGNORED_LABEL and (past.labels == IGNORED_LABEL).all()
        nothing = pairs(objective).make(Windows(ends=tuple(range(SEQ)), size=3), 0, 3)
        assert nothing.tokens[:3].tolist() == [FIRST, SEPARATOR, SEPARATOR] and nothing.sample_labels == IGNORED_LABEL
        assert (nothing.labels == IGNORED_LABEL).all()
        single = pairs(objective).make(Windows(ends=tuple(range(1, SEQ)), size=3), 0, 3)
        assert single.sample_labels == IGNORED_LABEL and 2000 in single.tokens[:3]


def run_masks(section: Data, seed: int, model: TransformerConfig) -> Masks:
    return masks_of(JobConfig.model_validate({"data": section, "job": {"seed": seed}}), model)


def test_what_has_no_pairs_is_one_sentence(tmp_path) -> None:
    words = save_words(tmp_path, ["</s>", "<mask>", "a"])
    assert (build_tokenizer("byte").pair_ids, ByteTokenizer.vocab_size) == ((FIRST, SEPARATOR, PADDING), 257)
    with pytest.raises(ConfigError, match=r"data.tokenizer.*has no \[CLS\] and \[SEP\].*use a tokenizer with these"):
        run_masks(Data(tokenizer=words, sentence_objective="sentence_order"), 0, BERT)
    with pytest.raises(ConfigError, match=r"\[PAD\] are 258, 259, 260, but the model's vocab_size is 260; .* to 261"):
        run_masks(Data(sentence_objective="sentence_order"), 0, BERT.model_copy(update={"vocab_size": 260}))
    (tmp_path / "text.jsonl").write_text('{"text": "some text for a stream"}\n' * 99)
    stream = [f"--data.paths={tmp_path}/text.jsonl", "--data.dataset=hf", "--data.num_readers=1", "--training.steps=1"]
    stream += [f"--job.dump_folder={tmp_path}", "--training.seq_len=16", "--evaluation.interval=0"]
    assert open_data(load_config([*stream, "--data.sentence_objective=sentence_order"]), BERT)
    with pytest.raises(ConfigError, match="a stream is read in order"):
        open_data(load_config([*stream, "--data.sentence_objective=next_sentence"]), BERT)
