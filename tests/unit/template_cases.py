"""Chat templates of published models, written anew in short, and plain functions that say what each writes and teaches.

A reference takes messages in one form (texts; roles as the template has them) and yields pieces of text, each with
whether it is learned. It knows nothing of how the product finds answers.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.unit.tokenizer_cases import ALPHABET, BYTES, CORPUS, trained

Message = dict[str, Any]
Pieces = Iterator[tuple[str, bool]]


class RefusedError(Exception):
    """The template has no place for the messages."""


LOOP, END = "{% for m in messages %}", "{% endfor %}"
CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
QWEN_TOOLS = (
    "{{ '\\n\\n# Tools\\n<tools>' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{{ '\\n</tools>' }}"
)
QWEN_SYSTEM = "{{ '<|im_start|>system\\n' }}SYSTEM{% if tools %}" + QWEN_TOOLS + "{% endif %}{{ '<|im_end|>\\n' }}"
QWEN_CALLS = (
    "{% for call in m.tool_calls or [] %}{% set c = call.function or call %}NEWLINE{{ '<tool_call>\\n' }}"
    + CALL
    + "{{ '\\n</tool_call>' }}{% endfor %}"
)
QWEN_REPLY = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}"
)
QWEN_MESSAGES = (
    LOOP + "{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + m.role + '\\n' + CONTENT + '<|im_end|>\\n' }}{% elif m.role == 'assistant' %}"
)
QWEN_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}THOUGHT{% endif %}"
QWEN25 = (
    QWEN_SYSTEM.replace("SYSTEM", "{{ messages[0].content if messages[0].role == 'system' else 'You are Qwen.' }}")
    + QWEN_MESSAGES.replace("CONTENT", "m.content")
    + "<|im_start|>assistant{% if m.content %}{{ '\\n' + m.content }}{% elif not m.tool_calls %}{{ '\\n' }}{% endif %}"
    + QWEN_CALLS.replace("NEWLINE", "{{ '\\n' }}")
    + "{{ '<|im_end|>\\n' }}"
    + QWEN_REPLY
    + END
    + QWEN_PROMPT.replace("THOUGHT", "")
)
# Thoughts are kept after the last question alone, and content that is no string is nothing.
QWEN3 = (
    "{% if tools or messages[0].role == 'system' %}"
    + QWEN_SYSTEM.replace("SYSTEM", "{{ messages[0].content if messages[0].role == 'system' }}")
    + "{% endif %}{% set ns = namespace(last=messages | length - 1, open=true) %}{% for m in messages[::-1] %}"
    "{% if ns.open and m.role == 'user' and m.content is string and not (m.content.startswith('<tool_response>')"
    " and m.content.endswith('</tool_response>')) %}{% set ns.open = false %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    + QWEN_MESSAGES.replace("CONTENT", "(m.content if m.content is string else '')")
    + "{% set content = m.content if m.content is string else '' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}"
    "{% endif %}"
    + QWEN_CALLS.replace("NEWLINE", "{% if content or not loop.first %}{{ '\\n' }}{% endif %}")
    + "{{ '<|im_end|>\\n' }}"
    + QWEN_REPLY
    + END
    + QWEN_PROMPT.replace("THOUGHT", "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}")
)
GLM4 = (
    "[gMASK]<sop>" + LOOP + "{% if m.role == 'tool' %}{{ '<|observation|>\\n' + m.content }}"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}{% set c = call.function %}"
    "{{ '<|assistant|>' + c.name + '\\n' }}{{ c.arguments | tojson }}{% endfor %}"
    "{% elif m.role in ('system', 'user', 'assistant') %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}"
    + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# An answer's thought is dropped with all before </think>, and the prompt opens one.
DEEPSEEK_R1 = (
    "{% set ns = namespace(tool=false, system='') %}"
    + LOOP
    + "{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endif %}" + END + "{{ bos_token + ns.system }}" + LOOP + "{% if m.role == 'user' %}{% set ns.tool = false %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' and m.content is none %}{% set ns.tool = false %}"
    "{% for call in m.tool_calls %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' + call.function.name + '\\n' }}"
    "{{ call.function.arguments | tojson }}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' + m.content }}"
    "{% set ns.tool = false %}{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}{% endif %}"
    "<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"
    "{{ ('' if ns.tool else '<｜tool▁outputs▁begin｜>') + m.content }}{% set ns.tool = true %}{% endif %}" + END + ""
    "{% if ns.tool %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>{{ 'Date: ' + strftime_now('%Y-%m-%d') }}"
    "{{ '\\nReasoning: ' + reasoning_effort | default('medium') }}<|end|>"
    "{% set loop_messages = messages %}{% if messages[0].role in ('developer', 'system') %}"
    "{{ '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}"
    "{% set loop_messages = messages[1:] %}{% endif %}{% set call = namespace(name=none) %}"
    "{% for m in loop_messages %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}"
    "{% set later = namespace(final=false) %}{% for n in loop_messages[loop.index:] %}"
    "{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.final = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not later.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% set call.name = m.tool_calls[0].function.name %}{{ '<|start|>assistant to=functions.' + call.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}{% if 'thinking' in m %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if call.name is none %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|start|>functions.' + call.name + ' to=assistant<|message|>' }}{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Tools, which no shape has, and the system's text come with the last question. No header begins an answer.
MISTRAL = (
    "{{ bos_token }}{% set system = '' %}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% set ns = namespace(last=0, turn=0) %}" + LOOP + ""
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}" + END + LOOP + "{% if m.role == 'user' %}[INST] "
    "{% if loop.index0 == ns.last and system %}{{ system + '\\n\\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no role') }}"
    "{% endif %}" + END
)


def calls_of(message: Message) -> list[Message]:
    return [call["function"] for call in message.get("tool_calls", [])]


def thought_of(message: Message) -> tuple[str, str]:
    """The thought and the answer in it."""
    text = message.get("content") or ""
    if "reasoning_content" in message:
        return message["reasoning_content"], text
    thought, _, answer = text.rpartition("</think>")
    return thought.removeprefix("<think>").strip("\n"), answer.lstrip("\n") if thought else text


def qwen25(messages: list[Message], **_: Any) -> Pieces:
    has_system = messages[0]["role"] == "system"
    yield f"<|im_start|>system\n{messages[0]['content'] if has_system else 'You are Qwen.'}<|im_end|>\n", False
    yield from _qwen(messages[has_system:], lambda number, message: message.get("content") or "")


def qwen3(messages: list[Message], enable_thinking: bool = True) -> Pieces:
    last_question = max(number for number, message in enumerate(messages) if message["role"] == "user")

    def said(number: int, message: Message) -> str:
        thought, answer = thought_of(message)
        is_kept = number > last_question and (number == len(messages) - 1 or thought)
        return f"<think>\n{thought}\n</think>\n\n{answer}" if is_kept else answer

    for text, is_learned in _qwen(messages, said):
        given = "<think>\n\n</think>\n\n" if is_learned and not enable_thinking else ""
        given = given if text.startswith(given) else ""
        yield given, False
        yield text[len(given) :], is_learned


def _qwen(messages: list[Message], said: Any) -> Pieces:
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            before, after = (messages[n]["role"] if n < len(messages) else "" for n in (number - 1, number + 1))
            yield "<|im_start|>user" * (before != "tool"), False
            yield f"\n<tool_response>\n{message['content']}\n</tool_response>", False
            yield "<|im_end|>\n" * (after != "tool"), False
            continue
        if role != "assistant":
            yield f"<|im_start|>{role}\n{message['content']}<|im_end|>\n", False
            continue
        text = said(number, message)
        for call in calls_of(message):
            body = (
                f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n</tool_call>'
            )
            text += "\n" * bool(text and not text.endswith("\n\n")) + body
        yield "<|im_start|>assistant\n", False
        yield f"{text}<|im_end|>", message["learn"]
        yield "\n", False


def glm4(messages: list[Message], **_: Any) -> Pieces:
    """The token that begins the next message ends an answer, or what would begin it."""
    yield "[gMASK]<sop>", False
    for number, message in enumerate(messages):
        is_begun = number > 0 and messages[number - 1]["role"] == "assistant" and message["role"] in ("user", "tool")
        sign = f"<|{'observation' if message['role'] == 'tool' else message['role']}|>"
        yield "" if is_begun else sign, False
        text = f"\n{message.get('content') or ''}"
        for call in calls_of(message):
            text = f"{call['name']}\n{json.dumps(call['arguments'])}"
        yield text, message["learn"]
        following = messages[number + 1]["role"] if number + 1 < len(messages) else ""
        if message["role"] == "assistant":
            is_observed = following == "tool" or (not following and calls_of(message))
            is_ended = following in ("user", "tool") or (not following and message["learn"])
            yield ("<|observation|>" if is_observed else "<|user|>") * is_ended, message["learn"]


def deepseek_r1(messages: list[Message], **_: Any) -> Pieces:
    yield "<|begin_of_text|>" + "".join(m["content"] for m in messages if m["role"] == "system"), False
    for number, message in enumerate(messages):
        role, is_reply = message["role"], number > 0 and messages[number - 1]["role"] == "tool"
        text = (message.get("content") or "").rpartition("</think>")[2]
        if role == "user":
            yield f"<｜User｜>{text}", False
        elif role == "tool":
            yield ("" if is_reply else "<｜tool▁outputs▁begin｜>") + text, False
        elif role == "assistant":
            yield "<｜tool▁outputs▁end｜>" if is_reply else "<｜Assistant｜>", False
            for call in calls_of(message):
                text = f"<｜tool▁calls▁begin｜>{call['name']}\n{json.dumps(call['arguments'])}<｜tool▁calls▁end｜>"
            yield f"{text}<｜end▁of▁sentence｜>", message["learn"]


def harmony(messages: list[Message], reasoning_effort: str = "medium", **_: Any) -> Pieces:
    yield f"<|start|>system<|message|>Date: 2024-07-26\nReasoning: {reasoning_effort}<|end|>", False
    if messages[0]["role"] == "system":
        yield f"<|start|>developer<|message|># Instructions\n\n{messages[0]['content']}<|end|>", False
        messages = messages[1:]
    called = ""
    for number, message in enumerate(messages):
        role, learns, is_last = message["role"], message["learn"], number == len(messages) - 1
        text, calls, thought = message.get("content") or "", calls_of(message), message.get("reasoning_content")
        if role == "tool" and not called:
            raise RefusedError
        if role == "assistant":
            yield "<|start|>assistant", False
            later = any(m["role"] == "assistant" and not calls_of(m) for m in messages[number + 1 :])
            if thought is not None and (not later if calls else is_last):
                yield f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant", learns
            if calls:
                called, arguments = calls[0]["name"], json.dumps(calls[0]["arguments"])
                yield f" to=functions.{called}<|channel|>commentary json<|message|>{arguments}<|call|>", learns
            else:
                yield f"<|channel|>final<|message|>{text}{'<|return|>' if is_last else '<|end|>'}", learns
        elif role == "tool":
            yield f"<|start|>functions.{called} to=assistant<|message|>{json.dumps(text)}<|end|>", False
        else:
            yield f"<|start|>{role}<|message|>{text}<|end|>", False


def mistral(messages: list[Message], **_: Any) -> Pieces:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    messages = messages[system is not None :]
    turns = [m["role"] for m in messages if m["role"] == "user" or (m["role"] == "assistant" and not calls_of(m))]
    if any((role == "user") != (turn % 2 == 0) for turn, role in enumerate(turns)):
        raise RefusedError
    last_question = max(number for number, message in enumerate(messages) if message["role"] == "user")
    yield "<|begin_of_text|>", False
    for number, message in enumerate(messages):
        text, calls = message.get("content") or "", calls_of(message)
        if message["role"] == "user":
            yield f"[INST] {system + chr(10) * 2 if system and number == last_question else ''}{text}[/INST]", False
        elif message["role"] == "tool":
            yield f"[TOOL_RESULTS]{text}[/TOOL_RESULTS]", False
        elif calls:
            yield f"[TOOL_CALLS] [{''.join(map(json.dumps, calls))}]<|endoftext|>", message["learn"]
        else:
            yield f" {text}<|endoftext|>", message["learn"]


# The template, its reference, and the tokens that end its texts by generation_config.json.
PUBLISHED: dict[str, tuple[str, Any, list[str]]] = {
    "qwen2.5": (QWEN25, qwen25, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (QWEN3, qwen3, ["<|im_end|>", "<|endoftext|>"]),
    "glm4": (GLM4, glm4, ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "deepseek_r1": (DEEPSEEK_R1, deepseek_r1, ["<｜end▁of▁sentence｜>"]),
    "gpt_oss": (HARMONY, harmony, ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "mistral": (MISTRAL, mistral, ["<|endoftext|>"]),
}
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>"]
SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[gMASK]", "<sop>", "<|observation|>"),
    *("<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "[INST]"),
    *("[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<eos>"),
]


def save_published(folder: Path, name: str) -> Path:
    """A folder with a published template, its special tokens and the ends that it names; the tokenizer.json."""
    (template, _, ends), tokenizer = PUBLISHED[name], Tokenizer.from_str(_tokenizer_json())
    roles = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    saved.chat_template = template
    saved.save_pretrained(folder)
    ids = {"eos_token_id": [tokenizer.token_to_id(end) for end in ends]}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return folder / "tokenizer.json"


@cache
def _tokenizer_json() -> str:
    parts: dict[str, Any] = {"pre_tokenizer": BYTES, "decoder": decoders.ByteLevel(), "initial_alphabet": ALPHABET}
    tokenizer = trained(models.BPE(), CORPUS, 300, **parts)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_TOKENS])
    return tokenizer.to_str()
