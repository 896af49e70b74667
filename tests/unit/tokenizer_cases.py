"""Small tokenizers of the three kinds that most models have, with all that their folders say."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the cat sat on the mat and the dog sat on the log", "def add(a, b):\n    return a + b", "17 + 25 = 42"] * 20
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_kind(folder: Path, kind: str, **about: Any) -> Path:
    """A tokenizer in a folder: "spm" (Llama 2), "l3" (Llama 3) or "chatml" (Qwen); ``about`` adds to its config."""
    tokenizer, config = {"spm": _spm, "l3": _l3, "chatml": _chatml}[kind]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | common | about))
    return folder / "tokenizer.json"


def save_words(folder: Path, words: Sequence[str], post_processor: Any = None) -> str:
    """A tokenizer.json of whole words, of which the first stands for others; its path."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def save_gpt2(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> tuple[str, list[str]]:
    """GPT-2's two files with all bytes, merged tokens and the end of text, as data.tokenizer; and the tokens."""
    tokens = [*sorted(ALPHABET), *("".join(pair) for pair in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    return f"gpt2:{folder}/vocab.json,{folder}/merges.txt", tokens


ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def trained(model: Any, texts: Sequence[str], size: int, special: Sequence[str] = (), **given: Any) -> Tokenizer:
    """A tokenizer that has learned up to ``size`` tokens of texts; ``given``: its parts and settings of its trainer."""
    tokenizer = Tokenizer(model)
    for name in {"normalizer", "pre_tokenizer", "decoder", "post_processor"} & given.keys():
        setattr(tokenizer, name, given.pop(name))
    trainer = getattr(trainers, type(model).__name__.replace("BPE", "Bpe") + "Trainer")
    learns = trainer(vocab_size=size, special_tokens=list(special), show_progress=False, **given)
    tokenizer.train_from_iterator(texts, learns)
    return tokenizer


def llama_2(texts: Sequence[str], size: int, special: Sequence[str] = ("<unk>", "<s>", "</s>")) -> Tokenizer:
    """Normalization marks spaces, nothing divides the text, and bytes stand for characters that are not known."""
    model = json.loads(trained(models.BPE(), texts, size, pre_tokenizer=pre_tokenizers.Metaspace()).to_str())["model"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=special[0], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([_special(name) for name in special])
    return tokenizer


@cache
def _spm() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = llama_2(CORPUS, 120)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    eos = {"__type": "AddedToken", "content": "</s>", "normalized": False, "lstrip": False, "rstrip": False}
    return tokenizer, {"bos_token": "<s>", "eos_token": eos | {"single_word": False}, "unk_token": "<unk>"}


@cache
def _l3() -> tuple[Tokenizer, dict[str, Any]]:
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = _byte_level(names)
    first = (names[0], tokenizer.token_to_id(names[0]))
    template = processors.TemplateProcessing(f"{names[0]} $A", f"{names[0]} $A {names[0]} $B", [first])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer, {"bos_token": names[0], "eos_token": names[4]}


@cache
def _chatml() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}


def _byte_level(names: tuple[str, ...]) -> Tokenizer:
    parts = {"pre_tokenizer": BYTES, "decoder": decoders.ByteLevel(), "initial_alphabet": ALPHABET}
    tokenizer = trained(models.BPE(), CORPUS, 300, **parts)
    tokenizer.add_special_tokens([_special(name) for name in names])
    return tokenizer


def _special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)
