"""Special tokens of a Hugging Face tokenizer: which exist, and what each is for.

`tokenizer.json` lists special tokens without saying what they are for. The files next to it do, in the order in which
transformers reads them: `tokenizer_config.json`, `special_tokens_map.json`, and, for the ids that end a text,
`generation_config.json` and `config.json`. Where none of them speaks, well-known names count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

TOKENIZER_FILE = "tokenizer.json"
ABOUT_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
ORIGIN_FILE = "hugging_face.json"  # in a checkpoint: the config.json that it came with, under "config"
_MAP_FILE = "special_tokens_map.json"
_SAY_ENDS = (GENERATION_FILE, CONFIG_FILE, ORIGIN_FILE)
COMPANIONS = (ABOUT_FILE, _MAP_FILE, *_SAY_ENDS)
TOKENIZER_FILES = (  # of a tokenizer alone; transformers may look for any of them
    *(TOKENIZER_FILE, ABOUT_FILE, _MAP_FILE, "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt"),
    "chat_template.jinja",
)

_WELL_KNOWN = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("<pad>", "[PAD]"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "unk": ("[UNK]", "<unk>"),
}


class SpecialTokens:
    """The special tokens of a tokenizer, by id. Adds to ``tokenizer`` the tokens that only its folder names."""

    def __init__(self, tokenizer: HFTokenizer, file: Path | None) -> None:
        """``file`` is its tokenizer.json; None: the tokenizer has no folder.

        Raises:
            ValueError: a file next to it is invalid; the message is the predicate of a sentence.
        """
        read = {name: dict[str, Any]() for name in COMPANIONS}
        if file is not None and file.name == TOKENIZER_FILE:
            read = {name: read_json(file.with_name(name)) for name in COMPANIONS}
        about = read[ABOUT_FILE]
        if "added_tokens_decoder" not in about:  # transformers reads the older file only then
            about = about | read[_MAP_FILE]
        names = {key.removesuffix("_token"): _text(value) for key, value in about.items() if key.endswith("_token")}
        others = about.get("extra_special_tokens") or about.get("additional_special_tokens") or ()
        texts = map(_text, others.values() if isinstance(others, dict) else others)
        _add(tokenizer, about.get("added_tokens_decoder") or {}, [name for name in (*names.values(), *texts) if name])
        self._tokenizer, self._names = tokenizer, names
        self.bos_id, self.mask_id, self.pad_id = self._id("bos"), self._id("mask"), self._id("pad")
        self.unk_id, self.cls_id, self.sep_id = self._id("unk"), self._id("cls"), self._id("sep")
        self.sample_id = None if self.bos_id is not None else tokenizer.token_to_id(names.get("cls") or "[CLS]")
        self.sentinel_ids = list(_ids(tokenizer, map("<extra_id_{}>".format, count()), stops=True))
        self.end_ids = _end_ids(read)
        # The tokenizer's own word counts before the model's, and both before a well-known name.
        ends = (number for number in self.end_ids if tokenizer.id_to_token(number) is not None)
        ids = ([self._id("eos")] if names.get("eos") else []), ends, _ids(tokenizer, _WELL_KNOWN["eos"])
        self.eos_id = next(chain(*ids), None)
        added = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        known = _ids(tokenizer, (name for names in _WELL_KNOWN.values() for name in names))
        mine = (self.eos_id, self.bos_id, self.mask_id, self.pad_id, self.unk_id, self.cls_id, self.sep_id)
        self.all_ids = frozenset({*added, *known, *(number for number in mine if number is not None)})

    @property
    def pair_ids(self) -> tuple[int, int, int] | None:
        """What begins, separates and fills up two sentences; None if the tokenizer is not made for them."""
        if self.cls_id is None or self.sep_id is None:
            return None
        return self.cls_id, self.sep_id, self.cls_id if self.pad_id is None else self.pad_id

    def _id(self, role: str) -> int | None:
        if role in self._names:
            name = self._names[role]
            return None if name is None else self._tokenizer.token_to_id(name)
        return next(iter(_ids(self._tokenizer, _WELL_KNOWN.get(role, ()))), None)


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text, by the files in a Hugging Face folder or checkpoint; empty if none says so.

    Raises:
        ValueError: a file is invalid; the message is the predicate of a sentence.
    """
    return _end_ids({name: read_json(folder / name) for name in _SAY_ENDS})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty if there is no such file.

    Raises:
        ValueError: it is no JSON object; the message is the predicate of a sentence.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"has a {path.name} that cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"has a {path.name} that is not a JSON object")
    return content


def _end_ids(read: dict[str, dict[str, Any]]) -> list[int]:
    """`eos_token_id`, one or several, of the first file that has it."""
    for name in _SAY_ENDS:
        fields = read[name].get("config", {}) if name == ORIGIN_FILE else read[name]
        given = fields.get("eos_token_id") if isinstance(fields, dict) else None
        ids = [number for number in (given if isinstance(given, list) else [given]) if isinstance(number, int)]
        if ids:
            return ids
    return []


def _text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _add(tokenizer: HFTokenizer, numbered: dict[str, Any], names: Iterable[str]) -> None:
    """Add tokens that tokenizer.json lacks, as transformers does: first the numbered ones, then the named ones."""
    for number, fields in sorted(numbered.items(), key=lambda item: int(item[0])):
        text = _text(fields)
        if text and tokenizer.token_to_id(text) is None:
            options = {key: bool(value) for key, value in fields.items() if key not in ("content", "__type")}
            tokenizer.add_tokens([AddedToken(text, **options)])
        if text and tokenizer.token_to_id(text) != int(number):
            where = f"token {number} {text!r}, which is {tokenizer.token_to_id(text)} in {TOKENIZER_FILE}"
            raise ValueError(f"has a {ABOUT_FILE} with the {where}; correct one of them")
    missing = dict.fromkeys(name for name in names if tokenizer.token_to_id(name) is None)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])


def _ids(tokenizer: HFTokenizer, names: Iterable[str], stops: bool = False) -> Iterator[int]:
    """The ids of those of the named tokens that a tokenizer has. With ``stops`` the first that it lacks is the end."""
    for name in names:
        number = tokenizer.token_to_id(name)
        if number is not None:
            yield number
        elif stops:
            return
