"""Tokenizes conversations, and marks the tokens of the answers, which a model learns to write.

`titan_like.data.chat.records` lists the forms of a record. A chat template writes every one of them. Without a
template, a prompt and its answer are tokenized as one text with an end-of-document token.

transformers renders templates, in its sandbox. If a template marks the assistant's text by ``{% generation %}``, the
marked parts are the answers. Otherwise an answer is the template's text of an assistant's message, including tool
calls, after the generation prompt (found by `titan_like.data.chat.answers`), with its end token:

- White space after an end token, such as <|im_end|>, is not learned.
- A token that ends texts according to the tokenizer's files is learned after an answer, even if it begins the next
  message. GLM's answers end with <|user|> or <|observation|>.
- If no token ends the last answer, as with GLM, the token that would follow it is added, or else the end of document.
  Without an end token, a model would generate up to the limit.
"""

import json
import re
from collections import Counter
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.errors import ConfigError, first_line
from titan_like.config.schema import DEFAULT_TOKENS, TokenOptions
from titan_like.data.chat.answers import Rendering, Span
from titan_like.data.chat.records import MESSAGE_KEYS, Conversation, read_conversation
from titan_like.data.readers.raw_text import BadRecord
from titan_like.data.text.special_tokens import TOKENIZER_FILE
from titan_like.data.text.tokenizer import Tokenizer, build_tokenizer, is_on_hub, tokenizer_files

CHAT_FORMAT = 2  # version of the rules above; a new one tokenizes conversations again
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write today's date. A run's data must not depend on the day, so they get Llama 3.1's.
_DATE = datetime(2024, 7, 26)
_DIRECTIVES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAwdbBmyYHIpMSfjUWuVGFDTRexXcZz"))
_FIXED_DATE = "{%- macro strftime_now(format) %}{{ format"
_FIXED_DATE += "".join(f" | replace('{directive}', '{_DATE.strftime(directive)}')" for directive in _DIRECTIVES)
_FIXED_DATE += " }}{% endmacro %}"
_THOUGHTS = {"reasoning_content", "thinking", "reasoning"}  # names of one field, which transformers copies


def read_template(spec: str) -> Any:
    """transformers' tokenizer for a value of `data.tokenizer`; None if it has no chat template."""
    file = None if is_on_hub(spec) else next(iter(tokenizer_files(spec)), Path())
    if file is not None and file.name != TOKENIZER_FILE:
        return None
    try:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(spec if file is None else str(file.parent))
    except Exception as error:  # the folder may contain anything
        reason = f"transformers cannot read its folder ({first_line(error)}); install titan_like[hf], or name another"
        raise ConfigError("data.tokenizer", spec, reason) from None
    return tokenizer if tokenizer.chat_template else None


