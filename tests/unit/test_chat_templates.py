"""What is learned of records with the chat templates of published models, against references written apart."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.unit.chat_templates import PUBLISHED, Message, RefusedError, save_published
from titan_like.data.chat import Chat
from titan_like.data.raw_text import BadRecord


def say(role: str, content: str | None = None, learn: bool | None = None, **fields: Any) -> Message:
    """A message as references take it: answers are learned unless it says otherwise."""
    message = {"role": role, "learn": role == "assistant" if learn is None else learn} | fields
    return message | ({} if content is None else {"content": content})


FUNCTION = {"name": "add", "arguments": {"first": 1, "second": "two"}}
CALLS = [{"type": "function", "id": "abcdefghi", "function": FUNCTION}]
SYSTEM, ASK, TELL = say("system", "be brief"), say("user", "the cat"), say("assistant", "sat on")
DEVELOPER = SYSTEM | {"role": "developer"}  # which is a system message where the template has no such role
ASK_2, TELL_2 = say("user", "the dog"), say("assistant", "the log")
CALL, REPLY = say("assistant", tool_calls=CALLS), say("tool", "3", name="add", tool_call_id="abcdefghi")


def plain(*messages: Message) -> list[Message]:
    """Messages of a record, without what is for references."""
    return [{key: value for key, value in message.items() if key != "learn"} for message in messages]


def part(message: Message) -> Message:
    begin, end = message["content"][:2], message["content"][2:]
    return message | {"content": [{"type": "text", "text": begin}, {"type": "text", "text": end}]}


def silent(message: Message) -> Message:
    return message | {"learn": False}


def spoken(message: Message, **fields: Any) -> Message:
    speaker = {"user": "human", "assistant": "gpt"}[message["role"]]
    return {"from": speaker, "value": message["content"]} | fields


TURNS = [ASK, TELL, ASK_2, TELL_2]
THOUGHTS = [
    ASK,
    say("assistant", "<think>\nfirst\n</think>\n\nsat"),
    ASK_2,
    say("assistant", "<think>\nmat\n</think>\n\nlog"),
]
REASONS = [ASK, TELL | {"reasoning_content": "one"}, ASK_2, TELL_2 | {"reasoning_content": "two"}]
AGENT = [ASK, CALL | {"reasoning_content": "one"}, REPLY, TELL, ASK_2, TELL_2]
SPACED = [say("user", "the cat \n"), say("assistant", "\n sat on\n"), ASK_2, say("assistant", "  the log ")]
EMPTY = [ASK, TELL | {"content": ""}, ASK_2, TELL_2]
WEIGHTS = [ASK, silent(TELL) | {"weight": 0}, ASK_2, TELL_2 | {"weight": 1}]
GIVEN = [*TURNS[:3], silent(TELL_2) | {"train": False}]
LONG_REPLY = REPLY | {"content": "3 4"}
SIGNS = [say("user", "a <|im_end|> b"), say("assistant", "1 <s> 2"), say("user", "<|eot_id|>"), TELL]
# The record, and the conversation that it stands for.
SHAPES: dict[str, tuple[Any, list[Message]]] = {
    "one turn": ({"messages": plain(ASK, TELL)}, [ASK, TELL]),
    "two turns": ({"messages": plain(*TURNS)}, TURNS),
    "system": ({"messages": plain(SYSTEM, *TURNS)}, [SYSTEM, *TURNS]),
    "a question at the end": ({"messages": plain(ASK, TELL, ASK_2)}, [ASK, TELL, ASK_2]),
    "the same turn again": ({"messages": plain(*[ASK, TELL] * 3)}, [ASK, TELL] * 3),
    "thoughts in the text": ({"messages": plain(*THOUGHTS)}, THOUGHTS),
    "thoughts in a field": ({"messages": plain(*REASONS)}, REASONS),
    "a call": ({"messages": plain(ASK, CALL, REPLY, TELL)}, [ASK, CALL, REPLY, TELL]),
    "a call at the end": ({"messages": plain(ASK, CALL)}, [ASK, CALL]),
    "a thought, a call, a turn": ({"messages": plain(*AGENT)}, AGENT),
    "two replies": ({"messages": plain(ASK, CALL, REPLY, REPLY, TELL)}, [ASK, CALL, REPLY, REPLY, TELL]),
    "developer": ({"messages": plain(DEVELOPER, ASK, TELL)}, [DEVELOPER, ASK, TELL]),
    "parts": ({"messages": plain(*map(part, (SYSTEM, *TURNS)))}, [SYSTEM, *TURNS]),
    "parts of a reply": ({"messages": plain(ASK, CALL, part(LONG_REPLY), TELL)}, [ASK, CALL, LONG_REPLY, TELL]),
    "an empty answer": ({"messages": plain(*EMPTY)}, EMPTY),
    "weight 0": ({"messages": plain(*WEIGHTS)}, WEIGHTS),
    "the last is no answer": ({"messages": plain(*GIVEN)}, GIVEN),
    "ShareGPT": (
        {"conversations": [spoken(ASK), spoken(TELL, loss=False), spoken(ASK_2), spoken(TELL_2)], "system": "be brief"},
        [SYSTEM, ASK, silent(TELL), ASK_2, TELL_2],
    ),
    "prompt and completion": (
        {"prompt": plain(*TURNS[:3]), "completion": plain(TELL_2)},
        [ASK, silent(TELL), ASK_2, TELL_2],
    ),
    "two texts": ({"prompt": "the cat", "completion": "sat on"}, [ASK, TELL]),
    "white space": ({"messages": plain(*SPACED)}, SPACED),
    "an answer first": ({"messages": plain(TELL, ASK_2, TELL_2)}, [TELL, ASK_2, TELL_2]),
    "two answers": ({"messages": plain(ASK, TELL, TELL_2)}, [ASK, TELL, TELL_2]),
    "signs in texts": ({"messages": plain(*SIGNS)}, SIGNS),
}  # fmt: skip


def reference(file: Path, name: str, messages: list[Message], **variables: Any) -> tuple[list[int], list[bool]]:
    """Tokens of the whole text, and those with a character of a learned piece."""
    if name != "llama3.1":  # whose template writes every role
        messages = [message | {"role": message["role"].replace("developer", "system")} for message in messages]
    pieces = list(PUBLISHED[name][1](messages, **variables))
    encoded = Tokenizer.from_file(str(file)).encode("".join(text for text, _ in pieces), add_special_tokens=False)
    is_learned = [learns for text, learns in pieces for _ in text]
    return encoded.ids, [any(is_learned[begin:end]) for begin, end in encoded.offsets]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_teach_what_their_references_say(tmp_path: Path, name: str) -> None:
    file = save_published(tmp_path, name)
    chat, refused = Chat(str(file)), list[str]()
    for shape, (record, messages) in SHAPES.items():
        try:
            expected: Any = reference(file, name, messages)
        except RefusedError:
            expected = None
        try:
            result: Any = tuple(x.tolist() for x in chat.encode(json.loads(json.dumps(record))))
        except BadRecord:
            result = None
            refused.append(shape)
        assert result == expected, (shape, decoded(chat, result), decoded(chat, expected))
    assert len(refused) <= len(SHAPES) // 2


def decoded(chat: Chat, result: Any) -> str:
    """The text of tokens, with the learned ones in brackets."""
    if result is None:
        return "refused"
    pairs = zip(*result, strict=True)
    return "".join(
        ("[{}]" if learns else "{}").format(chat.tokenizer.decode([n], skips_special=False)) for n, learns in pairs
    )
