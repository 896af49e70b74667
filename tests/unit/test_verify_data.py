"""Verification reads a run's own data on several ranks, resumed on others, and knows each sample by its definition."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import ipc
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.distributed.mutations import data
from tests.unit.chat_cases import CHATML, MARKED, VOCAB_SIZE, conversations, save_tokenizer, write_lines
from tests.unit.race_cases import VOCABULARY, write_race
from titan_like.commands.verify import format_verdict
from titan_like.config import load_config
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.data.indexed import DTYPES, IndexedWriter
from titan_like.data.open_source import open_data
from titan_like.data.registry import DATASETS
from titan_like.data.source import Source
from titan_like.models.registry import model_config
from titan_like.verify import data as verify_data
from titan_like.verify.compare import DATA, Row
from titan_like.verify.data import Found, check_data, compare_with_definition, short_blocks
from titan_like.verify.processes import Member, Prepare
from titan_like.verify.shrink import resolve, shrink
from titan_like.verify.verify import Verdict, Verifier

SEQ = 16


def texts(seed: int, count: int) -> list[str]:
    numbers = random.Random(seed)
    return [f"{seed}.{number}:{'abcdefgh' * 9}"[: numbers.randint(1, 70)] for number in range(count)]


def write_jsonl(path: Path, seed: int, count: int) -> None:
    lines = [json.dumps({"text": text}) for text in texts(seed, count)]
    lines.insert(count // 2, "")
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_indexed(prefix: Path, seed: int, documents: int) -> None:
    with IndexedWriter(prefix, DTYPES[8]) as writer:
        for text in texts(seed, documents):
            writer.add(np.array([*text.encode(), 256]))
            writer.end_document()


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "is", "the", "number", "of", "text", *"0123456789,:.", "th"]
PIECES += ["##is", "##er", "##s", *(f"##{digit}" for digit in range(10)), "<extra_id_1>", "<extra_id_0>"]


def write_word_pieces(path: Path) -> None:
    """A tokenizer of word pieces, with special tokens of BERT's and T5's."""
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of every kind. Epochs end within the samples that are read, and so do pieces of ``long.jsonl``."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("a", 60), ("b", 40), ("c", 90)):
        write_indexed(folder / name, ord(name), count)
    (folder / "shards").mkdir()
    for number, ending in enumerate(("jsonl", "jsonl.gz", "jsonl", "parquet", "arrow")):
        path = folder / "shards" / f"{number}.{ending}"
        if ending == "parquet":
            pq.write_table(pa.table({"text": texts(number, 60)}), path, row_group_size=7)
        elif ending == "arrow":
            table = pa.table({"text": texts(number, 60)})
            with ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=9)
        else:
            write_jsonl(path, number, 60)
    write_jsonl(folder / "long.jsonl", 9, 2000)
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"{number} is the number of this text, " * (1 + number % 7))
    write_word_pieces(folder / "pieces.json")
    for name, template in (("chatml", CHATML), ("marked", MARKED)):
        save_tokenizer(folder / name, template)
    chats = [*conversations(150), *conversations(20, seed=1, most_turns=9)]
    write_lines(folder / "chats.jsonl", [{"messages": messages} for messages in chats])
    for seed, name in ((3, "asked"), (4, "more")):
        records = [{"prompt": text, "answer": text[::2]} for text in texts(seed, 170)]
        write_lines(folder / f"{name}.jsonl", records)
    (folder / "race").mkdir()
    write_race(folder / "race", {"train": 8, "dev": 4, "test": 4})
    return folder


def config_of(folder: Path, *settings: str) -> JobConfig:
    return load_config(
        [
            *[f"--training.seq_len={SEQ}", "--training.steps=9", f"--job.dump_folder={folder}/run"],
            *["--data.split=6,3,1", "--evaluation.interval=0"],
            *(setting.replace("FOLDER", str(folder)) for setting in settings),
        ]
    )


def checked(config: JobConfig, cache: Path) -> Found:
    with short_blocks():
        return compare_with_definition(edit(config, {"job.dump_folder": str(cache)}))


TEXT = ["--data.dataset=text", "--data.paths=FOLDER/*.txt"]
INDEXED = ["--data.dataset=indexed", "--data.paths=FOLDER/b"]
BLEND = ["--data.dataset=indexed", '--data.paths=[0.5, "FOLDER/a", 0.3, "FOLDER/b", 0.2, "FOLDER/c"]']
STREAM = ["--data.dataset=hf", "--data.paths=FOLDER/shards", "--data.num_readers=3"]
ONE_READER = ["--data.dataset=hf", "--data.paths=FOLDER/long.jsonl", "--data.num_readers=1", "--training.seq_len=512"]
STREAMS = [*STREAM, '--data.paths=[3, "FOLDER/shards/0.jsonl", 1, "FOLDER/shards/[1-4].*"]']
RACE = ["--model.family=bert", "--model.overrides.sentence_head=choice", "--data.dataset=race"]
RACE += ["--data.paths=FOLDER/race", "--data.tokenizer=FOLDER/race/tokenizer.json"]
RACE += [f"--model.overrides.vocab_size={len(VOCABULARY)}"]
PIECES_OF = ["--data.tokenizer=FOLDER/pieces.json", f"--model.overrides.vocab_size={len(PIECES)}"]
WORDS = ["--model.family=bert", "--model.flavor=debug", "--data.mlm_whole_words=true", "--data.mlm_probability=0.4"]
PAIRS = [*WORDS, "--model.overrides.sentence_head=pair", "--data.sentence_objective=sentence_order"]
VOCAB = "--model.overrides.vocab_size=261"  # bytes and special tokens
DOCUMENTS = ["--data.reset_position_ids=true", "--data.reset_attention_mask=true", "--data.eod_mask_loss=true"]
SPANS = ["--model.family=t5", "--model.flavor=debug", "--data.mean_noise_span_length=1"]
CHATS = ["--data.dataset=conversations", "--data.paths=FOLDER/chats.jsonl", "--training.seq_len=96", *DOCUMENTS[:2]]
CHAT_TOKENS = [f"--model.overrides.vocab_size={VOCAB_SIZE}"]
ASKED = [*CHATS, "--data.paths=FOLDER/asked.jsonl"]
KINDS = {
    "text": TEXT,
    "blend of texts": ["--data.dataset=text", '--data.paths=[2, "FOLDER/1*.txt", 1, "FOLDER/2*.txt"]'],
    "indexed": INDEXED,
    "blend": BLEND,
    "blend by sizes": ["--data.dataset=indexed", '--data.paths=["FOLDER/a", "FOLDER/c"]'],
    "stream": [*STREAM, "--training.seq_len=256"],
    "stream of whole shards": [*STREAM, "--data.num_readers=5"],
    "one reader": ONE_READER,
    "more readers than shards": [*STREAM, "--data.num_readers=12"],
    "blend of streams": STREAMS,
    "blend of streams, one reader": [*STREAMS, "--data.num_readers=1"],
    "race": RACE,
    "chats": [*CHATS, *CHAT_TOKENS, "--data.tokenizer=FOLDER/chatml/tokenizer.json"],
    "marked chats": [*CHATS, *CHAT_TOKENS, "--data.tokenizer=FOLDER/marked/tokenizer.json"],
    "prompts": [*ASKED, "--training.seq_len=32"],
    "blend of prompts": [*ASKED, '--data.paths=[2, "FOLDER/asked.jsonl", 1, "FOLDER/more.jsonl"]'],
    "prefixes": [*BLEND, "--data.prefix_lm=true", "--data.reset_attention_mask=true"],
    "masked tokens of a stream": [*STREAM, "--model.family=bert", "--model.flavor=debug"],
    "documents": [*INDEXED, *DOCUMENTS],
    "words of bytes": [*BLEND, *WORDS, "--data.mlm_max_ngram=2"],
    "pairs of word pieces": [*TEXT, *PIECES_OF, *PAIRS],
    "next sentences in a blend": [*BLEND, *PAIRS, "--data.sentence_objective=next_sentence", VOCAB],
    "spans": [*INDEXED, *SPANS, "--training.decoder_seq_len=9"],
    "spans of word pieces": [*TEXT, *PIECES_OF, *SPANS],
}


# What workers do is the same for all kinds but streams, in which they read on from bookmarks. Forking them takes long.
WITH_WORKERS = {"text", "blend", "race", *(kind for kind, settings in KINDS.items() if "--data.dataset=hf" in settings)}
NO_WORKERS = tuple((ranks, 0) for ranks, _ in verify_data._RELAY)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_what_its_definition_says(
    folder: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in WITH_WORKERS:
        monkeypatch.setattr(verify_data, "_RELAY", NO_WORKERS)
    found = checked(config_of(folder, *KINDS[kind]), tmp_path)
    assert found.problem is None and found.unchecked is None
    assert found.covered.startswith("samples 0–47 of train") and "of validation" in found.covered


class Own(Source):
    """A dataset of a user's own."""

    fingerprint = "own"

    def __len__(self) -> int:
        return 100 if self.request.split == "train" else 30

    def sample(self, position: int) -> Batch:
        tokens = torch.arange(SEQ + 1) * 7 + position + len(self.request.section.paths[0])
        return Batch(tokens[:-1], tokens[1:])


