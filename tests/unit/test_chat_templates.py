"""What is learned of records with the chat templates of published models, against references written apart."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.unit.chat_cases import CHATML, GENERATION, TOOLS, learned, save_tokenizer, write_lines
from tests.unit.template_cases import PUBLISHED, QWEN_PROMPT, Message, RefusedError, save_published
from titan_like.config import ConfigError
from titan_like.config.schema import Data
from titan_like.data.chat.template import Chat
from titan_like.data.readers.raw_text import BadRecord
from titan_like.data.text.packed import corpus_job
from titan_like.data.text.preprocess import tokenize_files


def say(role: str, content: str | None = None, learn: bool | None = None, **fields: Any) -> Message:
    """A message as references take it: answers are learned unless it says otherwise."""
    message = {"role": role, "learn": role == "assistant" if learn is None else learn} | fields
    return message | ({} if content is None else {"content": content})


ARGUMENTS = {"first": 1, "second": "two"}
FUNCTION = {"name": "add", "arguments": ARGUMENTS}
CALLS = [{"type": "function", "id": "abcdefghi", "function": FUNCTION}]
SYSTEM, ASK, TELL = say("system", "be brief"), say("user", "the cat"), say("assistant", "sat on")
DEVELOPER = SYSTEM | {"role": "developer"}  # which is a system message where the template has no such role
ASK_2, TELL_2 = say("user", "the dog"), say("assistant", "the log")
CALL, REPLY = say("assistant", tool_calls=CALLS), say("tool", "3", name="add", tool_call_id="abcdefghi")

TEXT_CALL = say("assistant", tool_calls=[CALLS[0] | {"function": FUNCTION | {"arguments": json.dumps(ARGUMENTS)}}])
OLD_CALL = say("assistant", function_call=FUNCTION | {"arguments": json.dumps(ARGUMENTS)}) | {"content": None}


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
DIGITS = [say("user", "a 190475083621000010000 b"), say("assistant", "190475083621"), ASK_2, TELL_2]
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
    "a call in OpenAI's form": ({"messages": plain(ASK, TEXT_CALL, REPLY, TELL)}, [ASK, CALL, REPLY, TELL]),
    "a call in its older form": (
        {"messages": plain(ASK, OLD_CALL, REPLY | {"role": "function"}, TELL)}, [ASK, CALL, REPLY, TELL]
    ),
    "a reply of Llama's role": (
        {"messages": plain(ASK, OLD_CALL, REPLY | {"role": "ipython"}, TELL)}, [ASK, CALL, REPLY, TELL]
    ),
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
    "digits": ({"messages": plain(*DIGITS)}, DIGITS),
    "signs in texts": ({"messages": plain(*SIGNS)}, SIGNS),
}  # fmt: skip


def reference(file: Path, name: str, messages: list[Message], **variables: Any) -> tuple[list[int], list[bool]]:
    """Tokens of the whole text, and those with a character of a learned piece."""
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


@pytest.mark.parametrize("template", [CHATML, GENERATION])
@pytest.mark.parametrize(
    "name", ["weight", "loss", "loss_mask", "loss_weight", "train", "training", "trainable", "masked"]
)
def test_answers_that_a_record_marks_are_context(tmp_path: Path, template: str, name: str) -> None:
    chat = Chat(str(save_tokenizer(tmp_path, template)))
    turns, both = plain(*TURNS), ["sat on<|im_end|>", "the log<|im_end|>"]
    for learns in (True, 1, 1.0, None):
        flag = learns if name != "masked" or learns is None else type(learns)(False)
        assert learned(chat, {"messages": [*turns[:3], turns[3] | {name: flag}]}) == both
    for number, rest in ((1, both[1:]), (3, both[:1])):
        for value in (False, 0, 0.0):
            flag = type(value)(name == "masked")
            marked = [message | {name: flag} if at == number else message for at, message in enumerate(turns)]
            assert learned(chat, {"messages": marked}) == rest
        flags = [(at == number) == (name == "masked") for at in range(4)]
        assert learned(chat, {"messages": turns, name: flags}) == rest
        assert (
            learned(chat, {"conversations": [spoken(m) | {name: f} for m, f in zip(turns, flags, strict=True)]}) == rest
        )


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_variables_of_templates_come_from_settings_and_records(tmp_path: Path, name: str) -> None:
    file = save_published(tmp_path, name)
    variable, value = {"qwen3": ("enable_thinking", False), "gpt_oss": ("reasoning_effort", "high")}[name]
    record = {"messages": plain(*TURNS)}
    expected = reference(file, name, TURNS, **{variable: value})
    assert expected != reference(file, name, TURNS)
    for kwargs in ({variable: value}, json.dumps({variable: value})):
        assert tuple(x.tolist() for x in Chat(str(file)).encode(record | {"chat_template_kwargs": kwargs})) == expected
    chat = Chat(str(file), template_kwargs={variable: value})
    assert tuple(x.tolist() for x in chat.encode(record)) == expected
    default = {"chat_template_kwargs": {variable: {"qwen3": True, "gpt_oss": "medium"}[name]}}
    assert tuple(x.tolist() for x in chat.encode(record | default)) == reference(file, name, TURNS)


def section_of(folder: Path, file: Path, **fields: Any) -> Data:
    paths = [str(folder / "chats.jsonl")]
    return Data(dataset="conversations", paths=paths, tokenizer=str(file), **fields)


def test_variables_and_ends_are_part_of_the_cache_s_key(tmp_path: Path) -> None:
    file = save_published(tmp_path, "qwen3")
    write_lines(tmp_path / "chats.jsonl", [{"messages": plain(*TURNS)}])
    keys = [corpus_job(section_of(tmp_path, file)).fingerprint()]
    keys += [corpus_job(section_of(tmp_path, file, chat_template_kwargs={"enable_thinking": False})).fingerprint()]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1]}')
    keys += [corpus_job(section_of(tmp_path, file)).fingerprint()]
    assert len(set(keys)) == 3
    for name in ("enable_thoughts", "messages"):
        with pytest.raises(
            ConfigError, match=rf"data.chat_template_kwargs.{name} = true: the chat template of .* has no"
        ):
            corpus_job(section_of(tmp_path, file, chat_template_kwargs={name: True}))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_nobody_reads_is_named_once_with_counts(tmp_path: Path, capfd: Any, num_workers: int) -> None:
    file = save_published(tmp_path, "deepseek_r1")
    thinks = say("assistant", "<think>much</think>sat", name="x", mood="good", reasoning_content="r")
    records = [{"messages": plain(ASK, thinks, ASK_2 | {"mood": "bad"}), "other": 1}, {"messages": plain(ASK, thinks)}]
    write_lines(tmp_path / "chats.jsonl", [record | {"chat_template_kwargs": {"depth": 3}} for record in records] * 30)
    tokenize_files(corpus_job(section_of(tmp_path, file)), tmp_path / "tokens", num_workers)
    line = "the chat template does not write, and training ignores: "
    line += '"mood" (90 times), "reasoning_content" (60 times), chat_template_kwargs "depth" (60 times), '
    assert capfd.readouterr().err.count(line + "the thoughts in a last answer (30 times)\n") == 1


FORMATS = ("%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%A %-d/%-m/%y", "%H:%M:%S", "Today is %a, week %V, day %j")


def test_the_fixed_date_has_the_format_that_a_template_asks_for(tmp_path: Path) -> None:
    for number, text in enumerate(FORMATS):
        template = f"{{{{ strftime_now('{text}') }}}};" + CHATML
        chat = Chat(str(save_tokenizer(tmp_path / str(number), template)))
        written = chat.tokenizer.decode(chat.encode({"prompt": "a", "answer": "b"})[0].tolist(), skips_special=False)
        assert written.partition(";")[0] == datetime(2024, 7, 26).strftime(text)


def test_templates_that_take_parts_get_them(tmp_path: Path) -> None:
    """Text parts between others are not joined."""
    separated = TOOLS.replace("{{ part.text }}", "<{{ part.text or part.thinking }}>")
    chat = Chat(str(save_tokenizer(tmp_path, separated)))
    thought = {"type": "thinking", "thinking": "the mat"}
    answer = say("assistant") | {"content": [thought, {"type": "text", "text": "sat"}, "on"]}
    assert learned(chat, {"messages": plain(ASK, part(TELL))}) == ["<sa><t on><|im_end|>"]
    assert learned(chat, {"messages": plain(ASK, answer | {"content": answer["content"][:2]})}) == [
        "<the mat><sat><|im_end|>"
    ]


@pytest.mark.parametrize("written", ["{{ FIELD }}", "{{ '' + FIELD }}", "{{ FIELD | tojson }}"])
@pytest.mark.parametrize("content", ["", "{{ m.content + '' }}", "{{ raise_exception('') if m.content is string }}"])
def test_arguments_of_calls_have_the_form_that_a_template_takes(tmp_path: Path, written: str, content: str) -> None:
    call = f"{{{{ call.function.name }}}}{written.replace('FIELD', 'call.function.arguments')}{content}"
    chat = Chat(str(save_tokenizer(tmp_path, TOOLS.replace("<call>{{ call.function | tojson }}</call>", call))))
    ask = say("user", f"not {ARGUMENTS}, nor {json.dumps(json.dumps(ARGUMENTS))}")
    for message in (CALL, TEXT_CALL, CALL | {"content": ""}, say("assistant", tool_calls=[FUNCTION])):
        assert learned(chat, {"messages": plain(ask, message)}) == [f"add{json.dumps(ARGUMENTS)}<|im_end|>"]


def test_an_empty_answer_that_a_template_leaves_out_teaches_nothing(tmp_path: Path) -> None:
    """As with GLM-4's, where the sign of the next question would follow the text of the last one."""
    file = save_published(tmp_path, "glm4")
    chat = Chat(str(file))
    chat.template.chat_template = PUBLISHED["glm4"][0].replace("{% elif m.role in", "{% elif m.content and m.role in")
    assert learned(chat, {"messages": plain(*EMPTY)}) == ["\nthe log<|user|>"]


def test_a_prompt_that_the_template_always_writes_is_not_learned(tmp_path: Path) -> None:
    file = save_published(tmp_path, "qwen2.5")
    chat = Chat(str(file))
    always = QWEN_PROMPT.replace("THOUGHT", "").replace("{% if add_generation_prompt %}", "{% if true %}")
    chat.template.chat_template = PUBLISHED["qwen2.5"][0].partition("{% if add_generation_prompt %}")[0] + always
    assert learned(chat, {"messages": plain(*TURNS)}) == ["sat on<|im_end|>", "the log<|im_end|>"]
