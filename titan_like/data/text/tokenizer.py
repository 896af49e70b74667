"""Tokenizers, which convert between text and token ids."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from titan_like.config.entry_points import DATASETS, format_of
from titan_like.config.errors import ConfigError, blamed_on, first_line, require
from titan_like.config.paths import check_folder, unreadable_reason
from titan_like.config.schema import DEFAULT_TOKENS, Data, JobConfig, TokenOptions
from titan_like.data.readers.fetch import with_small_files
from titan_like.data.text.special_tokens import (
    ABOUT_FILE,
    COMPANIONS,
    GPT2_END,
    GPT2_FILES,
    TEMPLATES,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    SpecialTokens,
    has_gpt2,
)
from titan_like.data.text.words import Words, words_of

_KEY, _BOS_KEY, _EOD_KEY = "data.tokenizer", "data.bos", "data.eod_token"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CHOICES = (
    'give "byte", a tokenizer.json or its folder, "gpt2:vocab.json,merges.txt" or their folder, or a name of the '
    "Hugging Face hub"
)


class ByteTokenizer:
    """Uses UTF-8 bytes as tokens 0 to 255 and 256 as the end of a document.

    Models with more tokens than these 257 have 257 as the mask. Encoder-decoders have 258 as the padding and 259 to 358
    as sentinels, and models of pairs of sentences 258 to 260 as [CLS], [SEP] and [PAD].
    """

    vocab_size = 257
    eod_id = 256  # the end-of-document token, which follows every document
    stop_ids = frozenset({256})  # tokens that end a generated text
    first_ids: ClassVar[list[int]] = []  # tokens that begin every document, such as Llama's <s>; see `data.bos`
    mask_id: int | None = 257  # hides another token in masked language modelling
    pad_id: int | None = 258  # fills an encoder-decoder's targets, and begins the decoder's input
    sentinel_ids: ClassVar = list(range(259, 359))  # replace spans in span corruption
    pair_ids: tuple[int, int, int] | None = (258, 259, 260)  # around two sentences: [CLS], [SEP] and [PAD]
    special_ids = frozenset({256})  # tokens that do not occur in text, such as the end of a document
    digest = "byte"  # identifies the tokenization of any text

    def encode(self, text: str, parses_special: bool = False) -> np.ndarray:
        """One token per byte: int64 [bytes], without special tokens."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """One token per byte of each text."""
        return list(map(self.encode, texts))

    def encode_with_places(self, text: str, parses_special: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of `encode`, and the characters where each begins and ends: int64 [tokens] each."""
        begins = np.repeat(np.arange(len(text)), [len(character.encode("utf-8")) for character in text])
        return self.encode(text), begins, begins + 1

    def decode(self, ids: list[int]) -> str:
        """Text of the bytes, without end-of-document tokens. Invalid UTF-8 becomes replacement characters."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    @cached_property
    def words(self) -> Words:
        """Words are runs of letters, digits and underscores; every other character is a word."""
        divider = pre_tokenizers.Split(Regex(r"\w+|[\s\S]"), "isolated")
        return Words([*(bytes([byte]) for byte in range(256)), b""], divider, np.arange(257) == ord(" "))


class HuggingFaceTokenizer:
    """Wraps a tokenizer of the `tokenizers` library, with the attributes of `ByteTokenizer`."""

    def __init__(
        self, tokenizer: HFTokenizer, spec: str, options: TokenOptions, file: Path | None = None, key: str = _KEY
    ) -> None:
        """``file`` is its tokenizer.json. ``spec`` is the value of the setting ``key``, which errors name.

        Raises a `ConfigError` if it cannot encode, or lacks an end-of-document token or a token that a setting names.
        """
        self.tokenizer, self._spec, self._key = tokenizer, spec, key
        tokenizer.no_truncation()  # transformers may have stored it with the tokenizer
        tokenizer.no_padding()
        with blamed_on(key, spec):
            special = SpecialTokens(tokenizer, file)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        with _blamed(self._key, self._spec):
            tokenizer.encode("")
            template = tokenizer.post_process(HFTokenizer(models.WordLevel({"a": 0}, "a")).encode("a"))
        # The tokens that the tokenizer puts before a text, without the ones that it puts after it.
        text_index = template.special_tokens_mask.index(0)
        self.template_ids = template.ids[:text_index]
        # [CLS] begins a sample and not a document.
        template_start = [] if self.template_ids[:1] == [special.sample_id] else self.template_ids
        self.bos_id = next(iter(template_start), None) if special.bos_id is None else special.bos_id
        self.eod_id = self._end_of_document(options.eod_token, special.eos_id)
        self.mask_id, self.pad_id, self.names_eos = special.mask_id, special.pad_id, special.names_eos
        self.splits_special = special.splits_special
        has_bos = options.bos != "always" or self.bos_id is not None
        require(has_bos, _BOS_KEY, options.bos, f"{spec} has no bos_token; use auto or never")
        bos_start = [self.bos_id] if options.bos == "always" and self.bos_id is not None else []
        first_ids = [] if options.bos == "never" else template_start or bos_start
        # The previous document already ends with the end-of-document token.
        self.first_ids = first_ids[1:] if first_ids[:1] == [self.eod_id] else first_ids
        # The tokens that the tokenizer itself puts after such a text.
        self.last_ids = template.ids[text_index + 1 :] if self.first_ids == self.template_ids else []
        self.end_ids = special.end_ids  # ends of a text according to the files of its folder
        self.stop_ids = frozenset({self.eod_id, *self.end_ids})
        self.sentinel_ids, self.pair_ids, self.special_ids = special.sentinel_ids, special.pair_ids, special.all_ids
        self._parses_special = not options.split_special_tokens
        controls = special.all_ids - {special.unk_id}
        self._is_control = np.isin(np.arange(self.vocab_size), list(controls))

    def _end_of_document(self, eod_token: str, eos_id: int | None) -> int:
        token_id = self.tokenizer.token_to_id(eod_token) if eod_token else eos_id
        if token_id is None:
            hint = f"set {_EOD_KEY} to it"
            require(not eod_token, _EOD_KEY, eod_token, f"is no token of {self._spec}; name one of its tokens")
            raise ConfigError(self._key, self._spec, f"does not name the token that ends a document; {hint}")
        return token_id

    def encode(self, text: str, parses_special: bool | None = None) -> np.ndarray:
        """Token ids, int64 [tokens], without the special tokens that the tokenizer's template would add.

        ``parses_special``: whether special tokens that are written in the text become tokens or stay text; None
        follows `data.split_special_tokens`.
        """
        return self.encode_with_places(text, parses_special)[0]

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of several texts, each int64 [tokens]; faster than one by one."""
        self.tokenizer.encode_special_tokens = not self._parses_special
        with _blamed(self._key, self._spec):
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._checked(text.ids, self._parses_special)[0] for text in encoded]

    def encode_with_places(
        self, text: str, parses_special: bool | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of `encode`, and the characters where each begins and ends: int64 [tokens] each."""
        parses_special = self._parses_special if parses_special is None else parses_special
        self.tokenizer.encode_special_tokens = not parses_special
        with _blamed(self._key, self._spec):
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
        tokens, origins = self._checked(encoded.ids, parses_special)
        begins, ends = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)[origins].T
        return tokens, begins, ends

    def _checked(self, ids: list[int], parses_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and the index in ``ids`` that each comes from: int64 [tokens] each.

        Unless ``parses_special``, the characters of special tokens that a Unigram model finds in the text replace them.
        """
        tokens, origins = np.asarray(ids, dtype=np.int64), np.arange(len(ids))
        if parses_special or not self._is_control[tokens].any():
            return tokens, origins
        pieces = self.tokenizer.model.tokenize
        parts = [
            [piece.id for character in self.tokenizer.id_to_token(token) or "" for piece in pieces(character)]
            if self._is_control[token]
            else [token]
            for token in ids
        ]
        return np.concatenate(parts), np.repeat(origins, list(map(len, parts)))

    def decode(self, ids: list[int], skips_special: bool = True) -> str:
        """Text of the tokens, by default without special tokens."""
        with _blamed(self._key, self._spec):
            return self.tokenizer.decode(ids, skip_special_tokens=skips_special)

    @cached_property
    def digest(self) -> str:
        """A digest of the tokenizer, including the tokens that only the other files of its folder name."""
        return hashlib.blake2b(self.tokenizer.to_str().encode(), digest_size=16).hexdigest()

    @cached_property
    def words(self) -> Words:
        """Words of the tokenizer's own pre-tokenization; see `words_of`."""
        return words_of(self.tokenizer, self.special_ids, self._spec)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


@contextmanager
def _blamed(key: str, spec: str, reason: str = "cannot be used") -> Iterator[None]:
    """Turn any error of the tokenizers library, such as an unknown word without [UNK], into a `ConfigError`."""
    try:
        yield
    except Exception as error:  # the library raises bare ones
        raise ConfigError(key, spec, f"{reason} ({first_line(error)}); give another") from None


def decode_after(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> str:
    """The text of ``ids`` after the tokens ``before``, whose last character may be incomplete."""
    text = tokenizer.decode([*before, *ids])
    return text[len(os.path.commonprefix((text, tokenizer.decode(before)))) :]  # noqa: RUF071 (no paths)


def tokenizer_of(section: Data, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a run. Raises a `ConfigError` if a model of ``vocab_size`` lacks a token of it."""
    tokenizer = build_tokenizer(section.tokenizer, options=section.token_options)
    if vocab_size is not None:
        reason = f"it has {tokenizer.vocab_size} tokens"
        check_ids(section.tokenizer, reason, tokenizer.vocab_size - 1, vocab_size)
    return tokenizer


def describe_vocabulary(config: JobConfig, vocab_size: int) -> str | None:
    """A warning for the log if a model's ``vocab_size`` is far above the tokenizer's, beyond any padding."""
    section, spec = config.data, config.data.tokenizer
    is_tokenized_here = section.dataset in DATASETS and not format_of(section.dataset).is_tokenized
    is_unknown = not is_tokenized_here and (spec == "byte" or is_on_hub(spec))  # another may have made the data
    if is_unknown or config.model.from_ is not None or any(map(unreadable_reason, tokenizer_files(spec))):
        return None
    size = tokenizer_of(section).vocab_size
    message = f"the model's vocabulary has {vocab_size:,} tokens and the tokenizer {size:,}: the others cost memory and"
    message += f" time; set model.overrides.vocab_size = {-(-size // 128) * 128}"
    return message if vocab_size > size + max(1024, size // 4) else None


def build_tokenizer(spec: str, key: str = _KEY, options: TokenOptions = DEFAULT_TOKENS) -> Tokenizer:
    """Build the tokenizer that ``spec``, a value of `data.tokenizer`, names. ``key`` is the setting that errors name.

    A process caches the last one until its files change: a large one takes half a second to read, and every source of a
    blend needs it. Raises a `ConfigError` if a file is missing or is not a tokenizer, or if a needed token is missing.
    """
    files = tuple(tokenizer_files(spec, key))
    watched = (*files, *(files[0].with_name(name) for name in COMPANIONS)) if len(files) == 1 else files
    modified = tuple(path.stat().st_mtime_ns for path in watched if os.path.isfile(path))
    return _build(spec, key, options, files, modified)


@lru_cache(maxsize=1)
def _build(spec: str, key: str, options: TokenOptions, files: tuple[Path, ...], modified: tuple[int, ...]) -> Tokenizer:
    if spec == "byte":
        if options.eod_token or options.bos == "always":
            name, value = (_EOD_KEY, options.eod_token) if options.eod_token else (_BOS_KEY, options.bos)
            raise ConfigError(name, value, 'is for Hugging Face tokenizers; leave it out with data.tokenizer = "byte"')
        return ByteTokenizer()
    if spec.startswith("gpt2:") or len(files) == len(GPT2_FILES):
        return HuggingFaceTokenizer(_read_gpt2(spec, files, key), spec, options, key=key)
    folder = f'let transformers write it: AutoTokenizer.from_pretrained("{spec}").save_pretrained("{spec}")'
    _require_file(files[0], spec, key, folder if os.path.isdir(spec) else _CHOICES)
    check_folder(key, filter(os.path.lexists, map(files[0].with_name, TOKENIZER_FILES)))  # transformers may open them
    with _blamed(key, spec, "not a Hugging Face tokenizer.json"):
        tokenizer = HFTokenizer.from_file(str(files[0]))
    return HuggingFaceTokenizer(tokenizer, spec, options, files[0], key)


def check_ids(spec: str, reason: str, largest: int, vocab_size: int) -> None:
    """Raise a `ConfigError` unless a model of ``vocab_size`` has the token ``largest``, which ``reason`` names."""
    hint = f"set model.overrides.vocab_size to {largest + 1}"
    require(largest < vocab_size, _KEY, spec, f"{reason}, but the model's vocab_size is {vocab_size}; {hint}")


def check_token(spec: str, role: str, number: int | None, names: str, vocab_size: int | None = None) -> int:
    """The id of a special token of the objective. Raises a `ConfigError` if the tokenizer or the model lacks it."""
    if number is None:
        raise ConfigError(_KEY, spec, f"has no {role} token, which the objective needs; use a tokenizer with {names}")
    check_ids(spec, f"its {role} token is {number}", number, vocab_size or number + 1)
    return number


def is_on_hub(spec: str) -> bool:
    """Whether a value of `data.tokenizer` names a tokenizer on the Hugging Face hub: org/name, and no file."""
    is_name = _HUB_NAME.fullmatch(spec) is not None and not spec.endswith(".json")
    return is_name and unreadable_reason(Path(spec)) == "does not exist"


def tokenizer_files(spec: str, key: str = _KEY) -> list[Path]:
    """The files of the tokenizer that a value of `data.tokenizer` names, downloaded once if it is on the hub.

    Raises a `ConfigError` if the hub does not have it, or cannot be reached.
    """
    if spec == "byte":
        return []
    if spec.startswith("gpt2:"):
        return [Path(part) for part in spec.removeprefix("gpt2:").split(",")]
    if not is_on_hub(spec):
        return _files_in(Path(spec)) if os.path.isdir(spec) else [Path(spec)]
    patterns = [*COMPANIONS, *TOKENIZER_FILES, TEMPLATES]
    reason = f"no such file, nor can the Hugging Face hub give its {TOKENIZER_FILE}"
    return _files_in(from_hub(spec, patterns, (ABOUT_FILE,), key, reason, _CHOICES))


def _files_in(folder: Path) -> list[Path]:
    is_gpt2 = not (folder / TOKENIZER_FILE).exists() and has_gpt2(folder)
    return [folder / name for name in (GPT2_FILES if is_gpt2 else (TOKENIZER_FILE,))]


def tokenizer_in(folder: Path, named: Path | None = None) -> str | None:
    """The value of `data.tokenizer` for the files in a folder, or their copies in ``named``; None without files."""
    folder = with_small_files(folder)
    path = named or folder
    if (folder / TOKENIZER_FILE).is_file():
        return str(path / TOKENIZER_FILE)
    files = [path / name for name in GPT2_FILES if (folder / name).is_file()]
    return f"gpt2:{files[0]},{files[1]}" if len(files) == 2 else None


def from_hub(name: str, patterns: list[str], needed: Sequence[str], key: str, reason: str, hint: str) -> Path:
    """Download the matching files of a repository. Returns their folder in this machine's cache of the hub.

    The network is not used if a file of ``needed`` is cached. Without a network, the cached files are used. Raises a
    `ConfigError` with ``reason`` about setting ``key`` if there are none.
    """
    from huggingface_hub import HfApi, snapshot_download  # installed with the package tokenizers

    cached = None
    with suppress(Exception):
        cached = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    if cached is not None and any((cached / file).is_file() for file in needed):
        return cached
    try:
        HfApi().model_info(name, timeout=30)  # fails at once; a download would be tried for half a minute
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # from the network or the hub
        if cached is not None:
            return cached
        raise ConfigError(key, name, f"{reason} ({first_line(error)}); {hint}") from None


def _read_gpt2(spec: str, paths: Sequence[Path], key: str) -> HFTokenizer:
    require(len(paths) == 2, key, spec, "must name two files, gpt2:vocab.json,merges.txt")
    for path in paths:
        _require_file(path, spec, key, "give the paths of GPT-2's vocab.json and merges.txt")
    with _blamed(key, spec, "not GPT-2's vocab.json and merges.txt"):
        tokenizer = HFTokenizer(models.BPE.from_file(str(paths[0]), str(paths[1])))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([GPT2_END])
    return tokenizer


def _require_file(path: Path, spec: str, key: str, hint: str) -> None:
    reason = unreadable_reason(path)
    sentence = f"no such file as {path}" if reason == "does not exist" else f"{path} {reason}"
    require(reason is None, key, spec, f"{sentence}; {hint}")
