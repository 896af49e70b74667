"""Special tokens of a Hugging Face tokenizer and their roles.

`tokenizer.json` lists special tokens without their roles. The files next to it define these, in the order in which
transformers reads them: `tokenizer_config.json`, `special_tokens_map.json`, and, for the ids that end a text,
`generation_config.json` and `config.json`. If none of them names a token, well-known names are used.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from titan_like.config.paths import parse_json, unreadable_reason, user_file

TOKENIZER_FILE = "tokenizer.json"
ABOUT_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
ORIGIN_FILE = "hugging_face.json"  # in a checkpoint: the config.json that it came with, under "config"
MAP_FILE = "special_tokens_map.json"
_ADDED_FILE = "added_tokens.json"
_SAY_ENDS = (GENERATION_FILE, CONFIG_FILE, ORIGIN_FILE)
COMPANIONS = (ABOUT_FILE, MAP_FILE, _ADDED_FILE, *_SAY_ENDS)
TOKENIZER_FILES = (  # a tokenizer's alone; transformers may look for any of them
    *(TOKENIZER_FILE, ABOUT_FILE, MAP_FILE, _ADDED_FILE, "tokenizer.model", "vocab.json", "merges.txt"),
    "chat_template.jinja",
)
GPT2_FILES, GPT2_END = ("vocab.json", "merges.txt"), "<|endoftext|>"
TEMPLATES = "additional_chat_templates/*.jinja"

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which transformers adds their tokens

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
        """``file`` is its tokenizer.json; None: the tokenizer has no folder. Raises `read_json`'s errors."""
        folder = file.parent if file is not None and file.name == TOKENIZER_FILE else None
        about = {} if folder is None else read_about(folder)
        older = {} if folder is None or "added_tokens_decoder" in about else read_json(folder / _ADDED_FILE)
        roles = {key.removesuffix("_token"): value for key, value in about.items() if key.endswith("_token")}
        roles = {role: roles.pop(role) for role in _ROLES if role in roles} | roles
        try:
            values = about.get("extra_special_tokens") or about.get("additional_special_tokens") or []
            values = [*roles.values(), *(values.values() if isinstance(values, dict) else values)]
            named = [_token(value, special=True) for value in values if _text(value)]
            decoder = (about.get("added_tokens_decoder") or {}).items()
            numbered = {int(number): _token(fields) for number, fields in decoder if fields["content"]}
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"has a {ABOUT_FILE} whose special tokens cannot be read ({error})") from None
        special, listed = {token.content for token in named}, _added(tokenizer)
        lacking = {text: number for text, number in older.items() if text not in listed}
        numbered |= {number: AddedToken(text, special=text in special) for text, number in lacking.items()}
        _add(tokenizer, numbered, named)
        names = {role: _text(value) for role, value in roles.items()}
        self._tokenizer, self._names = tokenizer, names
        self.splits_special = bool(about.get("split_special_tokens"))  # whether transformers reads them as text
        self.names_eos = bool(names.get("eos"))
        self.bos_id, self.mask_id, self.pad_id = self._id("bos"), self._id("mask"), self._id("pad")
        self.unk_id, self.cls_id, self.sep_id = self._id("unk"), self._id("cls"), self._id("sep")
        self.sample_id = None if self.bos_id is not None else tokenizer.token_to_id(names.get("cls") or "[CLS]")
        sentinels = map(tokenizer.token_to_id, map("<extra_id_{}>".format, count()))
        self.sentinel_ids = [n for n in takewhile(lambda number: number is not None, sentinels) if n is not None]
        self.pair_ids: tuple[int, int, int] | None = None  # [CLS], [SEP] and [PAD]
        if self.cls_id is not None and self.sep_id is not None:
            self.pair_ids = self.cls_id, self.sep_id, self.cls_id if self.pad_id is None else self.pad_id
        self.end_ids = [] if folder is None else end_ids(folder)
        # The tokenizer's files take precedence over the model's, and both over a well-known name.
        ends = (number for number in self.end_ids if tokenizer.id_to_token(number) is not None)
        ids = ([self._id("eos")] if self.names_eos else []), ends, _ids(tokenizer, _WELL_KNOWN["eos"])
        self.eos_id = next(chain(*ids), None)
        added = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        well_known_ids = _ids(tokenizer, chain(*_WELL_KNOWN.values()))
        role_ids = (self.eos_id, self.bos_id, self.mask_id, self.pad_id, self.unk_id, self.cls_id, self.sep_id)
        self.all_ids = frozenset(number for number in (*added, *well_known_ids, *role_ids) if number is not None)

    def _id(self, role: str) -> int | None:
        if role in self._names:
            name = self._names[role]
            return None if name is None else self._tokenizer.token_to_id(name)
        return next(iter(_ids(self._tokenizer, _WELL_KNOWN.get(role, ()))), None)


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text according to a Hugging Face folder or checkpoint; empty if no file lists any.

    Raises `read_json`'s errors, also about ids that are not numbers.
    """
    for name in _SAY_ENDS:
        content = read_json(folder / name)
        fields = content.get("config") if name == ORIGIN_FILE else content
        if (eos_ids := fields.get("eos_token_id") if fields else None) is not None:
            numbers = eos_ids if isinstance(eos_ids, list) else [eos_ids]
            if not all(type(number) is int for number in numbers):
                raise ValueError(f"has a {name} whose eos_token_id is no whole number, nor a list of some")
            return numbers
    return []


def tokenizer_names(folder: Path) -> list[str]:
    """The tokenizer files in a folder, as paths relative to it."""
    paths = (*(folder / name for name in TOKENIZER_FILES), *sorted(folder.glob(TEMPLATES)))
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def has_gpt2(folder: Path) -> bool:
    """Whether a folder has GPT-2's two files, and no file that describes another tokenizer."""
    if not all((folder / name).is_file() for name in GPT2_FILES):
        return False
    try:
        about = read_about(folder)
        kind = about.get("tokenizer_class") or read_json(folder / CONFIG_FILE).get("model_type", "gpt2")
        added = [*read_json(folder / _ADDED_FILE), *(about.get("added_tokens_decoder") or {}).values()]
    except (ValueError, AttributeError):
        return False
    settings = ("add_prefix_space", "chat_template", "additional_special_tokens", "extra_special_tokens")
    declared = [*added, *(value for name, value in about.items() if name.endswith("_token") or name in settings)]
    is_plain = all(not value or (_text(value) or value) in (GPT2_END, [GPT2_END]) for value in declared)
    return is_plain and kind in ("gpt2", "GPT2Tokenizer", "GPT2TokenizerFast")


