"""Finds the answers in the rendering of a conversation by a chat template.

A model trains on the rendering of the whole conversation, with all changes of the template to earlier turns: Qwen3 and
gpt-oss drop thoughts, Mistral moves tools to the last question. So a rendering of the first messages need not be a
prefix of that text. Instead, copies of the messages are rendered with a mark at the end of every text, and the texts
after the marks are compared:

- If a mark is not in the rendering, the template leaves out that text.
- An answer begins where the text after the previous message differs from the prompt that the template writes for the
  answer (``add_generation_prompt``). That prompt may be longer than the text: DeepSeek-R1's opens a thought.
- An answer ends where the text after it differs from a conversation that ends with it.

Places are counted from the end of the text: a mark may change the text before it, but not after it.
"""

import json
import os
import re
import secrets
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

from titan_like.config.errors import first_line
from titan_like.config.paths import parse_json
from titan_like.data.readers.raw_text import BadRecord

Message = dict[str, Any]
# Random digits: quoting and changes of case do not alter them. The first digit occurs once, so no two marks overlap.
_STEM = "1" + "".join(secrets.choice("23456789") for _ in range(11))
_MARK = re.compile(_STEM + r"\d{9}")
_RAW = _STEM + "9" * 9  # in a field of a content's part, which only a template that prints the whole list shows
_EXAMPLE = {"role": "user", "content": "a"}
_ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}  # what most templates call OpenAI's and Llama's
_NO_QUESTION = ("system", "developer", "assistant")  # roles whose messages ask for no answer
_HINT = 'mark answers in it by {% generation %}, or give "prompt" and "completion" as texts, without a chat template'


class Span(NamedTuple):
    """An answer, as characters of the rendering."""

    begin: int
    text_end: int  # end of the message's text, or of the name of its last call
    end: int  # end of the template's text after it
    is_cut: bool  # whether a conversation that ends here would have another end


class Rendering:
    """A chat template's text of a conversation. Raises a `BadRecord` if it leaves out a text or hides an answer."""

    def __init__(self, write: Callable[..., str], messages: list[Message], encode: Callable[[str], Any]) -> None:
        """``write`` renders messages, and ``encode`` gives the tokens of a text and where each begins and ends."""
        self._write, self._encode = write, encode
        self.messages, self._whole, self.left_out = _fitting(write, messages)
        self.text = write(self.messages)
        self._is_exact = _MARK.sub("", self._whole) == self.text  # the marks changed nothing

    def span(self, number: int) -> Span | None:
        """The answer in message ``number``; None if it is empty, and the template writes nothing for it."""
        _, begin, rest = self._agreement(number, asks=True)
        message = self.messages[number]
        content = str(message.get("content") or "").strip()
        if rest.strip() and "think" not in rest.casefold():
            if not content and "tool_calls" not in message:
                return None
            if not self.text[begin:].lstrip().startswith(content):
                reason = "an answer does not begin with the end of the chat template's generation prompt"
                raise BadRecord(f"{reason}; {_HINT}")
        text_end, end, rest = self._agreement(number, asks=False)
        return Span(begin, text_end, end, bool(rest.strip()))

    def parts_of(self, parts: list[tuple[int, int]], numbers: list[int]) -> list[tuple[int, int]]:
        """The parts of the text in these answers. A part belongs to the first answer that ends after its begin."""
        answers = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        if answers == numbers:
            return parts
        ends = [self._agreement(number, asks=False)[0] for number in answers[:-1]]
        return [part for part in parts if answers[bisect(ends, part[0])] in numbers]

    def after_end(self) -> str:
        """The template's text between the last message and another one that would follow."""
        last = len(self.messages) - 1
        following = _EXAMPLE | {"role": "tool"} if "tool_calls" in self.messages[last] else _EXAMPLE
        marked, mark = _with_mark(self.messages, last)
        tail = _after(self._write([*marked, following]), mark) or ""
        return tail.removeprefix(self.text[self._agreement(last, asks=False)[0] :])

    def _agreement(self, answer: int, asks: bool) -> tuple[int, int, str]:
        """Compare the text after the previous message with the end of a prompt (``asks``), or the text after the answer
        with the end of a conversation. Returns where the message ends, where the two differ, and the rest of the prompt
        or conversation.
        """
        messages, is_exact = self.messages, self._is_exact
        if answer == 0 or messages[answer - 1]["role"] in _NO_QUESTION:
            # There is no such prompt: some templates write none, and others continue the last answer. The text after an
            # example question is the same.
            messages, is_exact = [*messages[:answer], _EXAMPLE, *messages[answer:]], False
            answer += 1
        number = answer - 1 if asks else answer
        marked, mark = _with_mark(messages, number)
        tail = _after(self._whole if is_exact and mark in self._whole else self._write(marked), mark)
        end = _after(self._write(marked[: number + 1], add_generation_prompt=asks), mark)
        if tail is None or end is None:
            raise BadRecord(f"the chat template writes a message only if more follows, or nothing; {_HINT}")
        shared = len(os.path.commonprefix((tail, end)))  # noqa: RUF071 (no paths)
        if shared < len(end):  # not in the middle of a token, such as <|return|> where the text has <|end|>
            _, _, ends = self._encode(end)
            shared = int(ends[ends <= shared].max(initial=0))
        text_end = len(self.text) - len(tail)
        if not self.text.endswith(tail[shared:]):
            raise BadRecord(f"the chat template's text after a message depends on the message's text; {_HINT}")
        return text_end, text_end + shared, end[shared:]


