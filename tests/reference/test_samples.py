"""Every kind of data, read on several ranks with data workers and resumed on others, against its definition."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.distributed.mutations import data
from tests.reference.objectives import sample_of
from tests.reference.sources import define, ids_of_tokenizer
from tests.unit.chat_cases import CHATML, MARKED, VOCAB_SIZE, conversations, save_tokenizer, write_lines
from tests.unit.race_cases import VOCABULARY, write_race
from tests.unit.record_cases import jsonl, write_records
from titan_like.config import load_config
from titan_like.config.entry_points import DATASETS
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading import blend
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler, State, merge_states
from titan_like.data.objectives.masks import Masks
from titan_like.data.readers import raw_text, shards
from titan_like.data.readers.indexed import DTYPES, IndexedWriter
from titan_like.data.source import IGNORED_LABEL, Source
from titan_like.data.text import preprocess
from titan_like.models.registry import model_config
from titan_like.train.setup import open_run_data
from titan_like.verify.processes import Prepare
from titan_like.verify.samples import TokenIds
from titan_like.verify.watch import digest, samples_of

RELAY = ((4, 0), (1, 2), (2, 1))  # ranks, and data workers of each
WITHOUT_WORKERS = tuple((ranks, 0) for ranks, _ in RELAY)
PART = 16  # samples that each of them reads
WINDOW = PART * len(RELAY)
SHORT = [  # blocks of blends and pieces of files, so that many of them end within these samples
    *((blend, "BLOCK", 24), (preprocess, "_BATCH", 3)),
    *((raw_text, "_PIECE", 1 << 14), (raw_text, "_CHUNK", 1 << 12), (raw_text, "_ROWS", 5), (shards, "_ROWS", 5)),
]
SEQ = 16


def texts(seed: int, count: int) -> list[str]:
    numbers = random.Random(seed)
    return [f"{seed}.{number}:{'abcdefgh' * 9}"[: numbers.randint(1, 70)] for number in range(count)]


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
        write_records(folder / "shards" / f"{number}.{ending}", texts(number, 60))
    (folder / "long.jsonl").write_bytes(jsonl(texts(9, 1000)) + b"\n" + jsonl(texts(8, 1000)))  # with an empty line
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


def problem_of(config: JobConfig, folder: Path, relay: tuple[tuple[int, int], ...] = RELAY) -> str | None:
    """The first samples of a run that are not as defined: of the beginning of both splits and around an epoch's end.

    One rank reads all of them. Then ``relay`` does, in which other ranks resume after each part.
    """
    config = edit(config, {"job.dump_folder": str(folder)})
    model, section, micro_batch = model_config(config.model), config.data, min(2, config.training.micro_batch_size)
    with ExitStack() as stack:
        for module, name, value in SHORT:
            stack.enter_context(patch.object(module, name, value))
        sources, masks = open_run_data(config, model)
        ids = ids_of_tokenizer(section) if section.separates_documents or not model.is_causal else TokenIds()
        for split in ("train", "validation"):
            source, defined = sources[split], define(config, split)
            if len(source) != len(defined):
                return f"{split}: {len(source)} samples, and should be {len(defined)}"
            assert len(source)
            wanted, stored = cache(partial(sample_of, defined, config, ids)), pickle.dumps(source)
            for start in sorted({0, max(0, defined.epoch_end - WINDOW // 2)}):
                parts = [(start + PART * number, PART, *ranks) for number, ranks in enumerate(relay)]
                state: State = {}
                for first, size, ranks, workers in [(start, WINDOW, 1, 0), *parts]:
                    copies = [pickle.loads(stored) for _ in range(ranks)]
                    for copy in copies:
                        copy.load_state_dict(state)
                    samples, reached = read(list(map(masks.over, copies)), first, size, micro_batch, workers)
                    state = reached if size < WINDOW else {}
                    where = f"{split}, read by {ranks} ranks with {workers} workers each from sample {first} on"
                    if len(samples) != size:
                        return f"{where}: {len(samples)} samples, and should be {size}"
                    digests = [(digest(sample), digest(wanted(first + i))) for i, sample in enumerate(samples)]
                    if wrong := [first + i for i, (found, due) in enumerate(digests) if found != due]:
                        return f"{where}: samples {wrong[:4]} of {size} are wrong"
    return None


def read(copies: list[Masks], first: int, size: int, micro_batch: int, workers: int) -> tuple[list[Batch], State]:
    """The samples that ranks with a copy of the data each take, in the stream's order, and the state after them."""
    taken, states = list[list[Batch]](), list[State]()
    for rank, samples in enumerate(copies):  # one after the other: a fork beside running threads may hang
        sampler = GlobalSampler(first, micro_batch, rank, len(copies), first + size)
        with closing(BackgroundLoader(samples, sampler, workers, torch.device("cpu"))) as loader:
            taken.append(list(loader))
            states.append(loader.state)
    turns = (batch for turn in zip_longest(*taken) for batch in turn if batch is not None)
    return [sample for batch in turns for sample in samples_of(batch)], merge_states(states)


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
AHEAD = ["--model.family=decoder", "--model.flavor=debug_latent"]
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
    "documents of tokens after the next": [*INDEXED, *AHEAD, *DOCUMENTS],
    "positions of tokens after the next": [*INDEXED, *AHEAD, DOCUMENTS[0]],
    "ends of tokens after the next": [*INDEXED, *AHEAD, DOCUMENTS[2]],
    "words of bytes": [*BLEND, *WORDS, "--data.mlm_max_ngram=2"],
    "pairs of word pieces": [*TEXT, *PIECES_OF, *PAIRS],
    "next sentences in a blend": [*BLEND, *PAIRS, "--data.sentence_objective=next_sentence", VOCAB],
    "spans": [*INDEXED, *SPANS, "--training.decoder_seq_len=9"],
    "spans of word pieces": [*TEXT, *PIECES_OF, *SPANS],
}