class Chat:
    """Tokenizes records with the tokenizer and the chat template that `data.tokenizer` names.

    ``unread`` counts ignored parts of records, such as fields of messages that the template does not use.
    """

    def __init__(self, spec: str, options: TokenOptions = DEFAULT_TOKENS, template_kwargs: Any = None) -> None:
        """``template_kwargs``: as `data.chat_template_kwargs`; a record's own take precedence."""
        self.tokenizer, self.template = build_tokenizer(spec, options=options), read_template(spec)
        self.unread, self._kwargs = Counter[str](), template_kwargs or {}

    def encode(self, record: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a record, int64, and whether each belongs to an answer, bool: [tokens]. Raises a `BadRecord`."""
        conversation = read_conversation(record)
        if not any(conversation.learned):
            raise BadRecord('the record has no "assistant" that answers and is learned')
        try:
            if self.template is not None:
                tokens, is_answer = self._by_template(conversation)
            elif conversation.texts is not None:
                tokens, is_answer = self._by_texts(*conversation.texts)
            else:
                raise BadRecord("the record has messages, but the tokenizer's folder has no chat template")
        except (ConfigError, UnicodeEncodeError):  # the only errors of a tokenizer that could be read
            raise BadRecord("the record has text that cannot be tokenized, such as half a surrogate pair") from None
        if not is_answer[1:].any():
            raise BadRecord("the record has no answer")
        return tokens, is_answer

    def _by_texts(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        tokens, _, ends = self.tokenizer.encode_with_places(prompt + answer)
        first, end = self.tokenizer.first_ids, self.tokenizer.eod_id
        is_answer = np.array([*[False] * len(first), *(ends > len(prompt)), True])
        return np.array([*first, *tokens, end], dtype=np.int64), is_answer

    def _by_template(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        learned = [number for number, is_learned in enumerate(conversation.learned) if is_learned]
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.template.get_chat_template(tools=conversation.tools)
            dated = _FIXED_DATE + template if "strftime_now" in template else template
            variables = self.template.special_tokens_map | self._kwargs | conversation.template_kwargs
            write: Any = partial(render_jinja_template, tools=conversation.tools, chat_template=dated, **variables)
            encode = partial(self.tokenizer.encode_with_places, parses_special=True)
            rendering = Rendering(lambda m, **how: write([m], **how)[0][0], conversation.messages, encode)
            text, added = _Tokens(self.tokenizer, rendering.text), list[int]()
            if _MARKS_ANSWERS.search(template):
                _, (marked,) = write([rendering.messages], return_assistant_tokens_mask=True)
                borders = rendering.parts_of(marked, learned)
            else:
                spans = [span for span in map(rendering.span, learned) if span]
                ends = [text.end_of(span, self.template.bos_token_id) for span in spans]
                borders = [(span.begin, end) for span, (end, _) in zip(spans, ends, strict=True)]
                if conversation.learned[-1] and ends and not ends[-1][1]:
                    added = self.tokenizer.encode(rendering.after_end().lstrip(), parses_special=True)[:1].tolist()
                    added = added if self.tokenizer.stop_ids.intersection(added) else [self.tokenizer.eod_id]
        except (BadRecord, ConfigError, UnicodeEncodeError):
            raise
        except Exception as error:  # a template may raise anything
            raise BadRecord(f"the chat template refuses the record ({first_line(error)})") from None
        self._count_unread(conversation, rendering, template)
        is_answer = np.append(text.is_within(borders), [True] * len(added))
        return np.append(text.ids, np.array(added, dtype=np.int64)), is_answer.astype(bool)

    def _count_unread(self, conversation: Conversation, rendering: Rendering, template: str) -> None:
        """Count the parts of a record that its rendering leaves out without an error."""
        words = set(re.findall(r"\w+", template))
        words |= _THOUGHTS if words & _THOUGHTS else set()
        for message in rendering.messages:
            self.unread.update(f'"{key}"' for key in message.keys() - MESSAGE_KEYS - words)
        self.unread.update(f'chat_template_kwargs "{name}"' for name in conversation.template_kwargs.keys() - words)
        thought = str(rendering.messages[-1].get("content")).rpartition("</think>")[0].rpartition("<think>")[2].strip()
        self.unread['"content" next to "tool_calls"'] += rendering.left_out
        self.unread["the thoughts in a last answer"] += thought not in rendering.text


class _Tokens:
    """The tokens of a rendering with their places."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._text = text
        self.ids, self._begins, self._ends = tokenizer.encode_with_places(text, parses_special=True)
        self._stops = np.isin(self.ids, list(tokenizer.stop_ids))  # end texts by the tokenizer's files
        self._is_special = np.isin(self.ids, list(tokenizer.special_ids)) | self._stops
        for number in np.flatnonzero(self._is_special):  # it may include white space of the previous message
            written = text[self._begins[number] : self._ends[number]]
            self._begins[number] += len(written) - len(written.lstrip())
        places = zip(self._begins, self._ends, strict=True)
        self._is_blank = np.array([not text[begin:end].strip() for begin, end in places], dtype=bool)

    def end_of(self, span: Span, bos_id: int | None) -> tuple[int, bool]:
        """Where an answer ends, and whether it ends with a special token that the template writes after its text.

        If more follows, a template may write another end, as gpt-oss does: a special token right before the special
        token that begins the next message.
        """
        after_text = (self._begins >= span.text_end) & (self._ends <= span.end)
        if (stops := np.flatnonzero(after_text & self._stops)).size:  # generation ends there
            return self._ends[stops[0]], True
        special = np.flatnonzero(self._is_special & (self._begins >= span.begin) & (self._ends <= span.end))
        end, is_ended = self._ends[special].max(initial=span.begin), bool(after_text[special[-1:]].any())
        if not special.size or self._text[end : span.end].strip():
            end, is_ended = span.end, False
        following = np.flatnonzero(~self._is_blank & (self._begins >= end))[:2]
        replaces = span.is_cut and not is_ended and self._is_special[following].sum() == 2
        if self._stops[following[:1]].any() or (replaces and self.ids[following[0]] != bos_id):
            return self._ends[following[0]], True
        return end, is_ended

    def is_within(self, borders: list[tuple[int, int]]) -> np.ndarray:
        """Whether each token belongs to one of these parts of the text: bool [tokens]."""
        is_within = np.zeros(len(self.ids), dtype=bool)
        for begin, end in borders:
            # A token across the begin belongs to the part, unless it is a header's token with white space after it.
            is_header = self._is_special & (self._begins < begin)
            is_within |= (self._ends > begin) & (self._begins < end) & ~is_header
        return is_within


@lru_cache(maxsize=1)
def build_chat(spec: str, options: TokenOptions, template: str, template_kwargs: str) -> Chat:
    """The `Chat` of a tokenizer with this template. A process caches the last one."""
    return Chat(spec, options, json.loads(template_kwargs))
