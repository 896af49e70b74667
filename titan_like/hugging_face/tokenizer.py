"""Writing a run's tokenizer as files that transformers' AutoTokenizer loads."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from titan_like.checkpoint.step_folders import write_durably
from titan_like.config.errors import require
from titan_like.config.schema import TokenOptions
from titan_like.data.text.special_tokens import (
    ABOUT_FILE,
    GENERATION_FILE,
    MAP_FILE,
    TOKENIZER_FILE,
    end_ids,
    read_about,
    read_json,
    tokenizer_names,
)
from titan_like.data.text.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, tokenizer_files
from titan_like.data.text.words import byte_characters
from titan_like.models.config import TransformerConfig

_KEY = "--tokenizer"
_ANY_CLASS = "PreTrainedTokenizerFast"  # works for any tokenizer.json, and keeps its template
_SAMPLES = (
    "a dog",
    "  two spaces,\n\ttab",
    "Hello, World! 1234 don't",
    "\u00c9t\u00e9 \u4f60\u597d e\u0301 \U0001f642 ",
)


def write_tokenizer(spec: str, options: TokenOptions, model: TransformerConfig, folder: Path) -> dict[str, int]:
    """Write the tokenizer that a value of `data.tokenizer` names; returns its special tokens as fields of config.json.

    generation_config.json is written if there is one already, or if several tokens end a text. Raises a `ConfigError`
    if its files are missing or invalid, or it has more tokens than the model.
    """
    ours = build_tokenizer(spec, _KEY, options)
    reason = f"has {ours.vocab_size} tokens, but the model has {model.vocab_size}; name the one it was trained with"
    require(ours.vocab_size <= model.vocab_size, _KEY, spec, reason)
    eod_id, tokenizer = ours.eod_id, byte_tokenizer(model) if isinstance(ours, ByteTokenizer) else ours.tokenizer
    # Where nothing else begins a document, the end of another does.
    bos_id = eod_id if isinstance(ours, ByteTokenizer) or ours.bos_id is None else ours.bos_id
    ids = {"bos_token_id": bos_id, "eos_token_id": eod_id}
    if model.objective == "span_corruption" and ours.pad_id is not None:
        ids |= {"pad_token_id": ours.pad_id, "decoder_start_token_id": ours.pad_id}
    files = tokenizer_files(spec, _KEY)
    if len(files) != 1:  # no tokenizer.json
        write_durably(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    else:  # copied, because this version of the library might write it differently
        shutil.copyfile(files[0], folder / TOKENIZER_FILE)
        if files[0].name == TOKENIZER_FILE:
            copy_files(files[0].parent, folder, tokenizer_names(files[0].parent))
    about = {name: _plain(value) for name, value in read_about(folder).items()}
    # With its class the file was written by transformers, so it is complete.
    full = about if "tokenizer_class" in about else _about(ours, tokenizer, bos_id, model) | about
    if options.eod_token or not about.get("eos_token"):
        full = full | {"eos_token": tokenizer.id_to_token(eod_id)}
    if bos_id != eod_id and not about.get("bos_token"):  # what the tokenizer itself puts before a text
        full = full | {"bos_token": tokenizer.id_to_token(bos_id)}
    if model.is_causal and not isinstance(ours, ByteTokenizer) and ours.first_ids != ours.template_ids:
        _begin_with(ours.first_ids, folder)
        full = full | {"add_bos_token": bool(ours.first_ids), "tokenizer_class": _ANY_CLASS}
    if full != about:
        _write_about(folder, full)
        (folder / MAP_FILE).unlink(missing_ok=True)  # its content is in the file above, and might be outdated
    name_class(ours, folder)
    generation = read_json(folder / GENERATION_FILE)
    if {*end_ids(folder)} != ours.stop_ids and (generation or len(ours.stop_ids) > 1):
        ends = [eod_id, *sorted(ours.stop_ids - {eod_id})]
        generation |= {name: ids[name] for name in ids.keys() & generation.keys()} | {"eos_token_id": ends}
        write_durably(folder / GENERATION_FILE, json.dumps(generation, indent=2) + "\n")
    return ids


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    write_durably(folder / ABOUT_FILE, json.dumps(about, indent=2, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    """A special token as tokenizer_config.json describes it: special_tokens_map.json leaves out what it is."""
    if isinstance(value, list):
        return list(map(_plain, value))
    return value | {"__type": "AddedToken"} if isinstance(value, dict) and "content" in value else value


def name_class(ours: Tokenizer, folder: Path) -> None:
    """Let tokenizer_config.json name the class that reads any tokenizer.json, if transformers' results differ without.

    Some classes build another tokenizer from the vocabulary.
    """
    if isinstance(ours, ByteTokenizer):
        return
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(str(folder))
        expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in _SAMPLES]
    except Exception:  # it is not installed, or cannot read the folder at all
        return
    if expected != [ours.encode(text, parses_special=True).tolist() for text in _SAMPLES]:
        _write_about(folder, read_json(folder / ABOUT_FILE) | {"tokenizer_class": _ANY_CLASS})


def _about(ours: Tokenizer, tokenizer: HFTokenizer, bos_id: int, model: TransformerConfig) -> dict[str, object]:
    """The content of tokenizer_config.json for a tokenizer whose folder has none."""
    known = range(model.vocab_size)
    roles: dict[str, int | None] = {"bos": bos_id, "eos": ours.eod_id}
    if model.objective == "mlm":
        roles["mask"] = ours.mask_id
    if model.objective == "span_corruption":
        roles["pad"] = ours.pad_id
    if ours.pair_ids is not None and _has_pairs(model):
        roles |= zip(("cls", "sep", "pad"), ours.pair_ids, strict=True)
    about: dict[str, object] = {
        "tokenizer_class": _ANY_CLASS,
        **{f"{role}_token": tokenizer.id_to_token(n) for role, n in roles.items() if n is not None and n in known},
        "model_max_length": model.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if model.objective == "span_corruption":
        about["additional_special_tokens"] = [tokenizer.id_to_token(n) for n in ours.sentinel_ids if n in known]
    return about


def _begin_with(first_ids: list[int], folder: Path) -> None:
    """Let a written tokenizer put before a text what the model's documents began with."""
    tokenizer = HFTokenizer.from_file(str(folder / TOKENIZER_FILE))
    first = [(str(tokenizer.id_to_token(number)), number) for number in first_ids]
    names = "".join(f"{name} " for name, _ in first)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names}$A", pair=f"{names}$A {names}$B", special_tokens=first
    )
    write_durably(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True))


def _has_pairs(model: TransformerConfig) -> bool:
    """Whether a sample of the model is two sentences."""
    return bool({"pair", "choice"} & set(model.predictions))


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the named files that exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def byte_tokenizer(model: TransformerConfig | None = None) -> HFTokenizer:
    """`ByteTokenizer`, with the tokens that it has for the model's objective, as byte-pair encoding without merges."""
    ours, vocab = ByteTokenizer(), {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>"]
    if model is not None and not model.is_causal:
        names.append("<mask>")
        if model.objective == "span_corruption":
            names += ["<pad>", *(f"<extra_id_{number}>" for number in range(len(ours.sentinel_ids)))]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"$A {names[0]}", special_tokens=[(names[0], ours.eod_id)]
            )  # which ends an encoder's input in training
        if _has_pairs(model):
            names += ["[CLS]", "[SEP]", "[PAD]"]
        names = names[: model.vocab_size - ours.eod_id]
    tokenizer.add_special_tokens(names)
    assert all(tokenizer.token_to_id(name) == number for number, name in enumerate(names, start=ours.eod_id))
    return tokenizer