# Workers do the same for all kinds but streams, in which they read on from reader states. Forking them takes long.
WITH_WORKERS = {"text", "blend", "race", *(kind for kind, settings in KINDS.items() if "--data.dataset=hf" in settings)}


# Those that read with workers take longest; two of them are in the quick tests.
SLOW = WITH_WORKERS - {"text", "stream"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_every_kind_of_data_is_what_its_definition_says(folder: Path, kind: str, tmp_path: Path) -> None:
    relay = RELAY if kind in WITH_WORKERS else WITHOUT_WORKERS
    assert problem_of(config_of(folder, *KINDS[kind]), tmp_path, relay) is None


class Own(Source):
    """A dataset of a user's own."""

    fingerprint = "own"

    def __len__(self) -> int:
        return 100 if self.request.split == "train" else 30

    def sample(self, position: int) -> Batch:
        tokens = torch.arange(self.request.seq_len + 1) * 7 + position + len(self.request.section.paths[0])
        return Batch(tokens[:-1], tokens[1:].where(tokens[1:] % 3 > 0, IGNORED_LABEL))


class OwnOrder(Own):
    def __getitem__(self, index: int) -> Batch:
        return self.sample((7 * index + self.request.part + self.request.seed) % len(self))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "paths", "settings"),
    [(Own, '[1, "a", 2, "bb"]', []), (OwnOrder, '["a"]', SPANS), (OwnOrder, '[1, "a", 2, "bb"]', [])],
)
def test_a_dataset_of_one_s_own_defines_itself(
    kind: type, paths: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "own", f"{__name__}:{kind.__name__}")
    relay = WITHOUT_WORKERS if kind is OwnOrder else RELAY
    config = config_of(tmp_path, "--job.seed=3", "--data.dataset=own", f"--data.paths={paths}", *settings)
    assert problem_of(config, tmp_path, relay) is None
    with data.the_run_has_another_seed():
        assert "train, read by 1 ranks" in str(problem_of(config, tmp_path))


# Each bug with kinds of data that show it, and the word that says where: sample 0 on one rank is right, for example.
BUGS: list[tuple[Prepare, list[str], str]] = [
    (data.a_sample_is_skipped_at_each_state, ["stream", "one reader", "blend of streams"], "1 ranks with 2 workers"),
    (data.the_last_record_of_a_piece_is_lost, ["one reader", "stream"], "1 ranks with 0 workers"),
    (data.states_are_a_document_late, ["stream", "one reader", "blend of streams"], "1 ranks with 2 workers"),
    (data.states_forget_the_tokens_before, ["stream", "blend of streams"], "1 ranks with 2 workers"),
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


def cases_of_bugs() -> Iterator[Any]:
    """Each bug with its first kind of data; the others are run by name."""
    for bug, kinds, words in BUGS:
        for kind in kinds:
            yield pytest.param(bug, kind, words, marks=[pytest.mark.exhaustive] * (kind != kinds[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "kind", "words"), list(cases_of_bugs()))
def test_bugs_are_found(folder: Path, bug: Callable, kind: str, words: str, tmp_path: Path) -> None:
    config = config_of(folder, "--job.seed=3", *KINDS[kind])
    with bug():
        problem = problem_of(config, tmp_path)
    assert problem is not None and words in problem, problem
