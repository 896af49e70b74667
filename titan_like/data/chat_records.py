"""Records of conversations as messages for a chat template, or as a prompt and its answer.

| keys | values |
|---|---|
| ``messages`` or ``conversations`` | messages with ``role`` and ``content``, or ``from`` and ``value`` (ShareGPT) |
| ``prompt`` and ``completion`` | lists of messages (TRL); the messages of the prompt are not learned |
| ``prompt`` and ``answer`` or ``completion`` | two texts |

``tools`` is a list for the template, and ``system`` the text of a first message. Lists may be given as JSON text.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from titan_like.config.paths import parse_json
from titan_like.data.raw_text import BadRecord

RECORD_KEYS = ("messages", "conversations", "prompt", "completion", "answer", "tools", "system")
# Who speaks in ShareGPT's records, and the role that templates know.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True)
class Conversation:
    """A record as messages for a chat template, and as a prompt and its answer if it is only that."""

    messages: list[dict[str, Any]]
    num_given: int  # how many messages at the beginning are not learned
    tools: list[Any] | None
    texts: tuple[str, str] | None  # prompt and answer, of a record of two texts


def read_conversation(record: Any) -> Conversation:
    """The conversation of a record.

    Raises:
        BadRecord: the record has none of the forms above.
    """
    texts, num_given = None, 0
    if isinstance(record, dict):
        record = {key: value for key, value in record.items() if value is not None}
        lists = [_json_messages(record.get(key)) for key in ("prompt", "completion")]
        if any(lists) and None not in lists:
            record |= dict(zip(("prompt", "completion"), lists, strict=True))
    match record:
        case {"messages": messages} | {"conversations": messages}:
            pass
        case {"prompt": [*prompt_messages], "completion": [*answers]}:
            messages, num_given = [*prompt_messages, *answers], len(prompt_messages)
        case {"prompt": str(prompt), "answer": str(answer)} | {"prompt": str(prompt), "completion": str(answer)}:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            texts = prompt, answer
        case _:
            raise BadRecord('the record has no "messages", "conversations", or "prompt" with "answer" or "completion"')
    messages = _parsed(messages, list, "the messages are no list")
    read = [_message(message, number) for number, message in enumerate(messages, start=1)]
    tools, system = record.get("tools") or None, record.get("system")
    if isinstance(system, str) and system and read and read[0]["role"] != "system":
        read, num_given, texts = [{"role": "system", "content": system}, *read], num_given + (num_given > 0), None
    if tools is not None:
        tools = [_parsed(tool, dict, "a tool is no object") for tool in _parsed(tools, list, "the tools are no list")]
    return Conversation(read, num_given, tools, texts)


def _parsed(value: Any, kind: Any, problem: str) -> Any:
    """A value of this kind, which may be given as JSON text."""
    with suppress(ValueError):
        value = parse_json(value) if isinstance(value, str) else value
    if not isinstance(value, kind):
        raise BadRecord(f"{problem}, nor the JSON text of one")
    return value


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message with ``role``, without the keys that are null, as transformers passes it to a template."""
    match message:
        case {"role": str()}:
            pass
        case {"from": "function_call", "value": value, **rest}:
            calls = _parsed(value, list | dict, f"the call of message {number} is no object")
            calls = calls if isinstance(calls, list) else [calls]
            message = {"role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls], **rest}
        case {"from": str(speaker), "value": value, **rest} if speaker in _ROLES:
            message = {"role": _ROLES[speaker], "content": value, **rest}
        case _:
            roles = ", ".join(_ROLES)
            raise BadRecord(f'message {number} has neither a "role" nor "value" and "from", which is one of {roles}')
    if not isinstance(message.get("content"), str | list | None):
        raise BadRecord(f'the "content" of message {number} is neither text nor a list of parts')
    return {key: value for key, value in message.items() if value is not None}


def _json_messages(value: Any) -> list[Any] | None:
    """The list of messages that is given, perhaps as JSON text; None for any other value."""
    with suppress(BadRecord):
        messages = _parsed(value, list, "")
        if all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages):
            return messages
    return None