def _with_mark(messages: list[Message], number: int) -> tuple[list[Message], str]:
    """The messages with marks in message ``number``, and the last mark."""
    message, marks = _mark(messages[number], number, is_empty_marked=True)
    return [*messages[:number], message, *messages[number + 1 :]], marks[-1]


def _after(text: str, mark: str) -> str | None:
    _, found_mark, tail = text.partition(mark)
    return _MARK.sub("", tail) if found_mark else None


def _fitting(write: Callable[..., str], messages: list[Message]) -> tuple[list[Message], str, int]:
    """The messages in the first form that the template can write, their marked rendering, and the number of texts next
    to calls that it leaves out.
    """
    refused, lacking = "", ""
    for form in _forms(messages):
        marked, marks = zip(*(_mark(message, number) for number, message in enumerate(form)), strict=True)
        try:
            whole = write(list(marked))
        except Exception as error:  # a template may raise anything
            refused = f"the chat template refuses the record ({first_line(error)})"
            continue
        texts = "\n".join(str(message.get("content")) for message in form)
        is_lost = [_RAW in whole or _is_lost(*pair, whole, texts) for pair in zip(form, marks, strict=True)]
        if not any(is_lost):
            return form, whole, sum(any(mark not in whole for mark in marks_of_message) for marks_of_message in marks)
        message = form[is_lost.index(True)]
        role, text = message["role"], " ".join(str(message.get("content") or "a call").split())
        lacking = f'the chat template leaves out the text of a message with the role "{role}" ("{text[:40]}")'
    raise BadRecord(lacking or refused)


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages, and then other forms of them, which more templates support."""
    yield messages
    yield (messages := list(map(_with_joined_parts, messages)))
    yield (messages := [message | {"role": _ROLES.get(message["role"], message["role"])} for message in messages])
    contents: tuple[Message, ...] = {}, {"content": ""}, {"content": None}  # next to calls; the last is DeepSeek's
    for content, change in product(contents, (lambda arguments: arguments, _other_arguments)):
        yield [_with_calls(message, content, change) if "tool_calls" in message else message for message in messages]


def _is_lost(message: Message, marks: list[str], whole: str, texts: str) -> bool:
    """Whether a template leaves out a message's text or the name of a call, or misprints a call's arguments: as quoted
    JSON text, or as a printed Python object, which is in none of the ``texts``.
    """
    calls = message.get("tool_calls", [])
    # Next to calls, a text is a thought for gpt-oss, which drops it later, and Llama 3.1 leaves it out.
    if any(mark not in whole for mark in marks[-len(calls) :]):
        return True
    for arguments in (call["function"].get("arguments") for call in calls):
        text, printed = json.dumps(arguments, ensure_ascii=False), str(arguments)
        wrong = text if isinstance(arguments, str) else printed
        if text != printed and whole.count(wrong) > texts.count(wrong):
            return True
    return False


def _mark(message: Message, number: int, is_empty_marked: bool = False) -> tuple[Message, list[str]]:
    """A copy of a message with a mark at the end of each of its texts, and the marks; the marks in calls come last."""
    marks = list[str]()

    def mark(text: str) -> str:
        if not text.strip() and (calls or not is_empty_marked):
            return text
        marks.append(f"{_STEM}{number:05}{len(marks):04}")
        end = len(text.rstrip())
        return text[:end] + marks[-1] + text[end:]

    def mark_part(part: Any) -> Any:
        key = "text" if not isinstance(part, dict) or "text" in part else part.get("type")
        text = part.get(key) if isinstance(part, dict) else part
        if not isinstance(text, str):
            mark("such as an image")  # this mark is never written
            return part
        return mark(text) if text is part else part | {key: mark(text), "raw": _RAW}

    content, calls = message.get("content"), message.get("tool_calls")
    message = dict(message)
    if isinstance(content, list):
        message["content"] = list(map(mark_part, content))
    elif isinstance(content, str) or (is_empty_marked and not calls):
        message["content"] = mark(content or "")
    if calls:
        message["tool_calls"] = [_changed(call, "name", mark) for call in calls]
    return message, marks


def _changed(call: dict[str, Any], key: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A call in which a field of its function, if it is there, is changed."""
    function = call["function"]
    return call | {"function": function | {key: change(function[key])}} if key in function else call


def _with_joined_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = list[str]()
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else ("text", part)
        if not isinstance(text, str) or not str(kind or "text").endswith("text"):  # input_text and output_text, too
            raise BadRecord(f'the "content" of a message is a list of parts, and one is no text (type {kind})')
        texts.append(text)
    return message | {"content": "".join(texts)}


def _with_calls(message: Message, content: Message, change: Callable[[Any], Any]) -> Message:
    """A message with this content, if it has none, and with changed arguments of its calls."""
    content = content | ({"content": message["content"]} if message.get("content") else {})
    return message | content | {"tool_calls": [_changed(call, "arguments", change) for call in message["tool_calls"]]}


def _other_arguments(arguments: Any) -> Any:
    """Arguments of a call as JSON text, which is OpenAI's form, or as an object if they are text."""
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    with suppress(ValueError):
        return parse_json(arguments)
    return arguments