class OwnOrder(Own):
    def __getitem__(self, index: int) -> Batch:
        return self.sample((7 * index + self.request.part + self.request.seed) % len(self))


@pytest.mark.parametrize(
    ("kind", "paths"), [(Own, '[1, "a", 2, "bb"]'), (OwnOrder, '["a"]'), (OwnOrder, '[1, "a", 2, "bb"]')]
)
def test_a_dataset_of_one_s_own_defines_itself(
    kind: type, paths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "own", f"{__name__}:{kind.__name__}")
    if kind is OwnOrder:
        monkeypatch.setattr(verify_data, "_RELAY", NO_WORKERS)
    config = config_of(tmp_path, "--job.seed=3", "--data.dataset=own", f"--data.paths={paths}")
    found = checked(config, tmp_path)
    assert found.problem is None and found.unchecked is None
    with data.the_run_has_another_seed():
        assert "train, read by 1 ranks" in str(checked(config, tmp_path).problem)


# Each bug with kinds of data that show it, and the word that says where: sample 0 on one rank is right, for example.
BUGS: list[tuple[Prepare, list[str], str]] = [
    (data.a_sample_is_skipped_at_each_bookmark, ["stream", "one reader", "blend of streams"], "1 ranks with 2 workers"),
    (data.the_last_record_of_a_piece_is_lost, ["one reader", "stream"], "1 ranks with 0 workers"),
    (data.bookmarks_are_a_document_late, ["stream", "one reader", "blend of streams"], "1 ranks with 2 workers"),
    (data.bookmarks_forget_the_tokens_before, ["stream", "blend of streams"], "1 ranks with 2 workers"),
    (data.a_blend_restarts_its_sources_in_each_block, ["blend", "blend of texts", "blend of streams"], "0 workers"),
    (data.epochs_have_the_first_one_s_order, ["indexed", "text", "blend", "stream"], "1 ranks with 0 workers"),
    (data.an_epoch_lacks_its_last_sample, ["indexed", "text"], "samples, and should be"),
    (data.windows_overlap_by_a_token, ["indexed", "text"], "1 ranks with 0 workers"),
    (data.ranks_share_a_sample, ["indexed", "stream", "race"], "4 ranks with 0 workers"),
    (data.a_resumed_run_repeats_a_sample, ["text", "blend of streams"], "from sample"),
    (data.workers_change_the_order, ["blend", "stream", "text"], "1 ranks with 2 workers"),
    (data.held_out_samples_are_those_of_training, ["indexed", "stream"], "validation"),
    (data.the_run_has_another_seed, ["indexed", "stream", "blend of streams"], "train, read by 1 ranks"),
    (data.samples_are_a_token_shorter, ["text"], "train: "),
    (data.every_source_of_a_blend_is_its_first, ["blend", "blend of streams"], "train, read by 1 ranks"),
    (data.a_blend_swaps_its_weights, ["blend", "blend of streams"], "train, read by 1 ranks"),
    (data.sources_without_weights_count_alike, ["blend by sizes"], "train, read by 1 ranks"),
    (data.a_held_out_blend_ends_early, ["blend"], "validation: "),
    (data.splits_cut_documents, ["indexed"], "train: "),
    (data.validation_has_the_test_split_s_weight, ["text"], "validation: "),
    (data.answers_are_those_of_other_questions, ["race"], "train, read by 1 ranks"),
    (data.passages_come_first, ["race"], "train, read by 1 ranks"),
    (data.questions_are_learned_too, ["chats", "marked chats", "blend of prompts"], "train, read by 1 ranks"),
    (data.conversations_are_one_document, ["chats", "blend of prompts"], "train, read by 1 ranks"),
    (data.the_last_of_equally_long_conversations_comes_first, ["chats"], "train"),
    (data.long_conversations_are_dropped, ["chats"], "train"),
    (data.sentinels_are_in_reverse, ["spans"], "train, read by 1 ranks"),
    (data.the_end_hides_tokens, ["words of bytes"], "train, read by 1 ranks"),
]


