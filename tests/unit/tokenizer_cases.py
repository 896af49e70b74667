"""Small tokenizers of the three kinds that most models have, with all that their folders say."""

import json
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
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | about
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def _spm() -> tuple[Tokenizer, dict[str, Any]]:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in sorted(model["vocab"], key=model["vocab"].get):
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.add_special_tokens([_special(name) for name in ("<unk>", "<s>", "</s>")])
    eos = {"__type": "AddedToken", "content": "</s>", "normalized": False, "lstrip": False, "rstrip": False}
    return tokenizer, {"bos_token": "<s>", "eos_token": eos | {"single_word": False}, "unk_token": "<unk>"}


def _l3() -> tuple[Tokenizer, dict[str, Any]]:
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = _byte_level(names)
    first = (names[0], tokenizer.token_to_id(names[0]))
    template = processors.TemplateProcessing(f"{names[0]} $A", f"{names[0]} $A {names[0]} $B", [first])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer, {"bos_token": names[0], "eos_token": names[4]}


def _chatml() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}


def _byte_level(names: tuple[str, ...]) -> Tokenizer:
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([_special(name) for name in names])
    return tokenizer


def _special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)
