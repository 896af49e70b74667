"""Tokenizers, which convert between text and token ids."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, lru_cache, partial
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from titan_like.config.errors import ConfigError, first_line
from titan_like.config.paths import file_problem
from titan_like.data.words import Words, words_of

_KEY = "data.tokenizer"
_MOST_TOKENS = 2**31  # datasets hold ids as int32
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CHOICES = 'give "byte", the path of a tokenizer.json, "gpt2:vocab.json,merges.txt", or a name of the Hugging Face hub'
_MASKS = ("[MASK]", "<mask>")
_PADS = ("<pad>", "[PAD]")
_PAIR = (("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[PAD]", "<pad>"))
_OTHER_SPECIAL = ("[CLS]", "[UNK]", "<s>", "<unk>")
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class ByteTokenizer:
    """Uses UTF-8 bytes as tokens 0 to 255 and 256 as the end of a document.

    Models with more tokens than these 257 have 257 as the mask. Encoder-decoders have 258 as the padding and 259 to 358
    as sentinels, and models of pairs of sentences 258 to 260 as [CLS], [SEP] and [PAD].
    """

    vocab_size = 257
    eod_id = 256  # the end-of-document token, which follows every document
    first_ids: ClassVar[list[int]] = []  # which Hugging Face's put before every text, such as Llama's <s>
    mask_id: int | None = 257  # hides another token in masked language modelling
    pad_id: int | None = 258  # fills an encoder-decoder's targets, and begins the decoder's input
    sentinel_ids: ClassVar = list(range(259, 359))  # which stand for spans in span corruption
    pair_ids: tuple[int, int, int] | None = (258, 259, 260)  # around two sentences: [CLS], [SEP] and [PAD]
    special_ids = frozenset({256})  # tokens that no text becomes, such as the end of a document

    def encode(self, text: str) -> np.ndarray:
        """One token per byte: int64 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """One token per byte of each text."""
        return list(map(self.encode, texts))

    def decode(self, ids: list[int]) -> str:
        """Text of the bytes, without end-of-document tokens. Invalid UTF-8 becomes replacement characters."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    @cached_property
    def words(self) -> Words:
        """Words are runs of letters, digits and underscores; every other character is a word."""
        divider = pre_tokenizers.Split(Regex(r"\w+|[\s\S]"), "isolated")
        return Words([*(bytes([byte]) for byte in range(256)), b""], divider, np.arange(257) == ord(" "))


class HuggingFaceTokenizer:
    """Wraps a tokenizer of the `tokenizers` library. Its attributes are those of `ByteTokenizer`."""

    def __init__(self, tokenizer: HFTokenizer, eod_id: int, spec: str, key: str = _KEY) -> None:
        """``spec`` is the value of the setting ``key``, which errors blame.

        Raises:
            ConfigError: it cannot encode, or has an id that is too large.
        """
        self.tokenizer, self._spec, self._key = tokenizer, spec, key
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > _MOST_TOKENS:
            raise ConfigError(
                key, spec, f"has the token id {self.vocab_size - 1}; ids must be below 2^31; give another"
            )
        self.eod_id = eod_id
        tokenizer.no_truncation()  # what transformers may have stored with it
        tokenizer.no_padding()
        with _without_panic_messages(), self._in_use():
            tokenizer.encode("")
            found = tokenizer.post_process(HFTokenizer(models.WordLevel({"a": 0}, "a")).encode("a"))
        # What the tokenizer puts before a text, whatever that is, and not what it puts after it.
        self.first_ids = found.ids[: found.special_tokens_mask.index(0)]
        self.mask_id, self.pad_id = (next(iter(_ids(tokenizer, names)), None) for names in (_MASKS, _PADS))
        self.sentinel_ids = list(_ids(tokenizer, map("<extra_id_{}>".format, count()), stops=True))
        self.pair_ids = _pair_ids(tokenizer)
        added = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        named = _ids(tokenizer, (*_MASKS, *_PADS, *_OTHER_SPECIAL, *_END_OF_DOCUMENT))
        self.special_ids = frozenset({*added, *named})

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int64 [tokens], without the special tokens that the tokenizer's template would add."""
        with self._in_use():
            return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of several texts, each int64 [tokens]; faster than one by one."""
        with self._in_use():
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(text.ids, dtype=np.int64) for text in encoded]

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids as `encode` returns them, and the characters where each begins and ends: int64 [tokens] each."""
        with self._in_use():
            found = self.tokenizer.encode(text, add_special_tokens=False)
        begins, ends = np.array(found.offsets, dtype=np.int64).reshape(-1, 2).T
        return np.asarray(found.ids, dtype=np.int64), begins, ends

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        with self._in_use():
            return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _in_use(self) -> AbstractContextManager[None]:
        """Blames the tokenizer for whatever the library raises, such as for an unknown word without [UNK]."""
        return _blamed(self._key, self._spec, "cannot be used")

    @cached_property
    def words(self) -> Words:
        """Words of the tokenizer's own pre-tokenization.

        Raises:
            ConfigError: its tokens do not tell where words begin.
        """
        return words_of(self.tokenizer, self.special_ids, self._spec)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