@pytest.mark.parametrize(("bug", "kind", "words"), [(bug, kind, words) for bug, kinds, words in BUGS for kind in kinds])
def test_bugs_are_found(folder: Path, bug: Callable, kind: str, words: str, tmp_path: Path) -> None:
    config = config_of(folder, "--job.seed=3", *KINDS[kind])
    with bug():
        problem = checked(config, tmp_path).problem
    assert problem is not None and words in problem, problem


def verdict_of(config: JobConfig, bug: Prepare | None = None) -> Verdict:
    return Verifier(shrink(config, resolve(config, None), 3), prepare=bug, kinds=[DATA]).verify()


def test_a_bug_in_the_data_is_no_fault_of_the_layout_s(folder: Path) -> None:
    same = verdict_of(config_of(folder, *STREAM))
    assert same.outcome == "same" and same.blame is None
    assert [(check.row, check.ok) for check in same.checks] == [(Row.DATA, True)]
    assert same.checks[0].detail == "samples 0–47 of train, 0–47 of validation"
    different = verdict_of(config_of(folder, *STREAM), data.bookmarks_are_a_document_late)
    assert different.outcome == "different"
    assert different.first_difference is not None and different.first_difference.title == f"{Row.DATA} (data)"
    assert different.blame is not None and different.blame.axis == "data"
    assert not (folder / "run").exists()


def test_data_that_is_not_there_is_no_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = verdict_of(config_of(folder, "--data.dataset=text", "--data.paths=/no/such/file"))
    assert missing.outcome == "same" and not missing.checks
    assert missing.unread.startswith('data.paths = "/no/such/file": no such file')
    last = format_verdict(missing, [DATA], 1.0).split("\n")[-1]
    assert last.startswith("same: ") and last.endswith(f"; its data was not read: {missing.unread} (1 s)")
    config = config_of(folder, *TEXT)
    monkeypatch.setattr(verify_data, "_MOST_TEXT", 100)
    member = Member(0, 1, folder / "member", 0, "cpu")
    assert "not tokenized yet" in str(check_data(member, config).unchecked)
    open_data(config, model_config(config.model))
    found = check_data(member, config)
    assert found.problem is None and found.unchecked is None
    shutil.rmtree(folder / "run")
