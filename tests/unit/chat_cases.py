"""Small chat models' tokenizers and conversations."""

import json
import random
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.tokenizer_cases import ALPHABET, BYTES, trained
from titan_like.data.chat.template import Chat

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
VOCAB_SIZE = 320
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2's: no header before an answer, which begins with a space, and a </s> in the middle of a conversation.
LLAMA = (
    "{% for message in messages %}{% if message.role == 'user' %}<s>[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }} </s>"
    "{% else %}{{ raise_exception('no ' + message.role + ' here') }}{% endif %}{% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant:{% endif %}"  # no special token; the answer's space is its own
MARKED = (
    "{%- for message in messages %}{% if message.role == 'assistant' %}A:{% generation %}{{ message.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ message.role if loop.last else 'earlier' }}: {{ message.content }}\n"
    "{% endif %}{% endfor %}"
)
# As Qwen's: a system message by default, calls of tools, and answers of tools that share a message of the user.
TOOLS = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}help{% endif %}"
    "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<reply>{{ m.name }}: {{ m.content }}</reply>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n"
    "{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}{{ part.text }}{% endfor %}"
    "{% endif %}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER = "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content }}<|im_end|>{% endfor %}"
HEADER += "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
TURNS = "{% for m in messages %}{% if m.role == 'user' %}USER{% else %}ANSWER{% endif %}{% endfor %}"
ALPACA = TURNS.replace("USER", "Q:{{ m.content }}\n\nA:").replace("ANSWER", "{{ m.content }}\n\n")
GENERATION = TURNS.replace("USER", "{{ m.content }}")
GENERATION = GENERATION.replace("ANSWER", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %};")
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "plain": PLAIN, "marked": MARKED}
WORDS = "the sum of two numbers is what you get when they are added 0 1 2 3 4 5 6 7 8 9".split()  # noqa: SIM905


def save_tokenizer(folder: Path, template: str | None, text: str = " ".join(WORDS), post_processor: Any = None) -> Path:
    """A byte-level BPE with special tokens, as transformers saves it; the path of its tokenizer.json."""
    tokenizer = Tokenizer.from_str(_tokenizer_json(text))
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    saved.chat_template = template
    saved.save_pretrained(folder)
    return folder / "tokenizer.json"


@cache
def _tokenizer_json(text: str) -> str:
    parts: dict[str, Any] = {"pre_tokenizer": BYTES, "decoder": decoders.ByteLevel(), "initial_alphabet": ALPHABET}
    return trained(models.BPE(), [text] * 20, VOCAB_SIZE, SPECIAL, **parts).to_str()


def prepended() -> Tokenizer:
    """As Llama 2's: a space before every text, and bytes of what is not in the vocabulary."""
    vocab = {piece: number for number, piece in enumerate(["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    vocab |= {piece: len(vocab) + at for at, piece in enumerate(["▁", *"1257+=a", "=4", "▁a"])}
    merges = [("=", "4"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab | {"4": len(vocab)}, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def word_pieces() -> Tokenizer:
    vocab = {
        piece: at for at, piece in enumerate(["[UNK]", "[SEP]", "un", "##known", "##able", "a", "17", "42", "+", "="])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return tokenizer


def conversations(count: int, seed: int = 0, most_turns: int = 3) -> list[list[dict[str, str]]]:
    """Questions and answers in turn, of different lengths."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    return [
        [
            {"role": role, "content": text(most)}
            for _ in range(draw.randint(1, most_turns))
            for role, most in (("user", 4), ("assistant", 6))
        ]
        for _ in range(count)
    ]


def learned(chat: Chat, record: Any) -> list[str]:
    """The stretches of a record's tokens that are learned, as text with special tokens."""
    pairs = zip(*(x.tolist() for x in chat.encode(record)), strict=True)
    runs = [[token for token, _ in run] for learns, run in groupby(pairs, key=lambda pair: pair[1]) if learns]
    return [chat.tokenizer.decode(tokens, skips_special=False) for tokens in runs]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
