"""Records of conversations as messages for a chat template, or as a prompt and its answer.

| keys | values |
|---|---|
| ``messages`` or ``conversations`` | messages with ``role`` and ``content``, or ``from`` and ``value`` (ShareGPT) |
| ``prompt`` and ``completion`` | lists of messages (TRL); the messages of the prompt are not learned |
| ``prompt`` and ``answer`` or ``completion`` | two texts |

``tools`` is a list for the template, ``chat_template_kwargs`` has variables for it, and ``system`` is the text of a
first message. Lists and objects may be given as JSON text. A field such as ``"weight": 0`` excludes a message from the
loss; in a record, it may be a list with a value for each message.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from titan_like.config.paths import parse_json
from titan_like.data.readers.raw_text import BadRecord

# Fields that include an answer in the loss, and the value that does: of OpenAI and Mistral, axolotl, ms-swift,
# LLaMA-Factory, torchtune.
_LEARNED = dict.fromkeys(("weight", "loss_weight", "loss_scale", "loss", "loss_mask", "train", "training"), True)
_LEARNED |= {"trainable": True, "masked": False}
RECORD_KEYS = (
    *("messages", "conversations", "prompt", "completion", "answer", "tools", "system", "chat_template_kwargs"),
    *_LEARNED,
)
MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})  # never reported as ignored
RESERVED = frozenset(  # variables of templates that the data or the trainer sets
    ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "conversations")
) | {"return_assistant_tokens_mask"}
# Speakers of ShareGPT's records, and their roles for templates.
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True)
class Conversation:
    """A record as messages for a chat template, and as two texts if it is only a prompt and its answer."""

    messages: list[dict[str, Any]]
    learned: list[bool]  # whether each message is an answer to learn
    tools: list[Any] | None
    template_kwargs: dict[str, Any]
    texts: tuple[str, str] | None  # prompt and answer, of a record of two texts


def read_conversation(record: Any) -> Conversation:
    """Parse a record. Raises a `BadRecord` if it has none of the forms above."""
    texts, num_given = None, 0
    if isinstance(record, BadRecord):
        raise record
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
    for name in _LEARNED.keys() & record.keys():
        flags = record[name] if isinstance(record[name], list) else [record[name]] * len(read)
        if len(flags) != len(read):
            raise BadRecord(f'"{name}" has {len(flags)} values for {len(read)} messages; give one for each')
        read = [{name: flag} | message for message, flag in zip(read, flags, strict=True)]
    is_learned = [_is_learned(m) and n >= num_given and m["role"] == "assistant" for n, m in enumerate(read)]
    read = [{key: value for key, value in message.items() if key not in _LEARNED} for message in read]
    tools, system = record.get("tools") or None, record.get("system")
    if isinstance(system, str) and system and read and read[0]["role"] != "system":
        read = [{"role": "system", "content": system}, *read]
        is_learned = [False, *is_learned]
        texts = None
    if tools is not None:
        tools = [_parsed(tool, dict, "a tool is no object") for tool in _parsed(tools, list, "the tools are no list")]
    template_kwargs = _parsed(record.get("chat_template_kwargs", {}), dict, '"chat_template_kwargs" is no object')
    if refused := RESERVED & template_kwargs.keys():
        raise BadRecord(f'"chat_template_kwargs" cannot set "{min(refused)}"')
    return Conversation(read, is_learned, tools, template_kwargs, texts)


def _is_learned(message: dict[str, Any]) -> bool:
    """Whether no field excludes a message from the loss."""
    flags = {name: value for name, value in message.items() if name in _LEARNED and value is not None}
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRecord(f'"{name}" is {json.dumps(value, default=str)}; give 0 or 1, or true or false')
    return all(bool(value) == _LEARNED[name] for name, value in flags.items())


def _parsed(value: Any, kind: Any, reason: str) -> Any:
    """A value of this kind, perhaps parsed from JSON text. Raises a `BadRecord` for any other value."""
    with suppress(ValueError):
        value = parse_json(value) if isinstance(value, str) else value
    if not isinstance(value, kind):
        raise BadRecord(f"{reason}, nor the JSON text of one")
    return value


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message with ``role``, without the keys that are null, as transformers passes it to a template."""
    match message:
        case {"role": str()}:
            pass
        case {"from": "function_call", "value": value, **rest}:
            calls = _parsed(value, list | dict, f"the call of message {number} is no object")
            calls = calls if isinstance(calls, list) else [calls]
            message = {"role": "assistant", "tool_calls": calls, **rest}
        case {"from": str(speaker), "value": value, **rest} if speaker in _ROLES:
            message = {"role": _ROLES[speaker], "content": value, **rest}
        case _:
            roles = ", ".join(_ROLES)
            raise BadRecord(f'message {number} has neither a "role" nor "value" and "from", which is one of {roles}')
    if not isinstance(message.get("content"), str | list | None):
        raise BadRecord(f'the "content" of message {number} is neither text nor a list of parts')
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("content") == []:
        message["content"] = ""
    if call := message.pop("function_call", None):  # OpenAI's older form
        message["tool_calls"] = [call]
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = list[Any]()
        for call in _parsed(calls, list, f'the "tool_calls" of message {number} are no list'):
            match call:
                case {"function": {"name": str()}}:
                    message["tool_calls"].append(call)
                case {"name": str()}:
                    message["tool_calls"].append({"type": "function", "function": call})
                case _:
                    raise BadRecord(f'a call in the "tool_calls" of message {number} has no function with a "name"')
    return message


def _json_messages(value: Any) -> list[Any] | None:
    """The list of messages, perhaps parsed from JSON text; None for any other value."""
    with suppress(BadRecord):
        messages = _parsed(value, list, "")
        if all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages):
            return messages
    return None