def read_about(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json where transformers still reads that; empty without both."""
    about = read_json(folder / ABOUT_FILE)
    return about if "added_tokens_decoder" in about else about | read_json(folder / MAP_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises a `ValueError` for any other content, with the predicate of a sentence about the folder as its message.
    """
    if unreadable_reason(path) == "does not exist":
        return {}
    with user_file(path, lambda reason: ValueError(f"has a {path.name} that {reason}")):
        content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"has a {path.name} that is not a JSON object")
    return content


def _text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _token(value: Any, special: bool = False) -> AddedToken:
    fields = value if isinstance(value, dict) else {"content": value}
    flags = {"special": special} | {name: bool(fields[name]) for name in _FLAGS if name in fields}
    return AddedToken(fields["content"], **flags)


def _added(tokenizer: HFTokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}


def _add(tokenizer: HFTokenizer, numbered: dict[int, AddedToken], named: list[AddedToken]) -> None:
    """Add tokens as transformers does: numbered ones that tokenizer.json lacks or describes otherwise, then named ones.

    A token of the model's vocabulary keeps its id and becomes a special token.
    """
    listed = _added(tokenizer)
    for number, token in sorted(numbered.items()):
        text = token.content
        if repr(token) != repr(listed.get(text)):
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(text) != number:
            conflict = f"token {number} {text!r}, which is {tokenizer.token_to_id(text)} in {TOKENIZER_FILE}"
            raise ValueError(f"has a {ABOUT_FILE} or {_ADDED_FILE} with the {conflict}; correct one of them")
    listed = _added(tokenizer)
    missing = {token.content: token for token in reversed(named) if token.content not in listed}
    tokenizer.add_tokens(list(reversed(missing.values())))


def _ids(tokenizer: HFTokenizer, names: Iterable[str]) -> Iterator[int]:
    """The ids of the named tokens that the tokenizer has."""
    return (number for number in map(tokenizer.token_to_id, names) if number is not None)