@contextmanager
def _blamed(key: str, spec: str, problem: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises into a ConfigError: bare Exceptions, and panics of Rust, which are
    no Exceptions.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(key, spec, f"{problem} ({first_line(error)}); give another") from None
        raise


@contextmanager
def _without_panic_messages() -> Iterator[None]:
    """Drop what is written to descriptor 2 while a tokenizer is read: Rust itself reports a panic there."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _ids(tokenizer: HFTokenizer, names: Iterable[str], stops: bool = False) -> Iterator[int]:
    """The ids of those of the named tokens that a tokenizer has. With ``stops`` the first that it lacks is the end."""
    for name in names:
        number = tokenizer.token_to_id(name)
        if number is not None:
            yield number
        elif stops:
            return


def _pair_ids(tokenizer: HFTokenizer) -> tuple[int, int, int] | None:
    first, separator, padding = (next(iter(_ids(tokenizer, names)), None) for names in _PAIR)
    if first is None or separator is None:
        return None
    return first, separator, first if padding is None else padding


def build_tokenizer(spec: str, key: str = _KEY) -> Tokenizer:
    """Build the tokenizer that a value of `data.tokenizer` names. ``key`` is the setting that errors blame.

    A process keeps the last one, unless its files change: a large one takes half a second to read, and every source of
    a blend needs it.

    Raises:
        ConfigError: a file is missing or is not a tokenizer, or the tokenizer has no end-of-document token.
    """
    files = tuple(tokenizer_files(spec, key))
    return _build(spec, key, files, tuple(path.stat().st_mtime_ns for path in files if os.path.isfile(path)))


@lru_cache(maxsize=1)
def _build(spec: str, key: str, files: tuple[Path, ...], changed: tuple[int, ...]) -> Tokenizer:
    return ByteTokenizer() if spec == "byte" else HuggingFaceTokenizer(*_read(spec, key, files), spec, key)


def _read(spec: str, key: str, files: Sequence[Path]) -> tuple[HFTokenizer, int]:
    if spec.startswith("gpt2:"):
        tokenizer = _read_gpt2(spec, files, key)
    else:
        _require_file(files[0], spec, key, _CHOICES)
        with _without_panic_messages(), _blamed(key, spec, "not a Hugging Face tokenizer.json"):
            tokenizer = HFTokenizer.from_file(str(files[0]))
    for token in _END_OF_DOCUMENT:
        eod_id = tokenizer.token_to_id(token)
        if eod_id is not None:
            return tokenizer, eod_id
    raise ConfigError(key, spec, f"has no end-of-document token; add one of {', '.join(_END_OF_DOCUMENT)}")


def check_vocabulary(spec: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that a model of ``vocab_size`` has an embedding for every token of the tokenizer ``spec``.

    Raises:
        ConfigError: the tokenizer has more tokens.
    """
    check_ids(spec, f"it has {tokenizer.vocab_size} tokens", tokenizer.vocab_size - 1, vocab_size)


def check_ids(spec: str, what: str, largest: int, vocab_size: int) -> None:
    """Check that a model of ``vocab_size`` has the token ``largest`` of the tokenizer ``spec``; ``what`` names it.

    Raises:
        ConfigError: it has not.
    """
    if largest >= vocab_size:
        problem = f"{what}, but the model's vocab_size is {vocab_size}; set model.overrides.vocab_size to {largest + 1}"
        raise ConfigError(_KEY, spec, problem)


def is_on_hub(spec: str) -> bool:
    """Whether a value of `data.tokenizer` names a tokenizer on the Hugging Face hub: org/name, where no file is."""
    is_name = _HUB_NAME.fullmatch(spec) is not None and not spec.endswith(".json")
    return is_name and file_problem(Path(spec)) == "does not exist"


def tokenizer_files(spec: str, key: str = _KEY) -> list[Path]:
    """The files of the tokenizer that a value of `data.tokenizer` names. One on the hub is downloaded, once.

    Raises:
        ConfigError: the hub does not have it, or cannot be reached.
    """
    if spec == "byte":
        return []
    if spec.startswith("gpt2:"):
        return [Path(part) for part in spec.removeprefix("gpt2:").split(",")]
    if not is_on_hub(spec):
        return [Path(spec)]
    from huggingface_hub import hf_hub_download  # which the package tokenizers brings

    fetch = partial(hf_hub_download, filename="tokenizer.json")
    return [from_hub(spec, fetch, key, "no such file, nor can the Hugging Face hub give its tokenizer.json", _CHOICES)]


def from_hub(name: str, fetch: Callable[..., str], key: str, problem: str, cure: str) -> Path:
    """What ``fetch`` downloads of a repository to the hub's cache of this machine. What is there already is used.

    Raises:
        ConfigError: ``problem``, for setting ``key``: the hub does not have it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    with suppress(Exception):
        return Path(fetch(name, local_files_only=True))
    try:
        HfApi().model_info(name, timeout=30)  # fails at once, where a download would be tried for half a minute
        return Path(fetch(name))
    except Exception as error:  # of the network, or the hub's answer
        raise ConfigError(key, name, f"{problem} ({first_line(error)}); {cure}") from None


def _read_gpt2(spec: str, paths: Sequence[Path], key: str) -> HFTokenizer:
    if len(paths) != 2:
        raise ConfigError(key, spec, "must name two files, gpt2:vocab.json,merges.txt")
    for path in paths:
        _require_file(path, spec, key, "give the paths of GPT-2's vocab.json and merges.txt")
    with _blamed(key, spec, "not GPT-2's vocab.json and merges.txt"):
        tokenizer = HFTokenizer(models.BPE.from_file(str(paths[0]), str(paths[1])))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _require_file(path: Path, spec: str, key: str, cure: str) -> None:
    problem = file_problem(path)
    if problem is not None:
        problem = f"no such file as {path}" if problem == "does not exist" else f"{path} {problem}"
        raise ConfigError(key, spec, f"{problem}; {cure}")
