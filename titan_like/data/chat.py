"""Conversations as tokens, of which those of the answers are marked: a model learns to write them.

A record is ``{"messages": [{"role": …, "content": …}, …]}`` or ``{"prompt": …, "answer": …}``. With a chat template,
the latter is a conversation of a user and an assistant. Without one it becomes the tokens of the prompt, those of the
answer and the end-of-document token.

transformers renders templates, in its sandbox. If a template marks what the assistant says by ``{% generation %}``,
that is the answers. Otherwise an answer is what the template writes for a message of the assistant, after the prompt
that it would give the model at this place. It ends with its last special token, such as <|im_end|>, if it has one.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.errors import ConfigError, first_line
from titan_like.data.raw_text import BadRecord
from titan_like.data.tokenizer import HuggingFaceTokenizer, build_tokenizer, is_on_hub, tokenizer_files

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write today's date. A run's data must not depend on the day, so they get that which Llama 3.1's has.
_FIXED_DATE = "{%- macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


def read_template(spec: str) -> Any:
    """transformers' tokenizer of the folder or repository whose tokenizer.json `data.tokenizer` names; None if that has
    no chat template.

    Raises:
        ConfigError: transformers is not installed, or cannot read the folder.
    """
    if not is_on_hub(spec) and Path(spec).name != "tokenizer.json":
        return None
    try:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(spec if is_on_hub(spec) else str(Path(spec).parent))
    except Exception as error:  # of whatever is in the folder
        problem = f"transformers cannot read its folder ({first_line(error)}); install titan_like[hf], or name another"
        raise ConfigError("data.tokenizer", spec, problem) from None
    return tokenizer if tokenizer.chat_template else None


class Chat:
    """Tokenizes records with the tokenizer and the chat template that `data.tokenizer` names."""

    def __init__(self, spec: str) -> None:
        self.tokenizer, self.template = build_tokenizer(spec), read_template(spec)

    def encode(self, record: Any) -> np.ndarray:
        """The tokens of a record, int32 [tokens]: t if it is of an answer, and else -1 - t.

        Raises:
            BadRecord: it is no conversation, has no answer, or the template does not fit it.
        """
        match record:
            case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
                if self.template is None:
                    raise BadRecord("the line has messages, but the tokenizer's folder has no chat template")
            case {"prompt": str(prompt), "answer": str(answer)}:
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            case _:
                problem = 'the line has neither "messages", each with the texts "role" and "content", nor the texts'
                raise BadRecord(f'{problem} "prompt" and "answer"')
        try:
            if self.template is not None:
                tokens, is_answer = self._by_template(messages, record.get("tools"))
            else:
                before = np.array([*self.tokenizer.first_ids, *self.tokenizer.encode(prompt)], dtype=np.int64)
                tokens = np.array([*before, *self.tokenizer.encode(answer), self.tokenizer.eod_id])
                is_answer = np.arange(len(tokens)) >= len(before)
        except (ConfigError, UnicodeEncodeError):  # nothing else is wrong with a tokenizer that could be read
            raise BadRecord("the line holds text that cannot be tokenized, such as half a surrogate pair") from None
        if not is_answer[1:].any():
            raise BadRecord("the line has no answer")
        return np.where(is_answer, tokens, ~tokens).astype(np.int32)

    def _by_template(self, messages: list[dict[str, Any]], tools: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a conversation and whether they are of an answer: int64 and bool [tokens]."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise BadRecord('the line has no "assistant" that answers')
        if answers[0] == 0:
            raise BadRecord('the line begins with a message of the "assistant", which answers no other; begin with one')
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            text = self.template.get_chat_template(tools=tools)
            text = _FIXED_DATE + text if "strftime_now" in text else text
            write = partial(self.template.apply_chat_template, tools=tools, chat_template=text, tokenize=False)
            prompts, throughs = list[str](), list[str]()
            if _MARKS_ANSWERS.search(text):
                known: Any = self.template.special_tokens_map
                found: Any = render_jinja_template(
                    [messages], tools=tools, chat_template=text, return_assistant_tokens_mask=True, **known
                )
                (whole,), (marked,) = found
                spans = [(begin, end, end) for begin, end in marked]
            else:
                whole = write(messages)
                prompts = [write(messages[:number], add_generation_prompt=True) for number in answers]
                throughs = [write(messages[: number + 1]) for number in answers]
                contents = [messages[number]["content"].strip() for number in answers]  # templates may strip it too
                spans = list(map(_span, prompts, contents, throughs))
        except Exception as error:  # a template may raise anything
            raise BadRecord(f"the chat template refuses the line ({first_line(error)})") from None
        if not all(map(whole.startswith, [*prompts, *throughs])):
            problem = "the chat template writes the beginning of the conversation in another way once more follows, so"
            raise BadRecord(f"{problem} its answers cannot be found; mark them in the template by {{% generation %}}")
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)  # others have no templates
        tokens, begins, ends = self.tokenizer.encode_with_places(whole, parses_special=True)
        can_end = np.isin(tokens, list(self.tokenizer.special_ids - {self.template.unk_token_id}))
        is_answer = np.zeros(len(tokens), dtype=bool)
        for begin, said, end in spans:
            # A token across a border is the answer's, unless it is a header's that takes in the white space after it.
            own = (ends > begin) & (begins < end) & ~(can_end & (begins < begin))
            last = np.flatnonzero(own & can_end & (begins >= said))
            own[last[-1] + 1 if len(last) else len(own) :] = False
            is_answer |= own
        return tokens, is_answer


def _span(prompt: str, content: str, through: str) -> tuple[int, int, int]:
    """Where an answer begins, where its ``content`` ends, and where the message ends, in the text ``through`` it."""
    at = through.find(content, len(prompt))
    return len(prompt), len(prompt) if at < 0 else at + len(content), len(through)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def build_chat(spec: str, template: str) -> Chat:
    """The `Chat` of a tokenizer with this template, of which a process keeps the last one, unless its files change."""
    return _build(spec, template, tuple(path.stat().st_mtime_ns for path in tokenizer_files(spec) if path.is_file()))


@lru_cache(maxsize=1)
def _build(spec: str, template: str, changed: tuple[int, ...]) -> Chat:
    return Chat(spec)
