"""Writing a run's tokenizer as files that transformers' AutoTokenizer loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from titan_like.checkpoint.step_folders import write_durably
from titan_like.config.errors import ConfigError
from titan_like.data.tokenizer import ByteTokenizer, build_tokenizer, read_tokenizer, tokenizer_files
from titan_like.models.config import TransformerConfig

_KEY = "--tokenizer"
TOKENIZER_FILE = "tokenizer.json"
ABOUT_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = (  # files that transformers may look for
    TOKENIZER_FILE,
    ABOUT_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_PAIR = ("[CLS]", "[SEP]", "[PAD]")


def write_tokenizer(spec: str, model: TransformerConfig, folder: Path) -> int:
    """Write the tokenizer that a value of `data.tokenizer` names; returns the id of its end-of-document token.

    Raises:
        ConfigError: its files are missing or invalid, or it has more tokens than the model.
    """
    ours = build_tokenizer(spec, _KEY)
    if ours.vocab_size > model.vocab_size:
        problem = (
            f"has {ours.vocab_size} tokens, but the model has {model.vocab_size}; name the one it was trained with"
        )
        raise ConfigError(_KEY, spec, problem)
    tokenizer, eod_id = (byte_tokenizer(), ByteTokenizer.eod_id) if spec == "byte" else read_tokenizer(spec, _KEY)
    has_mask = model.objective == "mlm" and ours.mask_id is not None and ours.mask_id < model.vocab_size
    if has_mask and spec == "byte":
        tokenizer.add_special_tokens(["<mask>"])
        assert tokenizer.token_to_id("<mask>") == ours.mask_id
    has_pairs = ours.pair_ids is not None and model.predictions[-1] != "tokens"
    if has_pairs and spec == "byte":
        tokenizer.add_special_tokens(list(_PAIR))
        assert tuple(map(tokenizer.token_to_id, _PAIR)) == ours.pair_ids
    files = tokenizer_files(spec, _KEY)
    if len(files) != 1:  # no tokenizer.json
        write_durably(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    elif files[0].name == TOKENIZER_FILE and files[0].with_name(ABOUT_FILE).is_file():
        copy_tokenizer_files(files[0].parent, folder)  # written by transformers, so it is complete
        return eod_id
    else:  # copied, because this version of the library might write it differently
        shutil.copyfile(files[0], folder / TOKENIZER_FILE)
    eod = tokenizer.id_to_token(eod_id)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # works for any tokenizer.json
        "bos_token": eod,  # in training, a document begins after the end of another
        "eos_token": eod,
        "model_max_length": model.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if has_mask and ours.mask_id is not None:
        about["mask_token"] = tokenizer.id_to_token(ours.mask_id)
    if has_pairs and ours.pair_ids is not None:
        names = ("cls_token", "sep_token", "pad_token")
        about |= {name: tokenizer.id_to_token(number) for name, number in zip(names, ours.pair_ids, strict=True)}
    write_durably(folder / ABOUT_FILE, json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    return eod_id


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy the tokenizer files that ``source`` has."""
    copy_files(source, target, _TOKENIZER_FILES)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy those of the named files that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def byte_tokenizer() -> Tokenizer:
    """`ByteTokenizer` as a tokenizer of the `tokenizers` library: byte-pair encoding without merges."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == ByteTokenizer.eod_id
    return tokenizer


def _byte_characters() -> list[str]:
    """The character for each byte in GPT-2's vocabulary: the byte itself if printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
