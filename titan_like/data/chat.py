"""Tokenizes conversations, and marks the tokens of the answers, which a model learns to write.

`titan_like.data.chat_records` has the forms of a record. A chat template writes every one of them. Without a template,
a prompt and its answer are tokenized as one text, which the end-of-document token follows.

transformers renders templates, in its sandbox. If a template marks what the assistant says by ``{% generation %}``,
the marked parts are the answers. Otherwise an answer is what the template writes for a message of the assistant, tool
calls included, after the generation prompt, without the white space after a special token that ends it, such as
<|im_end|>.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.errors import ConfigError, first_line
from titan_like.config.schema import TokenOptions
from titan_like.data.chat_records import Conversation, read_conversation
from titan_like.data.raw_text import BadRecord
from titan_like.data.special_tokens import TOKENIZER_FILE
from titan_like.data.tokenizer import Tokenizer, build_tokenizer, is_on_hub, tokenizer_files

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write today's date. A run's data must not depend on the day, so they get Llama 3.1's.
_FIXED_DATE = "{%- macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


def read_template(spec: str) -> Any:
    """transformers' tokenizer of the folder or repository whose tokenizer.json `data.tokenizer` names; None if that has
    no chat template.

    Raises a `ConfigError` if transformers is not installed, or cannot read the folder.
    """
    file = None if is_on_hub(spec) else next(iter(tokenizer_files(spec)), Path())
    if file is not None and file.name != TOKENIZER_FILE:
        return None
    try:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(spec if file is None else str(file.parent))
    except Exception as error:  # the folder may hold anything
        problem = f"transformers cannot read its folder ({first_line(error)}); install titan_like[hf], or name another"
        raise ConfigError("data.tokenizer", spec, problem) from None
    return tokenizer if tokenizer.chat_template else None


class Chat:
    """Tokenizes records with the tokenizer and the chat template that `data.tokenizer` names."""

    def __init__(self, spec: str, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer, self.template = tokenizer or build_tokenizer(spec), read_template(spec)

    def encode(self, record: Any) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a record and whether each belongs to an answer: int64 and bool [tokens].

        Raises a `BadRecord` if it is no conversation, has no answer, or the template does not fit it.
        """
        conversation = read_conversation(record)
        try:
            if self.template is not None:
                tokens, is_answer = self._by_template(conversation)
            elif conversation.texts is not None:
                tokens, is_answer = self._by_texts(*conversation.texts)
            else:
                raise BadRecord("the record has messages, but the tokenizer's folder has no chat template")
        except (ConfigError, UnicodeEncodeError):  # nothing else is wrong with a tokenizer that could be read
            raise BadRecord("the record holds text that cannot be tokenized, such as half a surrogate pair") from None
        if not is_answer[1:].any():
            raise BadRecord("the record has no answer")
        return tokens, is_answer

    def _by_texts(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a prompt with its answer and whether each belongs to the answer: int64 and bool [tokens]."""
        tokens, _, ends = self.tokenizer.encode_with_places(prompt + answer)
        first, end = self.tokenizer.first_ids, self.tokenizer.eod_id
        is_answer = np.array([*[False] * len(first), *(ends > len(prompt)), True])
        return np.array([*first, *tokens, end], dtype=np.int64), is_answer

    def _by_template(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a conversation and whether each belongs to an answer: int64 and bool [tokens]."""
        messages, num_given, tools = conversation.messages, conversation.num_given, conversation.tools
        is_learned = [n >= num_given and message["role"] == "assistant" for n, message in enumerate(messages)]
        if not any(is_learned):
            raise BadRecord('the record has no "assistant" that answers')
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            text = self.template.get_chat_template(tools=tools)
            text = _FIXED_DATE + text if "strftime_now" in text else text
            arguments: Any = {"tools": tools, "chat_template": text, **self.template.special_tokens_map}
            write: Callable[..., Any] = partial(render_jinja_template, **arguments)
            spans, prompts, throughs = list[tuple[int, int]](), list[str](), list[str]()
            if _MARKS_ANSWERS.search(text):
                conversations = [messages, messages[:num_given]] if num_given else [messages]
                (rendered, *_), (marked, *given_spans) = write(conversations, return_assistant_tokens_mask=True)
                spans = marked[sum(map(len, given_spans)) :]
            else:
                answers = np.flatnonzero(is_learned).tolist()
                (rendered, *throughs), _ = write([messages, *(messages[: number + 1] for number in answers)])
                prompts = [_prompt(write, messages[:number], throughs[0]) for number in answers]
        except Exception as error:  # a template may raise anything
            raise BadRecord(f"the chat template refuses the record ({first_line(error)})") from None
        if any(str(m["content"]) in rendered for m in messages if m.get("content") and isinstance(m["content"], list)):
            raise BadRecord('the chat template takes no "content" that is a list of parts')
        tokens, begins, ends = self.tokenizer.encode_with_places(rendered, parses_special=True)
        is_special = np.isin(tokens, list(self.tokenizer.special_ids))
        for number in np.flatnonzero(is_special):  # it may take in the white space of the previous message
            written = rendered[begins[number] : ends[number]]
            begins[number] += len(written) - len(written.lstrip())
        can_follow = is_special & (tokens != self.template.bos_token_id)
        cut = partial(_without_end, rendered, begins, ends, is_special, can_follow)
        for prompt, through in zip(map(cut, prompts), map(cut, throughs), strict=True):
            if not rendered.startswith(prompt) or not rendered.startswith(through):
                problem = "the chat template writes the beginning of the conversation in another way once more follows"
                if rendered.startswith(through):
                    problem = "an answer does not begin with what the chat template gives the model to begin it"
                cure = "mark them in the template by {% generation %}"
                raise BadRecord(f"{problem}, so answers cannot be found; {cure}")
            in_answer = is_special & (begins >= len(prompt)) & (ends <= len(through))
            last = ends[in_answer].max(initial=len(prompt))
            is_ended = in_answer.any() and not rendered[last : len(through)].strip()
            spans.append((len(prompt), last if is_ended else len(through)))
        is_answer = np.zeros(len(tokens), dtype=bool)
        for begin, end in spans:
            # A token across a border belongs to the answer, unless it is a header's that takes in white space after it.
            is_answer |= (ends > begin) & (begins < end) & ~(is_special & (begins < begin))
        return tokens, is_answer


def _prompt(write: Callable[..., Any], messages: list[dict[str, Any]], through: str) -> str:
    """The prompt for an answer after these messages. Many templates cannot write one without messages. Then the prompt
    is the beginning of ``through``, which the answer ends, up to and with what they add to another prompt.
    """
    if not messages:
        example = [{"role": "user", "content": "a"}]
        (written,), (asked,) = (write([example], add_generation_prompt=asks)[0] for asks in (False, True))
        shared = len(os.path.commonprefix((asked, written)))  # noqa: RUF071 (no paths)
        before, header, _ = through.partition(asked[shared:] or through)
        if header not in ("", through):
            return before + header
    (prompt,), _ = write([messages], add_generation_prompt=True)
    return prompt


def _without_end(
    rendered: str, begins: np.ndarray, ends: np.ndarray, is_special: np.ndarray, can_end: np.ndarray, text: str
) -> str:
    """The ``text`` of the first messages without the special tokens and white space that the template writes at the end
    of every conversation, the ``rendered`` one too, but not where more messages follow.

    If another token ends a message where more follows, as in gpt-oss, the text ends with that. It is known by another
    special token, with which the next message begins, right after it.
    """
    if rendered.startswith(text):
        return text
    is_blank = np.array([not rendered[begin:end].strip() for begin, end in zip(begins, ends, strict=True)])
    last, first = begins[is_special].max(initial=0), ends[~(is_special | is_blank)].max(initial=0)
    bodies = (text.removesuffix(rendered[at:]) for at in range(last, first - 1, -1))
    body = next(filter(rendered.startswith, bodies), text)
    before, after = (np.flatnonzero(~is_blank & side) for side in (ends <= len(body), begins >= len(body)))
    ends_otherwise = len(after) > 1 and can_end[after[0]] and is_special[after[1]] and not is_special[before[-1:]].any()
    return rendered[: ends[after[0]]] if ends_otherwise and rendered.startswith(body) else body


@lru_cache(maxsize=1)
def build_chat(spec: str, options: TokenOptions, template: str) -> Chat:
    """The `Chat` of a tokenizer with this template. A process keeps the last one."""
    return Chat(spec, build_tokenizer(spec, options=options))
